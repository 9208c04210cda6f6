"""Memory of results, used again and again: a step that is no larger than an earlier one allocates nothing."""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.comm.scratch import rounded
from spmd_rl.comm.shared import Segment


@dataclass(frozen=True)
class Lease:
    """Memory that is its holder's until the last view of it is gone. data: uint8; words_W: int64, by which other
    processes find it (`comm.transport.Peers.block`); all 0 where they cannot, or where there is none."""

    data: Tensor
    words_W: NDArray[np.int64]


NO_LEASE = Lease(torch.empty(0, dtype=torch.uint8), np.zeros(4, dtype=np.int64))


@dataclass(frozen=True, eq=False)
class _Block:
    memory: NDArray[np.uint8]
    words_W: NDArray[np.int64]
    segment: Segment | None

    @classmethod
    def of(cls, size: int) -> _Block:
        if hasattr(os, "memfd_create"):
            segment = Segment(size)
            return cls(segment.data.numpy(), segment.words(), segment)
        raw = np.empty(size + 64, dtype=np.uint8)
        return cls(raw[-raw.ctypes.data % 64 :][:size], NO_LEASE.words_W, None)


class Arenas:
    """Blocks for results, whose life the user of a batch decides: a block comes back when its last tensor is gone.

    On CUDA torch's caching allocator does the same; on the CPU a fresh block of megabytes costs a page fault per
    4 KiB, about as much as the copy into it. Other processes of the machine may write into them: see `Lease`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.allocated = 0  # blocks ever made
        self._free: list[_Block] = []
        self._lock = threading.RLock()  # the garbage collector may end a lease at any point

    def get(self, size: int) -> Tensor:
        """uint8 [size], contents undefined; starts at a multiple of 64 bytes."""
        if self.device.type != "cpu":
            return torch.empty(size, dtype=torch.uint8, device=self.device)
        return self.lease(size).data[:size]

    def lease(self, size: int) -> Lease:
        """At least `size` bytes of host memory."""
        if size == 0:
            return NO_LEASE
        with self._lock:
            fits = [block for block in self._free if size <= block.memory.size <= 4 * rounded(size)]
            block = min(fits, key=lambda b: b.memory.size, default=None)
            if block is not None:
                self._free.remove(block)
        if block is None:
            block = _Block.of(rounded(size))
            self.allocated += 1
        # The tensor's storage keeps `lease` alive; its end, whichever tensor was the last, hands the block back.
        lease = block.memory[:]
        weakref.finalize(lease, self._give_back, block).atexit = False
        return Lease(torch.from_numpy(lease), block.words_W)

    def _give_back(self, block: _Block) -> None:
        with self._lock:
            # At most eight idle blocks; the smallest go first.
            self._free = sorted([*self._free, block], key=lambda b: b.memory.size)
            dropped, self._free = self._free[:-8], self._free[-8:]
        for old in dropped:
            if old.segment is not None:
                old.segment.empty()
