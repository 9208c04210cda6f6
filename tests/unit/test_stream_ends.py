"""Both ends of the stream in one process: what a producer delivers is what a consumer hands out, within the credits."""

from __future__ import annotations

import threading
import time
from collections import deque

import numpy as np
import pytest
import torch

from spmd_rl.comm.transport import TransportError
from spmd_rl.config.errors import UserError
from spmd_rl.data.batch import Batch, Column
from spmd_rl.data.stream.admission import Starts
from spmd_rl.data.stream.channel import Bell, Inlet, Outlet
from spmd_rl.data.stream.consumer import Consumer
from spmd_rl.data.stream.ledger import Ledger
from spmd_rl.data.stream.loader import stream_loader
from spmd_rl.data.stream.producer import Producer
from spmd_rl.data.stream.rounds import Rounds
from spmd_rl.data.stream.store import Store
from spmd_rl.data.stream.window import Window
from spmd_rl.observe.metrics import Metrics

COLUMNS = ("prompt", "response", "reward", "version")


class Half:
    """One end of a pipe within this process."""

    def __init__(self, frames: deque[torch.Tensor], other: deque[torch.Tensor]) -> None:
        self.peer = 1
        self._out, self._in = frames, other
        self.broken = False

    def send(self, frame: torch.Tensor) -> None:
        self._out.append(frame)

    def receive(self, into: torch.Tensor | None = None) -> torch.Tensor:
        while not self._in:
            if self.broken:
                raise TransportError("rank 1 is gone")
            time.sleep(0.0005)
        return self._in.popleft()


class World:
    rank, size = 0, 1


def ends(rounds: Rounds, staleness: int = 0, in_order: bool = True, limit: int = 1 << 20, wait_s: float = 5.0):
    """(producer, consumer, the replica's half of the line)"""
    window = Window(rounds, staleness, waits=in_order)
    up: deque[torch.Tensor] = deque()
    down: deque[torch.Tensor] = deque()
    replica, trainer = Half(up, down), Half(down, up)
    bells = Bell(), Bell()
    producer = Producer(
        Starts(window, 0, 1), limit, COLUMNS, 8, (Inlet(replica, bells[0]), Outlet(replica, 60), bells[0])
    )
    consumer = Consumer(
        World(),  # type: ignore[arg-type]
        None,
        Ledger(window),
        Store(COLUMNS),
        {0: (Inlet(trainer, bells[1]), Outlet(trainer, 60))},
        bells[1],
        replicas=1,
        limit_s=wait_s,
    )
    return producer, consumer, trainer


def group(number: int, samples: int = 4, version: int = 0) -> Batch:
    lengths = torch.tensor([(number + s) % 5 + 1 for s in range(samples)], dtype=torch.int64)
    ids = torch.tensor([[0, number, s] for s in range(samples)], dtype=torch.int64).reshape(-1, 3)
    return Batch(
        ids,
        {
            "prompt": Column(torch.full((int(lengths.sum()),), number, dtype=torch.int32), lengths),
            "response": Column(torch.arange(int(lengths.sum()), dtype=torch.int32), lengths),
            "reward": Column.scalars(torch.full((samples,), float(number))),
            "version": Column.scalars(torch.full((samples,), version, dtype=torch.int64)),
        },
    )


def deliver(producer: Producer, number: int, version: int = 0, samples: int = 4) -> None:
    batch = group(number, samples, version)
    assert producer.starts.peek(version) == number
    assert producer.start(number, producer.largest(batch.only(["prompt"])))
    metrics = Metrics()
    metrics.mean("reward/mean", float(number) * samples, samples)
    producer.deliver(number, batch, metrics)


