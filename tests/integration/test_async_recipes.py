"""Asynchronous runs of recipes whose stages lie on both sides: on-policy they are the synchronous runs."""

from __future__ import annotations

import pytest

from tests.integration.program import metrics, samples, start, tiny_config
from tests.tiny_model import make_tiny_scorer

ASYNC = ("mode=async", "stream.staleness=0")


def same(ours, theirs, names):
    assert samples(ours) == samples(theirs) and samples(theirs)  # ids, steps, sampled tokens, rewards
    for mine, other in zip(metrics(ours), metrics(theirs), strict=True):
        for name in names:
            if name in other:
                assert mine[name] == pytest.approx(other[name], rel=1e-4, abs=1e-5), (name, mine["step"])


def test_a_reward_model_and_a_kl_coefficient_that_moves(tmp_path, model):
    """The model scores at the trainers what replicas draw, in steps and in evaluations; the coefficient is agreed."""
    scorer = make_tiny_scorer(tmp_path / "scorer")
    for mode in ("sync", "async"):
        folder = tmp_path / mode
        folder.mkdir()
        config = tiny_config(
            folder,
            model,
            reward_model={"path": str(scorer), "weight": 0.5},
            algorithm={"kl_coef": 0.1, "kl_target": 0.02, "kl_horizon": 40.0},
            eval={"at_end": True},
        )
        overrides = (*ASYNC, "placement.train=2") if mode == "async" else ()
        start(config, "train.steps=4", *overrides, ranks=3 if mode == "async" else 1).check()
    names = ("loss/policy", "grad_norm", "kl/ref", "kl/coef", "reward/mean", "reward/part/reward_model", "samples",
             "reward/zero_variance_fraction", "eval/held_out/reward_mean", "eval/held_out/n")  # fmt: skip
    same(tmp_path / "async" / "run", tmp_path / "sync" / "run", names)
    coefs = [line["kl/coef"] for line in metrics(tmp_path / "async" / "run") if "kl/coef" in line]
    assert len(set(coefs)) == 4 and "eval/held_out/reward_mean" in metrics(tmp_path / "async" / "run")[-1]
