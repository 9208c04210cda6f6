"""Fewer prompts than ranks, in training and in evaluation: ranks without work take part and change nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.program import metrics, samples, start, tiny_config
from tests.tiny_model import make_tiny_model

# Those that do not say how the work was divided or how long it took.
DIVIDED = ("time/", "time_max/", "throughput/", "memory/", "exchange/", "tokens/trained")


def run(folder: Path, model: Path, ranks: int) -> Path:
    folder.mkdir()
    source = {"name": "held_out", "generator": "chain_sum", "size": 3, "seed": 99, "params": {"max_terms": 3}}
    config = tiny_config(folder, model, data={"eval": [source]})
    settings = ["train.steps=2", "train.prompts_per_step=2", "train.updates_per_step=2", "algorithm.kl_coef=0.1"]
    launcher = "single" if ranks == 1 else "torchrun"
    start(config, *settings, "eval.at_end=true", "eval.every=1", ranks=ranks, launcher=launcher).check()
    return folder / "run"


def told(step: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in step.items() if not name.startswith(DIVIDED)}


def evaluated(folder: Path) -> list[tuple[str, float]]:
    records = map(json.loads, (folder / "samples.jsonl").read_text().split("\n")[:-1])
    return sorted((record["response"], round(record["reward"], 6)) for record in records if record["eval"])


def test_two_prompts_and_three_held_out_ones_on_four_ranks(tmp_path: Path) -> None:
    """Two updates of one prompt each: three of the four ranks have no sample in an update."""
    model = make_tiny_model(tmp_path / "model")
    alone, four = (run(tmp_path / str(ranks), model, ranks) for ranks in (1, 4))
    assert samples(four) == samples(alone) and len(samples(four)) == 2 * 2 * 4
    assert evaluated(four) == evaluated(alone) and len(evaluated(four)) == 2 * 3
    for ours, theirs in zip(metrics(four), metrics(alone), strict=True):
        assert told(ours) == pytest.approx(told(theirs), rel=1e-4, abs=1e-6)
        assert ours["eval/held_out/prompts"] == 3 if "eval/held_out/prompts" in ours else True
    assert metrics(four)[-1]["train/skipped_updates"] == 0
