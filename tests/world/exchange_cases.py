"""What the ranks of tests/world/test_exchange*.py do."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import torch

from spmd_rl.comm.transport import make_transport
from spmd_rl.comm.world import World
from spmd_rl.data.assignment import Assignment
from spmd_rl.data.balance import Balance
from spmd_rl.data.batch import Batch, Column
from spmd_rl.data.exchange import Coordinator
from spmd_rl.data.layout import Layout
from spmd_rl.observe.metrics import Metrics
from tests.exchanges import COLUMNS, make_samples, same_bytes
from tests.world.exchange_faults import faults, unwritable

SampleId = tuple[int, int, int]


def layouts(size: int) -> list[Layout]:
    """A few layouts of every kind over a world."""
    everyone = tuple(range(size))
    found = [Layout(everyone), Layout(everyone[::-1]), Layout(everyone[:1]), Layout(everyone[-1:])]
    found += [Layout(everyone, r, shared) for r in range(2, size + 1) if size % r == 0 for shared in (True, False)]
    if size > 2:
        found += [Layout(everyone[: size // 2]), Layout(everyone[size // 2 :]), Layout(everyone[1:])]
    return list(dict.fromkeys(found))


def place(rng: random.Random, ids: list[SampleId], layout: Layout) -> list[list[SampleId]]:
    """Samples thrown at random, in random order, onto the slots; some slots may stay empty."""
    slots: list[list[SampleId]] = [[] for _ in range(layout.slots)]
    shuffled = rng.sample(ids, len(ids))
    favourite = rng.randrange(layout.slots)
    for sample in shuffled:
        slots[favourite if rng.random() < 0.3 else rng.randrange(layout.slots)].append(sample)
    return slots


def held(slots: list[list[SampleId]], layout: Layout, rank: int, columns: dict[str, Any]) -> Batch:
    slot = layout.slot_of(rank)
    if slot is None:
        return Batch.empty()
    return make_samples(slots[slot] if rank in layout.holders else [], columns)


def check(
    result: Batch, assignment: Assignment, ids: list[SampleId], layout: Layout, rank: int, columns: dict[str, Any]
) -> None:
    assert [tuple(row) for row in assignment.ids_T3.tolist()] == sorted(ids)
    slot = layout.slot_of(rank)
    if slot is None:
        assert len(result) == 0 and not result.columns
        return
    wanted = [tuple(row) for row in assignment.of_slot(slot).tolist()] if rank in layout.holders else []
    assert same_bytes(result, make_samples(wanted, columns)), f"rank {rank} got wrong bytes"


def everything(world: World, transport: str, counts: dict[str, int]) -> dict[str, Any]:
    return {
        "random": random_exchanges(world, transport, counts, seed=world.size),
        "diamond": diamond(world, transport),
        "faults": faults(world, transport),
        "unwritable": unwritable(world, transport),
    }


def random_exchanges(world: World, transport: str, counts: dict[str, int], seed: int) -> dict[str, Any]:
    """Exchanges over random layouts, several alive at a time, waited for in random order. counts: how many through
    the transport alone (`plain`), and with payload through shared memory (`shared`)."""
    shapes = layouts(world.size)
    edges = [(source, target) for source in shapes for target in shapes]
    results: dict[str, Any] = {}
    for kind, count in counts.items():
        carrier = make_transport(transport, world, share_memory=kind == "shared")
        results[kind] = _random_exchanges(world, Coordinator(world, carrier, edges), shapes, count, seed)
    return results


def _random_exchanges(
    world: World, coordinator: Coordinator, shapes: list[Layout], count: int, seed: int
) -> dict[str, Any]:
    rng = random.Random(seed)
    done = 0
    while done < count:
        alive = []
        for number in range(min(rng.randint(1, 4), count - done)):
            source, target = rng.choice(shapes), rng.choice(shapes)
            names = rng.sample(sorted(COLUMNS), rng.randint(1, len(COLUMNS)))
            columns = {name: COLUMNS[name] for name in names}
            prompts, samples = rng.choice([(0, 0), (1, 1), (3, 2), (7, 4), (16, 4)])
            ids = [(rng.randint(0, 2), p * 7, s) for p in range(prompts) for s in range(samples)]
            slots = place(rng, ids, source)
            rule = rng.choice([None, Balance(), Balance(1.0, 0.1, keep_groups=False), Balance(equal_counts=True)])
            if not ids:
                columns = {}
            if world.rank in source or world.rank in target:
                batch = held(slots, source, world.rank, columns)
                cost = names[:1] if ids else ()
                pending = coordinator.start(done, f"edge{number}", batch, source, target, rule, cost)
                alive.append((pending, ids, target, columns))
            done += 1
        random.Random(seed + done + world.rank).shuffle(alive)
        for pending, ids, target, columns in alive:
            result, assignment = pending.wait()
            check(result, assignment, ids, target, world.rank, columns)
    uneven(world, coordinator, shapes[0])
    channel = type(next(iter(coordinator._lanes.values())).channel).__name__
    sent = sum(c.bytes_sent for c in coordinator.counters.values())
    hits = sum(c.local_hits for c in coordinator.counters.values())
    direct = sum(c.direct for c in coordinator.counters.values())
    coordinator.close()
    return {"exchanges": done, "sent": sent, "hits": hits, "direct": direct, "channel": channel}


def uneven(world: World, coordinator: Coordinator, everyone: Layout) -> None:
    """The first rank holds everything, so much of it that its metadata takes another way."""
    count = 5000
    batch = Batch.empty()
    order = torch.randperm(count, generator=torch.Generator().manual_seed(3))
    values = torch.arange(count, dtype=torch.int32)
    if world.rank == 0:
        ids = torch.stack([torch.zeros_like(order), order, torch.zeros_like(order)], 1)
        batch = Batch(ids, {"value": Column.scalars(values[order])})
    result, assignment = coordinator.start(10**6, "uneven", batch, everyone, everyone, Balance(), "value").wait()
    assert torch.equal(result["value"].values.long(), result.ids[:, 1])
    assert result.ids[:, 1].tolist() == assignment.of_slot(world.rank)[:, 1].tolist()
    assert abs(len(result) - count / world.size) < 1


def diamond(world: World, transport: str) -> dict[str, Any]:
    """rollout -> {ref, value} -> train: the join follows one assignment; two edges alive, waited for in any order."""
    everyone = Layout(tuple(range(world.size)))
    pairs = Layout(tuple(range(world.size)), 2)
    coordinator = Coordinator(
        world, make_transport(transport, world), [(everyone, everyone), (everyone, pairs), (pairs, everyone)]
    )
    ids = [(0, prompt, sample) for prompt in range(9) for sample in range(4)]
    rng = random.Random(5)
    slots = place(rng, ids, everyone)
    base = {"prompt": COLUMNS["prompt"], "row": COLUMNS["row"]}
    added = {"logprob": COLUMNS["logprob"], "hidden": COLUMNS["hidden"]}
    for step in range(3):
        rollout = held(slots, everyone, world.rank, base)
        to_ref = coordinator.start(step, "rollout>ref", rollout, everyone, pairs, Balance(), "row")
        to_value = coordinator.start(step, "rollout>value", rollout, everyone, everyone, Balance(1.0, 0.1), "row")
        to_train = coordinator.start(
            step, "rollout>train", rollout, everyone, everyone, Balance(equal_counts=True), "prompt"
        )
        waiting = [("ref", to_ref), ("value", to_value)]
        got = {name: pending.wait()[0] for name, pending in (waiting if (step + world.rank) % 2 else waiting[::-1])}
        made = {
            name: make_samples([tuple(row) for row in got[name].ids.tolist()], {column: added[column]})
            for name, column in (("ref", "logprob"), ("value", "hidden"))
        }
        main, assignment = to_train.wait()
        from_value = coordinator.start(step, "value>train", made["value"], everyone, everyone, follow=assignment)
        from_ref = coordinator.start(step, "ref>train", made["ref"], pairs, everyone, follow=assignment)
        joined = main
        for pending in (from_ref, from_value) if world.rank % 2 else (from_value, from_ref):
            more, same = pending.wait()
            assert same is assignment and torch.equal(more.ids, main.ids)
            joined = joined.with_columns(more.columns)
        check(joined, assignment, ids, everyone, world.rank, {**base, **added})
    coordinator.close()
    return {"samples": len(joined)}


def thousand_steps(world: World, transport: str, steps: int) -> dict[str, Any]:
    """Batches of changing size: no buffer is made once the largest was seen, and none is written too early."""
    everyone = Layout(tuple(range(world.size)))
    coordinator = Coordinator(world, make_transport(transport, world), [(everyone, everyone)])
    columns = {"prompt": COLUMNS["prompt"], "logprob": COLUMNS["logprob"], "version": COLUMNS["version"]}
    universe = make_samples([(0, p, 0) for p in range(16)], columns, longest=600)
    allocated = {}
    kept = None
    for step in range(steps):
        count = 16 if step < 4 else 5 + step % 11
        mine = torch.tensor([p for p in range(count) if (p + step) % world.size == world.rank], dtype=torch.int64)
        batch = universe.select(mine)
        pending = coordinator.start(step, "a", batch, everyone, everyone, Balance(slack=1.0), "prompt")
        second = coordinator.start(step, "b", batch, everyone, everyone, None)
        until = time.monotonic() + (60 if step % 100 == 50 else 0)
        while time.monotonic() < until and not (pending.done() and second.done()):
            time.sleep(0.001)  # as a rank that computes: nobody waits, and the exchange comes to its end
        assert step % 100 != 50 or (pending.done() and second.done())
        result, assignment = pending.wait()
        second.wait()
        wanted = universe.select(torch.from_numpy(assignment.of_slot(world.rank)[:, 1].copy()))
        assert same_bytes(result, wanted), step
        assert kept is None or same_bytes(*kept), f"the result of step {step - 1} was overwritten"
        kept = (result, wanted)
        allocated[step] = coordinator.allocated
    metrics = Metrics()
    coordinator.metrics(metrics)
    coordinator.metrics(metrics)
    reduced = metrics.reduce(world.control)
    coordinator.close()
    return {"early": allocated[20], "late": allocated[steps - 1], "metrics": reduced}


def bytes_per_rank(world: World, transport: str) -> dict[str, list[int]]:
    """Payload that this rank sends and receives when half of the ranks give all they hold to the other half, for
    sub-worlds of growing size; every giver holds samples of the same lengths."""
    sizes = [size for size in (2, 4, 8, 16, 32, 64) if size <= world.size]
    halves = [(Layout(tuple(range(size // 2))), Layout(tuple(range(size // 2, size)))) for size in sizes]
    coordinator = Coordinator(world, make_transport(transport, world), halves)
    moved: dict[str, list[int]] = {}
    for size, (givers, takers) in zip(sizes, halves, strict=True):
        if world.rank >= size:
            continue
        batch = Batch.empty()
        if world.rank in givers:
            ids = torch.tensor([(0, (world.rank * 64 + s) * 2654435761 % 2**31, 0) for s in range(64)])
            lengths = 1 + torch.arange(64).roll(world.rank) * 16
            batch = Batch(ids, {"tokens": Column(torch.zeros(int(lengths.sum()), dtype=torch.int32), lengths)})
        coordinator.start(0, f"of{size}", batch, givers, takers, Balance(keep_groups=False), "tokens").wait()
        counters = coordinator.counters[f"of{size}"]
        moved[str(size)] = [counters.bytes_sent, counters.bytes_received]
    coordinator.close()
    return moved


def large_message(world: World, transport: str) -> bool:
    """2.3 GiB from rank 0 to rank 1, not through shared memory."""
    channel = make_transport(transport, world, share_memory=False).open(range(world.size))
    assert channel is not None
    size = int(2.3 * 2**30) // 16 * 16
    send_N, recv_N = np.zeros(2, dtype=np.int64), np.zeros(2, dtype=np.int64)
    (send_N if world.rank == 0 else recv_N)[1 - world.rank] = size
    outbox = channel.outbox(int(send_N.sum()))
    mark = torch.arange(16, dtype=torch.uint8)
    for part in (outbox[:16], outbox[-16:]):
        part.copy_(mark[: part.numel()])
    inbox = channel.all_to_all(outbox, send_N, recv_N).wait()
    received = inbox.sources[0][:size]
    return world.rank == 0 or (torch.equal(received[:16], mark) and torch.equal(received[-16:], mark))
