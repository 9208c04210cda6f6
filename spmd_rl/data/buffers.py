"""Memory of results, used again and again: a step that is no larger than an earlier one allocates nothing."""

from __future__ import annotations

import threading
import weakref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.comm.scratch import rounded


class Arenas:
    """Blocks for results, whose life the user of a batch decides: a block comes back when its last tensor is gone.

    On CUDA torch's caching allocator does the same; on the CPU a fresh block of megabytes costs a page fault per
    4 KiB, about as much as the copy into it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.allocated = 0  # blocks ever made
        self._free: list[NDArray[np.uint8]] = []
        self._lock = threading.Lock()

    def get(self, size: int) -> Tensor:
        """uint8 [size], contents undefined; starts at a multiple of 64 bytes."""
        if self.device.type != "cpu":
            return torch.empty(size, dtype=torch.uint8, device=self.device)
        if size == 0:
            return torch.empty(0, dtype=torch.uint8)
        with self._lock:
            fits = [block for block in self._free if size <= block.size <= 4 * rounded(size)]
            block = min(fits, key=lambda b: b.size, default=None)
            if block is not None:
                self._free = [other for other in self._free if other is not block]
        if block is None:
            raw = np.empty(rounded(size) + 64, dtype=np.uint8)
            block = raw[-raw.ctypes.data % 64 :][: rounded(size)]
            self.allocated += 1
        # The tensor's storage keeps `lease` alive; its end, whichever tensor was the last, hands the block back.
        lease = block[:size]
        weakref.finalize(lease, self._give_back, block).atexit = False
        return torch.from_numpy(lease)

    def _give_back(self, block: NDArray[np.uint8]) -> None:
        with self._lock:
            self._free.append(block)
            # At most eight idle blocks; the smallest go first.
            self._free = sorted(self._free, key=lambda b: b.size)[-8:]