def test_a_step_comes_in_portions_through_a_data_loader_and_its_room_is_free_again():
    producer, consumer, _ = ends(Rounds(6, 3, 2))
    for number in range(3):
        deliver(producer, number)
    assert producer.starts.peek(0) is None and producer.credits.held > 0  # on-policy: the next round waits
    metrics = Metrics()
    loader = stream_loader(lambda: (p.batch for p in consumer.portions(1, 1, False, metrics)), ["prompt", "reward"])
    batches = list(loader)
    assert [b.ids[:, 1].unique().tolist() for b in batches] == [[0], [1], [2]]  # one group fills a micro-batch
    assert all(set(b.columns) == {"prompt", "reward"} for b in batches)
    assert torch.equal(batches[2]["prompt"].values, group(2)["prompt"].values)
    reduced = metrics.reduce()
    assert reduced["reward/mean"] == 1.0  # of the samples in this step, whoever measured it
    assert (reduced["staleness/mean"], reduced["staleness/max"]) == (0.0, 0.0)
    assert consumer.acknowledge().next == 3
    until = time.monotonic() + 5
    while producer.credits.held and time.monotonic() < until:
        producer.listen(0.01)
    assert producer.credits.held == 0 and producer.starts.peek(1) == 3


def test_a_prompt_that_was_left_out_is_an_empty_group():
    producer, consumer, _ = ends(Rounds(2, 2, 1))
    deliver(producer, 0, samples=0)
    deliver(producer, 1)
    (portion,) = consumer.portions(1, 10**6, False, Metrics())
    assert portion.last and portion.batch.ids[:, 1].tolist() == [1, 1, 1, 1]


def test_an_empty_group_is_never_too_old():
    producer, consumer, _ = ends(Rounds(9, 1, 9))
    for step in range(1, 5):
        deliver(producer, step - 1, version=step - 1, samples=4 if step < 4 else 0)
        metrics = Metrics()
        list(consumer.portions(step, 1, False, metrics))
        consumer.acknowledge()
        assert metrics.reduce()["staleness/max"] == 0.0


def test_a_step_of_only_empty_groups_keeps_its_columns():
    producer, consumer, _ = ends(Rounds(1, 1, 1))
    deliver(producer, 0, samples=0)
    (portion,) = consumer.portions(1, 10**6, False, Metrics())
    assert portion.last and len(portion.batch) == 0 and set(portion.batch.columns) == set(COLUMNS)


def test_a_group_that_is_too_old_goes_back_and_comes_again():
    producer, consumer, _ = ends(Rounds(9, 1, 9), staleness=1, in_order=False)
    for number in (0, 1):
        deliver(producer, number)
    for step in (1, 2):
        list(consumer.portions(step, 1, False, Metrics()))
        consumer.acknowledge()
    deliver(producer, 2, version=1)
    # Drawn with version 0 it would be too old for step 3; the producer pretends.
    producer.starts.start(3)
    assert producer.credits.reserve(3, 4096)
    producer.deliver(3, group(3, version=0), Metrics())
    list(consumer.portions(3, 1, False, Metrics()))
    consumer.acknowledge()
    done = threading.Event()

    def redo() -> None:
        while producer.starts.peek(3) != 3 or len(producer.credits):
            producer.listen(0.01)
        deliver(producer, 3, version=3)
        done.set()

    threading.Thread(target=redo, daemon=True).start()
    metrics = Metrics()
    (portion,) = consumer.portions(4, 1, False, metrics)
    assert done.wait(5) and portion.batch["version"].values.tolist() == [3] * 4
    assert metrics.reduce()["stream/given_back"] == 1.0


def test_what_does_not_come_and_who_is_gone_are_named():
    producer, consumer, trainer = ends(Rounds(4, 2, 2), wait_s=0.2)
    deliver(producer, 0)
    with pytest.raises(TimeoutError, match=r"step 1 waits for 1 groups .* group 1 of replica 0 \(rank 1\)"):
        list(consumer.portions(1, 10**6, False, Metrics()))
    trainer.broken = True
    with pytest.raises(TransportError, match="rank 1 is gone"):
        list(consumer.portions(1, 10**6, False, Metrics()))


