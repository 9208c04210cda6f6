"""Admission, credits and ledger: every interleaving of small worlds, random larger ones, kills and resumes."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.data.stream.admission import Frontier, Starts
from spmd_rl.data.stream.credits import Credits
from spmd_rl.data.stream.ledger import Ledger
from spmd_rl.data.stream.rounds import Place, Rounds
from spmd_rl.data.stream.tails import Tails
from spmd_rl.data.stream.window import Window
from tests.unit.stream_model import World, clone


def every_interleaving(world: World) -> tuple[int, int]:
    """(states, ends) reached from `world`; every path must end well, none may get stuck."""
    seen = {world.key()}
    todo, ends = [world], 0
    while todo:
        here = todo.pop()
        actions = list(here.actions())
        if here.finished:
            here.check()
            ends += 1
            continue
        assert actions, f"stuck: {here.key()}"
        for action in actions:
            there = clone(here)
            there.do(action)
            key = (there.key(), max((age for _, age in [*there.trained, *there.claimed]), default=0))
            if key not in seen:
                seen.add(key)
                todo.append(there)
    return len(seen), ends


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize(
    ("replicas", "staleness", "limit", "surplus"),
    [(1, 0, 1, 0), (1, 1, 1, 0), (1, 1, 3, 0), (2, 0, 2, 0), (2, 1, 1, 0), (1, 2, 9, 0), (1, 1, 9, 1), (2, 2, 2, 1)],
)
def test_no_interleaving_gets_stuck_or_breaks_the_bound(replicas, staleness, limit, surplus, in_order):
    """One to two replicas, three steps of two groups (the last round of the epoch has one), any order of events."""
    world = World(Rounds(5, 2, 3), staleness, in_order, replicas, limit, surplus=surplus)
    states, ends = every_interleaving(world)
    assert states > 10 and ends >= 1


@pytest.mark.parametrize(("replicas", "limit"), [(1, 2), (2, 1)])
def test_no_interleaving_with_groups_put_aside_gets_stuck_or_breaks_the_bound(replicas, limit):
    states, ends = every_interleaving(World(Rounds(4, 2, 2), 1, True, replicas, limit, surplus=1, tails=True))
    assert states > 10 and ends >= 1


@pytest.mark.parametrize("budget", [2, 4])
def test_room_for_less_than_a_microbatch_or_a_step_is_enough(budget):
    """What a step has claimed gives its room back, before the micro-batch that it waits for is full."""
    states, ends = every_interleaving(World(Rounds(4, 4, 2), 1, True, 1, 1, budget=budget))
    assert states > 10 and ends >= 1


def run_random(world: World, seed: int, kill_at: int | None = None, weights: dict[str, float] | None = None) -> int:
    rng = random.Random(seed)
    steps = 0
    while not world.finished:
        actions = list(world.actions())
        assert actions, f"stuck: {world.key()}"
        chances = [(weights or {}).get(kind, 1.0) for kind, _, _ in actions]
        world.do(rng.choices(actions, chances)[0])
        steps += 1
        if steps == kill_at:
            world.begin()
    return steps


@settings(max_examples=40, deadline=None)
@given(
    epoch_length=st.integers(1, 9),
    batch=st.integers(1, 4),
    steps=st.integers(1, 6),
    staleness=st.integers(0, 3),
    replicas=st.integers(1, 3),
    limit=st.integers(1, 6),
    in_order=st.booleans(),
    budget=st.integers(1, 6),
    surplus=st.integers(0, 11),
    tails=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_random_worlds_train_every_group_once_within_the_bound(
    epoch_length, batch, steps, staleness, replicas, limit, in_order, budget, surplus, tails, seed
):
    surplus = min(surplus, max(staleness * batch - 1, 0))
    world = World(
        Rounds(epoch_length, batch, steps),
        staleness,
        in_order,
        replicas,
        limit,
        budget=budget,
        surplus=surplus,
        tails=tails and in_order,
    )
    run_random(world, seed)
    world.check()


@pytest.mark.parametrize("surplus", [0, 2])
@pytest.mark.parametrize("in_order", [True, False])
def test_killed_at_any_of_200_points_and_resumed_nothing_is_lost_or_doubled(in_order, surplus):
    """A1, A5: what was ready or claimed at the end of the checkpointed step is made again, nothing else."""
    rng = random.Random(1)
    for number in range(100):
        tails = in_order and surplus > 0 and number % 2 == 1
        world = World(Rounds(7, 3, 5), 2, in_order, 2, 4, budget=2, surplus=surplus, tails=tails)
        run_random(world, number, kill_at=rng.randint(1, 80))
        world.check()


def test_eta_zero_is_on_policy_and_in_order():
    world = World(Rounds(10, 4, 5), 0, True, 2, 100)
    run_random(world, 3)
    groups = [group for group, _ in world.trained]
    assert [sorted(groups[i : i + 4]) for i in (0, 4)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert sorted(groups[8:10]) == [8, 9]  # the end of the epoch
    assert {age for _, age in world.trained} == {0}


def test_without_order_a_straggler_is_given_back_and_drawn_again():
    """Group 0 never ends in time: the bound holds all the same, and it is trained in the end."""
    world = World(Rounds(100, 2, 4), 1, False, 1, 100)

    def do(kind: str, group: int = 0) -> None:
        action = next(a for a in world.actions() if a[0] == kind and (kind not in ("start", "finish") or a[2] == group))
        world.do(action)

    for group in range(4):
        do("start", group)
    while world.step < 4:
        side = world.sides[0]
        side.version = world.version  # between engine steps, while group 0 goes on
        for kind, _, group in list(world.actions()):
            if kind in ("start", "finish") and group:
                world.do((kind, 0, group))
            elif kind != "finish" and kind != "start":
                world.do((kind, 0, group))
                break
    assert 0 in world.sides[0].running and world.sides[0].running[0] == 0
    do("finish", 0)
    do("deliver")
    world.tick()
    run_random(world, 0)
    world.check()


@pytest.mark.parametrize("weights", [{"finish": 10.0, "start": 10.0, "tick": 0.1}, {"finish": 0.1, "tick": 10.0}])
def test_a_producer_ten_times_too_fast_or_too_slow_keeps_to_the_byte_limit(weights):
    """A6: the limit is asserted after every action (`World.do`); nothing is dropped, nothing gets stuck."""
    world = World(Rounds(1000, 8, 6), 3, True, 2, 300, size=100)
    run_random(world, 5, weights=weights)
    world.check()


def test_rounds_follow_the_loader():
    """Against the loader's own rule: a step never crosses the end of an epoch."""
    rounds = Rounds(epoch_length=7, prompts_per_step=3, steps=100, epochs=2)
    assert (rounds.count, rounds.groups) == (6, 14)
    expected = []
    for epoch in range(2):
        for cursor in range(0, 7, 3):
            count = min(3, 7 - cursor)
            expected += [Place(epoch, cursor, index, count) for index in range(count)]
    assert [rounds.place(group) for group in range(14)] == expected
    assert [rounds.of(group) for group in range(14)] == [0, 0, 0, 1, 1, 1, 2, 3, 3, 3, 4, 4, 4, 5]
    assert [rounds.first(r) for r in range(7)] == [0, 3, 6, 7, 10, 13, 14]


