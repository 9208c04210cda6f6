"""Whitening over the tokens of the whole batch, in two steps, so that every rank does the same with its part.

`local_sums` of each rank's samples, summed over the ranks, go into `whiten`. A sample's value counts once per token.
"""

from __future__ import annotations

import torch
from torch import Tensor


def local_sums(values_S: Tensor, lengths_S: Tensor) -> Tensor:
    """float64 [3]: tokens, sum over tokens, sum of squares over tokens. Samples with NaN do not count."""
    counts_S = ~values_S.isnan()
    weight_S = torch.where(counts_S, lengths_S.double(), 0.0)
    values_S = torch.where(counts_S, values_S.double(), 0.0)
    return torch.stack([weight_S.sum(), (weight_S * values_S).sum(), (weight_S * values_S.square()).sum()])


def variance(sums: Tensor, centre: bool = True) -> Tensor:
    """float64 scalar: that of the population (divided by the count), from `local_sums` over all ranks.

    What is left of equal values is rounding, a few ulps of the second moment. It is no signal: exactly 0 is returned.
    centre=False takes the mean for 0.
    """
    tokens, total, squares = sums.unbind()
    tokens = tokens.clamp(min=1)
    second = squares / tokens
    found = second - (total / tokens * centre).square()
    return torch.where(found <= 64 * torch.finfo(torch.float64).eps * second, 0.0, found)


def whiten(values_S: Tensor, sums: Tensor, centre: bool = True, eps: float = 1e-8) -> Tensor:
    """float64 [S]: (value - mean) / sqrt(variance + eps); NaN becomes 0.

    sums: `local_sums` over all ranks. centre=False takes the mean for 0 (values that were centred before): zeros stay
    exactly 0. One valid token, or equal values everywhere, give 0 and not 0/0.
    """
    mean = sums[1] / sums[0].clamp(min=1) * centre
    spread = variance(sums, centre)
    scaled_S = (values_S.double() - mean) * torch.where(spread == 0, 0.0, (spread + eps).rsqrt())
    return torch.where(values_S.isnan(), 0.0, scaled_S)
