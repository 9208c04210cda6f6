"""One engine of several ranks, where one of them decides: what it asks of the engine, all do in the same order.

In a synchronous rollout the ranks of a tensor-parallel group know the same requests and come to the same calls by
themselves. A replica of asynchronous training decides by what has arrived and when, which no two ranks see alike. So
its head decides alone, and each call goes to the others first, a few bytes per step.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from spmd_rl.comm.alarm import one_line
from spmd_rl.engines.protocol import Completion, EngineFailure, InterruptibleEngine, Request, SampleId
from spmd_rl.weights.receive import Receiver


class Call(IntEnum):
    BEAT = 0  # nothing to do, and still there
    SUBMIT = 1
    STEP = 2
    ABORT = 3
    SWAP = 4  # while nothing is being drawn
    SWAP_IN_FLIGHT = 5
    SLEEP = 6
    WAKE = 7
    END = 8


class Lead:
    """The engine as the head of a replica uses it: a `RolloutEngine`, but weights come by `swap`.

    group: a gloo group over the ranks of the replica, the head first, whose others are in `follow`; None where the
    replica is one rank. guarded: what the engine raises becomes an EngineFailure.
    """

    def __init__(self, engine: InterruptibleEngine, group: ProcessGroup | None, guarded: bool = False) -> None:
        self.engine = engine
        self._group, self._guarded = group, guarded

    def submit(self, requests: Sequence[Request]) -> None:
        self._say(Call.SUBMIT, list(requests))
        with self._guard():
            self.engine.submit(requests)

    def step(self) -> list[Completion]:
        self._say(Call.STEP)
        with self._guard():
            return self.engine.step()

    def unfinished(self) -> int:
        return self.engine.unfinished()

    def abort(self, ids: Sequence[SampleId] | None = None) -> list[Completion]:
        self._say(Call.ABORT, ids)
        with self._guard():
            return self.engine.abort(ids)

    def swap(self, receiver: Receiver) -> int:
        """`Receiver.swap` on all ranks."""
        self._say(Call.SWAP)
        with self._guard():
            return receiver.swap(self.engine)

    def swap_in_flight(self, receiver: Receiver, keep_cache: bool) -> int:
        self._say(Call.SWAP_IN_FLIGHT, keep_cache)
        with self._guard():
            return receiver.swap_in_flight(self.engine, keep_cache)

    def sleep(self) -> None:
        self._say(Call.SLEEP)
        self.engine.sleep()

    def wake(self) -> None:
        self._say(Call.WAKE)
        self.engine.wake()

    def beat(self) -> None:
        """To be called now and then, so that the others can tell a head that waits from one that is gone."""
        self._say(Call.BEAT)

    def end(self) -> None:
        """Nothing follows."""
        self._say(Call.END)

    def close(self) -> None:
        """The others close theirs."""
        self.engine.close()

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self._guarded:
                raise
            raise EngineFailure(one_line(error)) from error

    def _say(self, call: Call, what: Any = None) -> None:
        if self._group is None:
            return
        body = b"" if what is None else pickle.dumps(what)
        dist.broadcast(torch.tensor([call, len(body)]), group=self._group, group_src=0)
        if body:
            dist.broadcast(torch.frombuffer(bytearray(body), dtype=torch.uint8), group=self._group, group_src=0)


def follow(engine: InterruptibleEngine, receiver: Receiver, group: ProcessGroup) -> bool:
    """Do the next thing that the head says; False where that was the last one. Waits as long as the group allows."""
    head = torch.zeros(2, dtype=torch.int64)
    dist.broadcast(head, group=group, group_src=0)
    call, size = (int(number) for number in head)
    what: Any = None
    if size:
        body = torch.empty(size, dtype=torch.uint8)
        dist.broadcast(body, group=group, group_src=0)
        what = pickle.loads(body.numpy().tobytes())
    match Call(call):
        case Call.SUBMIT:
            engine.submit(what)
        case Call.STEP:
            engine.step()
        case Call.ABORT:
            engine.abort(what)
        case Call.SWAP:
            receiver.swap(engine)
        case Call.SWAP_IN_FLIGHT:
            receiver.swap_in_flight(engine, what)
        case Call.SLEEP:
            engine.sleep()
        case Call.WAKE:
            engine.wake()
    return call != Call.END
