"""Dynamic sampling over the stream: which groups may be begun and which make up a step, where some teach nothing. Pure.

A group whose rewards are all equal comes without samples; it is *flat*. Step s trains on the groups at the places
(s - 1) * wanted to s * wanted - 1 of those that are not flat, in the order of their numbers, so a later group takes the
place of a flat one. Before all verdicts are there, each side counts a group that nobody has judged yet as one that will
be trained on: the most that can come before it. That bound only falls, and what it allows stays right.

Round k may be begun once the bound on the groups before it allows it for the version: as in synchronous training, where
a further round is drawn as a whole as soon as the last one has left a place. What such a round has too many waits for
the next step and is one step older then than `stream.staleness` says.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spmd_rl.data.stream.admission import Frontier, Starts
from spmd_rl.data.stream.ledger import Descriptor, Tick
from spmd_rl.data.stream.window import Window

Int64 = NDArray[np.int64]


class Count:
    """Groups that are not known to be flat. trained: how many the steps before `frontier` have trained on."""

    def __init__(self, trained: int, frontier: Frontier) -> None:
        self._from, self._kept = frontier.next, trained
        self._flat = list(frontier.beyond)  # numbers of flat groups from `_from` on, ascending

    def flat(self, group: int) -> None:
        """Its verdict has come. Each is told once."""
        if group < self._from:
            self._kept -= 1
        else:
            insort(self._flat, group)

    def before(self, group: int) -> int:
        """The most groups with a lower number that can be trained on."""
        return self._kept + group - self._from - bisect_left(self._flat, group)

    def forget(self, group: int) -> None:
        """Nobody will ask for the groups below `group` one by one any more."""
        if group > self._from:
            kept = self.before(group)
            del self._flat[: bisect_left(self._flat, group)]
            self._from, self._kept = group, kept


class SelectingStarts(Starts):
    """The groups that one replica starts. wanted: groups of a step; done: steps in the checkpoint that the run goes on
    from; the rest as for `Starts`."""

    def __init__(self, window: Window, replica: int, replicas: int, frontier: Frontier, wanted: int, done: int) -> None:
        super().__init__(window, replica, replicas, frontier)
        self._wanted = wanted
        self._count = Count(done * wanted, frontier)

    def peek(self, version: int) -> int | None:
        group, rounds = self._again[0] if self._again else self._next, self.window.rounds
        if group >= rounds.groups:
            return None
        first = rounds.first(rounds.of(group))
        self._count.forget(first)
        return group if self._count.before(first) // self._wanted <= version + self.window.staleness else None

    def flat(self, group: int) -> None:
        self._count.flat(group)


class TooFew(RuntimeError):
    """A step has drawn as many rounds as it may. found: groups that it has."""

    def __init__(self, rounds: int, found: int) -> None:
        super().__init__(f"{found} groups after {rounds} rounds")
        self.rounds, self.found = rounds, found


class SelectingLedger:
    """What `Ledger` is without dynamic sampling. tries: rounds that one step may draw; drawn: rounds that the last step
    has drawn."""

    def __init__(self, window: Window, frontier: Frontier, wanted: int, done: int, tries: int) -> None:
        self.window, self._rounds, self._wanted, self._tries = window, window.rounds, wanted, tries
        self.frontier = frontier
        self.drawn = 0
        self._count = Count(done * wanted, frontier)
        self._known: dict[int, Descriptor] = {}  # ready
        self._freed: set[int] = set()  # of those, the ones that take no more room from their replica
        self._claimed: set[int] = set()
        self._flat: set[int] = set(frontier.beyond)
        self._flat_now: list[Descriptor] = []  # have come since the last tick
        self._changed = True

    def __len__(self) -> int:
        """Groups that are ready."""
        return len(self._known)

    def arrive(self, table: Int64) -> None:
        """Descriptors [N, 6] of all trainers' new groups, flat ones without samples. Raises ValueError for a group that
        is there already."""
        for row in table.tolist():
            described = Descriptor._make(row)
            group = described.group
            if group in self._known or group in self._claimed or group in self._flat or group < self.frontier.next:
                raise ValueError(f"group {group} arrives twice")
            self._changed = True
            if described.samples:
                self._known[group] = described
            else:
                self._flat.add(group)
                self._flat_now.append(described)
                self._count.flat(group)

    def tick(self, step: int, budget: int, whole: bool = False) -> Tick | None:
        """As for `Ledger`. The last portion may be empty, where the data ends. Raises TooFew."""
        if not self._changed:
            return None
        self._changed = False
        chosen = self._chosen()
        self._refuse_too_few(chosen)
        # The last groups of the data: whether a portion is the step's last is known with all verdicts only.
        whole = whole or len(chosen) < self._wanted or chosen[-1] == self._rounds.groups - 1
        ready = [group for group in chosen if group in self._known]
        complete = len(ready) + len(self._claimed) == len(chosen)
        rest = self._rest_of_round(chosen) if complete else ()
        last = complete and all(group in self._known or group in self._flat for group in rest)
        taken = ready if last else self._oldest(ready, budget) if not whole else []
        # What is sure to be trained on takes no room from what the step still waits for.
        freed = [g for g in (*ready, *rest) if g in self._known and g not in self._freed]
        claimed, self._freed = tuple(self._known[group] for group in freed), self._freed | set(freed)
        flat, self._flat_now = tuple(sorted(self._flat_now)), []
        if not (claimed or taken or last or flat):
            return None
        self._changed = not last  # there may be more to hand out
        for group in taken:
            if self._known[group].version < step - 2 - self.window.staleness:
                raise ValueError(f"group {group} in step {step} is of version {self._known[group].version}: too old")
        self._claimed.update(taken)
        if last:
            self.drawn = self._rounds_drawn(chosen)
        places = tuple(chosen.index(group) for group in taken)
        self._freed.difference_update(taken)
        return Tick(claimed, tuple(self._known.pop(group) for group in taken), (), last, flat, places)

    def acknowledge(self) -> Frontier:
        """The step is taken: its groups, and the flat ones that have come, will never be wanted again."""
        passed = {group for group in self._flat if group not in self.frontier}
        self.frontier = Frontier.of(passed | self._claimed, self.frontier)
        self._claimed = set()
        self._flat = set(self.frontier.beyond)
        self._count.forget(self.frontier.next)
        self._changed = True
        return self.frontier

    def there(self) -> list[int]:
        """As for `Ledger`."""
        return sorted({*self._known, *self._claimed, *self._flat})

    def missing(self, step: int) -> list[int]:
        """Groups that the step waits for, for messages."""
        there = {*self._known, *self._claimed}
        return [group for group in self._chosen() if group not in there] or [self.frontier.next]

    def _chosen(self) -> list[int]:
        """The groups of the step, as far as one can know: the first ones from the frontier on that are not flat."""
        chosen: list[int] = []
        group = self.frontier.next
        while len(chosen) < self._wanted and group < self._rounds.groups:
            if group not in self._flat:
                chosen.append(group)
            group += 1
        return chosen

    def _oldest(self, ready: list[int], budget: int) -> list[int]:
        tokens, taken = 0, []
        for group in ready:
            if tokens >= budget:
                break
            taken.append(group)
            tokens += self._known[group].tokens
        return taken if tokens >= budget and len(taken) + len(self._claimed) < self._wanted else []

    def _rest_of_round(self, chosen: list[int]) -> Sequence[int]:
        """On-policy a step ends with its last round, whose other groups must still be drawn with its weights."""
        if self.window.staleness or not chosen:
            return ()
        return range(chosen[-1] + 1, self._rounds.first(self._rounds.of(chosen[-1]) + 1))

    def _first_drawn(self) -> int:
        """The first round that the step draws: the rounds before it had begun when the last step ended."""
        at = self.frontier.next
        round_ = self._rounds.of(at)
        return round_ if self._rounds.first(round_) == at else round_ + 1

    def _rounds_drawn(self, chosen: list[int]) -> int:
        last = self._rounds.of(chosen[-1]) if len(chosen) == self._wanted else self._rounds.of(self._rounds.groups - 1)
        return max(last + 1 - self._first_drawn(), 0)

    def _refuse_too_few(self, chosen: list[int]) -> None:
        end = self._rounds.first(self._first_drawn() + self._tries)
        if end < self._rounds.groups and sum(group < end for group in chosen) < self._wanted:
            raise TooFew(self._tries, sum(group < end for group in chosen if group in {*self._known, *self._claimed}))