def test_a_limit_that_one_group_exceeds_and_columns_of_unknown_width_are_user_errors():
    producer, _, _ = ends(Rounds(4, 2, 2), limit=64)
    with pytest.raises(UserError, match="stream.limit_mib is too small"):
        producer.start(0, 65)
    producer, _, _ = ends(Rounds(4, 2, 2))
    assert producer.start(0, 32)
    with pytest.raises(UserError, match="a column is larger than 8 bytes a token"):
        producer.deliver(0, group(0), Metrics())


def test_a_put_goes_through_while_the_consumer_waits_and_wakes_it(monkeypatch):
    """A3: by the bell, not by a look now and then, which is put off by a minute here."""
    monkeypatch.setattr("spmd_rl.data.stream.consumer._ALONE_S", 60.0)
    producer, consumer, _ = ends(Rounds(2, 1, 2), wait_s=120.0)
    got: list[list[int]] = []
    waiting = threading.Thread(
        target=lambda: got.extend(p.batch.ids[:, 1].tolist() for p in consumer.portions(1, 1, False, Metrics())),
        daemon=True,
    )
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive() and not got
    deliver(producer, 0)
    waiting.join(30.0)
    assert got == [[0, 0, 0, 0]]


@pytest.mark.parametrize("fast", [True, False])
def test_a_producer_ten_times_too_fast_or_too_slow_stays_within_its_bytes(fast):
    """A6: room for three groups of the 24; what is alive never exceeds it, and all come once, in their order."""
    work_s, train_s = (0.001, 0.01) if fast else (0.01, 0.001)
    limit = 3 * 512
    producer, consumer, _ = ends(Rounds(24, 4, 6), staleness=3, limit=limit)
    held, refused, version = [0], threading.Event(), [0]

    def produce() -> None:
        for number in range(24):
            while producer.starts.peek(version[0]) != number or not producer.start(number, 512):
                if producer.starts.peek(version[0]) == number:
                    refused.set()
                producer.listen(0.01)
            held.append(producer.credits.held)
            time.sleep(work_s)
            producer.deliver(number, group(number, version=version[0]), Metrics())

    thread = threading.Thread(target=produce, daemon=True)
    thread.start()
    assert not fast or refused.wait(30.0)  # the trainers have not even begun, and nobody has taken anything
    trained, most = [], 0.0
    for step in range(1, 7):
        metrics = Metrics()
        for portion in consumer.portions(step, 1, False, metrics):
            trained += portion.batch.ids[::4, 1].tolist()
            time.sleep(train_s)
        consumer.acknowledge()
        version[0] = step
        reduced = metrics.reduce()
        most = max(most, reduced["stream/bytes"])
        assert {"stream/wait_s", "stream/ready", "stream/bytes"} <= set(reduced) and reduced["staleness/max"] <= 3
    thread.join(30.0)
    assert trained == list(range(24)) and not thread.is_alive()
    assert max(held) <= limit and 0 < most <= limit


def test_notes_go_both_ways_and_the_end_is_said():
    producer, consumer, _ = ends(Rounds(4, 2, 2))
    consumer.tell(0, ("evaluate", 3))
    until = time.monotonic() + 5
    while not producer.notes and time.monotonic() < until:
        producer.listen(0.01)
    assert producer.notes == [("evaluate", 3)]
    deliver(producer, 0)  # comes while the note is awaited, and is not lost
    deliver(producer, 1)
    producer.tell({"answer": np.arange(3).tolist()})
    assert consumer.await_note(0) == {"answer": [0, 1, 2]}
    (portion,) = consumer.portions(1, 10**6, False, Metrics())
    assert len(portion.batch) == 8
    closing = threading.Thread(target=consumer.close, args=(5.0,))
    closing.start()
    while not producer.ended:
        producer.listen(0.01)
    producer.close(5.0)
    closing.join(5)
    assert not closing.is_alive()
