"""Between ragged rows and padded ones. Only engines that cannot do without padding need this."""

from __future__ import annotations

import torch
from torch import Tensor

from spmd_rl.ops.segments import as_bytes, copy_segments


def pad(values: Tensor, lengths_S: Tensor, fill: float | int = 0, longest: int | None = None) -> Tensor:
    """[S, longest, *inner]: rows filled up at the right.

    values: [sum(lengths), *inner] of any dtype; lengths_S: int64 on the CPU; longest: the longest row unless given.
    Raises ValueError where a row is longer than `longest`.
    """
    width = int(lengths_S.max()) if lengths_S.numel() else 0
    if longest is not None:
        if width > longest:
            raise ValueError(f"a row of length {width} does not fit into {longest}")
        width = longest
    padded = torch.full((lengths_S.numel(), width, *values.shape[1:]), fill, dtype=values.dtype, device=values.device)
    offsets, places, sizes = _rows(padded, lengths_S)
    table = torch.stack([torch.zeros_like(sizes), offsets, places, sizes])
    copy_segments([as_bytes(values.contiguous())], as_bytes(padded), table)
    return padded


def unpad(padded: Tensor, lengths_S: Tensor) -> Tensor:
    """[sum(lengths), *inner]: the first `lengths[s]` entries of each row of [S, longest, *inner].

    Raises ValueError where a length is negative or beyond the row.
    """
    if lengths_S.shape != padded.shape[:1]:
        raise ValueError(f"{lengths_S.numel()} lengths for {padded.shape[0]} rows")
    if lengths_S.numel() and not 0 <= int(lengths_S.min()) <= int(lengths_S.max()) <= padded.shape[1]:
        raise ValueError(f"a length is not in 0..{padded.shape[1]}")
    values = torch.empty(int(lengths_S.sum()), *padded.shape[2:], dtype=padded.dtype, device=padded.device)
    offsets, places, sizes = _rows(padded, lengths_S)
    table = torch.stack([torch.zeros_like(sizes), places, offsets, sizes])
    copy_segments([as_bytes(padded.contiguous())], as_bytes(values), table)
    return values


def _rows(padded: Tensor, lengths_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """int64 [S] each: byte offset of a row in the ragged values, in the padded ones, and its bytes."""
    unit = padded.element_size() * padded.shape[2:].numel()
    sizes = lengths_S * unit
    places = torch.arange(lengths_S.numel()) * (padded.shape[1] * unit)
    return sizes.cumsum(0) - sizes, places, sizes
