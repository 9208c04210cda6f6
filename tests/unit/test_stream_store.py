"""Groups as bytes, frames of messages, and the columnar store."""

from __future__ import annotations

import threading
import time
from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.comm.transport import TransportError
from spmd_rl.data.metadata import Schema
from spmd_rl.data.stream.channel import Bell, Inlet, Outlet
from spmd_rl.data.stream.codec import decode, encode, largest_bytes
from spmd_rl.data.stream.frames import Block, Kind, Message, pack, unpack
from spmd_rl.data.stream.store import Store
from tests.exchanges import COLUMNS, make_samples, same_bytes


@settings(max_examples=30, deadline=None)
@given(
    prompts=st.lists(st.integers(0, 1000), max_size=5, unique=True),
    names=st.sets(st.sampled_from(sorted(COLUMNS)), min_size=1),
)
def test_a_group_comes_back_from_its_bytes(prompts, names):
    batch = make_samples([(2, p, s) for p in prompts for s in range(3)], {name: COLUMNS[name] for name in names})
    block = encode(batch)
    assert block.numel() % 16 == 0
    assert same_bytes(decode(block, Schema.of(batch), len(batch)), batch)


def test_the_largest_block_is_not_exceeded():
    columns = {"prompt": ("int32", ()), "logprob": ("float32", ()), "version": ("int64", ())}
    batch = make_samples([(0, 0, s) for s in range(4)], columns, longest=9)
    assert encode(batch).numel() <= largest_bytes(4, [(4, 9), (4, 9), (8, 1)])


def test_frames_keep_messages_and_bodies_of_any_size():
    bodies = [None, torch.arange(5, dtype=torch.uint8), torch.arange(32, dtype=torch.uint8), None]
    messages = [Message(Kind.NOTE, 0 if b is None else b.numel(), group=i) for i, b in enumerate(bodies)]
    frame = unpack(pack(messages, bodies))
    assert [Message._make(row) for row in frame.table.tolist()] == messages
    for place, body in enumerate(bodies):
        assert frame.body(place).tolist() == ([] if body is None else body.tolist())
    assert len(unpack(pack([], [])).table) == 0


def whole(block: torch.Tensor) -> Block:
    return Block(block, 0, block.numel())


def put(store: Store, batch, group: int, of: int, version: int = 0, tokens: int = 0):
    return store.add(group, version, len(batch), of, tokens, whole(encode(batch)), Schema.of(batch))


def test_a_group_that_is_not_whole_is_not_ready():
    """A2: groups of 4; samples 1 to 3 of prompt 0 and 0 to 3 of prompt 1 are here: only prompt 1 can be consumed."""
    columns = {"prompt": COLUMNS["prompt"], "logprob": COLUMNS["logprob"]}
    store = Store(["prompt", "logprob"], trainer=3)
    zero = make_samples([(0, 0, s) for s in range(4)], columns)
    one = make_samples([(0, 1, s) for s in range(4)], columns)
    assert put(store, zero.select(torch.tensor([1, 2, 3])), 0, of=4, version=5, tokens=30) is None
    described = put(store, one, 1, of=4, version=2, tokens=40)
    assert described == [1, 2, 4, 40, encode(one).numel(), 3]
    assert same_bytes(store.take([1]), one)
    held = store.bytes
    late = put(store, zero.select(torch.tensor([0])), 0, of=4, version=4, tokens=10)
    assert late is not None and late[:4] == [0, 4, 4, 40] and store.bytes > held  # the oldest version of its parts
    assert same_bytes(store.take([0]), zero)
    assert store.bytes == 0 and len(store) == 0


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_columns_of_several_stages_fill_in_as_they_become_ready(order):
    names = ("prompt", "logprob", "mask")
    whole = make_samples([(0, 7, s) for s in range(3)], {name: COLUMNS[name] for name in names})
    store = Store(["logprob", "mask"])  # the prompt is nobody's business here
    answers = []
    for place in order:
        part = whole.only([names[place]])
        shuffled = part.select(torch.tensor([2, 0, 1])) if place else part  # parts may lie in any order
        answers.append(put(store, shuffled, 7, of=3, tokens=0))
    wanted = [place in (1, 2) for place in order]
    ready_at = max(i for i, is_wanted in enumerate(wanted) if is_wanted)
    assert [answer is not None for answer in answers].index(True) == ready_at
    assert same_bytes(store.take([7]), whole.only(["logprob", "mask"]))


def test_a_stage_on_the_trainer_fills_a_column_in():
    whole = make_samples([(0, 7, s) for s in range(3)], {"prompt": COLUMNS["prompt"], "logprob": COLUMNS["logprob"]})
    store = Store(["prompt", "logprob"])
    assert put(store, whole.only(["prompt"]), 7, of=3, tokens=12) is None
    assert store.fill(7, whole.only(["logprob"])) is not None
    assert same_bytes(store.take([7]), whole)


class Pipe:
    """A line within this process. `stuck`: the peer does not take anything."""

    def __init__(self) -> None:
        self.peer, self.stuck = 1, threading.Event()
        self.frames: deque[torch.Tensor] = deque()
        self.broken = False

    def send(self, frame: torch.Tensor) -> None:
        while self.stuck.is_set():
            time.sleep(0.001)
        self.frames.append(frame)

    def receive(self, into: torch.Tensor | None = None) -> torch.Tensor:
        while not self.frames:
            if self.broken:
                raise TransportError("rank 1 is gone")
            time.sleep(0.001)
        return self.frames.popleft()


def test_a_put_never_waits_and_what_gathers_goes_in_one_frame():
    """A3: nobody takes anything, yet the puts go on; order is kept; a beat tells that the line is alive."""
    pipe, bell = Pipe(), Bell()
    pipe.stuck.set()
    outlet = Outlet(pipe, beat_s=0.01)
    for group in range(1000):
        outlet.put(Message(Kind.RELEASE, group=group))
    assert not pipe.frames
    pipe.stuck.clear()
    inlet = Inlet(pipe, bell)
    groups: list[int] = []
    frames = 0
    while len(groups) < 1000:
        assert bell.wait(10.0)
        for frame in inlet.take():
            frames += 1
            groups += frame.table[:, 2].tolist()
    assert groups == list(range(1000)) and frames <= 3
    assert not inlet.closed
    outlet.close(10.0)
    inlet.join(10.0)
    assert inlet.closed


def test_a_broken_line_is_an_error_after_the_last_frame():
    pipe, bell = Pipe(), Bell()
    pipe.frames.append(pack([Message(Kind.RELEASE, group=3)], [None]))
    pipe.broken = True
    inlet = Inlet(pipe, bell)
    inlet._thread.join(10)
    assert inlet.take()[0].table[0, 2] == 3
    with pytest.raises(TransportError, match="rank 1 is gone"):
        inlet.take()
