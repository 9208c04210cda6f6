"""The whole program with adapters: merged weights reach the rollout engine, the base is the reference."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open

from tests.integration.program import metrics, samples, start, tiny_config
from tests.tiny_model import make_tiny_model


def run(folder: Path, model: Path, ranks: int, *more: str) -> Path:
    folder.mkdir()
    config = tiny_config(folder, model, algorithm={"kl_coef": 0.1}, checkpoint={"export": True})
    settings = ["model.lora_rank=4", "train.steps=3", "train.optimizer.lr=1e-2"]
    start(config, *settings, *more, ranks=ranks, launcher="single" if ranks == 1 else "torchrun").check()
    return folder / "run"


def test_lora_is_the_same_training_on_one_rank_and_on_two_in_lockstep_or_apart(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    one, two = (run(tmp_path / str(ranks), model, ranks) for ranks in (1, 2))
    apart = run(tmp_path / "async", model, 2, "mode=async", "placement.rollout=1", "stream.staleness=0")
    for other in (two, apart):
        assert samples(one) == samples(other)
        for ours, theirs in zip(metrics(other), metrics(one), strict=True):
            for name in ("loss/policy", "loss/kl", "grad_norm", "reward/mean", "entropy"):
                assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), (name, ours["step"])
            assert abs(ours["mismatch/kl"]) < 1e-5  # the rollout engine has the merged weights of this very step
    first, *_, last = metrics(one)
    assert first["loss/kl"] == 0.0 and last["loss/kl"] > 1e-6
    names = []
    for folder in (model, one / "model"):
        with safe_open(folder / "model.safetensors", "pt") as file:
            names.append(sorted(file.keys()))
    assert names[0] == names[1]
    assert sorted(p.name for p in (one / "adapter").iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
