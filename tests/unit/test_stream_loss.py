"""Replicas that are lost: the others make their groups, each is trained on once, whatever was under way."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.data.stream.admission import Frontier, Starts
from spmd_rl.data.stream.rounds import Rounds
from spmd_rl.data.stream.shares import Shares
from spmd_rl.data.stream.window import Window
from tests.unit.stream_model import Action, World


@dataclass
class Losing(World):
    """lost: replicas that are no more; told: what the others are told of it, by replica, in order."""

    lost: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sender: dict[int, int] = {}
        self.facts: list[tuple[int, int, list[int]]] = []
        super().__post_init__()

    def actions(self) -> Iterator[Action]:
        for kind, r, group in super().actions():
            if kind == "tick" or r not in self.lost:
                yield kind, r, group
        for r, side in enumerate(self.sides):  # beyond the limit
            due = None if r in self.lost else side.starts.peek(side.version)
            if due is not None and side.starts.urgent(due) and side.credits.held + self.size > side.credits.limit:
                yield "start", r, due

    def do(self, action: Action) -> None:
        kind, r, group = action
        side = self.sides[r]
        if kind == "start":
            side.starts.start(group)
            side.beyond += self.size * side.starts.urgent(group)
            assert side.credits.reserve(group, self.size, side.starts.urgent(group))
            side.running[group] = side.version
        elif kind == "finish":
            self.sender[group] = r
            super().do(action)
        elif kind == "hear" and side.back[0][0] == "lost":
            side.starts.take_over(*self.facts[side.back.pop(0)[1]])
        elif kind != "tick":
            super().do(action)
        else:
            self.tick()

    def tick(self) -> None:
        before = {r: list(side.back) for r, side in enumerate(self.sides)}
        super().tick()
        for r, side in enumerate(self.sides):  # answers go to whoever sent the group
            answers, side.back = side.back[len(before[r]) :], before[r]
            for what, group in answers:
                if self.sender[group] not in self.lost:
                    self.sides[self.sender[group]].back.append((what, group))

    def lose(self, r: int) -> None:
        """What was being drawn and what was on its way is gone."""
        self.lost.append(r)
        self.facts.append((r, self.ledger.frontier.next, self.ledger.there()))
        for other, side in enumerate(self.sides):
            if other not in self.lost:
                side.back.append(("lost", len(self.facts) - 1))


@settings(max_examples=120, deadline=None)
@given(
    replicas=st.integers(2, 4),
    staleness=st.integers(0, 3),
    limit=st.integers(1, 6),
    losses=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3)), min_size=1, max_size=3),
    seed=st.integers(0, 2**32),
)
def test_every_group_is_trained_once_whoever_is_lost_and_when(replicas, staleness, limit, losses, seed):
    world = Losing(Rounds(7, 3, 6), staleness, True, replicas, limit)
    rng = random.Random(seed)
    due = dict(losses)
    for count in range(10_000):
        if world.finished:
            break
        victim = due.get(count, replicas)
        if victim < replicas and victim not in world.lost and len(world.lost) < replicas - 1:
            world.lose(victim)
        actions = list(world.actions())
        assert actions, "stuck"
        world.do(rng.choice(actions))
    world.check()


def test_the_groups_of_the_lost_go_round_and_those_that_had_come_stay():
    starts = {r: Starts(Window(Rounds(100, 6, 5), 1), r, 3) for r in (0, 2)}
    for r in (0, 2):
        for _ in range(2):
            group = starts[r].peek(0)
            assert group is not None
            starts[r].start(group)
    for r in (0, 2):  # 0, 3 and 2, 5 have been started there; of 1, 4, 7, 10 group 4 had come
        starts[r].take_over(1, 0, [4])
    mine: dict[int, list[int]] = {0: [], 2: []}
    for r in (0, 2):
        while (group := starts[r].peek(0)) is not None:
            mine[r].append(group)
            starts[r].start(group)
    assert mine == {0: [1, 6, 7, 9], 2: [8, 10, 11]}
    assert starts[0].urgent(1) and not starts[0].urgent(6)


def test_shares_follow_the_losses():
    shares = Shares(3)
    shares.lose(1)
    assert [shares.of(group) for group in range(9)] == [0, 0, 2, 0, 2, 2, 0, 0, 2]
    shares.lose(2)
    assert {shares.of(group) for group in range(9)} == {0} and shares.alive == (0,)
    for replica in (2, 0):
        with pytest.raises(ValueError, match="cannot be lost"):
            shares.lose(replica)


def test_a_resumed_run_begins_at_its_frontier():
    starts = Starts(Window(Rounds(100, 4, 9), 0), 1, 2, Frontier(4, (5,)))
    assert starts.peek(1) == 7
    starts.take_over(0, 4, [6])
    assert starts.peek(1) == 4
    starts.start(4)
    assert starts.peek(1) == 7
