"""Weights in flat memory, who sends which bytes, and the protocol of versions in every interleaving."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.weights.buckets import WIDEST, buckets, cuts, sources
from spmd_rl.weights.layout import ALIGNMENT, Layout
from spmd_rl.weights.shelf import NOTHING, Shelf
from spmd_rl.weights.window import Offer, Window
from tests.weight_cases import make_weights


def test_a_layout_survives_the_wire_and_shows_every_weight() -> None:
    weights = make_weights(seed=1)
    layout = Layout.of(weights.items())
    assert Layout.decode(layout.encode()) == layout
    assert layout.numbers() == sum(tensor.numel() for tensor in weights.values())
    assert all(entry.begin % ALIGNMENT == 0 for entry in layout.entries)
    memory = torch.zeros(layout.size, dtype=torch.uint8)
    for (name, view), tensor in zip(layout.views(memory), weights.values(), strict=True):
        view.copy_(tensor)
        assert view.dtype == tensor.dtype and view.shape == tensor.shape, name
    assert all(torch.equal(view, weights[name]) for name, view in layout.views(memory))


def test_a_layout_refuses_what_has_no_meaning() -> None:
    one = ("a", torch.zeros(2))
    with pytest.raises(ValueError, match="weight 'a' comes more than once"):
        Layout.of([one, one])
    with pytest.raises(ValueError, match="no weights"):
        Layout.of([])


@settings(deadline=None, max_examples=100)
@given(
    numbers=st.lists(st.integers(0, 400), min_size=1, max_size=12),
    bucket_bytes=st.integers(1, 3000),
    width=st.integers(1, 5),
)
def test_every_byte_of_every_weight_is_sent_once(numbers: list[int], bucket_bytes: int, width: int) -> None:
    layout = Layout.of([(str(i), torch.empty(n)) for i, n in enumerate(numbers)])
    source = torch.randint(256, (layout.size,), dtype=torch.uint8)
    plan = buckets(layout.size, bucket_bytes, width)
    received = torch.zeros(layout.size, dtype=torch.uint8)
    touched = torch.zeros(layout.size, dtype=torch.int64)
    for place in range(width):
        own = [bucket for bucket in plan if bucket.place == place]
        memory = torch.zeros(sum(bucket.end - bucket.begin for bucket in own), dtype=torch.uint8)
        for entry, parts in zip(layout.entries, cuts(layout, own), strict=True):
            for cut in parts:
                begin = entry.begin + cut.source
                memory[cut.target : cut.target + cut.size] = source[begin : begin + cut.size]
        at = 0
        for bucket in own:
            size = bucket.end - bucket.begin
            received[bucket.begin : bucket.end] = memory[at : at + size]
            touched[bucket.begin : bucket.end] += 1
            at += size
    assert bool((touched == 1).all())
    for entry in layout.entries:
        where = slice(entry.begin, entry.begin + entry.size)
        assert torch.equal(received[where], source[where])


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 12, 16, 24, 64])
def test_the_trainers_share_the_sending(count: int) -> None:
    trainers = tuple(range(100, 100 + count))
    served = {rank: 0 for rank in trainers}
    for replica in range(2 * count):
        found = sources(trainers, replica)
        assert found.server in found.trainers and len(found.trainers) <= WIDEST and count % len(found.trainers) == 0
        served[found.server] += 1
    assert set(served.values()) == {2}


def test_only_the_right_memory_is_looked_into() -> None:
    window = Window(1000)
    window.memory.copy_(torch.arange(1000) % 256)
    seen = Offer.decode(window.offer.encode()).look()
    assert seen is not None and torch.equal(seen, window.memory)
    assert seen.data_ptr() != window.memory.data_ptr()  # mapped again, as another process would
    assert Offer().look() is None
    assert replace(window.offer, token="00" * 16).look() is None  # a process of that number elsewhere
    assert replace(window.offer, fd=10_000).look() is None
    assert replace(window.offer, size=10_000_000).look() is None


class Job:
    """Trainers and replicas as the protocol sees them; `moves` are all things that may happen next."""

    def __init__(self, trainers: int, replicas: int, versions: int, slots: int) -> None:
        self.shelves = [Shelf(slots) for _ in range(trainers)]
        self.servers = [replica % trainers for replica in range(replicas)]
        self.last = versions - 1
        self.version = 0  # the next to be published
        self.phase = ["idle"] * trainers  # of the publication: idle, closed, copying
        self.pinned = 0
        self.slot: list[int | None] = [None] * trainers
        self.has = [NOTHING] * replicas  # loaded
        self.asks = [True] * replicas  # the buffer is free and the server knows it
        self.buffer = [NOTHING] * replicas  # version that is arriving or complete
        self.missing: list[frozenset[int]] = [frozenset()] * replicas  # trainers that have not sent their part

    def key(self) -> Any:
        shelves = tuple(
            (tuple(shelf.versions), tuple(sorted(shelf.pins.items())), shelf.closed) for shelf in self.shelves
        )
        trainers = (tuple(self.phase), tuple(self.slot))
        replicas = tuple(zip(self.has, self.asks, self.buffer, self.missing, strict=True))
        return (shelves, self.version, self.pinned, trainers, replicas)

    def moves(self) -> list[tuple[str, int]]:
        found = []
        if self.version <= self.last:
            found += [("close", t) for t, phase in enumerate(self.phase) if phase == "idle"]
            found += [("put", t) for t, phase in enumerate(self.phase) if phase == "copying"]
        for replica in range(len(self.has)):
            if self.asks[replica] and self.can_give(replica):
                found.append(("give", replica))
            found += [("send", replica * 10 + t) for t in self.missing[replica] if self.holds(t, replica)]
            if not self.asks[replica] and not self.missing[replica]:
                found.append(("swap", replica))
        return found

    def can_give(self, replica: int) -> bool:
        shelf = self.shelves[self.servers[replica]]
        return not shelf.closed and shelf.newest > self.has[replica]

    def holds(self, trainer: int, replica: int) -> bool:
        held = self.shelves[trainer].slot(self.buffer[replica]) is not None
        # What a replica was given may not be there yet, but it must never be gone.
        assert held or self.shelves[trainer].newest < self.buffer[replica], "a version was lost under way"
        return held

    def after(self, what: str, which: int) -> Job:
        job = copy.deepcopy(self)
        getattr(job, f"_{what}")(which)
        return job

    def _close(self, trainer: int) -> None:
        self.pinned |= self.shelves[trainer].close()
        self.phase[trainer] = "closed"
        if all(phase == "closed" for phase in self.phase):  # the all-reduce is complete
            slots = [shelf.overwrite(self.pinned) for shelf in self.shelves]
            assert len(set(slots)) == 1
            self.pinned = 0
            self.slot = slots
            self.phase = ["idle" if slots[0] is None else "copying"] * len(self.phase)

    def _put(self, trainer: int) -> None:
        slot = self.slot[trainer]
        assert slot is not None
        self.shelves[trainer].put(slot, self.version)
        self.phase[trainer] = "put"
        if all(phase == "put" for phase in self.phase):
            self.phase = ["idle"] * len(self.phase)
            self.version += 1

    def _give(self, replica: int) -> None:
        version = self.shelves[self.servers[replica]].give(replica, self.has[replica])
        assert version is not None
        self.asks[replica], self.buffer[replica] = False, version
        self.missing[replica] = frozenset(range(len(self.shelves)))

    def _send(self, both: int) -> None:
        replica, trainer = divmod(both, 10)
        self.missing[replica] -= {trainer}
        if not self.missing[replica]:
            self.shelves[self.servers[replica]].done(replica)

    def _swap(self, replica: int) -> None:
        assert self.buffer[replica] > self.has[replica], "versions are applied in order"
        self.has[replica], self.asks[replica] = self.buffer[replica], True


@pytest.mark.parametrize(
    ("trainers", "replicas", "versions", "slots"), [(1, 2, 4, 2), (2, 1, 4, 2), (2, 2, 3, 2), (1, 2, 3, 1)]
)
def test_every_interleaving_brings_the_newest_to_all(trainers: int, replicas: int, versions: int, slots: int) -> None:
    """Case A4 among them: versions are made while a replica loads. No end but the right one, so no deadlock."""
    start = Job(trainers, replicas, versions, slots)
    seen, todo, ends = {start.key()}, [start], 0
    superseded = False
    while todo:
        job = todo.pop()
        moves = job.moves()
        if not moves:
            assert job.has == [versions - 1] * replicas and job.version == versions
            ends += 1
        for move in moves:
            later = job.after(*move)
            superseded |= move[0] == "give" and later.buffer[move[1]] > later.has[move[1]] + 1
            if later.key() not in seen:
                seen.add(later.key())
                todo.append(later)
    assert ends and superseded


def test_a_version_is_not_published_twice() -> None:
    shelf = Shelf(2)
    slot = shelf.overwrite(shelf.close())
    assert slot is not None
    shelf.put(slot, 4)
    slot = shelf.overwrite(shelf.close())
    assert slot is not None
    with pytest.raises(ValueError, match="version 4 is published after version 4"):
        shelf.put(slot, 4)
