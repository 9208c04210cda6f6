from __future__ import annotations

import random
from itertools import combinations
from math import comb, isnan, nan, sqrt

import pytest

from spmd_rl.observe.evaluation import Outcome, estimate, pass_at_k, summarize, wilson


@pytest.mark.parametrize("n", [1, 2, 5, 6])
def test_pass_at_k_is_the_share_of_draws_with_a_pass(n: int) -> None:
    for c in range(n + 1):
        passed = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            draws = [any(draw) for draw in combinations(passed, k)]
            assert pass_at_k(n, c, k) == pytest.approx(sum(draws) / len(draws), abs=1e-12)


def test_pass_at_k_is_exact_for_many_samples() -> None:
    assert pass_at_k(1000, 1, 500) == pytest.approx(0.5, abs=1e-12)
    assert pass_at_k(5000, 0, 100) == 0.0


@pytest.mark.parametrize("k", [0, 3])
def test_pass_at_k_needs_k_samples(k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} can't be estimated from 2"):
        pass_at_k(2, 1, k)


@pytest.mark.parametrize(
    ("passed", "n", "low", "high"),
    [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1.0), (1, 1, 0.2065, 1.0)],
)  # fmt: skip
def test_wilson(passed: int, n: int, low: float, high: float) -> None:
    found = wilson(passed, n)
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)
    assert found.value == passed / n
    assert found.half_width == pytest.approx((high - low) / 2, abs=1e-4)


def test_wilson_ends_solve_its_equation() -> None:
    found = wilson(41, 200)
    for end in (found.low, found.high):
        assert abs(41 / 200 - end) == pytest.approx(1.959964 * sqrt(end * (1 - end) / 200), rel=1e-6)


def test_wilson_covers_the_truth() -> None:
    for p in (0.02, 0.1, 0.5):
        covered = 0.0
        for c in range(201):
            found = wilson(c, 200)
            if found.low <= p <= found.high:
                covered += comb(200, c) * p**c * (1 - p) ** (200 - c)
        assert 0.93 < covered < 0.98


def test_samples_of_a_prompt_are_a_cluster() -> None:
    per_prompt = [0.0, 0.5, 1.0, 0.5]
    found = estimate(per_prompt, single=False)
    half = 1.959964 * sqrt(((0.5**2) * 2 / 3) / 4)
    assert found.value == 0.5
    assert (found.low, found.high) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-6)


@pytest.mark.parametrize("per_prompt", [[0.0, 0.0, 0.0], [0.25], [1.0, 1.0]])
def test_without_spread_the_interval_is_not_empty(per_prompt: list[float]) -> None:
    found = estimate(per_prompt, single=False)
    assert found == wilson(sum(per_prompt), len(per_prompt))
    assert found.high - found.low > 0.2


def outcomes() -> list[Outcome]:
    a = [Outcome("a", p, passed=p < 3, reward=float(p < 3), tokens=p) for p in range(10)]
    b = [Outcome("b", p, passed=s == 0, reward=nan if s == 1 else 0.5, tokens=10) for p in range(2) for s in range(4)]
    return a + b


def test_summary_by_source_and_overall() -> None:
    shuffled = outcomes()
    random.Random(0).shuffle(shuffled)
    a, b, overall = results = summarize(shuffled, pass_at=[1])
    assert results == summarize(outcomes(), pass_at=[1])
    assert [r.source for r in results] == ["a", "b", "overall"]
    assert (a.prompts, a.samples, a.reward, a.tokens) == (10, 10, 0.3, 4.5)
    assert a.pass_at[1] == wilson(3, 10)
    assert (b.prompts, b.samples, b.reward) == (2, 8, 0.5)  # excluded samples count as not passed, not in the reward
    assert b.pass_at[1].value == 0.25
    assert (overall.prompts, overall.samples) == (12, 18)
    assert overall.pass_at[1].value == pytest.approx((3 + 2 * 0.25) / 12)  # prompts of both sets, prompt 0 twice
    assert a.metrics()["eval/a/pass@1_low"] == wilson(3, 10).low
    assert {"eval/a/pass@1", "eval/a/pass@1_high", "eval/a/n", "eval/a/samples"} < set(a.metrics())


def test_several_k() -> None:
    (only,) = summarize([o for o in outcomes() if o.source == "b"], pass_at=[1, 4])
    assert only.pass_at[1].value == 0.25 and only.pass_at[4].value == 1.0
    with pytest.raises(ValueError, match="pass@2"):
        summarize(outcomes(), pass_at=[2])


def test_all_excluded() -> None:
    (only,) = summarize([Outcome("a", 0, False, nan, 1)])
    assert isnan(only.reward) and only.pass_at[1].value == 0.0
