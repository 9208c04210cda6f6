"""`Ledger`: what has arrived, what is claimed, what is done with. A pure state machine, equal on all trainers.

Every trainer feeds it the same descriptors in the same ticks, so all decide the same: there is no controller, nobody
asks for work, and each group has exactly one consumer by construction. A group goes from *ready* over *claimed* (by a
step) to *acknowledged* (the step is taken). Neither memory nor time of a tick depends on how much is waiting, but for
the logarithm of it in a heap.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spmd_rl.data.stream.admission import Frontier
from spmd_rl.data.stream.rounds import Rounds

Int64 = NDArray[np.int64]


class Descriptor(NamedTuple):
    """What the trainers tell each other about a group. version: of the oldest weights that drew a token of it;
    trainer: place of the one that has it; tokens: prompt and response, of all samples; bytes: as stored."""

    group: int
    version: int
    samples: int
    tokens: int
    bytes: int
    trainer: int


WIDTH = len(Descriptor._fields)


@dataclass(frozen=True)
class Tick:
    """What the trainers do next in a step. claimed: to be trained on now, by group number; stale: given back to be
    drawn again; last: the step has all its groups."""

    claimed: tuple[Descriptor, ...]
    stale: tuple[Descriptor, ...]
    last: bool


class Ledger:
    """staleness: the bound eta in steps; in_order: step s + 1 trains on round s and waits for it; else on whatever
    came first, where groups older than the bound are given back. frontier: of the checkpoint that the run goes on from.
    """

    def __init__(self, rounds: Rounds, staleness: int, in_order: bool, frontier: Frontier | None = None) -> None:
        self._rounds, self._staleness, self._in_order = rounds, staleness, in_order
        self.frontier = frontier or Frontier()
        self._known: dict[int, Descriptor] = {}  # ready
        self._ready: dict[int, list[int]] = {}  # heaps of group numbers by round; one heap where the order is free
        self._claimed: set[int] = set()

    def __len__(self) -> int:
        """Groups that are ready."""
        return len(self._known)

    def arrive(self, table: Int64) -> None:
        """Descriptors [N, 6] of all trainers' new groups. Raises ValueError for a group that is there already."""
        for row in table.tolist():
            described = Descriptor._make(row)
            group = described.group
            if group in self._known or group in self.frontier or group in self._claimed:
                raise ValueError(f"group {group} arrives twice")
            self._known[group] = described
            heappush(self._ready.setdefault(self._heap(group), []), group)

    def tick(self, step: int, budget: int, whole: bool = False) -> Tick | None:
        """The next groups of `step` (counted from 1): the oldest ones, until they have `budget` tokens.

        None as long as those that are ready have fewer tokens and more will come, and the step is not complete with
        them. whole: all groups of the step at once.
        """
        left = self._rounds.size(step - 1) - len(self._claimed)
        heap = self._ready.get(step - 1 if self._in_order else 0, [])
        taken: list[int] = []
        stale: list[int] = []
        tokens = 0
        while heap and len(taken) < left and (whole or tokens < budget):
            group = heappop(heap)
            if self._is_stale(group, step):
                stale.append(group)
            else:
                taken.append(group)
                tokens += self._known[group].tokens
        given_back = tuple(self._known.pop(group) for group in stale)
        last = len(taken) == left
        if not last and (whole or tokens < budget):
            for group in taken:
                heappush(heap, group)
            return Tick((), given_back, False) if given_back else None
        self._claimed.update(taken)
        if last and self._in_order:
            del self._ready[step - 1]
        return Tick(tuple(self._known.pop(group) for group in taken), given_back, last)

    def acknowledge(self) -> Frontier:
        """The step is taken: its groups will never be wanted again. The new frontier."""
        self.frontier = Frontier.of(self._claimed, self.frontier)
        self._claimed = set()
        return self.frontier

    def missing(self, step: int) -> list[int]:
        """Groups of the step's round that are neither ready nor done with, for messages."""
        first = self._rounds.first(step - 1)
        there = {*self._known, *self._claimed}
        groups = range(first, first + self._rounds.size(step - 1))
        return [group for group in groups if group not in there and group not in self.frontier] or [first]

    def _heap(self, group: int) -> int:
        return self._rounds.of(group) if self._in_order else 0

    def _is_stale(self, group: int, step: int) -> bool:
        """In order nothing can be, because of what `Starts` allows; a group that is all the same is an error."""
        version = self._known[group].version
        if version >= step - 1 - self._staleness:
            return False
        if self._in_order:
            raise ValueError(f"group {group} in step {step} is of version {version}, too old by the bound")
        return True
