"""How bytes get from rank to rank: one interface, carried by torch.distributed or by MPI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.comm.world import World
from spmd_rl.config.errors import UserError

Int64 = NDArray[np.int64]


class TransportError(RuntimeError):
    """A peer is gone or did not come in time, or the bytes could not be carried. The channel is of no use any more."""


class Channel(Protocol):
    """Collectives over some ranks. Every call is made by all of `ranks`, in the same order, from one thread at a time.

    Each raises TransportError within the transport's time limit. Byte tensors are uint8, contiguous, and lie on the
    world's device for `all_to_all`, `send` and `receive`, on the CPU for the rest.
    """

    ranks: tuple[int, ...]  # of the world, ascending

    def all_gather(self, words_K: Int64) -> Int64:
        """int64 [N, K]: the K words of each of the N ranks."""
        ...

    def all_gather_bytes(self, data: Tensor, sizes_N: Int64) -> Tensor:
        """uint8 [sum(sizes)]: every rank's bytes, in the order of the ranks; sizes_N: int64, known to all."""
        ...

    def broadcast(self, data: Tensor, root: int) -> None:
        """`data` of rank `root` (of the world) into `data` of the others."""
        ...

    def all_to_all(self, send: Tensor, send_N: Int64, recv: Tensor, recv_N: Int64) -> None:
        """Consecutive parts of `send`, of send_N bytes each, to the ranks; into consecutive parts of `recv`.

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


def make_transport(name: str, world: World, timeout_s: float | None = None) -> Transport:
    """The transport called `name` (config key `comm.transport`). timeout_s: limit of one call, `world.timeout_s`
    unless given. Raises UserError for an unknown name and for one that is not installed or does not fit the world."""
    limit = world.timeout_s if timeout_s is None else timeout_s
    if name == "torch":
        from spmd_rl.comm.transport_torch import TorchTransport

        return TorchTransport(world, limit)
    if name == "mpi":
        from spmd_rl.comm.transport_mpi import MpiTransport

        return MpiTransport(world, limit)
    raise UserError(f"comm.transport: {name!r} is neither torch nor mpi")
