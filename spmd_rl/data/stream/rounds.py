"""`Rounds`: the groups of a whole run in their one order, and which step's share each of them is. Pure.

A *group* is all samples of one prompt; groups are numbered 0, 1, 2, ... through all epochs. Round s are the groups
that a synchronous run would train on in step s + 1: `prompts_per_step` of them, fewer at the end of an epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Place:
    """Where a group stands in the data. epoch, cursor: the loader's position at the start of its round; index: of the
    group within the round, of `count`."""

    epoch: int
    cursor: int
    index: int
    count: int


@dataclass(frozen=True)
class Rounds:
    """epoch_length: prompts in one epoch; epochs: passes, 0 for no end; steps: optimizer steps of the whole run."""

    epoch_length: int
    prompts_per_step: int
    steps: int
    epochs: int = 0

    @cached_property
    def per_epoch(self) -> int:
        return -(-self.epoch_length // self.prompts_per_step)

    @property
    def count(self) -> int:
        """Rounds in the whole run."""
        return min(self.steps, self.epochs * self.per_epoch) if self.epochs else self.steps

    @property
    def groups(self) -> int:
        """Groups in the whole run."""
        return self.first(self.count)

    def first(self, round_: int) -> int:
        """Number of the round's first group."""
        epoch, within = divmod(round_, self.per_epoch)
        return epoch * self.epoch_length + within * self.prompts_per_step

    def size(self, round_: int) -> int:
        return self.first(round_ + 1) - self.first(round_)

    def fewest(self, rounds: int) -> int:
        """The fewest groups that so many rounds in a row can have: those at the ends of epochs may be short."""
        short = self.per_epoch * self.prompts_per_step - self.epoch_length
        return rounds * self.prompts_per_step - -(-rounds // self.per_epoch) * short

    def of(self, group: int) -> int:
        """The round that a group belongs to."""
        epoch, within = divmod(group, self.epoch_length)
        return epoch * self.per_epoch + within // self.prompts_per_step

    def place(self, group: int) -> Place:
        epoch, within = divmod(group, self.epoch_length)
        round_ = self.of(group)
        index = within % self.prompts_per_step
        return Place(epoch, within - index, index, self.size(round_))
