"""What the ranks of tests/world/test_exchange*.py do."""

from __future__ import annotations

import random
from typing import Any

import torch

from spmd_rl.comm.transport import make_transport
from spmd_rl.comm.world import World
from spmd_rl.data.assignment import Assignment
from spmd_rl.data.balance import Balance
from spmd_rl.data.batch import Batch
from spmd_rl.data.exchange import Coordinator
from spmd_rl.data.layout import Layout
from tests.exchanges import COLUMNS, make_samples, same_bytes

SampleId = tuple[int, int, int]


def layouts(size: int) -> list[Layout]:
    """A few layouts of every kind over a world."""
    everyone = tuple(range(size))
    found = [Layout(everyone), Layout(everyone[::-1]), Layout(everyone[:1]), Layout(everyone[-1:])]
    found += [Layout(everyone, r) for r in range(2, size + 1) if size % r == 0]
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
    return Batch.empty() if slot is None else make_samples(slots[slot], columns)


def check(
    result: Batch, assignment: Assignment, ids: list[SampleId], layout: Layout, rank: int, columns: dict[str, Any]
) -> None:
    assert [tuple(row) for row in assignment.ids_T3.tolist()] == sorted(ids)
    slot = layout.slot_of(rank)
    if slot is None:
        assert len(result) == 0 and not result.columns
        return
    wanted = [tuple(row) for row in assignment.of_slot(slot).tolist()]
    assert same_bytes(result, make_samples(wanted, columns)), f"rank {rank} got wrong bytes"


def random_exchanges(world: World, transport: str, count: int, seed: int) -> dict[str, Any]:
    """`count` exchanges over random layouts, several alive at a time, waited for in random order."""
    shapes = layouts(world.size)
    coordinator = Coordinator(
        world, make_transport(transport, world), [(source, target) for source in shapes for target in shapes]
    )
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
    sent = sum(c.bytes_sent for c in coordinator.counters.values())
    hits = sum(c.local_hits for c in coordinator.counters.values())
    coordinator.close()
    return {"exchanges": done, "sent": sent, "hits": hits, "threads": torch.get_num_threads()}
