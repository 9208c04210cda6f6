"""Metrics on one process; tests/world/test_metrics.py has those over ranks."""

from __future__ import annotations

from math import inf, isnan, nan

import pytest
import torch

from spmd_rl.observe.metrics import Metrics


def test_mean_is_weighted_over_microbatches() -> None:
    metrics = Metrics()
    metrics.mean("clip_fraction", 3, 12)
    metrics.mean("clip_fraction", 3, 4)
    assert metrics.reduce() == {"clip_fraction": 0.375}


def test_mean_without_weight_is_left_out() -> None:
    metrics = Metrics()
    metrics.mean("nothing", 0.0, 0.0)
    metrics.sum("samples", 2)
    assert metrics.reduce() == {"samples": 2.0}


def test_tensors_lose_their_graph_and_keep_their_sum_in_float64() -> None:
    metrics = Metrics()
    weight = torch.tensor(2.0, requires_grad=True)
    for _ in range(2):
        metrics.mean("loss", weight * 3, 4)
    metrics.sum("count", torch.tensor(2**24, dtype=torch.float32))
    metrics.sum("count", torch.tensor(1.0))  # lost in float32
    assert metrics.reduce() == {"loss": 1.5, "count": 2**24 + 1}
    assert weight.grad is None


def test_only_single_numbers() -> None:
    with pytest.raises(ValueError, match=r"shape \(2,\)"):
        Metrics().sum("x", torch.ones(2))


def test_moments_of_parts_are_those_of_the_whole() -> None:
    values = torch.randn(101, dtype=torch.float64) + 1e7  # a naive sum of squares loses the deviation here
    metrics = Metrics()
    for part in values.split([1, 0, 40, 60]):
        metrics.moments("reward", part.reshape(-1, 1))
    result = metrics.reduce()
    assert result["reward/mean"] == pytest.approx(values.mean().item(), rel=1e-15)
    assert result["reward/std"] == pytest.approx(values.std(correction=0).item(), rel=1e-8)


def test_names_of_moments() -> None:
    metrics = Metrics()
    metrics.moments("response/length", torch.tensor([1, 3]))
    metrics.moments("reward", torch.tensor([5.0]))
    metrics.moments("none", torch.empty(0))
    assert metrics.reduce() == {
        "response/length_mean": 2.0,
        "response/length_std": 1.0,
        "reward/mean": 5.0,
        "reward/std": 0.0,
    }


def test_moments_show_nan() -> None:
    metrics = Metrics()
    metrics.moments("reward", torch.tensor([1.0, nan]))
    assert all(map(isnan, metrics.reduce().values()))


def test_max_and_set() -> None:
    metrics = Metrics()
    for value in (1.0, torch.tensor(3.0), 2):
        metrics.max("peak", value)
    metrics.max("broken", nan)
    metrics.max("broken", 1.0)
    metrics.max("depth", -inf)
    metrics.set("lr", 1e-6)
    metrics.set("lr", 2e-6)
    metrics.set("loss", nan)
    result = metrics.reduce()
    assert isnan(result.pop("broken")) and isnan(result.pop("loss"))
    assert result == {"peak": 3.0, "depth": -inf, "lr": 2e-6}


def test_merge_adds_and_kinds_may_not_change() -> None:
    one, other = Metrics(), Metrics()
    one.mean("a", 1, 2)
    other.mean("a", 5, 2)
    other.max("b", 1)
    one.merge(other)
    assert one.reduce() == {"a": 1.5, "b": 1.0}
    with pytest.raises(ValueError, match="'a' is a mean, not a sum"):
        one.sum("a", 1)