def test_the_share_of_a_replica_is_a_pure_function():
    rounds = Rounds(100, 4, 3)
    started = []
    for replica in range(3):
        starts = Starts(Window(rounds, 1), replica, 3, Frontier.of([0, 1, 4]))
        while (group := starts.peek(version=0)) is not None:
            starts.start(group)
            started.append(group)
    assert sorted(started) == [2, 3, 5, 6, 7]  # rounds 0 and 1, without what is done
    with pytest.raises(ValueError, match="not the next"):
        Starts(Window(rounds, 0), 0, 1).start(3)


def test_the_frontier_closes_up_and_refuses_doubles():
    frontier = Frontier.of([1, 3])
    assert frontier == Frontier(0, (1, 3)) and 3 in frontier and 0 not in frontier
    assert Frontier.of([0], frontier) == Frontier(2, (3,))
    with pytest.raises(ValueError, match="group 3 is trained twice"):
        Frontier.of([3], frontier)


def test_credits_reserve_the_largest_and_keep_the_real_size():
    credits = Credits(10)
    assert credits.reserve(0, 6) and not credits.reserve(1, 6)
    credits.settle(0, 2)
    assert credits.reserve(1, 6) and credits.held == 8
    credits.release(0)
    assert credits.held == 6 and len(credits) == 1
    with pytest.raises(ValueError, match="never fits"):
        credits.reserve(2, 11)
    with pytest.raises(ValueError, match="started twice"):
        credits.reserve(1, 1)
    with pytest.raises(ValueError, match="6 were reserved"):
        credits.settle(1, 7)


def row(group: int, version: int = 0, tokens: int = 10) -> list[int]:
    return [group, version, 4, tokens, 100, 0]


def numbers(descriptors) -> list[int]:
    return [described.group for described in descriptors]


def test_a_tick_claims_the_oldest_and_hands_them_out_once_the_budget_is_full():
    ledger = Ledger(Window(Rounds(100, 4, 9), 1))
    ledger.arrive(np.array([row(5), row(2), row(3)]))
    tick = ledger.tick(1, budget=25)  # 20 tokens of round 0, and more will come
    assert tick is not None and numbers(tick.claimed) == [2, 3] and not tick.handed
    assert ledger.tick(1, budget=25) is None
    ledger.arrive(np.array([row(0)]))
    tick = ledger.tick(1, budget=25)
    assert tick is not None and numbers(tick.handed) == [0, 2, 3] and not tick.last
    assert ledger.tick(1, budget=25) is None and len(ledger) == 1 and ledger.missing(1) == [1]
    ledger.arrive(np.array([row(1)]))
    tick = ledger.tick(1, budget=25)
    assert tick is not None and numbers(tick.handed) == [1] and tick.last
    assert ledger.acknowledge() == Frontier(4)
    tick = ledger.tick(2, budget=1, whole=True)
    assert tick is not None and numbers(tick.claimed) == [5] and not tick.handed
    with pytest.raises(ValueError, match="group 1 arrives twice"):
        ledger.arrive(np.array([row(1)]))


