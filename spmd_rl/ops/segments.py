"""Copy many byte ranges at once: packing and unpacking ragged rows of many columns is one call of this."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spmd_rl.ops.library import built, stream_handle


def as_bytes(values: Tensor) -> Tensor:
    """uint8 view of a contiguous tensor's memory."""
    if values.numel() == 0:  # may have strides that `view` refuses
        return torch.empty(0, dtype=torch.uint8, device=values.device)
    return values.detach().reshape(-1).view(torch.uint8)


def copy_segments(sources: Sequence[Tensor], target: Tensor, segments_4K: Tensor) -> None:
    """Copy K byte ranges into `target`.

    sources: uint8 tensors; target: uint8, on the same device; segments_4K: int64 [4, K] on the CPU, rows: which
    source, offset in it, offset in the target, number of bytes. Ranges in the target must not overlap.
    Raises RuntimeError where a range lies outside its tensor.
    """
    if built():
        torch.ops.spmd_rl.copy_segments(list(sources), target, segments_4K, stream_handle(target))
    else:
        copy_segments_reference(sources, target, segments_4K)


def copy_segments_reference(sources: Sequence[Tensor], target: Tensor, segments_4K: Tensor) -> None:
    """One indexed copy per source, in the widest unit that divides all its offsets and sizes."""
    if segments_4K.numel() and not 0 <= int(segments_4K[0].min()) <= int(segments_4K[0].max()) < len(sources):
        raise RuntimeError(f"a segment names a source that is not among {len(sources)}")
    for number, source in enumerate(sources):
        _, begin, place, size = segments_4K[:, segments_4K[0] == number]
        if begin.numel() == 0:
            continue
        for offset, tensor, name in ((begin, source, f"source {number}"), (place, target, "the target")):
            if int(size.min()) < 0 or int(offset.min()) < 0 or bool((offset > tensor.numel() - size).any()):
                raise RuntimeError(f"a range lies outside {name}")
        unit = _unit(begin, place, size, source, target)
        begin, place, size = begin // unit, place // unit, size // unit
        within = torch.arange(int(size.sum())) - torch.repeat_interleave(size.cumsum(0) - size, size)
        read = (torch.repeat_interleave(begin, size) + within).to(target.device)
        write = (torch.repeat_interleave(place, size) + within).to(target.device)
        kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[unit]
        whole_source = source[: source.numel() // unit * unit].view(kind)
        target[: target.numel() // unit * unit].view(kind)[write] = whole_source[read]


def _unit(begin: Tensor, place: Tensor, size: Tensor, source: Tensor, target: Tensor) -> int:
    offsets = torch.cat([begin, place, size]).tolist()
    offsets += [source.storage_offset(), target.storage_offset()]
    return next(unit for unit in (8, 4, 2, 1) if all(offset % unit == 0 for offset in offsets))
