"""What the ranks of test_weights.py run: two trainers (0, 3) and two rollout ranks (1, 2)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.comm.transport import TransportError
from spmd_rl.comm.world import World
from spmd_rl.weights.publish import Publisher
from spmd_rl.weights.receive import Receiver
from spmd_rl.weights.window import Offer
from tests.weight_cases import make_weights

ROLES = {"train": [0, 3], "rollout": [1, 2]}
BUCKET_BYTES = 1000  # of some 4 kB, so that buckets and weights cut each other


class Sink:
    """An engine that keeps what it is given, and says whether it was right to the bit."""

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.right: list[bool] = []
        self.kept: list[bool] = []

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int, keep_cache: bool = False) -> None:
        got, expected = dict(weights), make_weights(version)
        same = all(
            torch.equal(got[name], tensor) and got[name].dtype == tensor.dtype for name, tensor in expected.items()
        )
        self.versions.append(version)
        self.right.append(same and list(got) == list(expected))
        self.kept.append(keep_cache)


def draw(version: int) -> Iterable[tuple[str, Tensor]]:
    return make_weights(version).items()


class Both:
    """A publisher on the trainers, a receiver on the others; closed in the end."""

    def __init__(
        self,
        job: World,
        mine: World,
        transport: str,
        name: str,
        replicas: Sequence[Sequence[int]],
        rolling: bool = False,
    ) -> None:
        self.job, self.mine, self.heads = job, mine, [replica[0] for replica in replicas]
        self.sink = Sink()
        if mine.role == "train":
            self.publisher = Publisher(job, mine, replicas, transport, 60.0, bucket_bytes=BUCKET_BYTES, name=name)
        else:
            self.receiver = Receiver(job, mine, replicas, ROLES["train"], transport, 60.0, rolling, name)

    def publish(self, version: int) -> None:
        self.publisher.publish(partial(draw, version), version)

    def take(self, version: int) -> None:
        """Wait for a version and load it."""
        if self.job.rank in self.heads:
            self.receiver.wait(version, 60.0)
        self.receiver.swap(self.sink)

    def meet(self) -> None:
        dist.barrier(group=self.job.control)

    def close(self) -> dict[str, Any]:
        side: Any = self.publisher if self.mine.role == "train" else self.receiver
        side.close()
        threads = [thread.name for thread in side._threads if thread.is_alive()]
        return {"versions": self.sink.versions, "right": all(self.sink.right), "threads": threads}


def everything(job: World, mine: World, transport: str) -> dict[str, Any]:
    cases = (in_order, sent) if transport == "mpi" else (in_order, sent, slow_and_fast, one_after_the_other, shared)
    return {case.__name__: case(job, mine, transport) for case in cases}


@contextmanager
def blind() -> Iterator[None]:
    """As if every rank were on a machine of its own."""
    look = Offer.look
    Offer.look = lambda self: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Offer.look = look  # type: ignore[method-assign]


def sent(job: World, mine: World, transport: str) -> dict[str, Any]:
    """The same as messages."""
    with blind():
        return in_order(job, mine, transport, "sent")


def in_order(job: World, mine: World, transport: str, name: str = "in order") -> dict[str, Any]:
    """Blocking updates; then what is refused."""
    both = Both(job, mine, transport, name, [[1], [2]])
    said = []
    if mine.role == "train":
        for version in (0, 1, 5):
            both.publish(version)
            both.publisher.wait(version)
        said.append(_message(lambda: both.publish(5)))
        wrong = {name: tensor.double() if name == "head" else tensor for name, tensor in make_weights(6).items()}
        said.append(_message(lambda: both.publisher.publish(wrong.items, 6)))
    else:
        for version in (0, 1, 5):
            both.take(version)
        assert both.receiver.newest() == 5 and both.receiver.swap(both.sink) == 5
        said.append(_message(lambda: both.receiver.wait(6, 0.2)))
    both.meet()
    return {**both.close(), "said": said, "seen": [*both.publisher._seen.values()] if mine.role == "train" else []}


def slow_and_fast(job: World, mine: World, transport: str) -> dict[str, Any]:
    """A4: many versions are made while rank 1 is busy with one; rank 2 takes what it can get."""
    both = Both(job, mine, transport, "slow", [[1], [2]])
    last = 30
    if mine.role == "train":
        for version in range(last + 1):
            both.publish(version)
            if version < 2:
                both.publisher.wait(version)
            if version == 0:
                both.meet()
        both.meet()
    elif job.rank == 1:
        both.take(0)
        both.meet()
        both.meet()  # all are made
        both.receiver.swap_in_flight(both.sink, keep_cache=True)
        both.take(last)
    else:
        both.take(0)
        both.meet()
        while both.receiver.newest() < last:
            both.receiver.swap(both.sink)
        both.receiver.swap(both.sink)
        both.meet()
    both.meet()
    return {**both.close(), "kept": both.sink.kept}


def one_after_the_other(job: World, mine: World, transport: str) -> dict[str, Any]:
    """Rolling: rank 2 is shown version 1 only after rank 1 has swapped to it."""
    both = Both(job, mine, transport, "rolling", [[1], [2]], rolling=True)
    shown: list[int] = []
    if mine.role == "train":
        for version in (0, 1):
            both.publish(version)
            both.publisher.wait(version)
            both.meet()
    else:
        both.take(0)
        both.meet()
        both.meet()  # both have received version 1
        if job.rank == 2:
            shown.append(both.receiver.newest())
    both.meet()
    if mine.role == "rollout":
        both.take(1)
    both.meet()
    return {**both.close(), "shown": shown}


def shared(job: World, mine: World, transport: str) -> dict[str, Any]:
    """One replica of two ranks: the second reads the memory of the first, or where it cannot is sent a copy."""
    found: dict[str, Any] = {}
    for way in ("mapped", "copied"):
        with blind() if way == "copied" else nullcontext():
            both = Both(job, mine, transport, way, [[1, 2]])
            for version in (3, 4):
                if mine.role == "train":
                    both.publish(version)
                    both.publisher.wait(version)
                else:
                    both.take(version)
            both.meet()
            copies = mine.role == "rollout" and both.receiver._mirror._copies
            found[way] = {**both.close(), "copies": copies}
    return found


def _message(action: Any) -> str:
    try:
        action()
    except (ValueError, TimeoutError, TransportError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def dies(job: World, mine: World) -> None:
    """Rank 1 is gone after version 0; rank 2 lives on. Leaves without the job's end, which would wait for rank 1."""
    both = Both(job, mine, "torch", "dies", [[1], [2]])

    def go_on() -> None:
        for version in range(9):
            if mine.role == "train":
                both.publish(version)
                both.publisher.wait(version)
            else:
                both.take(version)
                if job.rank == 1:
                    os._exit(0)

    print(f"rank {job.rank} heard: {_message(go_on)}", flush=True)
    os._exit(0)
