"""`bootstrap` under real launchers: every rank gets its place, and a collective over both groups works."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from spmd_rl.comm.bootstrap import describe
from spmd_rl.comm.world import World
from tests.world.harness import find_mpirun, run_world

needs_mpi = pytest.mark.skipif(find_mpirun() is None, reason="no mpirun in this environment")


def place(world: World) -> dict[str, Any]:
    total = torch.tensor([float(world.rank)])
    dist.all_reduce(total, group=world.data)
    largest = torch.tensor([world.rank])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=world.control)
    return {
        "place": [world.rank, world.size, world.local_rank, world.local_size, world.node, world.nodes],
        "sum": total.item(),
        "max": largest.item(),
        "source": world.source,
        "line": describe(world),
        "environ": [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")],
    }


@pytest.mark.parametrize(
    ("launcher", "ranks", "source"),
    [("single", 1, "single"), ("torchrun", 3, "torchrun"), pytest.param("mpirun", 3, "openmpi", marks=needs_mpi)],
)
def test_every_rank_has_its_place(launcher: str, ranks: int, source: str) -> None:
    result = run_world(place, ranks=ranks, launcher=launcher).check()
    for rank, got in enumerate(result.ranks):
        assert got["place"] == [rank, ranks, rank, ranks, 0, 1]
        assert got["sum"] == sum(range(ranks)) and got["max"] == ranks - 1
        assert got["source"] == source and f"started by {source}" in got["line"]
        assert got["environ"] == [str(rank), str(ranks), str(rank), str(ranks)]
