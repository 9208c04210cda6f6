"""Payload between ranks of one machine: packed into memory that the peers map, read by them in place.

A loopback connection would copy every byte twice more, through the kernel. Memory files (memfd) have no name in any
file system, need no cleaning up, and end with the processes that use them; a peer opens them through /proc.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.comm.scratch import rounded
from spmd_rl.comm.transport import Channel, Flight, Inbox, Transport, TransportError

Int64 = NDArray[np.int64]
_PROBE = 4096  # bytes of the first segment, which only shows whether the peers can read it


class Segment:
    """A memory file of this process. `data`: uint8 [size]."""

    def __init__(self, size: int) -> None:
        self.fd = os.memfd_create("spmd_rl", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, size)
        self.data = torch.frombuffer(mmap.mmap(self.fd, size), dtype=torch.uint8)

    def __del__(self) -> None:
        os.close(self.fd)


def map_peer(pid: int, fd: int, size: int) -> Tensor:
    """uint8 [size]: another process's segment. Raises OSError where this process may not see it."""
    own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return torch.frombuffer(mmap.mmap(own, size), dtype=torch.uint8)
    finally:
        os.close(own)


class SharedMemoryTransport:
    """Opens another transport's channels, and takes the payload from those whose ranks see each other's memory."""

    def __init__(self, inner: Transport, rank: int) -> None:
        self.name = inner.name
        self._inner = inner
        self._rank = rank

    def open(self, ranks: Sequence[int]) -> Channel | None:
        channel = self._inner.open(ranks)
        return None if channel is None else share_memory(channel, self._rank)


def share_memory(channel: Channel, rank: int) -> Channel:
    """The channel with payload through shared memory, where every rank can read every other's; else as it is."""
    segment, secret = Segment(_PROBE), secrets.randbits(62)
    segment.data[:8] = torch.from_numpy(np.array([secret], dtype=np.int64).view(np.uint8))
    peers = channel.all_gather(np.array([os.getpid(), segment.fd, secret], dtype=np.int64))
    verdicts = channel.all_gather(np.array([all(map(_readable, peers.tolist()))], dtype=np.int64))
    return SharedMemoryChannel(channel, rank) if verdicts.all() else channel


def _readable(peer: list[int]) -> bool:
    """Whether the peer's segment can be mapped and is the one it means: on another machine, another process may have
    the same number."""
    pid, fd, secret = peer
    try:
        return int(map_peer(pid, fd, _PROBE)[:8].view(torch.int64)) == secret
    except (OSError, ValueError):
        return False


class SharedMemoryChannel:
    def __init__(self, channel: Channel, rank: int) -> None:
        self.ranks = channel.ranks
        self._inner = channel
        self._place = channel.ranks.index(rank)
        self._segment = Segment(_PROBE)
        self._mapped = [torch.empty(0, dtype=torch.uint8)] * len(self.ranks)  # each rank's segment
        self._made = 1
        self.all_gather = channel.all_gather
        self.all_gather_bytes = channel.all_gather_bytes
        self.broadcast = channel.broadcast
        self.send = channel.send
        self.receive = channel.receive

    @property
    def allocated(self) -> int:
        return self._made + self._inner.allocated

    def outbox(self, size: int) -> Tensor:
        if self._segment.data.numel() < size:
            self._segment = Segment(rounded(size))
            self._made += 1
        return self._segment.data[:size]

    def all_to_all(self, outbox: Tensor, send_N: Int64, recv_N: Int64) -> Flight:
        """One small round: it says that all have packed, and where each one's message for this rank begins.

        Where a rank has a new segment, all map it before anyone goes on: its owner may end right after this exchange.
        """
        where = [os.getpid(), self._segment.fd, self._segment.data.numel()]
        words = self.all_gather(np.concatenate([where, np.cumsum(send_N) - send_N]).astype(np.int64))
        new = [place for place, size in enumerate(words[:, 2].tolist()) if size != self._mapped[place].numel()]
        for place in new:  # a later segment is always larger
            try:
                self._mapped[place] = map_peer(*words[place, :3].tolist())
            except OSError as error:
                raise TransportError(f"the memory of rank {self.ranks[place]} cannot be mapped: {error}") from None
        if new:
            self.all_gather(np.zeros(1, dtype=np.int64))
        return _Arrived(Inbox(self._mapped, np.arange(len(self.ranks)), words[:, 3 + self._place]))


class _Arrived:
    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox

    def wait(self) -> Inbox:
        return self._inbox
