"""`Line`: frames of bytes between two ranks, in order, both ways at once; for what does not run in lockstep.

A collective needs all ranks to come; here one rank sends when it has something, and a thread of the other waits for
it. Gloo cannot say whether something has arrived without waiting, so each direction has a process group of its own and
is used by one thread at a time. MPI can.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.comm.transport import TransportError
from spmd_rl.comm.world import World
from spmd_rl.config.errors import UserError

_CONNECT_S = 10.0
_LONGEST_PAUSE_S = 0.001


class Line(Protocol):
    """Each method may be called from one thread at a time, the two from different threads. Frames: uint8, on the CPU.

    Both raise TransportError, naming the peer, where it is gone or does nothing within the line's time limit.
    """

    peer: int  # rank of the world

    def send(self, frame: Tensor) -> None:
        """Returns when the memory may be used again."""
        ...

    def receive(self, into: Tensor | None = None) -> Tensor:
        """The next frame; in the memory `into`, where that is given and has the frame's size."""
        ...


def open_line(transport: str, world: World, peer: int, name: str, timeout_s: float) -> Line:
    """Called by both ends with one `name`, which no other pair of ranks uses; waits for the other end.

    transport: torch or mpi (config key `comm.transport`); timeout_s: of one frame. Raises TransportError where the
    peer does not come, UserError where there is no such transport.
    """
    if transport == "torch":
        return TorchLine(world, peer, name, timeout_s)
    if transport == "mpi":
        return MpiLine(world, peer, timeout_s)
    raise UserError(f"comm.transport: {transport!r} is neither torch nor mpi")


class TorchLine:
    def __init__(self, world: World, peer: int, name: str, timeout_s: float) -> None:
        self.peer = peer
        self._rank = world.rank
        self._timeout = timedelta(seconds=timeout_s)
        lower = world.rank < peer
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._place = 0 if lower else 1
        try:
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = dist.TCPStore(host, port, None, False, timedelta(seconds=_CONNECT_S), wait_for_workers=False)
            store.set_timeout(self._timeout)
            up, down = (
                dist.ProcessGroupGloo(
                    dist.PrefixStore(f"line/{restart}/{name}/{way}", store), self._place, 2, self._timeout
                )
                for way in ("up", "down")
            )
        except (RuntimeError, KeyError) as error:
            raise TransportError(self._say("line could not be opened", error)) from None
        self._out: Any = up if lower else down
        self._in: Any = down if lower else up

    def send(self, frame: Tensor) -> None:
        try:
            other = 1 - self._place
            self._out.send([torch.tensor([frame.numel()])], other, 0).wait(self._timeout)
            if frame.numel():
                self._out.send([frame], other, 0).wait(self._timeout)
        except RuntimeError as error:
            raise TransportError(self._say("send failed", error)) from None

    def receive(self, into: Tensor | None = None) -> Tensor:
        try:
            size, other = torch.zeros(1, dtype=torch.int64), 1 - self._place
            self._in.recv([size], other, 0).wait(self._timeout)
            frame = _memory(int(size), into)
            if frame.numel():
                self._in.recv([frame], other, 0).wait(self._timeout)
        except RuntimeError as error:
            raise TransportError(self._say("receive failed", error)) from None
        return frame

    def _say(self, what: str, error: Exception) -> str:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return f"{what} between rank {self._rank} and rank {self.peer}: {reason}"


class MpiLine:
    """Over MPI_COMM_WORLD of mpi4py, which numbers ranks as `world` does; needs MPI_THREAD_MULTIPLE."""

    _TAG = 7

    def __init__(self, world: World, peer: int, timeout_s: float) -> None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise UserError(f"comm.transport: mpi needs mpi4py and an MPI library ({error})") from None
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise UserError("comm.transport: mpi needs an MPI library with MPI_THREAD_MULTIPLE")
        self.peer = peer
        self._rank = world.rank
        self._timeout_s = timeout_s
        self._mpi = MPI
        first, second = sorted((world.rank, peer))
        pair = MPI.COMM_WORLD.Get_group().Incl([first, second])
        self._comm = MPI.COMM_WORLD.Create_group(pair, tag=pair_tag(first, second, world.size))
        self._other = 0 if peer == first else 1
        self._abandoned: list[Any] = []  # unfinished requests with their memory

    def send(self, frame: Tensor) -> None:
        if frame.numel() > 2**31 - 1:
            raise TransportError(f"a frame of {frame.numel()} bytes to rank {self.peer}; MPI counts to {2**31 - 1}")
        data = frame.numpy()
        request = self._comm.Isend([data, self._mpi.BYTE], dest=self._other, tag=self._TAG)
        self._until(request.Test, "send to", (request, data))

    def receive(self, into: Tensor | None = None) -> Tensor:
        status = self._mpi.Status()
        found: list[Any] = []

        def probe() -> bool:
            message = self._comm.Improbe(source=self._other, tag=self._TAG, status=status)
            if message is not None:
                found.append(message)
            return bool(found)

        self._until(probe, "wait for", None)
        frame = _memory(status.Get_count(self._mpi.BYTE), into)
        request = found[0].Irecv([frame.numpy(), self._mpi.BYTE])
        self._until(request.Test, "receive from", (request, frame))
        return frame

    def _until(self, done: Any, what: str, memory: Any) -> None:
        started, pause = time.monotonic(), 0.0
        try:
            while not done():
                if time.monotonic() - started > self._timeout_s:
                    self._abandoned.append(memory)
                    raise TransportError(
                        f"{what} rank {self.peer} not complete within {self._timeout_s:g} s on rank {self._rank}"
                    )
                pause = min(_LONGEST_PAUSE_S, 1.25 * pause + 2e-6)
                time.sleep(pause)
        except self._mpi.Exception as error:
            raise TransportError(f"{what} rank {self.peer} failed on rank {self._rank}: {error}") from None


def pair_tag(first: int, second: int, size: int) -> int:
    """For the communicator of two ranks of `size`. A rank may make several at once, from different threads, and MPI
    tells them apart by tags: those of one rank's pairs differ. MPI only promises tags up to 32,767: enough for 22,000
    ranks above the channels' tags, which count up from 1 (transport_mpi.py)."""
    return 10_000 + (first + second) % size


def _memory(size: int, into: Tensor | None) -> Tensor:
    return into if into is not None and into.numel() == size else torch.empty(size, dtype=torch.uint8)
