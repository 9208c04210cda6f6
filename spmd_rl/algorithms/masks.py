"""Which samples and which tokens count.

An excluded sample (reward NaN) leaves its group's statistics and the loss. A masked sample leaves the loss alone: its
reward still counts in the group's statistics. What is masked is out of numerator and denominator alike, because both
are counted from the same `loss_mask`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from spmd_rl.algorithms.ragged import expand, offsets_of, segment_cumsum, segment_sum, zero_where_masked
from spmd_rl.data.batch import Finish


def loss_mask(lengths_S: Tensor, reward_S: Tensor, finish_S: Tensor, mask_truncated: bool) -> Tensor:
    """uint8 [R]: 1 where a token counts in the loss.

    lengths_S: int64 [S]; reward_S: float [S], NaN where excluded; finish_S: [S] of `Finish`. Aborted responses never
    count, responses that hit the token limit count unless `mask_truncated`.
    """
    counts_S = ~reward_S.isnan() & (finish_S != Finish.ABORTED)
    if mask_truncated:
        counts_S = counts_S & (finish_S != Finish.LENGTH)
    return spread(counts_S.to(torch.uint8), lengths_S)


def until_end(response_R: Tensor, lengths_S: Tensor, end_tokens: Sequence[int]) -> Tensor:
    """uint8 [R]: 1 up to and including each response's first end token, 0 after it; all 1 where there is none.

    The end token itself is trained on, also where it is the padding token too.
    """
    cu_seqlens = offsets_of(lengths_S)
    is_end_R = torch.isin(response_R, torch.tensor(list(end_tokens), dtype=response_R.dtype, device=response_R.device))
    ends_before_R = segment_cumsum(is_end_R.float(), cu_seqlens) - is_end_R.float()
    return (ends_before_R == 0).to(torch.uint8)


def nonfinite_samples(values_R: Tensor, cu_seqlens: Tensor, mask_R: Tensor | None = None) -> Tensor:
    """bool [S]: samples with a NaN or infinite value, where `mask_R` (if given) is not 0."""
    bad_R = ~values_R.isfinite()
    if mask_R is not None:
        bad_R = bad_R & (mask_R != 0)
    return segment_sum(bad_R.float(), cu_seqlens) > 0


def refuse_nonfinite(columns: Mapping[str, Tensor], mask_R: Tensor, cu_seqlens: Tensor, ids: Tensor) -> None:
    """Raises FloatingPointError, naming column and samples, where a value that counts is NaN or infinite.

    columns: float [R] each, at least one, on the device of `mask_R`; ids: int64 [S, 3].
    """
    # One read from the device in the good case.
    fine = torch.stack([zero_where_masked(v.detach(), mask_R).isfinite().all() for v in columns.values()])
    if bool(fine.all()):
        return
    name = next(n for n, ok in zip(columns, fine.tolist(), strict=True) if not ok)
    bad_S = nonfinite_samples(columns[name].detach(), cu_seqlens.to(mask_R.device), mask_R)
    raise FloatingPointError(f"{name} is NaN or infinite in sample {name_samples(ids, bad_S)}")


def exclude(reward_S: Tensor, bad_S: Tensor) -> Tensor:
    """float [S]: the reward with NaN, the mark of exclusion, where `bad_S`."""
    return torch.where(bad_S, float("nan"), reward_S)


def name_samples(ids: Tensor, bad_S: Tensor, most: int = 5) -> str:
    """The identities of the samples `bad_S`, for messages. ids: int64 [S, 3]."""
    rows = ids[bad_S.to(ids.device)].tolist()
    named = ", ".join(f"(epoch {e}, prompt {p}, sample {s})" for e, p, s in rows[:most])
    return named + (f" and {len(rows) - most} more" if len(rows) > most else "")


def spread(values_S: Tensor, lengths_S: Tensor) -> Tensor:
    """[R]: each sample's value on all of its tokens: the `advantage` column from one advantage per sample."""
    return expand(values_S, offsets_of(lengths_S))
