"""Named buffers that are used again and again."""

from __future__ import annotations

import torch
from torch import Tensor

_GRANULE = 1 << 16  # bytes; sizes are rounded up, so that steps of slightly different sizes share buffers


def rounded(size: int) -> int:
    """`size` with an eighth to spare, in whole granules."""
    return (size + size // 8 + _GRANULE - 1) // _GRANULE * _GRANULE


class Scratch:
    """Each buffer grows to the largest size asked for. Not thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.allocated = 0  # buffers ever made
        self._buffers: dict[str, Tensor] = {}

    def get(self, name: str, size: int) -> Tensor:
        """uint8 [size], contents undefined, valid until the next call with this name."""
        held = self._buffers.get(name)
        if held is None or held.numel() < size:
            self._buffers[name] = held = torch.empty(rounded(size), dtype=torch.uint8, device=self.device)
            self.allocated += 1
        return held[:size]
