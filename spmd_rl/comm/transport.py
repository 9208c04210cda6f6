"""How bytes get from rank to rank: one interface, carried by torch.distributed or by MPI, or by common memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.comm.world import World
from spmd_rl.config.errors import UserError

Int64 = NDArray[np.int64]


class TransportError(RuntimeError):
    """A peer is gone or did not come in time, or the bytes could not be carried. The channel is of no use any more."""


@dataclass(frozen=True)
class Inbox:
    """Where the messages of N peers lie: that of peer k begins at `start_N[k]` of `sources[source_N[k]]` (uint8)."""

    sources: list[Tensor]
    source_N: Int64
    start_N: Int64

    @classmethod
    def of(cls, received: Tensor, sizes_N: Int64) -> Inbox:
        """Messages that lie one behind the other."""
        return cls([received], np.zeros(len(sizes_N), dtype=np.int64), np.cumsum(sizes_N) - sizes_N)


class Peers(Protocol):
    """The memory of a channel's ranks, which are all on one machine."""

    def block(self, words_W: Int64) -> Tensor:
        """uint8, writable: what a rank has offered by these words. Raises OSError where it is gone."""
        ...


class Flight(Protocol):
    """Messages under way."""

    def wait(self) -> Inbox:
        """The messages for this rank, valid until the channel's next collective."""
        ...


class Channel(Protocol):
    """Collectives over some ranks. Every call is made by all of `ranks`, in the same order, from one thread at a time.

    Each raises TransportError within the transport's time limit. Byte tensors are uint8, contiguous, and lie on the
    world's device for payload (`outbox`, `all_to_all`, `send`, `receive`), on the CPU for the rest.
    """

    ranks: tuple[int, ...]  # of the world, ascending
    peers: Peers | None  # where all ranks can write into each other's memory

    @property
    def allocated(self) -> int:
        """Buffers made so far."""
        ...

    def all_gather(self, words_K: Int64) -> Int64:
        """int64 [N, K]: the K words of each of the N ranks."""
        ...

    def all_gather_bytes(self, data: Tensor, sizes_N: Int64) -> Tensor:
        """uint8 [sum(sizes)]: every rank's bytes, in the order of the ranks; sizes_N: int64, known to all."""
        ...

    def broadcast(self, data: Tensor, root: int) -> None:
        """`data` of rank `root` (of the world) into `data` of the others."""
        ...

    def outbox(self, size: int) -> Tensor:
        """uint8 [size]: where to put the messages of the next `all_to_all`. All ranks must have passed an
        `all_gather` since the last one: then every peer has read what lay there."""
        ...

    def all_to_all(self, outbox: Tensor, send_N: Int64, recv_N: Int64) -> Flight:
        """Send consecutive parts of the outbox, of send_N bytes each, to the N ranks; recv_N: bytes from each.

        All sizes are multiples of 16.
        """
        ...

    def send(self, data: Tensor, ranks: Sequence[int]) -> None:
        """The same bytes to some ranks of the channel, which call `receive`."""
        ...

    def receive(self, data: Tensor, rank: int) -> None: ...


class Transport(Protocol):
    """Makes channels."""

    name: str

    def open(self, ranks: Sequence[int]) -> Channel | None:
        """A channel over `ranks`; None on the others. Collective over the whole world, in one order everywhere."""
        ...


def make_transport(name: str, world: World, timeout_s: float | None = None, share_memory: bool = True) -> Transport:
    """The transport called `name` (config key `comm.transport`).

    timeout_s: limit of one call, `world.timeout_s` unless given; share_memory: ranks that can all map each other's
    memory gather metadata through it and write payload straight to its place (CPU only). Raises UserError for an
    unknown name and for a transport that is not installed or does not fit the world.
    """
    limit = world.timeout_s if timeout_s is None else timeout_s
    transport: Transport
    if name == "torch":
        from spmd_rl.comm.transport_torch import TorchTransport

        transport = TorchTransport(world, limit)
    elif name == "mpi":
        from spmd_rl.comm.transport_mpi import MpiTransport

        transport = MpiTransport(world, limit)
    else:
        raise UserError(f"comm.transport: {name!r} is neither torch nor mpi")
    if share_memory and world.device.type == "cpu" and hasattr(os, "memfd_create"):
        from spmd_rl.comm.shared import SharedMemoryTransport

        return SharedMemoryTransport(transport, world.rank, limit)
    return transport
