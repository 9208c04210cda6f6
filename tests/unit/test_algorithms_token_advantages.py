"""Advantages per token from a critic: a float64 loop over tokens, values by hand, and independence of the split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spmd_rl.algorithms.token_advantages import compute_token_advantages
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.observe.metrics import Metrics

GAE = AlgorithmConfig(advantage="gae", gae_gamma=0.9, gae_lambda=0.7)
NAN = float("nan")


def oracle(
    algorithm: AlgorithmConfig, rewards: list[float], lengths: list[int], value: list[float], mask: list[float],
    kl: list[float], max_tokens: int,
) -> tuple[np.ndarray, np.ndarray, float]:  # fmt: skip
    """Advantages, returns and explained variance, token by token in float64."""
    advantage, returns, start = [0.0] * len(value), [0.0] * len(value), 0
    for length, reward in zip(lengths, rewards, strict=True):
        if algorithm.overlong_buffer:
            over = length - (max_tokens - algorithm.overlong_buffer)
            reward -= algorithm.overlong_penalty * min(max(over / algorithm.overlong_buffer, 0.0), 1.0)
        after, running = 0.0, 0.0
        for t in range(start + length - 1, start - 1, -1):
            paid = -algorithm.kl_coef * kl[t] + (reward if t == start + length - 1 else 0.0)
            delta = paid + algorithm.gae_gamma * after - value[t]
            running = delta + algorithm.gae_gamma * algorithm.gae_lambda * running
            advantage[t], returns[t], after = running, running + value[t], value[t]
        start += length
    counts = np.array(mask, bool)
    a, r, v = np.array(advantage), np.array(returns), np.array(value)
    explained = 1 - np.var((r - v)[counts]) / np.var(r[counts])
    if algorithm.gae_whiten:
        a = (a - a[counts].mean()) / np.sqrt(a[counts].var() + 1e-8)
    return np.where(counts, a, 0.0), np.where(counts, r, 0.0), float(explained)


CASES = [
    GAE,
    replace(GAE, gae_whiten=False),
    replace(GAE, kl_coef=0.3, kl_in="reward", overlong_buffer=4.0, overlong_penalty=0.5),
]


@given(
    lengths=st.lists(st.integers(0, 12), min_size=2, max_size=6).filter(lambda x: sum(n > 0 for n in x) > 1),
    seed=st.integers(0, 2**31),
    algorithm=st.sampled_from(CASES),
    cut=st.integers(0, 6),
)
@settings(deadline=None, max_examples=60)
def test_equals_the_loop_however_the_samples_are_divided(
    lengths: list[int], seed: int, algorithm: AlgorithmConfig, cut: int
) -> None:
    torch.manual_seed(seed)
    tokens_in_all, samples = sum(lengths), len(lengths)
    reward_S = torch.randn(samples)
    value_R, kl_R = torch.randn(2, tokens_in_all)
    excluded = int(torch.randint(samples, ()))
    keep = [i for i in range(samples) if i != excluded]
    if sum(lengths[i] for i in keep) < 2:
        return
    mask_R = torch.repeat_interleave(
        torch.tensor([float(i != excluded) for i in range(samples)]), torch.tensor(lengths)
    )
    given_S = torch.where(torch.arange(samples) == excluded, NAN, reward_S)

    # Two "ranks": the sums of both are known to each.
    bounds = [0, min(cut, samples), samples]
    seen: list[Tensor] = []

    def on_rank(rank: int, total: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Metrics]:
        first, last = bounds[rank], bounds[rank + 1]
        tokens = slice(sum(lengths[:first]), sum(lengths[:last]))
        metrics = Metrics()
        made = compute_token_advantages(
            algorithm, given_S[first:last], torch.tensor(lengths[first:last], dtype=torch.int64), value_R[tokens],
            mask_R[tokens], max_tokens=12, kl_R=kl_R[tokens], total=total, metrics=metrics,
        )  # fmt: skip
        return *made, metrics

    def remembered(own: Tensor) -> Tensor:
        seen.append(own)
        return own

    for rank in (0, 1):
        on_rank(rank, remembered)
    everyone = seen[0] + seen[1]
    parts = [on_rank(rank, lambda own: everyone) for rank in (0, 1)]
    want_a, want_r, explained = oracle(
        algorithm, reward_S.tolist(), lengths, value_R.tolist(), mask_R.tolist(), kl_R.tolist(), 12
    )
    np.testing.assert_allclose(torch.cat([p[0] for p in parts]), want_a, atol=2e-5, rtol=2e-5)
    np.testing.assert_allclose(torch.cat([p[1] for p in parts]), want_r, atol=2e-5, rtol=2e-5)
    parts[0][2].merge(parts[1][2])
    found = parts[0][2].reduce()
    assert found["value/explained_variance"] == pytest.approx(explained, rel=1e-2, abs=1e-4)
    assert found["value/mean"] == pytest.approx(float((value_R * mask_R).sum() / mask_R.sum()), abs=1e-5)


def test_by_hand() -> None:
    # gamma = lambda = 1/2, no whitening. Sample 1 (2 tokens, reward 4): delta = (0 + 1 - 1, 4 - 2), A = (1/2, 2).
    # Sample 2 (1 token, reward 1, value 3): A = -2. With kl_coef 1 each token also pays its k1.
    algorithm = AlgorithmConfig(advantage="gae", gae_gamma=0.5, gae_lambda=0.5, gae_whiten=False)
    reward_S, lengths_S, value_R = torch.tensor([4.0, 1.0]), torch.tensor([2, 1]), torch.tensor([1.0, 2.0, 3.0])
    advantage_R, return_R = compute_token_advantages(
        algorithm, reward_S, lengths_S, value_R, torch.ones(3), max_tokens=8
    )
    assert advantage_R.tolist() == [0.5, 2.0, -2.0] and return_R.tolist() == [1.5, 4.0, 1.0]
    taxed = replace(algorithm, kl_coef=1.0, kl_in="reward")
    kl_R = torch.tensor([0.0, 1.0, -1.0])
    advantage_R, _ = compute_token_advantages(
        taxed, reward_S, lengths_S, value_R, torch.ones(3), max_tokens=8, kl_R=kl_R
    )
    assert advantage_R.tolist() == [0.25, 1.0, -1.0]
    with pytest.raises(ValueError, match="needs the KL of every token"):
        compute_token_advantages(taxed, reward_S, lengths_S, value_R, torch.ones(3), max_tokens=8)


def test_n9_one_token_that_counts_is_whitened_to_0() -> None:
    metrics = Metrics()
    advantage_R, return_R = compute_token_advantages(
        GAE, torch.tensor([1.0, NAN]), torch.tensor([1, 2]), torch.zeros(3), torch.tensor([1, 0, 0]), max_tokens=8,
        metrics=metrics,
    )  # fmt: skip
    assert advantage_R.tolist() == [0.0, 0.0, 0.0] and return_R.tolist() == [1.0, 0.0, 0.0]
    assert "value/explained_variance" not in metrics.reduce()  # all returns are equal: nothing to explain


def test_an_infinite_reward_and_nothing_at_all() -> None:
    with pytest.raises(ValueError, match="infinite reward of sample 1"):
        compute_token_advantages(
            GAE, torch.tensor([0.0, float("inf")]), torch.tensor([1, 1]), torch.zeros(2), torch.ones(2), max_tokens=8
        )
    none, no_samples = torch.empty(0), torch.empty(0, dtype=torch.int64)
    made = compute_token_advantages(GAE, none, no_samples, none, none, max_tokens=8)
    assert [x.shape for x in made] == [(0,), (0,)]
