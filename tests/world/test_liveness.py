"""Failure detection, on real processes: killed, stopped, failing and merely late ranks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from spmd_rl.comm.alarm import EXIT_STOPPED
from spmd_rl.comm.liveness import Liveness
from spmd_rl.comm.stop import StopFlag
from spmd_rl.comm.world import World
from spmd_rl.config.errors import UserError
from spmd_rl.config.schema import CommConfig
from tests.world.harness import TWO_MACHINES, WorldResult, can_make_machines, find_mpirun, run_world

no_mpirun = pytest.mark.skipif(find_mpirun() is None, reason="no mpirun in this environment")
no_machines = pytest.mark.skipif(not can_make_machines(), reason="network namespaces need root and ip")
LAUNCHERS = ["torchrun", pytest.param("mpirun", marks=[pytest.mark.mpi, no_mpirun])]


@contextmanager
def watched(world: World, heartbeat_s: float = 30.0) -> Iterator[Liveness]:
    """As in the main program: signals are requests to stop, so a launcher's SIGTERM does not end a rank."""
    with StopFlag(), Liveness(world, CommConfig(heartbeat_s=heartbeat_s)) as watch:
        yield watch


def reduce_for_ever(world: World) -> None:
    while True:
        dist.all_reduce(torch.ones(4), group=world.data)


def mark_fault() -> None:
    print(f"fault at {time.time()}", flush=True)


def seconds_to_end(result: WorldResult) -> float:
    """From the fault until all ranks were gone (the launcher takes longer)."""
    found = re.search(r"fault at ([\d.]+)", result.stdout)
    assert found, result.stdout
    return result.gone_at - float(found[1])


def alarms(result: WorldResult) -> list[str]:
    return re.findall(r"^spmd_rl: (rank \d+ \(host .*)$", result.stderr, re.MULTILINE)


def kill_one(world: World, where: str) -> None:
    """Rank 2 is killed in step 7; the others sit in a collective, or compute and never look at the network."""
    with watched(world) as watch, watch.stage("rollout", 7):
        if world.rank == 2:
            time.sleep(0.5)
            mark_fault()
            os.kill(os.getpid(), signal.SIGKILL)
        if where == "collective":
            reduce_for_ever(world)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            torch.ones(200, 200) @ torch.ones(200, 200)


@pytest.mark.parametrize(
    ("where", "launcher"),
    [
        ("compute", "torchrun"),
        ("collective", "torchrun"),
        pytest.param("collective", "mpirun", marks=[pytest.mark.mpi, no_mpirun]),
        pytest.param("collective", TWO_MACHINES, marks=[pytest.mark.root, no_machines]),  # nobody else ends the ranks
    ],
)
def test_a_killed_rank_is_named_and_all_end(where: str, launcher: str | list[str]) -> None:
    result = run_world(kill_one, ranks=4, launcher=launcher, args={"where": where})
    assert not result.timed_out and result.returncode != 0
    assert seconds_to_end(result) < 10
    (line,) = alarms(result)
    assert re.match(r"rank 2 \(host \S+, pid \d+\) died in stage 'rollout' of step 7; rank [0-9] stops the job", line)
    assert "closed by peer" not in result.stderr  # the errors of the broken collectives would bury the line


def stop_one(world: World) -> None:
    with watched(world, heartbeat_s=2.0) as watch, watch.stage("update", 3):
        if world.rank == 1:
            time.sleep(0.5)
            mark_fault()
            os.kill(os.getpid(), signal.SIGSTOP)
        reduce_for_ever(world)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_stopped_rank_is_named_as_stuck(launcher: str) -> None:
    result = run_world(stop_one, ranks=3, launcher=launcher)
    assert not result.timed_out and result.returncode != 0
    assert seconds_to_end(result) < 20  # torchrun alone would wait 30 s for a process that takes no SIGTERM
    (line,) = alarms(result)
    assert re.match(r"rank 1 \(.*\) is stuck in stage 'update' of step 3: silent for \d s; rank [02] stops", line)


def hold_the_interpreter(world: World) -> None:
    """Rank 1 sits in C code that never lets go of the interpreter: its watching thread cannot speak either."""
    with watched(world, heartbeat_s=3.0) as watch, watch.stage("update", 4):
        if world.rank == 1:
            catastrophic_match()
        reduce_for_ever(world)


def catastrophic_match() -> None:
    re.match(r"(?:a?){40}a{40}$", "a" * 39 + "b")


def test_a_rank_that_holds_the_interpreter_writes_its_stacks() -> None:
    result = run_world(hold_the_interpreter, ranks=2)
    assert not result.timed_out
    assert any("is stuck in stage 'update' of step 4" in line for line in alarms(result))
    assert "catastrophic_match" in result.stderr


def raise_one(world: World, kind: str) -> None:
    with watched(world) as watch, watch.stage("reward", 5):
        if world.rank in ([0, 1, 2] if kind == "user everywhere" else [1]):
            time.sleep(0.3)
            mark_fault()
            if kind == "plain":
                raise KeyError("answer\nsecond line")
            raise UserError("a column is missing")
        reduce_for_ever(world)


