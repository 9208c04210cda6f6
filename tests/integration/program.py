"""Starts the whole program on a tiny random model, and reads what the run left behind."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.world.harness import ROOT, WorldResult, run_world

MAIN = ROOT / "spmd_rl" / "main.py"


def tiny_config(folder: Path, model: Path, **sections: Mapping[str, Any]) -> Path:
    """A YAML file of a run that takes seconds: float32, transformers rollout, a reward that depends on the tokens."""
    rewards = folder / "rewards.py"
    rewards.write_text(
        "def letters(prompt, response, row):\n"
        "    return sum(ord(c) % 7 for c in response) / (1 + len(response)) + 0.01 * len(row['answer'])\n"
    )
    settings: dict[str, Any] = {
        "run": {"name": "tiny", "folder": str(folder / "run"), "seed": 7},
        "model": {"path": str(model), "compute_dtype": "float32", "logprob_chunk": 64},
        "data": {
            "train": [{"name": "sums", "generator": "chain_sum", "size": 24, "seed": 3, "params": {"max_terms": 3}}],
            "eval": [{"name": "held_out", "generator": "chain_sum", "size": 6, "seed": 99, "params": {"max_terms": 3}}],
            "max_prompt_tokens": 160,
        },
        "rollout": {"engine": "transformers", "dtype": "float32", "max_tokens": 12},
        "reward": {"functions": [{"function": f"{rewards}:letters"}]},
        "train": {
            "steps": 5,
            "prompts_per_step": 5,
            "samples_per_prompt": 4,
            "tokens_per_microbatch": 300,
            "optimizer": {"lr": 1e-3, "warmup_steps": 2, "grad_clip": 1.0},
        },
        "eval": {"at_start": False, "at_end": False},
        "checkpoint": {"every": 2, "export": False},
        "comm": {"timeout_s": 60.0, "init_timeout_s": 60.0},
        "observe": {"tensorboard": False, "samples_per_step": 1000, "console_samples": 0},
    }
    for name, values in sections.items():
        settings[name] = {**settings.get(name, {}), **values}
    path = folder / "tiny.yaml"
    path.write_text(json.dumps(settings))  # JSON is YAML
    return path


def start(
    config: Path, *overrides: str, ranks: int = 1, launcher: str | Sequence[str] = "torchrun", timeout_s: float = 180.0
) -> WorldResult:
    return run_world(MAIN, ranks=ranks, launcher=launcher, args=[str(config), *overrides], timeout_s=timeout_s)


def start_each(*runs: Sequence[str], timeout_s: float = 180.0) -> WorldResult:
    """Runs of one rank in one process, each with its command line (file, overrides); all must end well."""
    several = Path(__file__).with_name("several.py")
    return run_world(several, 1, "single", timeout_s, [json.dumps([list(map(str, run)) for run in runs])]).check()


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().split("\n") if line]


def samples(run: Path) -> dict[tuple[int, ...], tuple[int, str, float]]:
    """id → (step, response, reward) of all training samples."""
    found = {}
    for line in (run / "samples.jsonl").read_text().split("\n")[:-1]:  # not splitlines: text may hold U+2028
        record = json.loads(line)
        if not record["eval"]:
            found[tuple(record["id"])] = (record["step"], record["response"], round(record["reward"], 6))
    return found
