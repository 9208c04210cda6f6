"""Loads the compiled kernels. Where they are not built, the torch reference beside each kernel serves, and says so."""

from __future__ import annotations

import functools
import logging
from pathlib import Path

import torch
from torch import Tensor

BUILD = "pip install --no-build-isolation -e ."
OPERATORS = ("copy_segments", "copy_slices", "deliver", "divide", "lay_out", "meet", "partition")
log = logging.getLogger(__name__)


@functools.cache
def built() -> bool:
    """Whether `torch.ops.spmd_rl.*` are there; loads them at the first call.

    Without them, or with those of an older version, results are the same, only slower: one warning per process says
    how to build them. Raises RuntimeError where a library is there but does not load (made for another torch).
    """
    libraries = sorted(Path(__file__).parent.glob("_kernels*.so"))
    if not libraries:
        log.warning("kernels are not built: the (slower) torch reference serves; build them with `%s`", BUILD)
        return False
    try:
        torch.ops.load_library(str(libraries[0]))
    except OSError as error:
        problem = f"{libraries[0].name} does not load into torch {torch.__version__} ({error})"
        raise RuntimeError(f"{problem}; build it again: {BUILD}") from None
    missing = [name for name in OPERATORS if not hasattr(torch.ops.spmd_rl, name)]
    if missing:
        older = f"{libraries[0].name} is older than this version (no {missing[0]})"
        log.warning("%s: the (slower) torch reference serves; build it again with `%s`", older, BUILD)
        return False
    _register_shapes()
    return True


def stream_handle(tensor: Tensor) -> int:
    """The CUDA stream that an operator on `tensor` must use; 0 on the CPU.

    Passed as a number, because the stable ABI of the oldest supported torch has no way to ask for it.
    """
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0


def _register_shapes() -> None:
    """What the operators return, for tracing without data."""

    @torch.library.register_fake("spmd_rl::copy_segments")
    def _(sources: list[Tensor], target: Tensor, segments: Tensor, stream: int = 0) -> None:
        return None

    @torch.library.register_fake("spmd_rl::copy_slices")
    def _(sources: list[Tensor], targets: list[Tensor], slices: Tensor, stream: int = 0) -> None:
        return None

    @torch.library.register_fake("spmd_rl::deliver")
    def _(columns: list[Tensor], targets: list[Tensor], lengths: Tensor, bytes: Tensor, to: Tensor, at: Tensor) -> None:
        return None

    @torch.library.register_fake("spmd_rl::divide")
    def _(ids: Tensor, source: Tensor, lengths: Tensor, *rule: float) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty_like(source), torch.empty_like(source), source.new_empty(3, dtype=torch.float64)

    @torch.library.register_fake("spmd_rl::lay_out")
    def _(lengths: Tensor, row_bytes: Tensor, order: Tensor, bins_of: Tensor, bins: int) -> tuple[Tensor, Tensor]:
        columns = lengths.shape[1]
        return lengths.new_empty(order.shape[0], columns), lengths.new_empty(bins, columns + 1)

    @torch.library.register_fake("spmd_rl::meet")
    def _(counter: Tensor, expected: int, seconds: float) -> bool:
        return True

    @torch.library.register_fake("spmd_rl::partition")
    def _(costs: Tensor, slots: int, equal_counts: bool) -> Tensor:
        return torch.empty_like(costs, dtype=torch.int64)
