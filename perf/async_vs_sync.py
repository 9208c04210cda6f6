"""What streaming and asynchrony bring, as an ablation: the same ranks, samples and lengths, trained in several ways.

    .venv/bin/python perf/async_vs_sync.py --check            # engines whose work is a measured sleep
    .venv/bin/python perf/async_vs_sync.py --real             # a real small model with vLLM, beside it

sequential: separate ranks that take turns: training begins once all samples of the step are there, drawing once the
new weights are. streaming: training begins with the first full micro-batch of the step. asynchronous: and the replicas
go on by up to `--staleness` steps; they take new weights when nothing is being drawn, or between two tokens. With
`--surplus` also over-provisioning and tail batching. All are the whole program (`spmd_rl/main.py`), and differ in a few
keys.
One JSON object per line; seconds per step are means without the first steps; `--check` exits with 1 where
the fastest way is less than 1.59 times as fast as sequential (AsyncFlow's average over its baseline).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # when run as a script, from a checkout that is not installed

from tests.tiny_model import make_tiny_model  # noqa: E402
from tests.world.harness import run_world  # noqa: E402

MAIN = ROOT / "spmd_rl" / "main.py"
TARGET = 1.59
SKIPPED = 2  # first steps, while the pipeline fills


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", action="store_true", help="a real model (model.path of configs/quickstart.yaml)")
    parser.add_argument("--train", type=int, default=1, help="training ranks")
    parser.add_argument("--rollout", type=int, default=1, help="rollout ranks")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--staleness", type=int, default=2)
    parser.add_argument("--surplus", type=int, default=0, help="also with so many groups of over-provisioning")
    parser.add_argument("--tail-tokens", type=int, default=100, help="and with tail batching from so many tokens")
    parser.add_argument("--check", action="store_true", help="exit with 1 where the target is missed")
    parser.add_argument("overrides", nargs="*", help="further settings, for all of them")
    arguments = parser.parse_args()
    ways = {
        "sequential": ["stream.staleness=0", "stream.train_on=step"],
        "streaming": ["stream.staleness=0"],
        "asynchronous": [f"stream.staleness={arguments.staleness}"],
        "asynchronous, weights in flight": [f"stream.staleness={arguments.staleness}", "stream.swap=in_flight"],
    }
    if arguments.surplus:
        ahead = [f"stream.staleness={arguments.staleness}", f"stream.surplus={arguments.surplus}"]
        ways |= {
            "asynchronous, surplus": ahead,
            "asynchronous, surplus, tail batching": [*ahead, f"stream.tail_tokens={arguments.tail_tokens}"],
            "asynchronous, weights in flight, surplus": [*ahead, "stream.swap=in_flight"],
        }
    seconds: dict[str, float] = {}
    for name, keys in ways.items():
        line = measure(arguments, keys)
        seconds[name] = line["s_per_step"]
        speedup = seconds["sequential"] / seconds[name]
        print(json.dumps({"case": name, **line, "speedup": round(speedup, 2)}), flush=True)
    reached = seconds["sequential"] / min(seconds.values())
    print(json.dumps({"case": "target", "speedup": round(reached, 2), "target": TARGET, "met": reached >= TARGET}))
    return 1 if arguments.check and reached < TARGET else 0


def measure(arguments: argparse.Namespace, keys: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="async-") as name:
        folder = Path(name)
        config = real(folder) if arguments.real else sleeping(folder)
        placement = ["mode=async", f"placement.train={arguments.train}", f"placement.rollout={arguments.rollout}"]
        overrides = [f"train.steps={arguments.steps}", *placement, *keys, *arguments.overrides]
        env = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        ranks = arguments.train + arguments.rollout
        run_world(MAIN, ranks, "torchrun", 1800, [str(config), *overrides], env=env).check()
        lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["step"] > SKIPPED and "time/step" in line]
    total = sum(line["time/step"] for line in steps)
    return {
        "engines": "real" if arguments.real else "sleep",
        "ranks": f"{arguments.rollout} + {arguments.train}",
        "s_per_step": round(total / len(steps), 3),
        "samples_per_s": round(sum(line["samples"] for line in steps) / total, 2),
        "waited_s": round(sum(line["stream/wait_s"] for line in steps) / len(steps), 3),
        "staleness_mean": round(sum(line["staleness/mean"] for line in steps) / len(steps), 2),
        "late": round(sum(line["stream/late"] for line in steps) / len(steps), 2),
        "put_aside": round(sum(line.get("stream/put_aside", 0.0) for line in steps) / len(steps), 2),
        "longest": max(line["response/length_max"] for line in steps),
        "length_mean": round(sum(line["response/length_mean"] for line in steps) / len(steps), 1),
    }


def sleeping(folder: Path) -> Path:
    settings = {
        "defaults": str(ROOT / "configs" / "base.yaml"),
        "run": {"name": "sleeping", "folder": str(folder / "run"), "graph": "perf.sleep_engines:graph"},
        "model": {"path": str(make_tiny_model(folder / "model"))},
        "data": {
            "train": [{"name": "sums", "generator": "chain_sum", "size": 4000, "seed": 1}],
            "max_prompt_tokens": 400,
        },
        "rollout": {"engine": "transformers", "max_tokens": 400, "max_sequences": 64},
        "reward": {"functions": [{"function": "near_number"}], "workers": 0},
        "train": {"prompts_per_step": 16, "samples_per_prompt": 4, "tokens_per_microbatch": 2048},
    }
    return written(folder, settings)


def real(folder: Path) -> Path:
    """The quickstart's model, asked for explanations: their lengths differ widely."""
    source = {"name": "sums", "generator": "chain_sum", "params": {"min_terms": 2, "max_terms": 3}, "size": 4000}
    settings = {
        "defaults": str(ROOT / "configs" / "quickstart.yaml"),
        "run": {"name": "real", "folder": str(folder / "run")},
        "data": {"train": [{**source, "seed": 1, "system_prompt": "Answer, and say how you found it."}], "eval": []},
        "rollout": {"max_tokens": 96, "max_sequences": 64},
        "train": {"prompts_per_step": 8, "samples_per_prompt": 4, "tokens_per_microbatch": 1024},
    }
    return written(folder, settings)


def written(folder: Path, settings: dict[str, Any]) -> Path:
    settings |= {
        "eval": {"at_start": False, "at_end": False, "every": 0},
        "checkpoint": {"every": 0, "export": False},
        "observe": {"tensorboard": False, "samples_per_step": 0, "console_samples": 0},
    }
    path = folder / "settings.yaml"
    path.write_text(json.dumps(settings))  # JSON is YAML
    return path


if __name__ == "__main__":
    sys.exit(main())
