"""Memory that other processes of the machine may read where it lies. What sees it need not be sent anything."""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from spmd_rl.comm.shared import Segment, map_peer

_TOKEN = 16  # random bytes behind the memory, by which it is known: the number of a process is that of others elsewhere


@dataclass(frozen=True)
class Offer:
    """How to find a window. pid 0: there is none."""

    pid: int = 0
    fd: int = 0
    size: int = 0
    token: str = ""

    def encode(self) -> Tensor:
        return torch.frombuffer(bytearray(json.dumps(asdict(self)).encode()), dtype=torch.uint8)

    @classmethod
    def decode(cls, frame: Tensor) -> Offer:
        return cls(**json.loads(frame.numpy().tobytes()))

    def look(self) -> Tensor | None:
        """uint8 [size], not to be written to; None where this process does not see it."""
        if not self.pid:
            return None
        try:
            memory, token = map_peer(self.pid, self.fd, self.size + _TOKEN).split([self.size, _TOKEN])
        except (OSError, ValueError):
            return None
        return memory if token.numpy().tobytes().hex() == self.token else None


class Window:
    """memory: uint8 [size], of this process; offer: for the others. None can look where
    the system has no memory files."""

    def __init__(self, size: int) -> None:
        if not hasattr(os, "memfd_create"):
            self.memory, self.offer = torch.empty(size, dtype=torch.uint8), Offer()
            return
        token = secrets.token_bytes(_TOKEN)
        self._segment = Segment(size + _TOKEN)
        self.memory, behind = self._segment.data.split([size, _TOKEN])
        behind.copy_(torch.frombuffer(bytearray(token), dtype=torch.uint8))
        self.offer = Offer(os.getpid(), self._segment.fd, size, token.hex())