def test_a_whole_step_is_handed_out_at_once_where_it_is_wanted():
    ledger = Ledger(Window(Rounds(100, 2, 9), 1))
    ledger.arrive(np.array([row(0, tokens=10**6)]))
    tick = ledger.tick(1, budget=1, whole=True)
    assert tick is not None and not tick.handed
    ledger.arrive(np.array([row(1)]))
    tick = ledger.tick(1, budget=1, whole=True)
    assert tick is not None and numbers(tick.handed) == [0, 1] and tick.last


def test_with_a_surplus_a_step_takes_the_first_ready_and_waits_for_a_straggler_when_it_is_due():
    """4 groups a step, 2 more under way, 2 steps ahead at most: 6 groups may be late. Group 0 does not come."""
    window = Window(Rounds(100, 4, 9), 2, surplus=2)
    assert window.late == 6 and [window.due(step) for step in range(1, 6)] == [0, 2, 6, 10, 14]
    starts, ledger = Starts(window, 0, 1), Ledger(window)
    trained: list[list[int]] = []

    def start(version: int) -> list[int]:
        begun = []
        while (group := starts.peek(version)) is not None:
            starts.start(group)
            begun.append(group)
        return begun

    for step in (1, 2):
        ledger.arrive(np.array([row(group, step - 1) for group in start(step - 1) if group]))
        tick = ledger.tick(step, budget=1000)
        if step == 1:
            assert tick is not None and tick.last
            trained.append(numbers(tick.handed))
            ledger.acknowledge()
    assert trained == [[1, 2, 3, 4]]
    assert tick is not None and numbers(tick.claimed) == [5, 6, 7] and not tick.last  # the fourth place is group 0's
    assert len(ledger) == 2 and ledger.missing(2) == [0]
    ledger.arrive(np.array([row(0, version=0)]))
    tick = ledger.tick(2, budget=1000)
    assert tick is not None and numbers(tick.handed) == [0, 5, 6, 7] and tick.last
    assert ledger.acknowledge() == Frontier(8) and len(ledger) == 2  # the surplus is for the next step


def test_long_groups_go_on_together_when_nothing_else_is_to_do_or_one_is_due():
    """As above, 6 groups may be late: group 1 is due in step 2, group 5 in step 3."""
    window = Window(Rounds(100, 4, 9), 2, surplus=2)
    tails = Tails(window)
    tails.put_aside(5)
    assert tails.gather(version=1, idle=False) == [] and tails.aside == {5}
    tails.put_aside(1)
    assert tails.gather(version=0, idle=False) == []
    assert tails.gather(version=1, idle=False) == [1, 5]
    with pytest.raises(ValueError, match="group 7 is put aside during a long round"):
        tails.put_aside(7)
    assert tails.gather(version=1, idle=True) == []  # one long round at a time
    for group in (5, 1):
        tails.finish(group)
    tails.put_aside(7)
    assert tails.gather(version=1, idle=True) == [7]


def test_the_window_at_the_end_of_an_epoch_and_of_the_run():
    """A step always has groups enough that may be started, and places enough for all that is due; by brute force."""
    for length, batch, eta, surplus in [(5, 2, 1, 1), (7, 3, 2, 4), (3, 2, 3, 5), (2, 3, 2, 1), (11, 4, 2, 7)]:
        rounds = Rounds(length, batch, 9)
        sizes = [rounds.size(r) for r in range(60)]
        assert rounds.fewest(eta) == min(sum(sizes[r : r + eta]) for r in range(40))
        window = Window(rounds, eta, min(surplus, eta * batch - 1))
        due = [0, *(window.due(step) for step in range(1, 10))]
        for step in range(1, 10):
            assert all(window.allows(group, step - 1) for group in range(rounds.first(step)))
            assert step == 9 or due[step] - due[step - 1] <= rounds.size(step - 1)
        for group in range(rounds.groups):
            first = next(version for version in range(9) if window.allows(group, version))
            last = next(step for step in range(1, 10) if due[step] > group)
            assert last - 1 - first <= eta
        assert due[9] == rounds.groups and not window.allows(rounds.groups, 99)


def test_a_group_that_is_too_old_is_an_error_in_order_and_given_back_otherwise():
    for in_order in (True, False):
        ledger = Ledger(Window(Rounds(100, 1, 9), 1, waits=in_order))
        for step in (1, 2):
            ledger.arrive(np.array([row(step - 1, step - 1)]))
            assert ledger.tick(step, 1) is not None
            ledger.acknowledge()
        ledger.arrive(np.array([row(2, version=0)]))
        if in_order:
            with pytest.raises(ValueError, match="too old"):
                ledger.tick(3, 1)
        else:
            tick = ledger.tick(3, 1)
            assert tick is not None and not tick.claimed and [d.group for d in tick.stale] == [2]
