"""What the ranks of perf/exchange.py do: bare collectives and whole exchanges of the same bytes, by turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from perf.exchange_samples import columns, lengths
from spmd_rl.comm.transport import make_transport
from spmd_rl.comm.world import World
from spmd_rl.data.balance import Balance
from spmd_rl.data.batch import Batch, Column
from spmd_rl.data.counters import EdgeCounters
from spmd_rl.data.exchange import Coordinator
from spmd_rl.data.layout import Layout


def share(world: World, samples: int, tokens: int) -> Batch:
    """This rank's part of the samples: every world.size-th, so that balancing moves nearly all of them."""
    lengths_S = lengths(samples, tokens)
    everything = {name: Column(*pair) for name, pair in columns(lengths_S, tokens).items()}
    ids = torch.stack([torch.zeros(samples, dtype=torch.int64), torch.arange(samples), torch.zeros(samples).long()], 1)
    return Batch(ids, everything).select(torch.arange(world.rank, samples, world.size))


def slowest(world: World, action: Callable[[], Any]) -> float:
    """Seconds until the last rank is done, all having begun together."""
    world.control.barrier().wait()
    begin = time.perf_counter()
    action()
    seconds = torch.tensor([time.perf_counter() - begin])
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group=world.control)
    return float(seconds)


def bare_collective(world: World, transport: str, total: int) -> Callable[[], None]:
    """The transport's own all-to-all of `total` bytes over all ranks, in equal parts; nothing else."""
    part = total // world.size // world.size // 16 * 16
    send = torch.randint(0, 256, (part * world.size,), dtype=torch.uint8)
    recv = torch.empty_like(send)
    if transport == "mpi":
        from mpi4py import MPI

        comm = MPI.COMM_WORLD.Dup()
        counts = [part] * world.size
        ours, theirs = [send.numpy(), counts, MPI.BYTE], [recv.numpy(), counts, MPI.BYTE]
        return lambda: comm.Alltoallv(ours, theirs)
    group = dist.new_group(backend="gloo")
    return lambda: dist.all_to_all_single(recv, send, group=group)


def exchange(world: World, transport: str, samples: int, tokens: int, repeats: int) -> dict[str, Any]:
    batch = share(world, samples, tokens)
    layout = Layout(tuple(range(world.size)))
    coordinator = Coordinator(world, make_transport(transport, world), [(layout, layout)])
    held = torch.tensor([sum(c.values.numel() * c.values.element_size() for c in batch.columns.values())])
    dist.all_reduce(held, group=world.control)
    total = int(held)
    bare = bare_collective(world, transport, total)
    state: dict[str, Batch] = {}
    step = 0

    def ours() -> None:
        # Groups of one sample, balanced anew each time: nothing stays where it is by luck.
        rule = Balance(1.0, 1e-4, keep_groups=False, slack=1.0)
        state["result"], _ = coordinator.start(step, "edge", batch, layout, layout, rule, "response").wait()

    times: dict[str, list[float]] = {"bare_s": [], "ours_s": []}
    parts: list[EdgeCounters] = []
    for step in range(repeats + 3):
        state.clear()  # as in training, the previous step's samples are gone
        before = EdgeCounters(**asdict(coordinator.counters["edge"]))
        pair = slowest(world, bare), slowest(world, ours)
        if step >= 3:
            times["bare_s"].append(pair[0])
            times["ours_s"].append(pair[1])
            parts.append(coordinator.counters["edge"].since(before))
    names = ("metadata_s", "plan_s", "copy_s", "flight_s", "total_s")
    seconds = {name: round(1e3 * median(getattr(part, name) for part in parts), 2) for name in names}
    coordinator.close()
    return {
        **times,
        "total_bytes": total,
        "parts_ms": seconds,
        "sent": parts[-1].bytes_sent,
        "local": parts[-1].bytes_local,
        "allocated": coordinator.allocated,
    }


def bytes_by_world(world: World, transport: str) -> dict[str, list[int]]:
    from tests.world.exchange_cases import bytes_per_rank

    return bytes_per_rank(world, transport)


def plan_seconds(ranks: int, per_rank: int) -> dict[str, float]:
    """One virtual rank's plan among `ranks`, from gathered metadata to its copy table."""
    from spmd_rl.data.assignment import assign
    from spmd_rl.data.exchange_plan import Part, plan_messages
    from spmd_rl.data.metadata import Schema, decode_rows

    count = ranks * per_rank
    rng = np.random.RandomState(0)
    lengths_S = lengths(count, 1024).numpy()
    words = np.empty((count, 6 + 9), dtype=np.int32)
    ids = np.stack(
        [np.zeros(count, dtype=np.int64), rng.permutation(count // 8).repeat(8), np.tile(np.arange(8), count // 8)], 1
    )
    words[:, :6] = ids.view(np.int32).reshape(count, 6)
    words[:, 6:] = lengths_S[:, None]
    schema = Schema(tuple((f"column{number}", "float32", ()) for number in range(9)))
    layout = Layout(tuple(range(ranks)))
    raw, counts = words.reshape(-1).view(np.uint8), np.full(ranks, per_rank)
    seconds, sent = [], []
    for rank in (0, ranks // 2, ranks - 1):
        begin = time.perf_counter()
        metadata = decode_rows(raw, schema, counts)
        decision = assign(metadata, layout, layout, Balance(keep_groups=False, slack=1.0), ("column0",), None)
        plan = plan_messages(Part(metadata, decision, layout, layout, rank, True), layout.ranks)
        seconds.append(time.perf_counter() - begin)
        sent.append(int(plan.send_N.sum()) / (36 * int(lengths_S.sum()) / ranks))
    return {
        "ranks": ranks,
        "plan_s": median(seconds),
        "sent_of_held": float(np.mean(sent)),
        "imbalance": decision.after,
    }
