"""Which group a replica starts next, and when it may: the bound on staleness, without any communication. Pure.

With version v of the weights and a bound of eta steps, the groups of the rounds 0 to v + eta may be started: as many
as `started < (v + eta + 1) * prompts_per_step` allows in all, shared among the replicas by the group's number. With
eta = 0 exactly the groups of the round that the trainers are at: the run is on-policy. (`Window` has the rule, also
with over-provisioning.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush

from spmd_rl.data.stream.shares import Shares
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

    replica, replicas: it takes the groups that `Shares` gives it; frontier: groups that are done with (a resumed run).
    """

    def __init__(self, window: Window, replica: int, replicas: int, frontier: Frontier | None = None) -> None:
        self.window = window
        self._replica, self._shares = replica, Shares(replicas)
        self._frontier = frontier or Frontier()
        self._made: set[int] = set()  # by replicas that are lost
        self._again: list[int] = []  # a heap
        self._urgent: set[int] = set()
        self._next = self._skip(self._frontier.next)

    def peek(self, version: int) -> int | None:
        """The group to start next; None where the weights of `version` do not allow any, or none is left."""
        group = self._again[0] if self._again else self._next
        return group if self.window.allows(group, version) else None

    def start(self, group: int) -> None:
        """It is started: the one that `peek` gave."""
        if self._again and group == self._again[0]:
            heappop(self._again)
        elif group == self._next:
            self._next = self._skip(group + 1)
        else:
            raise ValueError(f"group {group} is not the next one")

    def again(self, group: int) -> None:
        """What was made of this group is of no use: it will be started once more, before later ones."""
        heappush(self._again, group)

    def take_over(self, lost: int, begin: int, made: Collection[int]) -> None:
        """Replica `lost` makes nothing more: of its groups from `begin` on, but those that it has made, each is now
        somebody's. `urgent` are those of them that come before what was started here."""
        there = set(made)
        its = [group for group in range(begin, self._next) if self._shares.of(group) == lost and group not in there]
        self._shares.lose(lost)
        self._made.update(group for group in there if group >= self._next)
        for group in its:
            if self._shares.of(group) == self._replica:
                self.again(group)
                self._urgent.add(group)

    def urgent(self, group: int) -> bool:
        """Whether the trainers may wait for it already: it must not wait for room that later groups have taken."""
        return group in self._urgent

    def flat(self, group: int) -> None:
        """A group, of any replica, teaches nothing: of use where that lets another one be begun (`selection.py`)."""
        raise ValueError(f"group {group} teaches nothing, but nobody selects groups here")

    def _skip(self, group: int) -> int:
        while group in self._frontier or group in self._made or self._shares.of(group) != self._replica:
            group += 1
        return group
