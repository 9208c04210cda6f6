"""Dynamic sampling over the stream, against a synchronous run by hand: any order of events, kills, any split."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.data.stream.admission import Frontier
from spmd_rl.data.stream.credits import Credits
from spmd_rl.data.stream.rounds import Rounds
from spmd_rl.data.stream.selection import Count, SelectingLedger, SelectingStarts, TooFew
from spmd_rl.data.stream.window import Window
from tests.unit.stream_model import Action, Replica, World


@dataclass
class Selecting(World):
    """Group g is flat where `flat` says so. steps: of the run; taken: (step, group, version) of all steps."""

    flat: frozenset[int] = frozenset()
    wanted: int = 2
    tries: int = 100
    steps: int = 3

    def __post_init__(self) -> None:
        self.taken: list[tuple[int, int, int]] = []
        self.versions: dict[int, int] = {}
        super().__post_init__()

    def begin(self) -> None:
        self.version = self.step - 1
        self.claimed = []
        args = (self.frontier, self.wanted, self.step - 1)
        window = Window(self.rounds, self.staleness)
        self.ledger: Any = SelectingLedger(window, *args, self.tries)
        self.sides = [
            Replica(SelectingStarts(window, r, self.replicas, *args), Credits(self.limit), self.version)
            for r in range(self.replicas)
        ]

    def do(self, action: Action) -> None:
        kind, r, group = action
        side = self.sides[r]
        if kind == "start":
            self.versions[group] = side.version
        if kind == "deliver":
            group, version = side.sent.pop(0)
            samples = int(group not in self.flat)
            self.ledger.arrive(np.array([[group, version, samples, 1, self.size, 0]]))
        elif kind == "hear" and side.back[0][0] == "flat":
            side.starts.flat(side.back.pop(0)[1])
        else:
            super().do(action)

    def tick(self) -> None:
        tick = self.ledger.tick(self.step, budget=1)
        assert tick is not None
        for described in (*tick.claimed, *tick.flat):
            self.sides[described.group % self.replicas].back.append(("taken", described.group))  # room is free
        for described in tick.flat:
            for side in self.sides:
                side.back.append(("flat", described.group))
        self.claimed += [(described.group, described.version) for described in tick.handed]
        if tick.last:
            self.taken += [(self.step, group, version) for group, version in sorted(self.claimed)]
            self.claimed = []
            self.frontier = self.ledger.acknowledge()
            self.version = self.step
            self.step += 1

    @property
    def finished(self) -> bool:
        return self.step > self.steps or self.frontier.next >= self.rounds.groups

    def check(self) -> None:
        """Every step has the next groups that teach, none is too old, none comes twice or is passed over."""
        good = [group for group in range(self.rounds.groups) if group not in self.flat]
        due = [(1 + i // self.wanted, group) for i, group in enumerate(good)][: self.steps * self.wanted]
        assert [(step, group) for step, group, _ in self.taken] == due
        assert all(0 <= step - 1 - version <= self.staleness + 1 for step, _, version in self.taken), self.taken


def run(world: Selecting, seed: int, kill_at: int = 0) -> Selecting:
    rng = random.Random(seed)
    count = 0
    while not world.finished:
        actions = list(world.actions())
        assert actions, "stuck"
        world.do(rng.choice(actions))
        count += 1
        if count == kill_at:
            world.begin()
    world.check()
    return world


def world_of(flat, staleness=0, replicas=2, limit=100, wanted=3, steps=4, epoch_length=20, epochs=2, tries=100):
    rounds = Rounds(epoch_length, wanted, steps * tries, epochs)
    return Selecting(
        rounds, staleness, True, replicas, limit, flat=frozenset(flat), wanted=wanted, steps=steps, tries=tries
    )


def synchronous(world: Selecting) -> tuple[list[tuple[int, int, int]], dict[int, int]]:
    """(step, group, version) of all steps, and the version that drew each group, as recipes/dynamic.py goes."""
    rounds, round_ = world.rounds, 0
    waiting: list[int] = []
    taken: list[tuple[int, int, int]] = []
    drawn: dict[int, int] = {}
    for step in range(1, world.steps + 1):
        while len(waiting) < world.wanted and rounds.first(round_) < rounds.groups:
            for group in range(rounds.first(round_), rounds.first(round_ + 1)):
                drawn[group] = step - 1
                waiting += [group] if group not in world.flat else []
            round_ += 1
        now, waiting = waiting[: world.wanted], waiting[world.wanted :]
        taken += [(step, group, drawn[group]) for group in now]
    return taken, drawn


@settings(max_examples=60, deadline=None)
@given(
    flat=st.sets(st.integers(0, 39)), replicas=st.integers(1, 3), seed=st.integers(0, 2**32), limit=st.integers(1, 9)
)
def test_on_policy_it_is_the_synchronous_run(flat, replicas, seed, limit):
    """The same groups in the same steps, each drawn by the same version, also those that wait or are flat."""
    world = run(world_of(flat, replicas=replicas, limit=limit), seed)
    taken, drawn = synchronous(world)
    assert world.taken == taken
    if world.frontier.next < world.rounds.groups:
        early = {group: version for group, version in world.versions.items() if group in drawn}
        assert early == {g: v for g, v in drawn.items() if g in early} and set(drawn) <= set(world.versions)


@settings(max_examples=60, deadline=None)
@given(
    flat=st.sets(st.integers(0, 39)),
    staleness=st.integers(1, 3),
    replicas=st.integers(1, 3),
    limit=st.integers(1, 9),
    seed=st.integers(0, 2**32),
    kill_at=st.integers(0, 80),
)
def test_ahead_of_the_trainers_and_over_a_kill(flat, staleness, replicas, limit, seed, kill_at):
    """Exactly once, in order, within the bound, whatever happens when; flat groups hold no room for long."""
    run(world_of(flat, staleness, replicas, limit), seed, kill_at)


def test_a_flat_group_lets_the_next_round_begin():
    starts = SelectingStarts(Window(Rounds(100, 2, 50), 0), 0, 1, Frontier(), wanted=2, done=0)
    for group in (0, 1):
        assert starts.peek(0) == group
        starts.start(group)
    assert starts.peek(0) is None and starts.peek(1) == 2
    starts.flat(1)
    assert starts.peek(0) == 2
    starts.start(2)
    assert starts.peek(0) == 3  # the round as a whole
    starts.start(3)
    starts.flat(0)
    assert starts.peek(0) is None  # 2 and 3 may both teach
    starts.flat(3)
    assert starts.peek(0) == 4


def test_too_few_after_so_many_rounds():
    world = world_of(range(4, 40), wanted=3, steps=4, tries=3)  # 0 to 3 teach: one step, and one group more
    with pytest.raises(TooFew) as few:
        run(world, 1)
    assert (few.value.rounds, few.value.found) == (3, 1) and world.step == 2


def test_the_count_only_falls():
    count = Count(10, Frontier(5, (7, 9)))
    assert [count.before(group) for group in (5, 6, 8, 10)] == [10, 11, 12, 13]
    count.flat(6)
    count.forget(8)
    assert count.before(10) == 12
    count.flat(5)
    assert count.before(10) == 11


def test_places_are_those_in_the_step():
    ledger = SelectingLedger(Window(Rounds(100, 3, 50), 0), Frontier(), wanted=3, done=0, tries=9)
    ledger.arrive(np.array([[g, 0, int(g != 1), 4, 1, 0] for g in (3, 1, 0, 5)]))
    tick = ledger.tick(1, 1, whole=True)
    assert tick is not None and [d.group for d in tick.flat] == [1] and not tick.handed
    ledger.arrive(np.array([[g, 0, 1, 4, 1, 0] for g in (4, 2)]))
    tick = ledger.tick(1, 1, whole=True)
    assert tick is not None and tick.last and [d.group for d in tick.handed] == [0, 2, 3] and tick.places == (0, 1, 2)
    assert ledger.acknowledge() == Frontier(4) and ledger.drawn == 2 and len(ledger) == 2
    with pytest.raises(ValueError, match="arrives twice"):
        ledger.arrive(np.array([[1, 0, 0, 0, 1, 0]]))