def test_an_exception_on_one_rank_ends_all_and_is_named() -> None:
    result = run_world(raise_one, ranks=3, args={"kind": "plain"})
    assert not result.timed_out and result.returncode != 0 and seconds_to_end(result) < 10
    (line,) = alarms(result)
    assert re.match(r"rank 1 \(.*\) failed in stage 'reward' of step 5: KeyError: .*answer.*; it stops the job", line)
    assert result.errors[1] is not None and "KeyError" in result.errors[1]
    assert result.errors[0] is None and result.errors[2] is None  # they ended by the alarm, without errors of their own


def test_a_user_error_on_every_rank_keeps_its_own_message() -> None:
    result = run_world(raise_one, ranks=3, args={"kind": "user everywhere"})
    assert not result.timed_out and result.returncode != 0
    assert alarms(result) == []  # main prints a user's error
    assert all(error and "a column is missing" in error for error in result.errors)


def overdue(world: World) -> None:
    """Rank 0 sleeps in `rollout`; rank 1 waits for it in `update`, whose deadline is nearer."""
    with watched(world) as watch:
        if world.rank == 0:
            with watch.stage("rollout", 2):
                time.sleep(60)
        with watch.stage("update", 2, deadline_s=1.5):
            dist.all_reduce(torch.ones(4), group=world.data)


def test_a_stage_beyond_its_deadline_is_named_with_the_stacks_of_the_rank_elsewhere() -> None:
    result = run_world(overdue, ranks=2)
    assert not result.timed_out and result.returncode != 0
    (line,) = alarms(result)
    assert re.match(r"rank 1 \(.*\) is overdue in stage 'update' of step 2: \d+ s of 1.5 s, ", line)
    assert "rank 0 is in stage 'rollout' of step 2" in line
    assert "rank 0, in stage 'rollout' of step 2, its Python stacks:" in result.stderr
    assert result.stderr.count("in overdue") >= 2  # both ranks' stacks show the function they hang in


def end_late(world: World) -> str:
    with watched(world, heartbeat_s=2.0) as watch, watch.stage("export", 9):
        time.sleep(3.0 if world.rank == 1 else 0.0)
    return "ended"


def test_ranks_may_end_at_different_times() -> None:
    result = run_world(end_late, ranks=4).check()
    assert result.ranks == ["ended"] * 4
    assert alarms(result) == []


def die_while_others_end(world: World) -> None:
    with watched(world) as watch, watch.stage("export", 9):
        if world.rank == 1:
            time.sleep(1.0)
            os._exit(0)  # without a goodbye, whatever its exit status


def test_a_rank_that_ends_without_goodbye_is_dead_even_with_status_0() -> None:
    result = run_world(die_while_others_end, ranks=3)
    assert result.returncode != 0 and not result.timed_out
    (line,) = alarms(result)
    assert "rank 1" in line and "died in stage 'export' of step 9" in line


def leave_a_child(world: World) -> None:
    """A forked child outlives rank 1 and has all of its files open."""
    with watched(world) as watch, watch.stage("reward", 1):
        if world.rank == 1:
            if os.fork() == 0:
                time.sleep(120)
                os._exit(0)
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        reduce_for_ever(world)


def test_a_forked_child_does_not_hide_the_death_of_its_parent() -> None:
    result = run_world(leave_a_child, ranks=2)
    assert not result.timed_out
    assert any("rank 1" in line and "died in stage 'reward' of step 1" in line for line in alarms(result))


def stop_on_signal(world: World) -> list[int]:
    """Rank 1 alone is signalled; all ranks must leave at the same step."""
    steps = 0
    with StopFlag() as stop:
        for step in range(200):
            if world.rank == 1 and step == 20:
                os.kill(os.getpid(), signal.SIGUSR2)
            time.sleep(0.002 * world.rank)
            if stop.agreed(world):
                break
            steps += 1
        return [steps, int(stop.is_set), int(signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL)]


def test_a_stop_signal_on_one_rank_stops_all_at_the_same_step() -> None:
    result = run_world(stop_on_signal, ranks=3).check()
    assert [value[0] for value in result.ranks] == [20, 20, 20]
    assert [value[1] for value in result.ranks] == [0, 1, 0]


INTERRUPTED = """
import os, signal, threading, time
from spmd_rl.comm.stop import StopFlag
stop = StopFlag()
def interrupt():
    for _ in range(2):
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
import ctypes
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
libc.pthread_mutex_lock(mutex)
libc.pthread_mutex_lock(mutex)  # for ever, in C code, as in a collective: no Python handler runs meanwhile
"""


def test_a_second_interrupt_ends_the_process_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60)
    assert done.returncode == 130 and "interrupted twice" in done.stderr


def test_exit_status_of_a_stopped_rank_is_not_that_of_a_user_error() -> None:
    assert EXIT_STOPPED not in (0, 1, 2)
