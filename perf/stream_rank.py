"""What the two ranks of perf/stream.py do: one is a replica without an engine, the other a trainer without a model."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import numpy as np
import torch

from spmd_rl.comm.line import open_line
from spmd_rl.comm.world import World
from spmd_rl.data.batch import Batch, Column
from spmd_rl.data.metadata import Schema
from spmd_rl.data.stream.channel import Bell, Inlet, Outlet
from spmd_rl.data.stream.codec import encode
from spmd_rl.data.stream.frames import Kind, Message
from spmd_rl.data.stream.ledger import Ledger
from spmd_rl.data.stream.rounds import Rounds
from spmd_rl.data.stream.store import Store
from spmd_rl.data.stream.window import Window

LIMIT_S = 300.0
BATCH = 256  # groups per step


def flow(world: World, transport: str, backlog: int, groups: int) -> dict[str, Any]:
    """Groups of one sample and one number through the stream, while `backlog` others wait at the trainer.

    The trainer reads frames, stores, agrees (alone), claims step by step, and gives the room back; payload is not
    decoded. Counted from the first group behind the backlog to the last one claimed.
    """
    line, bell = open_line(transport, world, 1 - world.rank, f"flow/{backlog}", LIMIT_S), Bell()
    inlet, outlet = Inlet(line, bell), Outlet(line, LIMIT_S / 8)
    batch = Batch(torch.zeros(1, 3, dtype=torch.int64), {"reward": Column.scalars(torch.zeros(1))})
    block, schema = encode(batch), Schema.of(batch)
    if world.rank == 1:
        found = _produce(inlet, outlet, bell, block, backlog, groups)
    else:
        found = _consume(inlet, outlet, bell, schema, backlog, groups)
    outlet.close(LIMIT_S)
    inlet.join(LIMIT_S)
    return found


def _produce(
    inlet: Inlet, outlet: Outlet, bell: Bell, block: torch.Tensor, backlog: int, groups: int
) -> dict[str, Any]:
    for group in range(groups, groups + backlog):  # of rounds that no step comes to
        outlet.put(Message(Kind.GROUP, block.numel(), group, group // BATCH, 1, 1, 1), block)
    while not any((frame.table[:, 0] == Kind.NOTE).any() for frame in inlet.take()):  # all of them are there
        bell.wait(1.0)
    begin = time.perf_counter()
    for group in range(groups):
        outlet.put(Message(Kind.GROUP, block.numel(), group, group // BATCH, 1, 1, 1), block)
    put_s = time.perf_counter() - begin
    released = 0
    while released < groups:
        bell.wait(1.0)
        released += sum(int((frame.table[:, 0] == Kind.RELEASE).sum()) for frame in inlet.take())
    return {"put_us": 1e6 * put_s / groups}


def _consume(inlet: Inlet, outlet: Outlet, bell: Bell, schema: Schema, backlog: int, groups: int) -> dict[str, Any]:
    rounds = Rounds(groups + backlog, BATCH, (groups + backlog) // BATCH)
    ledger, store = Ledger(Window(rounds, rounds.count)), Store(["reward"])

    def collect() -> None:
        rows = []
        for frame in inlet.take():
            for row, block in zip(frame.table.tolist(), frame.blocks(), strict=True):
                _, _, group, version, samples, of, tokens, _ = row
                rows.append(store.add(group, version, samples, of, tokens, block, schema))
        if rows:
            ledger.arrive(np.array(rows, dtype=np.int64))

    while len(ledger) < backlog:
        bell.wait(1.0)
        collect()
    outlet.put(Message(Kind.NOTE))
    while not len(ledger) - backlog:
        bell.wait(1.0)
        collect()
    begin = time.perf_counter()
    ticks = []
    for step in range(1, groups // BATCH + 1):
        while True:
            began = time.perf_counter()
            tick = ledger.tick(step, budget=64)
            if tick is None:
                bell.wait(1.0)
                collect()
                continue
            for described in tick.claimed:
                store.discard(described.group)
            outlet.put_all([(Message(Kind.RELEASE, group=described.group), None) for described in tick.claimed])
            ticks.append(time.perf_counter() - began)
            if tick.last:
                break
        ledger.acknowledge()
    seconds = time.perf_counter() - begin
    return {"groups_per_s": groups / seconds, "tick_us": 1e6 * median(ticks), "ticks": len(ticks)}


def delay(world: World, transport: str, puts: int) -> dict[str, Any]:
    """One group at a time, while the consumer waits for it: how long a put takes, and until the consumer wakes up.

    Both clocks are the machine's monotonic one.
    """
    line, bell = open_line(transport, world, 1 - world.rank, "delay", LIMIT_S), Bell()
    inlet, outlet = Inlet(line, bell), Outlet(line, LIMIT_S / 8)
    times: list[float] = []
    while len(times) < puts:
        if world.rank == 1:
            time.sleep(0.02)  # the consumer is waiting by now
            began = time.monotonic_ns()
            outlet.put(Message(Kind.GROUP, tokens=began))
            times.append((time.monotonic_ns() - began) / 1e6)
        elif bell.wait(1.0):
            begun = [row[6] for frame in inlet.take() for row in frame.table.tolist() if row[0] == Kind.GROUP]
            times += [(time.monotonic_ns() - then) / 1e6 for then in begun]
    outlet.close(LIMIT_S)
    inlet.join(LIMIT_S)
    return {"median_ms": median(times), "max_ms": max(times)}
