"""What makes sharded training fast on CPU ranks: a reduce-scatter of least traffic, and memory that is used again."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ReduceOp
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


class GlooReduceScatter(ReduceScatter):
    """Each rank sends every other rank that one's slice and adds up what it receives, in rank order.

    Gloo's own reduce-scatter is an all-reduce of the whole buffer of which a slice is kept: twice the bytes and several
    more passes over memory. The order of the sum is fixed, so results repeat to the bit.
    """

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        if op != ReduceOp.SUM:
            raise ValueError(f"a sum is wanted here, not {op}")
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        torch.sum(received.view(group.size(), -1), dim=0, out=output_tensor)


def reuse_freed_memory() -> None:
    """Lets the C library keep freed blocks of any size instead of returning them to the system at once.

    A training step allocates and frees the same large buffers again and again; each time the system would have to
    clear and map their pages anew. The price: memory between steps stays near its peak, and holes between blocks
    raise the peak itself by about a tenth. Does nothing where the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
