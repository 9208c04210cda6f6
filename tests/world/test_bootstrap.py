"""`bootstrap` under real launchers: every rank gets its place, and a collective over both groups works."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

from spmd_rl.comm.bootstrap import describe, shutdown
from spmd_rl.comm.digest import Disagreement, agree
from spmd_rl.comm.liveness import Liveness
from spmd_rl.comm.world import World
from spmd_rl.config.schema import CommConfig
from tests.world.harness import TWO_MACHINES, can_make_machines, find_mpirun, run_world

needs_mpi = [pytest.mark.mpi, pytest.mark.skipif(find_mpirun() is None, reason="no mpirun in this environment")]


def place(world: World) -> dict[str, Any]:
    total = torch.tensor([float(world.rank)])
    dist.all_reduce(total, group=world.data)
    largest = torch.tensor([world.rank])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=world.control)
    with Liveness(world, CommConfig()):
        pass
    return {
        "place": [world.rank, world.size, world.local_rank, world.local_size, world.node, world.nodes],
        "sum": total.item(),
        "max": largest.item(),
        "source": world.source,
        "line": describe(world),
        "environ": [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")],
        "address": world.address,
        "interface": os.environ["GLOO_SOCKET_IFNAME"],
    }


def lost_at_the_end(world: World) -> None:
    if world.rank == 1:
        os._exit(0)
    shutdown(world)
    os._exit(0)  # the runner would come to `shutdown` again


def test_a_rank_lost_between_the_last_work_and_the_end_is_one_line() -> None:
    result = run_world(lost_at_the_end, ranks=2)
    assert result.returncode == 0, result.stderr
    assert "spmd_rl: rank 0: another rank is gone before all said goodbye; the work was done" in result.stderr
    assert "Traceback" not in result.stderr


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
        assert (got["address"], got["interface"]) == ("127.0.0.1", "lo")


@pytest.mark.root
@pytest.mark.skipif(not can_make_machines(), reason="network namespaces need root and ip")
def test_ranks_on_two_machines_meet_by_the_addresses_between_them() -> None:
    result = run_world(place, ranks=4, launcher=TWO_MACHINES).check()
    for rank, got in enumerate(result.ranks):
        assert got["place"] == [rank, 4, rank % 2, 2, rank // 2, 2]
        assert got["sum"] == 6.0 and got["source"] == "explicit"
        assert got["address"] == f"10.77.0.{1 + rank // 2}"
        assert got["interface"].startswith("va" if rank < 2 else "vb")


STRAGGLER = """
import sys
from spmd_rl.comm.bootstrap import bootstrap
from spmd_rl.config.errors import UserError
from spmd_rl.config.schema import CommConfig
try:
    bootstrap(CommConfig(init_timeout_s=4.0), threads=1)
except UserError as error:
    print(error)
    sys.exit(2)
"""


def explicit_ranks(ranks: list[int], size: int, port: int) -> list[tuple[int, str]]:
    """Exit status and output of `ranks`, started by hand in a world of `size`."""
    processes = []
    for rank in ranks:
        environ = {"SPMD_RL_RANK": str(rank), "SPMD_RL_SIZE": str(size), "SPMD_RL_MASTER": f"127.0.0.1:{port}"}
        local = {"SPMD_RL_LOCAL_RANK": str(rank), "SPMD_RL_LOCAL_SIZE": str(size)}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", STRAGGLER],
                env={**os.environ, **environ, **local},
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=60)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def test_ranks_that_do_not_come_are_named_on_all_others() -> None:
    for status, output in explicit_ranks([0, 2], size=4, port=29417):
        assert status == 2
        assert "only 2 of 4 ranks have come; missing: 1, 3" in output and output.count("\n") == 1


def test_a_missing_meeting_point_is_named() -> None:
    ((status, output),) = explicit_ranks([1], size=2, port=29418)
    assert status == 2
    assert "did not reach the meeting point 127.0.0.1:29418 within 4 s" in output and output.count("\n") == 1


def disagree(world: World) -> list[str]:
    """Everyone agrees on the first, rank 2 differs in the second, a sub-group in the third."""
    agree(world, "plan", b"the same")
    messages = []
    pair = dist.new_group([1, 2])
    for name, value, where in (
        ("plan", "other" if world.rank == 2 else "the same", world),
        ("schedule", f"of {world.rank}", pair if world.rank > 0 else None),
    ):
        if where is None:
            continue
        try:
            agree(where, name, value)
        except Disagreement as error:
            messages.append(str(error))
    agree(world, "plan", "again the same")
    return messages


def test_a_rank_with_another_plan_is_named_on_every_rank() -> None:
    result = run_world(disagree, ranks=3).check()
    for messages in result.ranks:
        assert messages[0].startswith("plan is not the same on all ranks: rank 2 (")
        assert messages[0].endswith("on 2 of 3 ranks")
    assert len(result.ranks[0]) == 1
    assert "schedule is not the same on all ranks: rank 2 (" in result.ranks[1][1]


LEAVER = """
import atexit, sys, threading, time
from spmd_rl.comm.bootstrap import leave
atexit.register(print, "registered first")
atexit.register(print, "registered last")
threading.Thread(target=time.sleep, args=(60,)).start()  # a thread that a library left running
print("buffered", end=" ")
leave(7)
"""


def test_leaving_runs_exit_functions_flushes_and_keeps_the_status() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVER], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (7, "buffered registered last\nregistered first\n")
