"""`Ledger`: what has arrived, what is claimed, what is done with. A pure state machine, equal on all trainers.

Every trainer feeds it the same descriptors in the same ticks, so all decide the same: there is no controller, nobody
asks for work, and each group has exactly one consumer by construction. A group goes from *ready* over *claimed* (by a
step) to *acknowledged* (the step is taken). Neither memory nor time of a tick depends on how much is waiting, but for
the logarithm of it in a heap.

A step claims the oldest groups that have come. Those that are due (`Window.due`) it waits for: with no surplus they
are its own round and nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spmd_rl.data.stream.admission import Frontier
from spmd_rl.data.stream.window import Window

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
    """What the trainers do next in a step. claimed: belong to the step from now on, and take no more room from their
    replica; handed: to be trained on now, by group number; stale: given back to be drawn again; last: the step has all
    its groups. With dynamic sampling (`selection.py`), flat: groups that teach nothing; places: those of the handed
    ones in the step."""

    claimed: tuple[Descriptor, ...]
    handed: tuple[Descriptor, ...]
    stale: tuple[Descriptor, ...]
    last: bool
    flat: tuple[Descriptor, ...] = ()
    places: tuple[int, ...] = ()


class Ledger:
    """window: what must be in a step; frontier: of the checkpoint that the run goes on from."""

    def __init__(self, window: Window, frontier: Frontier | None = None) -> None:
        self.window, self._rounds = window, window.rounds
        self.frontier = frontier or Frontier()
        self._known: dict[int, Descriptor] = {}  # ready
        self._ready: list[int] = []  # a heap of their numbers
        self._claimed: set[int] = set()
        self._gathered: list[Descriptor] = []  # claimed, but not handed out yet
        self._tokens = 0  # of the gathered ones
        self._step = 0
        self._due: set[int] = set()  # groups that the step cannot do without and has not claimed yet

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
            heappush(self._ready, group)

    def tick(self, step: int, budget: int, whole: bool = False) -> Tick | None:
        """Claim what is ready for `step` (counted from 1), the oldest first; hand it out once it has `budget` tokens.

        None where there is nothing to do. whole: all groups of the step are handed out at once.
        """
        self._begin(step)
        enough = budget if not whole else math.inf
        claimed, stale = self._claim(step, enough)
        last = len(self._claimed) == self._rounds.size(step - 1)
        handed: list[Descriptor] = []
        if last or self._tokens >= enough:
            handed, self._gathered, self._tokens = sorted(self._gathered), [], 0
        return Tick(claimed, tuple(handed), stale, last) if claimed or stale else None

    def acknowledge(self) -> Frontier:
        """The step is taken: its groups will never be wanted again. The new frontier."""
        self.frontier = Frontier.of(self._claimed, self.frontier)
        self._claimed = set()
        return self.frontier

    def there(self) -> list[int]:
        """Groups from the frontier on that have come; nobody needs to make them."""
        return sorted({*self._known, *self._claimed, *self.frontier.beyond})

    def missing(self, step: int) -> list[int]:
        """Groups that the step cannot do without, or else those of its round, that have not come; for messages."""
        first = self._rounds.first(step - 1)
        there = {*self._known, *self._claimed}
        groups = sorted(self._due) or range(first, first + self._rounds.size(step - 1))
        return [group for group in groups if group not in there and group not in self.frontier] or [first]

    def _begin(self, step: int) -> None:
        if self._step != step:
            self._step = step
            lowest, beyond = self.frontier.next, set(self.frontier.beyond)
            self._due = {group for group in range(lowest, self.window.due(step)) if group not in beyond}

    def _claim(self, step: int, enough: float) -> tuple[tuple[Descriptor, ...], tuple[Descriptor, ...]]:
        """(claimed, stale). Claims until `enough` tokens are gathered; keeps places for the groups that must come."""
        claimed, stale = [], []
        size = self._rounds.size(step - 1)
        while self._ready and len(self._claimed) < size and self._tokens < enough:
            group = self._ready[0]
            if group not in self._due and size - len(self._claimed) <= len(self._due):
                break
            heappop(self._ready)
            described = self._known.pop(group)
            if self._is_stale(described, step):
                stale.append(described)
                continue
            self._due.discard(group)
            self._claimed.add(group)
            self._tokens += described.tokens
            claimed.append(described)
        self._gathered += claimed
        return tuple(claimed), tuple(stale)

    def _is_stale(self, described: Descriptor, step: int) -> bool:
        """Where steps wait nothing can be, because of what `Starts` allows; there it is an error."""
        if described.version >= step - 1 - self.window.staleness:
            return False
        if self.window.waits:
            raise ValueError(
                f"group {described.group} in step {step} is of version {described.version}, too old by the bound"
            )
        return True
