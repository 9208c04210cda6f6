"""Lines between two real ranks: frames both ways at once, a peer that dies, one that does nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch

from spmd_rl.comm.line import open_line
from spmd_rl.comm.transport import TransportError
from spmd_rl.comm.world import World
from tests.world.harness import find_mpirun, run_world

SIZES = (0, 1, 16, 1000, 3_000_000)


def frame(size: int, sender: int) -> torch.Tensor:
    return (torch.arange(size) % 251 + sender).to(torch.uint8)


def talk(world: World, transport: str) -> list[Any]:
    """Both ranks send and receive at once, each direction in its own thread."""
    line = open_line(transport, world, 1 - world.rank, "talk", 60.0)

    def send() -> None:
        for size in SIZES * 3:
            line.send(frame(size, world.rank))

    sender = threading.Thread(target=send)
    sender.start()
    wanted = [frame(size, 1 - world.rank) for size in SIZES * 3]
    memory = torch.zeros(16, dtype=torch.uint8)
    right = []
    for want in wanted:
        got = line.receive(into=memory)
        right.append(torch.equal(got, want) and (got.data_ptr() == memory.data_ptr()) == (want.numel() == 16))
    sender.join()
    return right


@pytest.mark.parametrize(("transport", "launcher"), [("torch", "torchrun"), ("mpi", "mpirun")])
def test_frames_of_all_sizes_both_ways_at_once(transport, launcher):
    if launcher == "mpirun" and find_mpirun() is None:
        pytest.skip("no mpirun")
    result = run_world(talk, ranks=2, launcher=launcher, args={"transport": transport}, timeout_s=90).check()
    assert all(all(right) for right in result.ranks)


def lonely(world: World, how: str) -> str:
    line = open_line("torch", world, 1 - world.rank, "lonely", 2.0 if how == "silent" else 60.0)
    if world.rank == 1:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(5.0)
        return ""
    try:
        line.receive()
    except TransportError as error:
        return str(error)
    return "nothing happened"


@pytest.mark.parametrize("how", ["dies", "silent"])
def test_a_peer_that_dies_or_does_nothing_is_named(how):
    result = run_world(lonely, ranks=2, args={"how": how}, timeout_s=60)
    if how == "silent":
        assert "receive failed between rank 0 and rank 1" in result.check().ranks[0]
    else:  # the launcher may end rank 0 before it has said so
        assert result.returncode != 0 and not result.timed_out
        assert result.ranks[0] is None or "between rank 0 and rank 1" in result.ranks[0]
