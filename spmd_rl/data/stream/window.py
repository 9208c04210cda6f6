"""`Window`: how far ahead of the trainers a group may be started, and by which step it must be trained on. Pure.

Both are functions of the group's number, so the bound on staleness needs no communication. Group g is started with
version `of(g - surplus)` at the earliest, and trained on in step `of(g + late) + 1` at the latest; surplus + late
groups never reach over more than eta rounds, so no group can become too old.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from spmd_rl.data.stream.rounds import Rounds


@dataclass(frozen=True)
class Window:
    """staleness: the bound eta, in steps; surplus: groups that may be started beyond those of the step, 0: as many as
    the bound allows, where each step trains on its own round; waits: whether a step waits for stragglers (else they
    are given back once they are too old)."""

    rounds: Rounds
    staleness: int
    surplus: int = 0
    waits: bool = True

    @cached_property
    def late(self) -> int:
        """Groups by which a straggler may be late: what `surplus` leaves of the eta rounds, at the end of an epoch too.

        Short rounds at the ends of epochs have fewer groups; the fewest in eta rounds that follow each other count.
        """
        if not (self.waits and self.surplus):
            return 0
        return max(self.rounds.fewest(self.staleness) - self.surplus, 0)

    def allows(self, group: int, version: int) -> bool:
        """Whether it may be started with these weights."""
        rounds = self.rounds
        if group >= rounds.groups or (self.surplus and group >= rounds.first(version + 1) + self.surplus):
            return False
        return rounds.of(group) <= version + self.staleness

    def due(self, step: int) -> int:
        """All groups with a lower number are trained on by the end of `step`.

        It grows by no more than the step has groups, so there is always a place for what is due; with the last step,
        all that is left is due, which is as much as that step has.
        """
        if not self.waits:
            return 0
        if step >= self.rounds.count:
            return self.rounds.groups
        return max(self.rounds.first(step) - self.late, 0)
