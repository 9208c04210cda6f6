"""Ranks of one machine: messages are packed into memory that the peers map, and read by them in place.

A loopback connection would copy every byte twice more, through the kernel, and wake a process for every pair of ranks
in every round of metadata. Memory files (memfd) have no name in any
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

from spmd_rl.comm.board import SHARE, Board
from spmd_rl.comm.scratch import rounded
from spmd_rl.comm.transport import Channel, Flight, Inbox, Transport, TransportError
from spmd_rl.ops.meet import can_meet

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
    """Opens another transport's channels, and takes over from those whose ranks see each other's memory."""

    def __init__(self, inner: Transport, rank: int, timeout_s: float) -> None:
        self.name = inner.name
        self._inner = inner
        self._rank = rank
        self._timeout_s = timeout_s

    def open(self, ranks: Sequence[int]) -> Channel | None:
        channel = self._inner.open(ranks)
        return None if channel is None else share_memory(channel, self._rank, self._timeout_s)


def share_memory(channel: Channel, rank: int, timeout_s: float) -> Channel:
    """The channel with shared memory, where every rank can read every other's; else as it is."""
    count = len(channel.ranks)
    segment, secret = Segment(_PROBE), secrets.randbits(62)
    segment.data[:8] = torch.from_numpy(np.array([secret], dtype=np.int64).view(np.uint8))
    board = Segment(Board.size(count))  # the first rank's is used; the others' cost nothing
    peers = channel.all_gather(np.array([os.getpid(), segment.fd, secret, board.fd], dtype=np.int64))
    shared = can_meet() and all(_readable(peer[:3]) for peer in peers.tolist())
    memory = map_peer(int(peers[0, 0]), int(peers[0, 3]), Board.size(count)) if shared else board.data
    verdicts = channel.all_gather(np.array([shared], dtype=np.int64))
    if not verdicts.all():
        return channel
    place = channel.ranks.index(rank)
    return SharedMemoryChannel(channel, place, Board(memory, channel.ranks, place, timeout_s))


def _readable(peer: list[int]) -> bool:
    """Whether the peer's segment can be mapped and is the one it means: on another machine, another process may have
    the same number."""
    pid, fd, secret = peer
    try:
        return int(map_peer(pid, fd, _PROBE)[:8].view(torch.int64)) == secret
    except (OSError, ValueError):
        return False


class SharedMemoryChannel:
    def __init__(self, channel: Channel, place: int, board: Board) -> None:
        self.ranks = channel.ranks
        self._inner = channel
        self._place = place
        self._board = board
        self._segment = Segment(_PROBE)
        self._mapped = [torch.empty(0, dtype=torch.uint8)] * len(self.ranks)  # each rank's segment
        self._made = 1
        self.broadcast = channel.broadcast
        self.send = channel.send
        self.receive = channel.receive

    @property
    def allocated(self) -> int:
        return self._made + self._inner.allocated

    def all_gather(self, words_K: Int64) -> Int64:
        if words_K.nbytes > SHARE:
            return self._inner.all_gather(words_K)
        sizes = np.full(len(self.ranks), words_K.nbytes)
        gathered = self._board.all_gather(torch.from_numpy(words_K).view(torch.uint8), sizes)
        return gathered.view(torch.int64).numpy().reshape(len(self.ranks), -1)

    def all_gather_bytes(self, data: Tensor, sizes_N: Int64) -> Tensor:
        if int(sizes_N.max()) > SHARE:  # known to all, who decide alike
            return self._inner.all_gather_bytes(data, sizes_N)
        return self._board.all_gather(data, sizes_N)

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
