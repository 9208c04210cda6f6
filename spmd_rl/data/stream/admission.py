"""Which group a replica starts next, and when it may: the bound on staleness, without any communication. Pure.

With version v of the weights and a bound of eta steps, the groups of the rounds 0 to v + eta may be started: as many
as `started < (v + eta + 1) * prompts_per_step` allows in all, shared among the replicas by the group's number. With
eta = 0 exactly the groups of the round that the trainers are at: the run is on-policy. (`Window` has the rule, also
with over-provisioning.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush

from spmd_rl.data.stream.window import Window


@dataclass(frozen=True)
class Frontier:
    """Groups whose training is in the weights: all below `next`, and those of `beyond` (ascending)."""

    next: int = 0
    beyond: tuple[int, ...] = ()

    @classmethod
    def of(cls, groups: Iterable[int], start: Frontier | None = None) -> Frontier:
        """`start` and some more groups. Raises ValueError for one that was already there."""
        start = start or cls()
        done = set(start.beyond)
        for group in groups:
            if group < start.next or group in done:
                raise ValueError(f"group {group} is trained twice")
            done.add(group)
        following = start.next
        while following in done:
            done.remove(following)
            following += 1
        return cls(following, tuple(sorted(done)))

    def __contains__(self, group: int) -> bool:
        return group < self.next or group in self.beyond


class Starts:
    """The groups that one replica starts, in order; the same on all ranks of the replica.

    replica, replicas: it takes the groups with `group % replicas == replica`; frontier: groups that are done with (a
    resumed run).
    """

    def __init__(self, window: Window, replica: int, replicas: int, frontier: Frontier | None = None) -> None:
        self.window = window
        self._replicas = replicas
        self._frontier = frontier or Frontier()
        first = self._frontier.next
        self._next = self._skip(first + (replica - first) % replicas)
        self._again: list[int] = []  # a heap

    def peek(self, version: int) -> int | None:
        """The group to start next; None where the weights of `version` do not allow any, or none is left."""
        group = self._again[0] if self._again else self._next
        return group if self.window.allows(group, version) else None

    def start(self, group: int) -> None:
        """It is started: the one that `peek` gave."""
        if self._again and group == self._again[0]:
            heappop(self._again)
        elif group == self._next:
            self._next = self._skip(group + self._replicas)
        else:
            raise ValueError(f"group {group} is not the next one")

    def again(self, group: int) -> None:
        """What was made of this group is of no use: it will be started once more, before later ones."""
        heappush(self._again, group)

    def flat(self, group: int) -> None:
        """A group, of any replica, teaches nothing: of use where that lets another one be begun (`selection.py`)."""
        raise ValueError(f"group {group} teaches nothing, but nobody selects groups here")

    def _skip(self, group: int) -> int:
        while group in self._frontier:
            group += self._replicas
        return group
