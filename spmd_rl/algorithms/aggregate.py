"""From one loss per token to one number, so that any split into micro-batches and ranks adds up to the same number.

A denominator is never counted in the micro-batch at hand: it comes from `normalizers`, the counts of the whole
optimizer step over all ranks. Then the loss of the step is the *sum* of the losses of its micro-batches, and gradients
are summed, not averaged, over ranks.

| mode                  | loss of the step                                    | used by                    |
| --------------------- | --------------------------------------------------- | -------------------------- |
| `token_mean`          | sum over all tokens / tokens                        | DAPO, arXiv:2503.14476     |
| `seq_mean_token_mean` | mean over sequences of the mean over their tokens   | GRPO, arXiv:2402.03300     |
| `seq_mean_token_sum`  | mean over sequences of the sum over their tokens    | RLOO, arXiv:2402.14740     |
| `constant`            | sum over all tokens / (sequences * constant)        | Dr. GRPO, arXiv:2503.20783 |

A sequence counts where at least one of its tokens does: masked samples leave numerator and denominator together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor

from spmd_rl.algorithms.ragged import segment_mean, segment_sum, zero_where_masked

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant")
Number = TypeVar("Number", float, Tensor)


def counts(mask_R: Tensor, cu_seqlens: Tensor) -> dict[str, Tensor]:
    """`tokens` and `sequences` that count in this part: scalars on the mask's device, float64."""
    tokens_S = segment_sum((mask_R != 0).double(), cu_seqlens)
    return {"tokens": tokens_S.sum(), "sequences": (tokens_S > 0).sum().double()}


def local_counts(mask_R: Tensor, cu_seqlens: Tensor) -> dict[str, float]:
    """`counts` as numbers. Their sums over all micro-batches and ranks of a step are its `normalizers`."""
    return {name: float(count) for name, count in counts(mask_R, cu_seqlens).items()}


def numerator(values_R: Tensor, mask_R: Tensor, cu_seqlens: Tensor, mode: str) -> Tensor:
    """Scalar: this part's share of the loss before the division by the global denominator.

    values_R: float [R]; mask_R: [R], 0 where a token does not count (its value may then be anything, also NaN).
    Raises ValueError for an unknown mode.
    """
    if mode == "seq_mean_token_mean":
        return segment_mean(values_R, cu_seqlens, mask_R).sum()
    if mode in AGGREGATIONS:
        return zero_where_masked(values_R, mask_R).sum()
    raise ValueError(f"aggregation {mode!r} is unknown; there are {', '.join(AGGREGATIONS)}")


def units(mode: str, counted: Mapping[str, Number], constant: float = 0.0) -> Number:
    """What the numerators of parts with these counts are divided by; additive over the parts.

    Raises ValueError where `constant` is needed and not positive.
    """
    if mode == "token_mean":
        return counted["tokens"]
    if mode != "constant":
        return counted["sequences"]
    if constant <= 0:
        raise ValueError(f"aggregation 'constant' needs a positive number of tokens per sequence, not {constant}")
    return counted["sequences"] * constant


def aggregate(
    values_R: Tensor,
    mask_R: Tensor,
    cu_seqlens: Tensor,
    mode: str,
    normalizers: Mapping[str, float],
    constant: float = 0.0,
) -> Tensor:
    """Scalar: this part's share of the step's loss. The shares of all micro-batches and ranks add up to the loss."""
    # Where nothing counts at all, the numerator is 0 and so is the loss.
    return numerator(values_R, mask_R, cu_seqlens, mode) / (units(mode, normalizers, constant) or 1.0)
