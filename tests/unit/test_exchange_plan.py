"""Whole worlds of pure plans in one process: every byte is delivered once, in order, to the right sample."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.data.assignment import (
    Assignment,
    assign,
    contiguous_slots,
    divide_by_kernel,
    divide_reference,
    identity_order,
)
from spmd_rl.data.balance import Balance, imbalance
from spmd_rl.data.batch import Batch
from spmd_rl.data.exchange_plan import Messages, Part, plan_messages
from spmd_rl.data.layout import Layout
from spmd_rl.data.metadata import Metadata, Schema, decode_rows, encode_rows
from spmd_rl.ops.divide import can_divide
from tests.exchanges import COLUMNS, make_samples, same_bytes, virtual_exchange

PER_EXAMPLE = 20  # exchanges of the same samples over other layouts, by other rules
RULES = [
    None,
    Balance(),
    Balance(1.0, 0.05),
    Balance(keep_groups=False),
    Balance(equal_counts=True),
    Balance(keep_groups=False, equal_counts=True),
    Balance(slack=1e9),
]


def random_layout(rng: random.Random, world: int) -> Layout:
    """Any ranks in any order, with any replicas that divide them."""
    ranks = rng.sample(range(world), rng.randint(1, world))
    if rng.random() < 0.5:
        ranks.sort()
    replicas = rng.choice([n for n in range(1, len(ranks) + 1) if len(ranks) % n == 0])
    return Layout(tuple(ranks), replicas)


def check(results: dict[int, Batch], assignment: Assignment, everything: Batch, source: Layout, target: Layout) -> None:
    """Every sample sits once, in the order of identities, with its own bytes, on all ranks of its slot."""
    order = identity_order(everything.ids.numpy())
    assert (everything.ids.numpy()[order] == assignment.ids_T3).all()
    for rank, result in results.items():
        slot = target.slot_of(rank)
        if slot is None:
            assert len(result) == 0
        else:
            wanted = everything.select(torch.from_numpy(order[assignment.slot_T == slot]))
            assert result.ids.tolist() == wanted.ids.tolist()
            assert same_bytes(result, wanted) or (len(everything) == 0 and len(result) == 0), f"rank {rank}"


@settings(max_examples=500, deadline=None)
@given(
    world=st.integers(1, 6),
    prompts=st.integers(0, 6),
    samples=st.integers(1, 4),
    names=st.sets(st.sampled_from(sorted(COLUMNS)), min_size=1),
    seed=st.integers(0, 2**32 - 1),
)
def test_random_exchanges_deliver_every_byte(
    world: int, prompts: int, samples: int, names: set[str], seed: int
) -> None:
    rng = random.Random(seed)
    columns = {name: COLUMNS[name] for name in names}
    ids = [(rng.randint(0, 1), rng.randint(0, 2**40), s) for _ in range(prompts) for s in range(samples)]
    everything = make_samples(ids, columns)
    follow: Assignment | None = None
    for _ in range(PER_EXAMPLE):
        source, target = random_layout(rng, world), random_layout(rng, world)
        if rng.random() < 0.3:
            target = source
        rule = rng.choice(RULES)
        if follow is not None and rng.random() < 0.3:
            target = follow.layout
        else:
            follow = None
        slot_of = np.array([rng.randrange(source.slots) for _ in ids], dtype=np.int64)
        order = torch.tensor(rng.sample(range(len(ids)), len(ids)), dtype=torch.int64)
        if rng.random() < 0.4:  # often enough in order, so that whole batches stay where they are
            order = torch.from_numpy(identity_order(everything.ids.numpy())).to(torch.int64)
        hold = source.replicas > 1 and rng.random() < 0.7
        batches = {}
        for rank in source.ranks:
            slot = source.slot_of(rank)
            mine = everything.select(order[torch.from_numpy(slot_of)[order] == slot])
            batches[rank] = mine if hold or rank in source.heads else Batch.empty()
        cost = tuple(sorted(names)[:2])
        results, assignment, plans = virtual_exchange(
            batches, source, target, rule, cost, follow, hold or source.replicas == 1
        )
        check(results, assignment, everything, source, target)
        check_bytes(plans, everything)
        for rank, plan in plans.items():
            assert not plan.in_place or results[rank] is batches[rank]
        follow = assignment


def check_bytes(plans: dict[int, Messages], everything: Batch) -> None:
    """Payload is what the columns hold, with less than 16 bytes of alignment per column and message."""
    held = sum(column.values.numel() * column.values.element_size() for column in everything.columns.values())
    sent = sum(int(plan.send_N.sum()) for plan in plans.values())
    messages = sum(int((plan.send_N > 0).sum()) for plan in plans.values())
    assert sent <= held + 16 * messages * len(everything.columns)
    assert sent == sum(int(plan.recv_N.sum()) for plan in plans.values())


def spread(ids: list[tuple[int, int, int]], layout: Layout, columns: list[str]) -> dict[int, Batch]:
    parts = np.array_split(np.arange(len(ids)), layout.slots)
    return {
        rank: make_samples(
            [ids[i] for i in parts[layout.slot_of(rank) or 0]], {name: COLUMNS[name] for name in columns}
        )
        for rank in layout.ranks
    }


IDS = [(0, prompt, sample) for prompt in range(6) for sample in range(4)]


def test_samples_in_place_are_handed_over_by_reference() -> None:
    layout = Layout((0, 1, 2, 3), 2)
    batches = spread(IDS, layout, ["prompt", "version"])
    results, assignment, plans = virtual_exchange(batches, layout, layout, Balance(), ("version",))
    assert all(results[rank] is batches[rank] for rank in layout.ranks)
    assert all(int(plan.send_N.sum()) == 0 and not plan.share_with for plan in plans.values())
    assert assignment.slot_T.tolist() == [0] * 12 + [1] * 12


def test_samples_in_place_but_out_of_order_are_sorted_without_a_message() -> None:
    layout = Layout((0, 1))
    batches = {
        rank: batch.select(torch.arange(len(batch)).flip(0)) for rank, batch in spread(IDS, layout, ["row"]).items()
    }
    results, _, plans = virtual_exchange(batches, layout, layout, None)
    for rank in (0, 1):
        assert not plans[rank].in_place and int(plans[rank].send_N.sum()) == 0
        assert results[rank].ids.tolist() == batches[rank].ids.flip(0).tolist()


def test_an_imbalance_beyond_the_slack_moves_samples() -> None:
    layout = Layout((0, 1))
    batches = spread(IDS, layout, ["version"])
    heavy = {0: batches[0], 1: batches[1].select(torch.arange(4))}
    _, stays, _ = virtual_exchange(heavy, layout, layout, Balance(slack=1.51), ("version",))
    _, moves, _ = virtual_exchange(heavy, layout, layout, Balance(slack=1.49), ("version",))
    assert np.bincount(stays.slot_T).tolist() == [12, 4]
    assert np.bincount(moves.slot_T).tolist() == [8, 8]


def test_groups_stay_whole_and_a_split_group_is_mended() -> None:
    layout = Layout((0, 1))
    odd = {0: IDS[:6], 1: IDS[6:12]}  # group 1 is torn apart
    batches = {rank: make_samples(ids, {"version": COLUMNS["version"]}) for rank, ids in odd.items()}
    _, assignment, _ = virtual_exchange(batches, layout, layout, Balance(), ("version",))
    slots = assignment.slot_T.reshape(-1, 4)
    assert (slots == slots[:, :1]).all()
    _, torn, _ = virtual_exchange(batches, layout, layout, Balance(keep_groups=False), ("version",))
    assert torn.slot_T.tolist() == [0] * 6 + [1] * 6


def test_the_result_does_not_depend_on_the_source_world() -> None:
    target = Layout((0, 1, 2), 1)
    outcomes = []
    for source in (Layout((0,)), Layout((0, 1, 2, 3)), Layout((3, 1)), Layout((0, 1, 2, 3, 4, 5), 2)):
        for rule in (None, Balance(1.0, 0.1)):
            results, assignment, _ = virtual_exchange(
                spread(IDS, source, ["prompt", "row"]), source, target, rule, ("row",)
            )
            outcomes.append((rule, assignment.slot_T.tolist(), [results[rank].ids.tolist() for rank in target.ranks]))
    assert outcomes[0::2] == [outcomes[0]] * 4 and outcomes[1::2] == [outcomes[1]] * 4


def test_different_layouts_without_balance_get_consecutive_equal_parts() -> None:
    source, target = Layout((0, 1)), Layout((0, 1, 2, 3, 4))
    _, assignment, _ = virtual_exchange(spread(IDS, source, ["version"]), source, target, None)
    assert assignment.slot_T.tolist() == sorted(assignment.slot_T.tolist())
    assert np.bincount(assignment.slot_T).tolist() == [5, 5, 5, 5, 4]
    assert contiguous_slots(3, 5).tolist() == [0, 1, 2]


def test_each_head_sends_once_and_shares_with_its_group() -> None:
    source, target = Layout(tuple(range(8))), Layout(tuple(range(8)), 4)
    _, _, plans = virtual_exchange(spread(IDS, source, ["prompt", "row"]), source, target, Balance(), ("row",))
    assert plans[0].share_with == (1, 2, 3) and plans[4].share_with == (5, 6, 7)
    assert [plans[rank].share_from for rank in range(8)] == [None, 0, 0, 0, None, 4, 4, 4]
    for rank in (1, 2, 3, 5, 6, 7):
        assert int(plans[rank].recv_N.sum()) == 0


def test_identity_order_falls_back_for_huge_spans() -> None:
    ids = np.array([[2**62, 0, 0], [-(2**62), 5, 1], [0, 2**61, 3], [0, 2**61, 2]], dtype=np.int64)
    assert identity_order(ids).tolist() == [1, 3, 2, 0]
    with pytest.raises(ValueError, match="occurs more than once"):
        identity_order(np.concatenate([ids, ids[:1]]))
    with pytest.raises(ValueError, match=r"\(0, 1, 2\) occurs more than once"):
        identity_order(np.array([[0, 1, 2], [0, 0, 0], [0, 1, 2]]))


@pytest.mark.skipif(not can_divide(), reason="kernels are not built")
@settings(max_examples=300, deadline=None)
@given(
    samples=st.integers(0, 40),
    slots=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    rule=st.sampled_from([rule for rule in RULES if rule is not None]),
    spread=st.sampled_from([3, 2**40]),
    seed=st.integers(0, 2**32 - 1),
)
def test_samples_are_divided_as_by_the_reference(
    samples: int, slots: tuple[int, int], rule: Balance, spread: int, seed: int
) -> None:
    """Every bit of it, also of the floating-point figures; two samples of one identity are named by both."""
    rng = np.random.RandomState(seed)
    ids = rng.randint(-spread, spread, (samples, 3))
    ids[:, 2] = rng.permutation(samples) if rng.rand() < 0.8 else ids[:, 2]
    lengths = rng.randint(0, 4000, samples)
    counts = rng.multinomial(samples, np.full(slots[0], 1 / slots[0]))
    metadata = Metadata(Schema(()), ids, np.repeat(np.arange(slots[0]), counts), lengths[:, None])
    source, target = Layout(tuple(range(slots[0]))), Layout(tuple(range(slots[1])))
    outcomes: list[Any] = []
    for divide in (divide_by_kernel, divide_reference):
        try:
            order, slot_T, before, after = divide(metadata, source, target, rule, lengths)
            outcomes.append((order.tolist(), slot_T.tolist(), before, after))
        except ValueError as fault:
            outcomes.append(str(fault))
    assert outcomes[0] == outcomes[1]


def test_an_assignment_to_follow_must_fit() -> None:
    source, target = Layout((0, 1)), Layout((0, 1, 2))
    _, assignment, _ = virtual_exchange(spread(IDS, source, ["version"]), source, target, None)
    with pytest.raises(ValueError, match=r"\(0, 5, 3\) is missing"):
        virtual_exchange(spread(IDS[:-1], source, ["version"]), source, target, None, follow=assignment)
    with pytest.raises(ValueError, match=r"\(0, 9, 0\) is not in the assignment"):
        virtual_exchange(spread([*IDS, (0, 9, 0)], source, ["version"]), source, target, None, follow=assignment)
    with pytest.raises(ValueError, match="is for 3x1"):
        virtual_exchange(spread(IDS, source, ["version"]), source, source, None, follow=assignment)


def test_bytes_per_rank_and_plan_time_do_not_grow_with_the_world() -> None:
    """Fixed samples per rank; up to 4,096 ranks, of which three make their plans."""
    per_rank, sent = 16, []
    for world in (2, 16, 256, 4096):
        layout = Layout(tuple(range(world)))
        rng = np.random.RandomState(world)
        prompts = np.arange(world * per_rank // 8)
        rng.shuffle(prompts)
        ids = np.stack([np.zeros(world * per_rank), np.repeat(prompts, 8), np.tile(np.arange(8), len(prompts))], axis=1)
        batch = Batch(torch.from_numpy(ids.astype(np.int64)), {})
        lengths = torch.from_numpy(np.minimum(rng.lognormal(5.5, 0.8, len(ids)), 2000).astype(np.int64))
        schema = Schema((("response", "int32", ()),))
        rows = np.concatenate(
            [encode_rows(batch).reshape(-1, 24), lengths.to(torch.int32).view(torch.uint8).reshape(-1, 4).numpy()],
            axis=1,
        )
        metadata = decode_rows(rows.reshape(-1), schema, np.full(world, per_rank))
        decision = assign(metadata, layout, layout, Balance(keep_groups=False, slack=1.0), ("response",), None)
        plans = [
            plan_messages(Part(metadata, decision, layout, layout, rank, True), layout.ranks)
            for rank in {0, world // 2, world - 1}
        ]
        held = float(lengths.sum()) * 4 / world
        sent.append(np.mean([int(plan.send_N.sum()) for plan in plans]) / held)
        assert (
            imbalance(lengths.numpy().astype(float), decision.assignment.slot_T[np.argsort(decision.order_T)], world)
            < 1.2
        )
    assert all(share <= 1.5 for share in sent), sent  # of what a rank holds; three ranks are few, so they scatter
