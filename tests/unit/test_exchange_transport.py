"""Transports without processes: what is refused, what is agreed, what is kept."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from spmd_rl.comm.board import Board
from spmd_rl.comm.line import pair_tag
from spmd_rl.comm.rollcall import RollCall
from spmd_rl.comm.scratch import Scratch
from spmd_rl.comm.shared import MappedPeers, Segment, SharedMemoryChannel, map_peer, share_memory
from spmd_rl.comm.transport import Channel, TransportError, make_transport
from spmd_rl.comm.transport_torch import _overlap
from spmd_rl.comm.world import World
from spmd_rl.config.errors import UserError
from spmd_rl.data.buffers import Arenas

WORLD = cast(World, SimpleNamespace(rank=0, size=1, device=torch.device("cpu"), timeout_s=5.0))


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(UserError, match="comm.transport: 'smoke' is neither torch nor mpi"):
        make_transport("smoke", WORLD)


def test_mpi_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(UserError, match="comm.transport: mpi needs mpi4py"):
        make_transport("mpi", WORLD)


class Alone:
    """A channel of one rank, or what a rank sees of it when the others answer `others`."""

    allocated = 0

    def __init__(self, others: list[list[int]]) -> None:
        self.ranks = tuple(range(1 + len(others)))
        self.others = others

    def all_gather(self, words: np.ndarray) -> np.ndarray:
        rows = [words, *(np.array(row[: len(words)]) for row in self.others)]
        return np.stack([np.resize(row, len(words)) for row in rows])

    def __getattr__(self, name: str) -> Any:
        return None


def test_shared_memory_is_used_only_where_every_rank_can_read_it() -> None:
    assert isinstance(share_memory(cast(Channel, Alone([])), 0, 5.0, MappedPeers()), SharedMemoryChannel)
    for stranger in ([2**22 - 3, 5, 1, 6], [os.getpid(), 0, 1, 1], [1, 10**6, 1, 2]):
        channel = Alone([stranger])
        assert share_memory(cast(Channel, channel), 0, 5.0, MappedPeers()) is channel


def test_a_segment_is_seen_by_whoever_maps_it_and_ends_with_its_owner() -> None:
    segment = Segment(1 << 16)
    mapped = map_peer(os.getpid(), segment.fd, 1 << 16)
    segment.data[7] = 42
    assert int(mapped[7]) == 42
    fd = segment.fd
    del segment
    with pytest.raises(OSError):
        os.fstat(fd)
    assert int(mapped[7]) == 42


def test_shares_of_uneven_ranks_overlap_exactly() -> None:
    sizes, begins = np.array([10, 0, 3]), np.array([0, 10, 10])
    assert _overlap(5, 5, begins, sizes).tolist() == [5, 0, 0]
    assert _overlap(9, 4, begins, sizes).tolist() == [1, 0, 3]
    assert _overlap(13, 5, begins, sizes).tolist() == [0, 0, 0]


def test_scratch_grows_and_stays() -> None:
    scratch = Scratch(torch.device("cpu"))
    first = scratch.get("send", 1000)
    assert scratch.get("send", 900).data_ptr() == first.data_ptr() and scratch.allocated == 1
    assert scratch.get("send", 10**6).numel() == 10**6 and scratch.allocated == 2
    assert scratch.get("receive", 1).numel() == 1 and scratch.allocated == 3


def test_a_block_comes_back_when_its_last_view_is_gone() -> None:
    arenas = Arenas(torch.device("cpu"))
    block = arenas.get(100_000)
    view, where = block[4:8].view(torch.int32), block.data_ptr()
    assert where % 64 == 0
    del block
    other = arenas.get(100_000)
    assert other.data_ptr() != where and arenas.allocated == 2  # the view still lives
    del view
    assert arenas.get(90_000).data_ptr() == where and arenas.allocated == 2
    assert arenas.get(0).numel() == 0


def test_a_lease_is_found_by_its_words_and_what_is_dropped_gives_its_memory_back() -> None:
    arenas, peers = Arenas(torch.device("cpu")), MappedPeers()
    leases = [arenas.lease(70_000 * (1 + number)) for number in range(9)]
    mapped = [peers.block(lease.words_W) for lease in leases]
    for number, (lease, block) in enumerate(zip(leases, mapped, strict=True)):
        assert lease.data.numel() == block.numel() and lease.data.data_ptr() != block.data_ptr()
        block[number] = 7
        assert int(lease.data[number]) == 7
    files = [f"/proc/{lease.words_W[0]}/fd/{lease.words_W[1]}" for lease in leases]
    sizes = [os.stat(file).st_size for file in files]
    del lease
    leases.clear()
    held = [os.stat(file).st_size if os.path.exists(file) else 0 for file in files]
    assert held == [0, *sizes[1:]]  # eight idle blocks are kept; the smallest is empty, or closed already
    assert peers.block(arenas.lease(sizes[8]).words_W).data_ptr() == mapped[8].data_ptr()


def test_a_block_that_is_gone_is_not_taken_for_another() -> None:
    peers, first = MappedPeers(), Segment(1 << 16)
    words = first.words()
    peers.block(words)[0] = 1
    del first
    second = Segment(1 << 16)
    assert second.words()[1] == words[1]  # the descriptor is used again
    assert int(peers.block(second.words())[0]) == 0
    third = words.copy()
    third[1:3] = 10**6, 1
    with pytest.raises(OSError):
        peers.block(third)


def test_the_pairs_of_a_rank_have_tags_of_their_own_that_mpi_can_carry() -> None:
    for size in (2, 3, 4096):
        for rank in {0, 1, size // 2, size - 1}:
            tags = [pair_tag(min(rank, peer), max(rank, peer), size) for peer in range(size) if peer != rank]
            assert len(set(tags)) == size - 1 and min(tags) >= 10_000 and max(tags) < 2**15


def test_without_a_meeting_point_nobody_is_accused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert RollCall("x", [0, 1], 0).say(1) == ""


def test_ranks_that_meet_at_a_board_read_what_each_left() -> None:
    """Threads in the place of processes: they share memory just so. Many rounds, sizes that differ, also nothing."""
    count, rounds = 3, 200
    memory = torch.zeros(Board.size(count), dtype=torch.uint8)
    sizes = [np.array([(5 * r + 7 * place) % 11 for place in range(count)]) for r in range(rounds)]

    def share(place: int, r: int) -> torch.Tensor:
        return torch.full((int(sizes[r][place]),), (31 * r + place) % 251, dtype=torch.uint8)

    def rank(place: int) -> bool:
        board = Board(memory, (0, 1, 2), place, timeout_s=20.0)
        return all(
            torch.equal(board.all_gather(share(place, r), sizes[r]), torch.cat([share(p, r) for p in range(count)]))
            for r in range(rounds)
        )

    with ThreadPoolExecutor(count) as pool:
        assert all(pool.map(rank, range(count)))


def test_who_does_not_come_to_the_board_is_named() -> None:
    memory = torch.zeros(Board.size(4), dtype=torch.uint8)
    with ThreadPoolExecutor(2) as pool:
        boards = [Board(memory, (2, 3, 5, 8), place, timeout_s=0.2) for place in (0, 2)]
        for late in [pool.submit(board.all_gather, torch.empty(0), np.zeros(4, dtype=int)) for board in boards]:
            with pytest.raises(TransportError, match=r"within 0.2 s on rank [25]; ranks 3, 8 did not come"):
                late.result()
