"""Rewards shaped by what is known without the task: length and distance from the reference model."""

from __future__ import annotations

from math import ceil

from torch import Tensor


def overlong_tokens(buffer: float, max_tokens: int) -> int:
    """The penalised last tokens: `buffer` itself, or below 1 that fraction of `max_tokens`, rounded up."""
    return ceil(buffer * max_tokens) if buffer < 1 else int(buffer)


def soft_overlong(lengths_S: Tensor, max_tokens: int, buffer: int) -> Tensor:
    """float64 [S], to be added to the reward: 0 up to `max_tokens - buffer` tokens, falling linearly to -1 at
    `max_tokens`. Soft overlong punishment of DAPO, arXiv:2503.14476, equation 13.

    Raises ValueError unless 0 < buffer <= max_tokens.
    """
    if not 0 < buffer <= max_tokens:
        raise ValueError(f"the overlong buffer must lie in 1..{max_tokens} (the longest response), not {buffer}")
    return ((max_tokens - buffer - lengths_S.double()) / buffer).clamp(-1.0, 0.0)


def kl_penalized(reward_S: Tensor, kl_S: Tensor, coef: float) -> Tensor:
    """float64 [S]: reward - coef * kl, where kl_S sums the k1 of the response's tokens. NaN stays NaN.

    With k1 the policy gradient of this reward is that of E[reward] - coef * KL(policy || reference).
    """
    return reward_S.double() - coef * kl_S.double()
