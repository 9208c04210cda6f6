"""Generalised advantage estimation on ragged values, without a loop over tokens. arXiv:1506.02438."""

from __future__ import annotations

import torch
from torch import Tensor

from spmd_rl.algorithms.ragged import lengths_of

# Tokens that one row of the matrix product sums up. Two levels of 32 cover 1,024 tokens, three 32,768.
BLOCK = 32


def terminal_rewards(reward_S: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[R]: each sample's reward at its last token, 0 elsewhere. An empty sample's reward has no token to be at."""
    reward_R = reward_S.new_zeros(int(cu_seqlens[-1]))
    present_S = lengths_of(cu_seqlens) > 0
    reward_R[cu_seqlens[1:][present_S] - 1] = reward_S[present_S]
    return reward_R


def gae(
    reward_R: Tensor,
    value_R: Tensor,
    cu_seqlens: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    bootstrap_S: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(advantage_R, return_R), [R], no gradient: A_t = sum_k (gamma lam)^k delta_{t+k} within the sample,
    delta_t = reward_t + gamma value_{t+1} - value_t, return = A + value.

    reward_R, value_R: float32 or float64 [R]; value_R is the value *before* the token is drawn. bootstrap_S: [S], the
    value after a sample's last token, for responses that were cut off; 0 without it.
    """
    value_R = value_R.detach()
    present_S = lengths_of(cu_seqlens) > 0
    last_S = cu_seqlens[1:][present_S] - 1
    next_R = torch.empty_like(value_R)
    next_R[:-1] = value_R[1:]
    next_R[last_S] = 0.0 if bootstrap_S is None else bootstrap_S[present_S].to(value_R.dtype)
    delta_R = torch.add(reward_R, next_R, alpha=gamma).sub_(value_R)
    advantage_R = discounted_suffix_sum(delta_R, cu_seqlens, gamma * lam)
    return advantage_R, advantage_R + value_R


def discounted_suffix_sum(values_R: Tensor, cu_seqlens: Tensor, decay: float) -> Tensor:
    """[R], dtype of `values_R`: y_t = x_t + decay * y_{t+1} within each sample, for 0 <= decay <= 1.

    The flat values are cut into rows of BLOCK, whatever the samples. One product with the triangular matrix of powers
    solves every row by itself, and the few rows with a border between samples are solved again with it. What enters a
    row from its right is the same recurrence over the rows' first values, with decay ** BLOCK: a problem BLOCK times
    smaller. Nothing is divided by a power, so nothing under- or overflows, and no sample's NaN reaches another.

    Raises ValueError for a decay out of range.
    """
    if not 0 <= decay <= 1:
        raise ValueError(f"the decay must lie in 0..1, not {decay}")
    total = values_R.shape[0]
    if total == 0:
        return values_R.clone()
    rows = -(-total // BLOCK)
    rows_NB = torch.nn.functional.pad(values_R, (0, rows * BLOCK - total)).view(rows, BLOCK)
    exponent_BB = torch.arange(BLOCK).unsqueeze(1) - torch.arange(BLOCK)  # [source, target]
    powers_BB = torch.where(exponent_BB >= 0, float(decay) ** exponent_BB.clamp(min=0).double(), 0.0)
    solved_NB = rows_NB @ powers_BB.to(values_R)

    border_K = torch.unique_consecutive(cu_seqlens[cu_seqlens % BLOCK != 0] // BLOCK)
    position_KB = border_K.unsqueeze(1) * BLOCK + torch.arange(BLOCK, device=values_R.device)
    sample_KB = torch.searchsorted(cu_seqlens, position_KB, right=True)
    border_KB = _solve_with_borders(rows_NB[border_K], sample_KB, decay)
    solved_NB[border_K] = border_KB

    # Two rows are linked where the first value of the one depends on that of the other: no border in the row, or after.
    links = torch.unique_consecutive((cu_seqlens + BLOCK - 1) // BLOCK)
    heads_N = solved_NB[:, 0].contiguous()
    if len(links) - 1 < rows:
        heads_N = discounted_suffix_sum(heads_N, links, decay**BLOCK)
    entering_N = torch.nn.functional.pad(heads_N[1:], (0, 1))
    entering_N[cu_seqlens[(cu_seqlens % BLOCK == 0) & (cu_seqlens > 0)] // BLOCK - 1] = 0  # a border between two rows
    to_end_B = (float(decay) ** torch.arange(BLOCK, 0, -1).double()).to(values_R)
    solved_NB.addcmul_(entering_N.unsqueeze(1), to_end_B)
    # In a row with a border, only the sample that its end belongs to goes on to the right.
    goes_on_KB = torch.where(sample_KB == sample_KB[:, -1:], entering_N[border_K].unsqueeze(1) * to_end_B, 0.0)
    solved_NB[border_K] = border_KB + goes_on_KB
    return solved_NB.view(-1)[:total]


def _solve_with_borders(values_KB: Tensor, sample_KB: Tensor, decay: float) -> Tensor:
    """[K, B]: the recurrence within each row and sample, by doubling the span that is summed up."""
    solved_KB, span = values_KB, 1
    while span < values_KB.shape[1]:
        same_KB = sample_KB[:, :-span] == sample_KB[:, span:]
        added_KB = torch.where(same_KB, solved_KB[:, span:] * decay**span, 0.0)
        solved_KB = solved_KB + torch.nn.functional.pad(added_KB, (0, span))
        span *= 2
    return solved_KB
