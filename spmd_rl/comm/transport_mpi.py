"""Channels over MPI (mpi4py), for host memory.

All calls are the non-blocking ones, tested until they are complete: MPI's blocking ones have no deadline, and would
keep a core busy while a peer computes. Each channel has a communicator of its own, so channels may be used from
different threads; MPI must support that (MPI_THREAD_MULTIPLE).
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.comm.rollcall import RollCall
from spmd_rl.comm.scratch import Scratch
from spmd_rl.comm.transport import Inbox, Peers, TransportError
from spmd_rl.comm.world import World
from spmd_rl.config.errors import UserError

Int64 = NDArray[np.int64]
UNIT = 16  # bytes that payload counts and displacements are given in: MPI's are 32-bit, so 2 GiB become 32 GiB
LARGEST = 2**31 - 1
_EAGER_S = 0.002  # a wait begins by testing again and again, only giving way to others; then the pauses grow
_SLOWEST = 2e8  # bytes per second: while payload may still be flowing, pauses would hold it up (MPI moves it in tests)
_LONGEST_PAUSE_S = 0.001
_TELL_S = 1.0  # a rank that has waited so long leaves word that it is there


class MpiTransport:
    name = "mpi"

    def __init__(self, world: World, timeout_s: float) -> None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise UserError(f"comm.transport: mpi needs mpi4py and an MPI library ({error})") from None
        if world.device.type != "cpu":
            raise UserError(f"comm.transport: mpi carries host memory, the ranks use {world.device.type}; choose torch")
        there = (MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size())
        here = (world.job_rank(), there[1] if world.role else world.size)
        if there != here:
            raise UserError(
                f"comm.transport: mpi sees rank {there[0]} of {there[1]}, but this is rank {here[0]} of "
                f"{here[1]}; start the ranks with mpirun or srun"
            )
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise UserError("comm.transport: mpi needs an MPI library with MPI_THREAD_MULTIPLE")
        self._mpi = MPI
        self._world = world
        self._timeout_s = timeout_s
        self._opened = 0

    def open(self, ranks: Sequence[int]) -> MpiChannel | None:
        ranks = sorted(ranks)
        self._opened += 1
        if self._world.rank not in ranks:
            return None
        group = self._mpi.COMM_WORLD.Get_group().Incl([*map(self._world.job_rank, ranks)])
        comm = self._mpi.COMM_WORLD.Create_group(group, tag=self._opened)
        return MpiChannel(self._mpi, comm, tuple(ranks), self._world, self._timeout_s, self._opened)


class MpiChannel:
    def __init__(
        self, mpi: Any, comm: Any, ranks: tuple[int, ...], world: World, timeout_s: float, number: int
    ) -> None:
        self.ranks = ranks
        self.peers: Peers | None = None
        self.rank = world.rank
        self._name, self._me = world.job_rank, world.job_rank()  # what messages call a rank
        self._mpi = mpi
        self._comm = comm
        self._timeout_s = timeout_s
        self._unit = mpi.BYTE.Create_contiguous(UNIT).Commit()
        self._roll = RollCall(f"mpi/{world.role}/{number}", [*map(world.job_rank, ranks)], world.job_rank())
        self._calls = 0
        self._scratch = Scratch(torch.device("cpu"))
        self._abandoned: list[Any] = []  # unfinished requests with their memory, which MPI may still write to

    def all_gather(self, words_K: Int64) -> Int64:
        gathered = np.empty((len(self.ranks), len(words_K)), dtype=np.int64)
        self._finish("all_gather", lambda: self._comm.Iallgather(words_K, gathered), words_K, gathered)
        return gathered

    def all_gather_bytes(self, data: Tensor, sizes_N: Int64) -> Tensor:
        total = int(sizes_N.sum())
        gathered = torch.empty(total, dtype=torch.uint8)
        if total == 0:
            return gathered
        if total > LARGEST:
            raise TransportError(f"{total} bytes of metadata; MPI counts to {LARGEST}")
        send = [data.numpy(), self._mpi.BYTE]
        recv = [gathered.numpy(), (sizes_N, np.cumsum(sizes_N) - sizes_N), self._mpi.BYTE]
        self._finish("all_gather of metadata", lambda: self._comm.Iallgatherv(send, recv), send, recv)
        return gathered

    def broadcast(self, data: Tensor, root: int) -> None:
        place = self.ranks.index(root)
        self._finish("broadcast", lambda: self._comm.Ibcast([data.numpy(), self._mpi.BYTE], root=place), data)

    @property
    def allocated(self) -> int:
        return self._scratch.allocated

    def outbox(self, size: int) -> Tensor:
        return self._scratch.get("send", size)

    def all_to_all(self, outbox: Tensor, send_N: Int64, recv_N: Int64) -> MpiFlight:
        received = self._scratch.get("receive", int(recv_N.sum()))
        parts = [
            [buffer.numpy(), self.counts(sizes), self._unit] for buffer, sizes in ((outbox, send_N), (received, recv_N))
        ]
        request = self._begin("all_to_all", functools.partial(self._comm.Ialltoallv, *parts))
        return MpiFlight(self, request, parts, Inbox.of(received, recv_N))

    def send(self, data: Tensor, ranks: Sequence[int]) -> None:
        count, _ = self.counts(np.array([data.numel()]))
        buffer = [data.numpy(), int(count[0]), self._unit]
        for rank in ranks:
            place = self.ranks.index(rank)
            begin = functools.partial(self._comm.Isend, buffer, place)
            self._finish(f"send to rank {self._name(rank)}", begin, buffer, payload=data.numel())

    def receive(self, data: Tensor, rank: int) -> None:
        count, _ = self.counts(np.array([data.numel()]))
        buffer, place = [data.numpy(), int(count[0]), self._unit], self.ranks.index(rank)
        begin = functools.partial(self._comm.Irecv, buffer, place)
        self._finish(f"receive from rank {self._name(rank)}", begin, buffer, payload=data.numel())

    @staticmethod
    def counts(sizes: Int64) -> tuple[Int64, Int64]:
        """Counts and displacements in units. Raises TransportError where MPI cannot count so far."""
        counts, odd = np.divmod(sizes, UNIT)
        if odd.any() or int(counts.sum()) > LARGEST:
            raise TransportError(f"a message of {int(sizes.sum())} bytes: multiples of {UNIT} up to 32 GiB can be sent")
        return counts, np.cumsum(counts) - counts

    def _finish(self, what: str, begin: Callable[[], Any], *memory: Any, payload: int = 0) -> None:
        self.complete(what, self._begin(what, begin), memory, payload)

    def _begin(self, what: str, begin: Callable[[], Any]) -> Any:
        self._calls += 1
        try:
            return begin()
        except self._mpi.Exception as error:
            raise TransportError(f"{what} failed on rank {self._me}: {error}{self._roll.say(self._calls)}") from None

    def complete(self, what: str, request: Any, memory: Any, payload: int = 0) -> None:
        """Test a request until it is complete. memory: what it uses; payload: bytes that it moves, if they are many."""
        eager_s = _EAGER_S + payload / _SLOWEST
        started = time.monotonic()
        pause, told = 0.0, False
        try:
            while not request.Test():
                waited = time.monotonic() - started
                if waited > _TELL_S and not told:
                    self._roll.present(self._calls)
                    told = True
                if waited > self._timeout_s:
                    self._abandoned.append((request, memory))
                    absent = self._roll.say(self._calls)
                    raise TransportError(f"{what} not complete within {self._timeout_s:g} s on rank {self._me}{absent}")
                if waited < eager_s:
                    os.sched_yield()
                else:
                    pause = min(_LONGEST_PAUSE_S, 1.25 * pause + 2e-6)
                    time.sleep(pause)
        except self._mpi.Exception as error:
            raise TransportError(f"{what} failed on rank {self._me}: {error}{self._roll.say(self._calls)}") from None


class MpiFlight:
    def __init__(self, channel: MpiChannel, request: Any, memory: list[Any], inbox: Inbox) -> None:
        self._channel = channel
        self._request = request
        self._memory = memory
        self._inbox = inbox

    def wait(self) -> Inbox:
        moved = sum(buffer.nbytes for buffer, _, _ in self._memory)
        self._channel.complete("all_to_all", self._request, self._memory, moved)
        return self._inbox
