"""The second buffer of a replica: in the memory of its head, seen by the replica's other ranks of the machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from spmd_rl.comm.world import World
from spmd_rl.weights.layout import Layout
from spmd_rl.weights.window import Window

_PIECE = 1 << 26  # bytes of one broadcast


class Mirror:
    """memory: uint8, all weights as the layout says. `make` on the head, from any thread; `share` on all its ranks."""

    memory: Tensor

    def __init__(self, job: World, ranks: Sequence[int], group: ProcessGroup | None) -> None:
        self._group = group
        self._is_head = job.rank == ranks[0]
        self._pin = job.device.type == "cuda"
        self._layout: Layout | None = None
        self._window: Window | None = None
        self._shared = False
        self._copies = False  # some rank cannot see the head's memory

    def make(self, layout: Layout) -> None:
        if self._group is None:
            self.memory = torch.empty(layout.size, dtype=torch.uint8, pin_memory=self._pin)
        else:
            self._window = Window(layout.size)
            self.memory = self._window.memory
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
            assert self._layout is not None and self._window is not None
            told = [(self._layout.encode(), self._window.offer)]
        dist.broadcast_object_list(told, group=group, group_src=0)
        sees = torch.ones(1, dtype=torch.int64)
        if not self._is_head:
            layout, offer = told[0]
            self._layout = Layout.decode(layout)
            found = offer.look()
            sees[0] = int(found is not None)
            self.memory = torch.empty(0) if found is None else found
        dist.all_reduce(sees, op=dist.ReduceOp.MIN, group=group)
        self._copies, self._shared = not bool(sees), True
        if self._copies and not self._is_head:
            assert self._layout is not None
            self.memory = torch.empty(self._layout.size, dtype=torch.uint8)
