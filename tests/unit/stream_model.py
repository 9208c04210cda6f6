"""A whole asynchronous world in one process, made of the pure parts alone: every step is one atomic action."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from spmd_rl.data.stream.admission import Frontier, Starts
from spmd_rl.data.stream.credits import Credits
from spmd_rl.data.stream.ledger import Ledger
from spmd_rl.data.stream.rounds import Rounds
from spmd_rl.data.stream.tails import Tails
from spmd_rl.data.stream.window import Window

Action = tuple[str, int, int]
Value = TypeVar("Value")


def clone(value: Value) -> Value:
    """As `copy.deepcopy`, several times as fast."""
    copied: Value = pickle.loads(pickle.dumps(value))
    return copied


@dataclass
class Replica:
    starts: Starts
    credits: Credits
    version: int
    running: dict[int, int] = field(default_factory=dict)  # group → version that began it
    sent: list[tuple[int, int]] = field(default_factory=list)  # on the way to the trainer, in order
    back: list[tuple[str, int]] = field(default_factory=list)  # on the way from the trainer, in order
    beyond: int = 0  # bytes of groups that were taken over, which may go beyond the limit

    def __post_init__(self) -> None:
        self.tails = Tails(self.starts.window)


@dataclass
class World:
    """actions: what may happen next; do: let it happen. `trained`: (group, staleness) of all steps taken."""

    rounds: Rounds
    staleness: int
    in_order: bool
    replicas: int
    limit: int
    size: int = 1  # bytes of a group, all of them
    budget: int = 1  # groups of a micro-batch
    surplus: int = 0
    tails: bool = False  # tail batching: any group may turn out to be long
    step: int = 1
    frontier: Frontier = field(default_factory=Frontier)
    trained: list[tuple[int, int]] = field(default_factory=list)
    claimed: list[tuple[int, int]] = field(default_factory=list)
    handed: list[int] = field(default_factory=list)
    late: list[tuple[int, int]] = field(default_factory=list)  # (group, steps after its round) of all steps taken

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start, or start again after everything but the checkpoint was lost."""
        self.version = self.step - 1
        self.claimed, self.handed = [], []
        self.window = Window(self.rounds, self.staleness, self.surplus, waits=self.in_order)
        self.ledger = Ledger(self.window, self.frontier)
        self.sides = [
            Replica(
                Starts(self.window, r, self.replicas, self.frontier),
                Credits(self.limit),
                self.version,
            )
            for r in range(self.replicas)
        ]

    def actions(self) -> Iterator[Action]:
        for r, side in enumerate(self.sides):
            group = side.starts.peek(side.version)
            if group is not None and side.credits.held + self.size <= side.credits.limit and not side.tails.long:
                yield "start", r, group
            drawn = [group for group in side.running if group not in side.tails.aside]
            for group in drawn:
                yield "finish", r, group
                if self.tails and not side.tails.long:
                    yield "aside", r, group
            if clone(side.tails).gather(side.version, idle=not drawn):
                yield "gather", r, 0
            if side.sent:
                yield "deliver", r, 0
            if side.back:
                yield "hear", r, 0
            if side.version < self.version and not drawn:
                yield "swap", r, 0
        if self.step <= self.rounds.count and clone(self.ledger).tick(self.step, budget=self.budget) is not None:
            yield "tick", 0, 0

    def do(self, action: Action) -> None:
        kind, r, group = action
        side = self.sides[r]
        if kind == "start":
            side.starts.start(group)
            assert side.credits.reserve(group, self.size)
            side.running[group] = side.version
        elif kind == "finish":
            side.sent.append((group, side.running.pop(group)))
            side.tails.finish(group)
            side.credits.settle(group, self.size)
        elif kind == "deliver":
            group, version = side.sent.pop(0)
            self.ledger.arrive(np.array([[group, version, 1, 1, self.size, 0]]))
        elif kind == "hear":
            what, group = side.back.pop(0)
            side.credits.release(group)
            if what == "again":
                side.starts.again(group)
        elif kind == "aside":
            side.tails.put_aside(group)
        elif kind == "gather":
            drawn = side.running.keys() - side.tails.aside
            side.tails.gather(side.version, idle=not drawn)
        elif kind == "swap":
            side.version = self.version
        else:
            self.tick()
        assert all(side.credits.held <= side.credits.limit + side.beyond for side in self.sides)

    def tick(self) -> None:
        tick = self.ledger.tick(self.step, budget=self.budget)
        assert tick is not None
        for described in tick.claimed:
            self.claimed.append((described.group, self.step - 1 - described.version))
            self.sides[described.group % self.replicas].back.append(("taken", described.group))
        for described in tick.stale:
            self.sides[described.group % self.replicas].back.append(("again", described.group))
        self.handed += [described.group for described in tick.handed]
        if tick.last:
            assert sorted(self.handed) == sorted(group for group, _ in self.claimed)  # nothing claimed stays behind
            self.handed = []
            self.late += [(group, self.step - 1 - self.rounds.of(group)) for group, _ in self.claimed]
            self.trained += self.claimed
            self.claimed = []
            self.frontier = self.ledger.acknowledge()
            self.version = self.step
            self.step += 1

    @property
    def finished(self) -> bool:
        return self.step > self.rounds.count

    def key(self) -> tuple:
        """Equal for worlds that can do the same from here on."""
        return (
            self.step,
            self.frontier,
            tuple(sorted(self.claimed)),
            tuple(sorted(self.handed)),
            tuple(sorted((d.group, d.version) for d in self.ledger._known.values())),
            tuple(
                (
                    side.version,
                    side.starts._next,
                    tuple(sorted(side.starts._again)),
                    side.credits.held,
                    tuple(sorted(side.running.items())),
                    tuple(sorted(side.tails.aside)),
                    tuple(sorted(side.tails.long)),
                    tuple(side.sent),
                    tuple(side.back),
                )
                for side in self.sides
            ),
        )

    def check(self) -> None:
        """At the end: every group trained once, none too old."""
        assert sorted(group for group, _ in self.trained) == list(range(self.rounds.groups))
        assert all(0 <= age <= self.staleness for _, age in self.trained), self.trained
        assert self.frontier == Frontier(self.rounds.groups)
