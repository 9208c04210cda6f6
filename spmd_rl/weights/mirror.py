"""The second buffer of a replica: in the memory of its head, seen by the replica's other ranks of the machine."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from spmd_rl.comm.shared import Segment, map_peer
from spmd_rl.comm.world import World
from spmd_rl.weights.layout import Layout

_PIECE = 1 << 26  # bytes of one broadcast
_TOKEN = 16  # random bytes behind the weights, by which the memory is known


class Mirror:
    """memory: uint8, all weights as the layout says. `make` on the head, from any thread; `share` on all its ranks."""

    memory: Tensor

    def __init__(self, job: World, ranks: Sequence[int], group: ProcessGroup | None) -> None:
        self._group = group
        self._is_head = job.rank == ranks[0]
        self._pin = job.device.type == "cuda"
        self._layout: Layout | None = None
        self._segment: Segment | None = None
        self._token = secrets.token_bytes(_TOKEN)
        self._shared = False
        self._copies = False  # some rank cannot see the head's memory

    def make(self, layout: Layout) -> None:
        if self._group is None:
            self.memory = torch.empty(layout.size, dtype=torch.uint8, pin_memory=self._pin)
        else:
            self._segment = Segment(layout.size + _TOKEN)
            self.memory, token = self._segment.data.split([layout.size, _TOKEN])
            token.copy_(torch.frombuffer(bytearray(self._token), dtype=torch.uint8))
        self._layout = layout

    def share(self) -> tuple[Layout, Tensor]:
        """Layout and weights, on every rank of the replica. Collective; valid until the head receives again."""
        if self._group is not None:
            if not self._shared:
                self._meet(self._group)
            if self._copies:
                for piece in self.memory.split(_PIECE):
                    dist.broadcast(piece, group=self._group, group_src=0)
        assert self._layout is not None
        return self._layout, self.memory

    def _meet(self, group: ProcessGroup) -> None:
        """The first time: the other ranks learn the layout and map the head's memory, where they can."""
        told: list[Any] = [None]
        if self._is_head:
            assert self._layout is not None and self._segment is not None
            told = [(self._layout.encode(), self._token, os.getpid(), self._segment.fd)]
        dist.broadcast_object_list(told, group=group, group_src=0)
        sees = torch.ones(1, dtype=torch.int64)
        if not self._is_head:
            layout, token, pid, fd = told[0]
            self._layout = Layout.decode(layout)
            try:
                self.memory, seen = map_peer(pid, fd, self._layout.size + _TOKEN).split([self._layout.size, _TOKEN])
                sees[0] = int(seen.numpy().tobytes() == token)  # else a process of that number on another machine
            except (OSError, ValueError):
                sees.zero_()
        dist.all_reduce(sees, op=dist.ReduceOp.MIN, group=group)
        self._copies, self._shared = not bool(sees), True
        if self._copies and not self._is_head:
            assert self._layout is not None
            self.memory = torch.empty(self._layout.size, dtype=torch.uint8)
