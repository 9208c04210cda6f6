"""Ragged GAE against a float64 loop over tokens, and values worked by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spmd_rl.algorithms.gae import BLOCK, discounted_suffix_sum, gae, terminal_rewards
from spmd_rl.algorithms.ragged import offsets_of


def loop(reward_R: Tensor, value_R: Tensor, lengths: list[int], gamma: float, lam: float, after: list[float]) -> Tensor:
    """The textbook recursion, token by token."""
    advantage, start = [0.0] * len(value_R), 0
    for length, bootstrap in zip(lengths, after, strict=True):
        next_value, running = bootstrap, 0.0
        for t in range(start + length - 1, start - 1, -1):
            running = float(reward_R[t]) + gamma * next_value - float(value_R[t]) + gamma * lam * running
            advantage[t], next_value = running, float(value_R[t])
        start += length
    return torch.tensor(advantage, dtype=torch.float64)


EDGES = [0, 1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK - 1, BLOCK * BLOCK, BLOCK * BLOCK + 1]
LENGTHS = st.lists(st.one_of(st.sampled_from(EDGES), st.integers(0, 100)), min_size=1, max_size=8)


@given(LENGTHS, st.integers(0, 2**31), st.sampled_from([0.0, 0.3, 0.99, 1.0]), st.sampled_from([0.0, 0.5, 0.95, 1.0]))
@settings(deadline=None, max_examples=60)
def test_equals_the_loop(lengths: list[int], seed: int, gamma: float, lam: float) -> None:
    torch.manual_seed(seed)
    reward_R, value_R = torch.randn(2, sum(lengths), dtype=torch.float64)
    bootstrap_S = torch.randn(len(lengths), dtype=torch.float64)
    cu = offsets_of(torch.tensor(lengths))
    for given_S, after in ((bootstrap_S, bootstrap_S.tolist()), (None, [0.0] * len(lengths))):
        right_R = loop(reward_R, value_R, lengths, gamma, lam, after)
        advantage_R, return_R = gae(reward_R, value_R, cu, gamma, lam, given_S)
        torch.testing.assert_close(advantage_R, right_R, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(return_R, right_R + value_R, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("decay", [0.5, 0.95, 1.0])
def test_float32_keeps_its_digits_over_long_responses(decay: float) -> None:
    torch.manual_seed(0)
    lengths = [5000, 3, 0, 20000]
    values_R, cu = torch.randn(sum(lengths)), offsets_of(torch.tensor(lengths))
    right_R = loop(values_R, torch.zeros(sum(lengths)), lengths, 1.0, decay, [0.0] * 4)
    found_R = discounted_suffix_sum(values_R, cu, decay)
    scale = max(1.0, float(right_R.abs().max()))
    assert float((found_R - right_R).abs().max()) < 2e-6 * scale


def test_by_hand() -> None:
    # gamma = lam = 1/2. Sample 1: delta = (0 + 1 - 1, 4 - 2) = (0, 2), A = (0 + 2/4, 2). Sample 2: delta = A = 1 - 3.
    advantage_R, return_R = gae(
        torch.tensor([0.0, 4.0, 1.0]), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 2, 2, 3]), 0.5, 0.5
    )
    assert advantage_R.tolist() == [0.5, 2.0, -2.0]
    assert return_R.tolist() == [1.5, 4.0, 1.0]
    assert advantage_R.dtype == torch.float32


def test_without_discount_and_critic_it_is_the_reward_of_the_response() -> None:
    cu = torch.tensor([0, 3, 3, 5])
    reward_R = terminal_rewards(torch.tensor([2.0, 9.0, -1.0]), cu)
    assert reward_R.tolist() == [0.0, 0.0, 2.0, 0.0, -1.0]
    assert gae(reward_R, torch.zeros(5), cu)[0].tolist() == [2.0, 2.0, 2.0, -1.0, -1.0]


def test_no_sample_reaches_another() -> None:
    lengths = [5, 40, 7, 64, 3]
    values_R, cu = torch.randn(sum(lengths)), offsets_of(torch.tensor(lengths))
    clean = discounted_suffix_sum(values_R, cu, 0.9).split(lengths)
    values_R[int(cu[2]) + 3] = float("nan")  # in the third
    dirty = discounted_suffix_sum(values_R, cu, 0.9).split(lengths)
    for i in (0, 1, 3, 4):
        assert torch.equal(clean[i], dirty[i])
    assert bool(dirty[2][:4].isnan().all()) and bool(dirty[2][4:].isfinite().all())


def test_bad_decay_and_nothing() -> None:
    with pytest.raises(ValueError, match=r"0\.\.1, not 1\.5"):
        discounted_suffix_sum(torch.ones(2), torch.tensor([0, 2]), 1.5)
    assert discounted_suffix_sum(torch.empty(0), torch.tensor([0, 0]), 0.5).shape == (0,)
    assert gae(torch.empty(0), torch.empty(0), torch.tensor([0, 0]))[0].shape == (0,)
