"""Sums, means and extremes over the segments of flat ragged values, and over groups of samples.

Two kinds of segment occur. The tokens of one sample are neighbours: values [R] and `cu_seqlens` int64 [S + 1]
(sample s owns `cu_seqlens[s]:cu_seqlens[s + 1]`; empty samples are allowed). The samples of one group may lie
anywhere: values [S] and a dense group number int64 [S].
"""

from __future__ import annotations

import torch
from torch import Tensor


def lengths_of(cu_seqlens: Tensor) -> Tensor:
    """int64 [S]: tokens of each sample."""
    return cu_seqlens.diff()


def offsets_of(lengths_S: Tensor) -> Tensor:
    """int64 [S + 1]: where each sample starts, and the end of the last one."""
    return torch.nn.functional.pad(lengths_S.to(torch.int64).cumsum(0), (1, 0))


def segment_sum(values_R: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[S]: the sum over each sample's tokens; 0 for an empty sample. Deterministic, also on CUDA."""
    return torch.segment_reduce(values_R, "sum", offsets=cu_seqlens, initial=0)


def segment_mean(values_R: Tensor, cu_seqlens: Tensor, mask_R: Tensor | None = None) -> Tensor:
    """[S]: the mean over each sample's tokens where `mask_R` is not 0 (all tokens without one); 0 where none counts."""
    if mask_R is None:
        return segment_sum(values_R, cu_seqlens) / lengths_of(cu_seqlens).clamp(min=1)
    count_S = segment_sum(mask_R.to(values_R.dtype), cu_seqlens)
    return segment_sum(zero_where_masked(values_R, mask_R), cu_seqlens) / count_S.clamp(min=1)


def segment_cumsum(values_R: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[R]: the running sum within each sample, in float64 inside so that long neighbours cost no digits."""
    if values_R.numel() == 0:
        return values_R.clone()
    running_R = values_R.double().cumsum(0)
    before_S = torch.nn.functional.pad(running_R, (1, 0))[cu_seqlens[:-1]]
    return (running_R - expand(before_S, cu_seqlens, values_R.shape[0])).to(values_R.dtype)


def expand(values_S: Tensor, cu_seqlens: Tensor, total: int | None = None) -> Tensor:
    """[R]: each sample's value repeated over its tokens. `total` = R, where known, saves a device synchronisation."""
    lengths_S = lengths_of(cu_seqlens)
    if values_S.is_cpu and not values_S.requires_grad and values_S.dtype != torch.bfloat16:
        # NumPy copies runs where torch gathers by an index: ten times as fast.
        return torch.from_numpy(values_S.numpy().repeat(lengths_S.numpy(), axis=0))
    return torch.repeat_interleave(values_S, lengths_S, dim=0, output_size=total)


def zero_where_masked(values_R: Tensor, mask_R: Tensor) -> Tensor:
    """[R]: 0 where `mask_R` is 0. Unlike a product, it lets no NaN or infinity through, in value or in gradient."""
    return torch.where(mask_R != 0, values_R, torch.zeros((), dtype=values_R.dtype, device=values_R.device))


def group_sum(values_S: Tensor, group_S: Tensor, groups: int) -> Tensor:
    """[G]: the sum over each group's samples."""
    return values_S.new_zeros(groups).index_add(0, group_S, values_S)


def group_extremes(values_S: Tensor, group_S: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """([G], [G]): the least and the largest value of each group; +inf and -inf for a group without samples."""
    least = values_S.new_full((groups,), float("inf")).scatter_reduce(0, group_S, values_S, "amin")
    largest = values_S.new_full((groups,), float("-inf")).scatter_reduce(0, group_S, values_S, "amax")
    return least, largest
