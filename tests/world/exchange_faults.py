"""Exchanges that must fail, by the same named error on every rank."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any, cast

import torch

from spmd_rl.comm.transport import Peers, make_transport
from spmd_rl.comm.world import World
from spmd_rl.data.balance import Balance
from spmd_rl.data.batch import Batch, Column
from spmd_rl.data.exchange import Coordinator, ExchangeError
from spmd_rl.data.layout import Layout
from spmd_rl.data.movers import ByMemory
from tests.exchanges import COLUMNS, make_samples, same_bytes

SIMPLE = {"prompt": COLUMNS["prompt"], "version": COLUMNS["version"]}


def faults(world: World, transport: str) -> dict[str, Any]:
    """Every fault that leaves the channel usable, one after the other; then an exchange that works."""
    everyone = Layout(tuple(range(world.size)))
    half = Layout(everyone.ranks[: world.size // 2])
    coordinator = Coordinator(world, make_transport(transport, world), [(everyone, everyone), (half, everyone)])
    last = world.rank == world.size - 1
    mine = [(0, world.rank, s) for s in range(3)]
    good = make_samples(mine, SIMPLE)
    heard: dict[str, str] = {}

    def attempt(name: str, batch: Batch, source: Layout = everyone, **options: Any) -> None:
        try:
            coordinator.start(len(heard), options.pop("edge", "e"), batch, source, everyone, **options).wait()
        except ExchangeError as error:
            heard[name] = str(error)
        else:
            heard[name] = "no error"

    broken = Column(torch.zeros(6), torch.tensor([1, 2, 3]))
    broken.lengths[0] = 5  # behind the constructor's back
    attempt("lengths", good.with_columns({"prompt": broken}) if last else good)
    attempt("duplicates", make_samples([(0, 0, 0), (0, 9, 9), (0, 9, 8)], SIMPLE) if last else good)
    sparse = Column(torch.eye(3).to_sparse(), torch.tensor([1, 1, 1]))
    attempt("dtype", good.with_columns({"prompt": sparse}) if last else good)
    attempt("schema", good.only(["prompt"]) if last else good)
    attempt("bare", Batch(good.ids, {}) if last else good)
    attempt("plan", good, balance=Balance(linear=2.0 if last else 1.0))
    attempt("cost", good, balance=Balance(), cost="respons")
    attempt("outside", good, source=half)
    _, elsewhere = coordinator.start(90, "first", good, everyone, everyone, Balance(), "prompt").wait()
    other = make_samples([(1, world.rank, s) for s in range(3)], SIMPLE)
    attempt("follow", other if last else good, follow=elsewhere)
    result, assignment = coordinator.start(91, "works", good, everyone, everyone, Balance(), "prompt").wait()
    wanted = [tuple(row) for row in assignment.of_slot(world.rank).tolist()]
    assert same_bytes(result, make_samples(wanted, SIMPLE))
    coordinator.close()
    return heard


def unwritable(world: World, transport: str) -> dict[str, str]:
    """The last rank cannot map what the others offer: all must hear of it, and not by waiting. What a late peer might
    still write to is not used again."""
    everyone = Layout(tuple(range(world.size)))
    coordinator = Coordinator(world, make_transport(transport, world), [(everyone, everyone)])
    mover = coordinator._lanes[everyone.ranks].mover
    assert isinstance(mover, ByMemory)
    if world.rank == world.size - 1:
        mover._peers = cast(Peers, NoPeers())
    heard = {}
    for name in ("first", "again"):
        try:
            batch = make_samples([(0, p, world.rank) for p in range(8)], SIMPLE)
            coordinator.start(0, name, batch, everyone, everyone, Balance(), "prompt").wait()
        except ExchangeError as error:
            heard[name] = str(error)
    assert [lease.data.numel() > 0 for lease in mover._unsafe] == [True]
    coordinator.close()
    return heard


class NoPeers:
    def block(self, words_W: Any) -> torch.Tensor:
        raise OSError("not permitted")


def absent_peer(world: World, transport: str, patience_s: float) -> dict[str, Any]:
    """The last rank never comes: the others must say so, in time."""
    everyone = Layout(tuple(range(world.size)))
    coordinator = Coordinator(world, make_transport(transport, world, patience_s), [(everyone, everyone)])
    batch = make_samples([(0, world.rank, 0)], SIMPLE)
    coordinator.start(0, "warm", batch, everyone, everyone, Balance(), "prompt").wait()
    begin = time.monotonic()
    if world.rank == world.size - 1:
        time.sleep(patience_s + 8)
        os._exit(0)
    message = "no error"
    try:
        coordinator.start(1, "rollout", batch, everyone, everyone, Balance(), "prompt").wait()
    except ExchangeError as error:
        message = str(error)
    seconds = time.monotonic() - begin
    try:
        coordinator.start(2, "rollout", batch, everyone, everyone).wait()
    except ExchangeError as error:
        again = str(error)
    print(f"rank {world.rank} heard: {message}", flush=True)
    print(f"rank {world.rank} again: {again} ({seconds:.1f} s)", flush=True)
    time.sleep(4)
    os._exit(3)


def wrong_transport(world: World) -> str:
    try:
        make_transport("mpi", replace(world, size=world.size + 1))
    except ValueError as error:
        return str(error)
    return "no error"
