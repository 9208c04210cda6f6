"""`LongRounds`: tail batching at the desk of one replica; which groups when, `Tails` says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spmd_rl.data.stream.tails import Tails
from spmd_rl.data.stream.window import Window
from spmd_rl.engines.rollout.desk import Desk, Slip

Slips = Mapping[int, Sequence[Slip]]  # of each group that is under way, those that are not done


class LongRounds:
    """after: tokens (steps of the engine) after which a group that is still being drawn is put aside; 0: none is."""

    def __init__(self, desk: Desk, window: Window, after: int) -> None:
        self._desk, self._after = desk, after
        self._tails = Tails(window)

    @property
    def under_way(self) -> bool:
        """Whether nothing else may be begun."""
        return bool(self._tails.long)

    def waits(self, group: int) -> bool:
        """Whether it is put aside."""
        return group in self._tails.aside

    def put_aside(self, slips: Slips) -> list[int]:
        """The groups that turn out to be long, which make room for others, and for newer weights."""
        for group in [group for group in self._tails.long if not slips.get(group)]:
            self._tails.finish(group)
        if self.under_way or not self._after:
            return []
        late = [group for group in slips if not self.waits(group) and self._is_long(slips[group])]
        for group in late:
            self._tails.put_aside(group)
            for slip in slips[group]:
                self._desk.put_aside(slip)
        return late

    def take_up(self, version: int, slips: Slips) -> list[int]:
        """The groups of the long round that begins now, if it is time. version: of the weights."""
        groups = self._tails.gather(version, idle=not self._desk.unfinished())
        for group in groups:
            for slip in slips[group]:
                self._desk.take_up(slip)
        return groups

    def _is_long(self, slips: Sequence[Slip]) -> bool:
        return any(self._desk.steps - slip.since >= self._after for slip in slips)
