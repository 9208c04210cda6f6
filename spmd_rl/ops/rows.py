"""Ragged rows of many columns that move as a whole: where each one lies, and the copy to where it belongs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.ops.library import built
from spmd_rl.ops.segments import as_bytes

Int64 = NDArray[np.int64]
ALIGN = 16  # bytes; widest vector access of the copy kernels


def lay_out(lengths_TC: Int64, row_bytes_C: Int64, order_K: Int64, bin_K: Int64, bins: int) -> tuple[Int64, Int64]:
    """Put K samples into B bins of memory. A bin holds column after column, each beginning at a multiple of ALIGN,
    and in a column the rows of its samples, one behind the other, in the given order.

    lengths_TC: int64, of T samples in C columns; row_bytes_C: bytes of one unit of length; order_K: which of the T
    samples; bin_K: its bin, negative for none. Returns the byte in its bin at which each row begins, [K, C] (-1: in no
    bin), and that at which each column begins, [B, C + 1], the last being the bin's size. Raises RuntimeError for a
    sample or a bin that does not exist.
    """
    if not built():
        return lay_out_reference(lengths_TC, row_bytes_C, order_K, bin_K, bins)
    arrays = (torch.from_numpy(part) for part in (lengths_TC, row_bytes_C, order_K, bin_K))
    places, starts = torch.ops.spmd_rl.lay_out(*arrays, bins)
    return places.numpy(), starts.numpy()


def lay_out_reference(
    lengths_TC: Int64, row_bytes_C: Int64, order_K: Int64, bin_K: Int64, bins: int
) -> tuple[Int64, Int64]:
    """Bin by bin."""
    for what, index, known in (("row", order_K, len(lengths_TC)), ("bin", bin_K, bins)):
        if index.size and (int(index.max()) >= known or (what == "row" and int(index.min()) < 0)):
            raise RuntimeError(f"there is no {what} {int(index.max())}")
    places = np.full((len(order_K), len(row_bytes_C)), -1, dtype=np.int64)
    starts = np.zeros((bins, len(row_bytes_C) + 1), dtype=np.int64)
    sizes_KC = lengths_TC[order_K] * row_bytes_C
    for number in range(bins):
        inside = np.flatnonzero(bin_K == number)
        sizes = sizes_KC[inside]
        blocks = (sizes.sum(axis=0) + ALIGN - 1) // ALIGN * ALIGN
        np.cumsum(blocks, out=starts[number, 1:])
        places[inside] = starts[number, :-1] + np.cumsum(sizes, axis=0) - sizes
    return places, starts


def deliver(
    columns: Sequence[Tensor],
    targets: Sequence[Tensor],
    lengths_SC: Int64,
    row_bytes_C: Int64,
    target_S: Int64,
    place_SC: Int64,
) -> None:
    """Copy the rows of S samples to where they belong.

    columns: C contiguous tensors on the CPU, of the samples' rows one behind the other; targets: memory, uint8;
    target_S: which of them a sample goes to (negative: to none); place_SC: bytes from its beginning; all int64.
    Rows must not overlap in the targets. Raises RuntimeError, before anything is copied, where a row lies outside.
    """
    if built():
        arrays = (torch.from_numpy(part) for part in (lengths_SC, row_bytes_C, target_S, place_SC))
        torch.ops.spmd_rl.deliver(list(columns), list(targets), *arrays)
    else:
        deliver_reference(columns, targets, lengths_SC, row_bytes_C, target_S, place_SC)


def deliver_reference(
    columns: Sequence[Tensor],
    targets: Sequence[Tensor],
    lengths_SC: Int64,
    row_bytes_C: Int64,
    target_S: Int64,
    place_SC: Int64,
) -> None:
    """Row by row."""
    columns = [as_bytes(values) for values in columns]
    sizes_SC = lengths_SC * row_bytes_C
    begins_SC = np.cumsum(sizes_SC, axis=0) - sizes_SC
    rows = []
    for sample, number in enumerate(target_S.tolist()):
        for column, values in enumerate(columns):
            begin, size = int(begins_SC[sample, column]), int(sizes_SC[sample, column])
            if size < 0 or begin + size > values.numel():
                raise RuntimeError(f"row {sample} lies outside column {column}")
            if number >= len(targets):
                raise RuntimeError(f"row {sample} goes to target {number} of {len(targets)}")
            place = int(place_SC[sample, column])
            if number >= 0 and size:
                if place < 0 or place + size > targets[number].numel():
                    raise RuntimeError(f"row {sample} of column {column} lies outside target {number}")
                rows.append((targets[number][place : place + size], values[begin : begin + size]))
    for target, source in rows:
        target.copy_(source)
