"""Copy many strided two-dimensional slices at once, with a cast from float32 to bfloat16 where the targets want it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spmd_rl.ops.library import built, stream_handle


def copy_slices(sources: Sequence[Tensor], targets: Sequence[Tensor], slices_8M: Tensor) -> None:
    """Copy M slices of `rows` x `columns` elements.

    sources, targets: contiguous tensors on one device, addressed as if flat; all sources of one dtype, all targets of
    the same one, or of bfloat16 where the sources are float32 (rounded to nearest, ties to even). slices_8M: int64
    [8, M] on the CPU, rows: source, offset and row stride in it, target, offset and row stride in it, rows, columns;
    all in elements. Slices must not overlap in the targets. Raises RuntimeError where one lies outside its tensor.
    """
    if built():
        handle = stream_handle(targets[0]) if targets else 0
        torch.ops.spmd_rl.copy_slices(list(sources), list(targets), slices_8M, handle)
    else:
        copy_slices_reference(sources, targets, slices_8M)


def copy_slices_reference(sources: Sequence[Tensor], targets: Sequence[Tensor], slices_8M: Tensor) -> None:
    """One strided copy per slice."""
    dtypes = ({tensor.dtype for tensor in sources}, {tensor.dtype for tensor in targets})
    if dtypes[0] != dtypes[1] and dtypes != ({torch.float32}, {torch.bfloat16}):
        raise RuntimeError(f"only float32 to bfloat16 is cast, not {dtypes[0]} to {dtypes[1]}")
    for source, begin, stride, target, place, target_stride, rows, columns in slices_8M.T.tolist():
        if rows == 0 or columns == 0:
            continue
        try:
            block = _window(sources[source], begin, stride, rows, columns)
            _window(targets[target], place, target_stride, rows, columns).copy_(block)
        except IndexError:
            raise RuntimeError(
                f"a slice names source {source} of {len(sources)}, target {target} of {len(targets)}"
            ) from None


def _window(tensor: Tensor, offset: int, stride: int, rows: int, columns: int) -> Tensor:
    if offset < 0 or stride < 0 or offset + (rows - 1) * stride + columns > tensor.numel():
        raise RuntimeError("a slice lies outside its tensor")
    return tensor.as_strided((rows, columns), (stride, 1), tensor.storage_offset() + offset)
