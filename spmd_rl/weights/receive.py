"""A replica's side of a weight transfer: a second buffer that fills while it generates, swapped in at a safe point."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.comm.line import Line, open_line
from spmd_rl.comm.roles import group_of
from spmd_rl.comm.transport import TransportError
from spmd_rl.comm.world import World
from spmd_rl.weights.buckets import Bucket, buckets, sources
from spmd_rl.weights.layout import Layout
from spmd_rl.weights.mirror import Mirror
from spmd_rl.weights.shelf import NOTHING
from spmd_rl.weights.window import Offer
from spmd_rl.weights.words import BYE, DONE, READY, Grant, number, word

_JOIN_S = 5.0


class Loads(Protocol):
    """What an engine must be able to do; see `engines.protocol.RolloutEngine`."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None: ...


class KeepsCache(Protocol):
    """The same for an engine that may keep its cache; see `engines.protocol.InterruptibleEngine`."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int, keep_cache: bool = False) -> None: ...


class Receiver:
    """One rollout rank's part in receiving weights. Collective over the rollout role to make.

    The head of each replica receives; the other ranks of the replica read its memory, or where they cannot see it are
    sent a copy when weights are swapped. rolling: a version is shown only once the replica before has swapped to it,
    so that at most one replica at a time drains. The rest is as for `Publisher`. `newest` and `wait` are for the head
    alone; swapping is collective over the ranks of the replica. Errors of the receiving thread are raised by the next
    call.
    """

    def __init__(
        self,
        job: World,
        rollout: World,
        replicas: Sequence[Sequence[int]],
        trainers: Sequence[int],
        transport: str,
        limit_s: float,
        rolling: bool = False,
        name: str = "weights",
    ) -> None:
        self._job, self._limit_s = job, limit_s
        self.version = NOTHING  # of the weights that the engine has
        self.transfer_s = self.load_s = 0.0  # of the last version: until it was complete; while the engine loaded it
        self.transfer_bytes = 0
        self.receiving = False  # bytes are coming in now
        index = next(i for i, replica in enumerate(replicas) if job.rank in replica)
        self._ranks = tuple(replicas[index])
        self._group = group_of(rollout, replicas, limit_s)
        self._mirror = Mirror(job, self._ranks, self._group)
        self._changed = threading.Condition()  # guards what follows, on the head
        self._complete = NOTHING  # version in the second buffer
        self._before: float = math.inf  # version of the replica before this one
        self._error: BaseException | None = None
        self._closing = False
        self._bye: str = ""  # why no version will come any more
        self._threads: list[threading.Thread] = []
        self._next: Line | None = None
        if job.rank != self._ranks[0]:
            return
        self._from = sources(trainers, index)
        self._lines = [
            open_line(transport, job, rank, f"{name}/{rank}-{job.rank}", limit_s) for rank in self._from.trainers
        ]
        self._server = self._lines[self._from.trainers.index(self._from.server)]
        self._layout: Layout | None = None
        self._buckets: list[list[Bucket]] = []  # by line
        self._windows: dict[Line, Tensor | None] = {}  # to the memory of trainers on this machine
        self._start(self._receive, "weights")
        if rolling:
            heads = [replica[0] for replica in replicas]
            if index:
                previous = open_line(transport, job, heads[index - 1], f"{name}/rolling/{index - 1}", limit_s)
                self._before = NOTHING
                self._start(lambda: self._listen(previous), "weights-rolling")
            if index + 1 < len(heads):
                self._next = open_line(transport, job, heads[index + 1], f"{name}/rolling/{index}", limit_s)

    def newest(self) -> int:
        """The version that `swap` would load, or has loaded."""
        with self._changed:
            return self._shown()

    def wait(self, version: int, timeout_s: float) -> None:
        """Until `newest()` is at least `version`. Raises TimeoutError after `timeout_s` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._bye or self._shown() >= version, timeout_s)
            found = self._shown()
        if found < version:
            raise TimeoutError(
                f"rank {self._job.rank} waited {timeout_s:g} s for version {version} of the weights from ranks "
                f"{list(self._from.trainers)}; it has version {found}{self._bye}"
            )

    def swap(self, engine: Loads) -> int:
        """Load what `newest` shows into the engine, unless it has it already; the version. Then the buffer is free."""
        return self._swap(engine.load_weights)

    def swap_in_flight(self, engine: KeepsCache, keep_cache: bool) -> int:
        """The same while requests run; keep_cache: they go on with the keys and values that older weights made."""
        return self._swap(partial(engine.load_weights, keep_cache=keep_cache))

    def close(self) -> None:
        """Take nothing more. Returns when the trainers have closed too, after a few seconds at most."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._next is not None and self._error is None:
            self._next.send(word(BYE))
        for thread in self._threads:
            thread.join(_JOIN_S)

    def _swap(self, load: Callable[[Iterable[tuple[str, Tensor]], int], None]) -> int:
        version = self._agreed(self.newest() if self._job.rank == self._ranks[0] else NOTHING)
        if version == self.version:
            return version
        begin = time.monotonic()
        layout, memory = self._mirror.share()
        load(layout.views(memory), version)
        self.version, self.load_s = version, time.monotonic() - begin
        if self._group is not None:
            dist.barrier(group=self._group)  # all ranks have read
        with self._changed:
            self._complete = NOTHING
            self._changed.notify_all()
        if self._next is not None:
            self._next.send(word(version))
        return version

    def _shown(self) -> int:
        """On the head: the version to swap to now."""
        if self._error is not None:
            raise TransportError(f"weights were not received: {self._error}") from self._error
        if self._complete == NOTHING or (self.version != NOTHING and self._before < self._complete):
            return self.version
        return self._complete

    def _agreed(self, version: int) -> int:
        """What the head says, on all ranks of the replica."""
        if self._group is None:
            return version
        told = torch.tensor([version])
        dist.broadcast(told, group=self._group, group_src=0)
        return int(told)

    # ---- the threads of the head

    def _start(self, work: Callable[[], None], name: str) -> None:
        def guarded() -> None:
            try:
                work()
            except BaseException as error:
                with self._changed:
                    self._error = self._error or error
                    self._changed.notify_all()

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _receive(self) -> None:
        """Ask for a version whenever the buffer is free, and take it in."""
        others = [line for line in self._lines if line is not self._server]
        with ThreadPoolExecutor(len(self._lines), "weights-line") as pool:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._complete == NOTHING or self._closing)
                    if self._closing:
                        break
                self._server.send(word(READY))
                grant = Grant.decode(self._server.receive())
                if grant.version == BYE:
                    with self._changed:
                        self._bye = ", and the trainers have ended"
                        self._changed.notify_all()
                    for line in others:
                        line.send(word(BYE))
                    return
                begin, self.receiving = time.monotonic(), True
                if self._layout is None:
                    self._prepare(grant)
                for line in others:
                    line.send(word(grant.version))
                list(pool.map(self._take, self._lines, self._buckets))
                self._server.send(word(DONE))
                self.transfer_s, self.receiving = time.monotonic() - begin, False
                with self._changed:
                    self._complete = grant.version
                    self._changed.notify_all()
        for line in self._lines:
            line.send(word(BYE))

    def _prepare(self, grant: Grant) -> None:
        self._layout = Layout.decode(grant.layout.encode())
        cut = buckets(self._layout.size, grant.bucket_bytes, len(self._lines))
        self._buckets = [[b for b in cut if b.place == place] for place in range(len(self._lines))]
        self._mirror.make(self._layout)
        self.transfer_bytes = self._layout.size

    def _take(self, line: Line, own: Sequence[Bucket]) -> None:
        """What one trainer has: read where it lies, or as messages."""
        memory = self._mirror.memory
        if line not in self._windows:
            self._windows[line] = Offer.decode(line.receive()).look()
            line.send(word(int(self._windows[line] is not None)))
        window = self._windows[line]
        if window is None:
            for bucket in own:
                line.receive(memory[bucket.begin : bucket.end])
            return
        begin = number(line.receive()) * sum(bucket.end - bucket.begin for bucket in own)
        for bucket in own:
            end = begin + bucket.end - bucket.begin
            memory[bucket.begin : bucket.end] = window[begin:end]
            begin = end

    def _listen(self, previous: Line) -> None:
        """To the replica before: which version it has swapped to."""
        while (version := number(previous.receive())) != BYE:
            with self._changed:
                self._before = version
                self._changed.notify_all()
        with self._changed:
            self._before = math.inf
            self._changed.notify_all()
