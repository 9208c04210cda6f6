"""Ranks of one machine: each maps the memory that the others offer, and writes there what is for them.

Every byte is copied once; a loopback connection copies it four times, and wakes a process for every pair of ranks in
every round of metadata. Memory files (memfd) have no name in any file system, need no cleaning up, and end with the
processes that use them; a peer opens them through /proc.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.comm.board import SHARE, Board
from spmd_rl.comm.transport import Channel, Peers, Transport
from spmd_rl.ops.meet import can_meet

Int64 = NDArray[np.int64]
_PROBE = 4096  # bytes of the first segment, which only shows whether the peers can read it
_KEPT = 16  # segments of one process that stay mapped; more at a time are rarely in use


class Segment:
    """A memory file of this process. `data`: uint8 [size]."""

    def __init__(self, size: int) -> None:
        self.fd = os.memfd_create("spmd_rl", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, size)
        self.data = torch.frombuffer(mmap.mmap(self.fd, size), dtype=torch.uint8)

    def words(self) -> Int64:
        """int64 [4]: how others find it. The file's number tells it from a later one with the same descriptor."""
        return np.array([os.getpid(), self.fd, os.fstat(self.fd).st_ino, self.data.numel()], dtype=np.int64)

    def empty(self) -> None:
        """Gives the memory back at once, also where others have it mapped. Nobody may touch it from now on."""
        os.ftruncate(self.fd, 0)

    def __del__(self) -> None:
        os.close(self.fd)


def map_peer(pid: int, fd: int, size: int) -> Tensor:
    """uint8 [size]: another process's segment. Raises OSError where this process may not see it."""
    own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return torch.frombuffer(mmap.mmap(own, size), dtype=torch.uint8)
    finally:
        os.close(own)


class MappedPeers:
    """Other processes' segments, by the words that describe them. Safe to use from several threads."""

    def __init__(self) -> None:
        self._mapped: dict[int, dict[int, Tensor]] = {}  # by process and file; the one used last comes last
        self._lock = threading.Lock()

    def block(self, words_W: Int64) -> Tensor:
        pid, fd, file, size = words_W.tolist()
        with self._lock:
            known = self._mapped.setdefault(pid, {})
            memory = known.pop(file, None)
            if memory is None:
                memory = map_peer(pid, fd, size)
            known[file] = memory
            if len(known) > _KEPT:
                del known[next(iter(known))]
        return memory


class SharedMemoryTransport:
    """Opens another transport's channels, and takes over from those whose ranks see each other's memory."""

    def __init__(self, inner: Transport, rank: int, timeout_s: float) -> None:
        self.name = inner.name
        self._inner = inner
        self._rank = rank
        self._timeout_s = timeout_s
        self._peers = MappedPeers()

    def open(self, ranks: Sequence[int]) -> Channel | None:
        channel = self._inner.open(ranks)
        return None if channel is None else share_memory(channel, self._rank, self._timeout_s, self._peers)


def share_memory(channel: Channel, rank: int, timeout_s: float, peers: Peers) -> Channel:
    """The channel with shared memory, where every rank can read every other's; else as it is."""
    count = len(channel.ranks)
    segment, secret = Segment(_PROBE), secrets.randbits(62)
    segment.data[:8] = torch.from_numpy(np.array([secret], dtype=np.int64).view(np.uint8))
    board = Segment(Board.size(count))  # the first rank's is used; the others' cost nothing
    found = channel.all_gather(np.array([os.getpid(), segment.fd, secret, board.fd], dtype=np.int64))
    shared = can_meet() and all(_readable(words[:3]) for words in found.tolist())
    memory = map_peer(int(found[0, 0]), int(found[0, 3]), Board.size(count)) if shared else board.data
    verdicts = channel.all_gather(np.array([shared], dtype=np.int64))
    if not verdicts.all():
        return channel
    place = channel.ranks.index(rank)
    return SharedMemoryChannel(channel, Board(memory, channel.ranks, place, timeout_s), peers)


def _readable(peer: list[int]) -> bool:
    """Whether the peer's segment can be mapped and is the one it means: on another machine, another process may have
    the same number."""
    pid, fd, secret = peer
    try:
        return int(map_peer(pid, fd, _PROBE)[:8].view(torch.int64)) == secret
    except (OSError, ValueError):
        return False


class SharedMemoryChannel:
    """Metadata by the board; payload is written straight to where it belongs (`peers`); the rest as without it."""

    def __init__(self, channel: Channel, board: Board, peers: Peers) -> None:
        self.ranks = channel.ranks
        self.peers: Peers | None = peers
        self._inner = channel
        self._board = board
        self.broadcast = channel.broadcast
        self.outbox = channel.outbox
        self.all_to_all = channel.all_to_all
        self.send = channel.send
        self.receive = channel.receive

    @property
    def allocated(self) -> int:
        return self._inner.allocated

    def all_gather(self, words_K: Int64) -> Int64:
        if words_K.nbytes > SHARE:
            return self._inner.all_gather(words_K)
        return self._board.all_gather_equal(words_K.view(np.uint8)).view(np.int64)

    def all_gather_bytes(self, data: Tensor, sizes_N: Int64) -> Tensor:
        if int(sizes_N.max()) > SHARE:  # known to all, who decide alike
            return self._inner.all_gather_bytes(data, sizes_N)
        return self._board.all_gather(data, sizes_N)
