"""The trainers' side of a weight transfer: a snapshot after the optimizer step, sent while training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.comm.digest import agree
from spmd_rl.comm.line import Line, open_line
from spmd_rl.comm.transport import TransportError
from spmd_rl.comm.world import World
from spmd_rl.weights.buckets import Bucket, Cut, buckets, cuts, sources
from spmd_rl.weights.layout import Layout
from spmd_rl.weights.shelf import NOTHING, Shelf
from spmd_rl.weights.window import Offer, Window
from spmd_rl.weights.words import BYE, DONE, Grant, number, word

BUCKET_BYTES = 1 << 24
_POLL_S = 0.002
_JOIN_S = 5.0

T = TypeVar("T")
Weights = Callable[[], Iterable[tuple[str, Tensor]]]


@dataclass(frozen=True)
class Published:
    """What one publication kept the trainer from doing. waited_s: for a free slot; snapshot_s: copying."""

    version: int
    waited_s: float
    snapshot_s: float


class Publisher:
    """One trainer's part in sending weights. Collective over the trainers to make and to `publish`.

    job: the world of all ranks; trainers: that of the training role; replicas: the ranks of the job that make up each
    rollout replica, its head first; transport: `comm.transport`; limit_s: longest wait for a message or a free slot;
    slots: versions held at a time. Each trainer holds its share of the weights (see `buckets.sources`) in host memory,
    once per slot. Waits for the heads of the replicas, which make a `Receiver` each, of the same `name`: that of the
    model, where several are sent.

    Errors of the threads that send are raised by the next call: TransportError, naming the rank that is gone. tolerant:
    such a replica is sent nothing more instead; who is lost is for the stream to find out.
    """

    def __init__(
        self,
        job: World,
        trainers: World,
        replicas: Sequence[Sequence[int]],
        transport: str,
        limit_s: float,
        slots: int = 2,
        bucket_bytes: int = BUCKET_BYTES,
        name: str = "weights",
        tolerant: bool = False,
    ) -> None:
        self._tolerant = tolerant
        self._trainers, self._limit_s, self._bucket_bytes = trainers, limit_s, bucket_bytes
        self._device = trainers.device
        self._heads = [replica[0] for replica in replicas]
        self._layout: Layout | None = None
        self._own: list[Bucket] = []
        self._cuts: list[list[Cut]] = []
        self._memory: list[Tensor] = []  # uint8, by slot
        self._window: Window | None = None  # to it, for replicas of this machine
        self._seen: dict[Line, bool] = {}  # whether the replica looks into it
        self._shelf = Shelf(slots)
        self._changed = threading.Condition()  # guards the shelf and what follows
        self._received: dict[int, int] = {}  # replica served here → version that it has
        self._error: BaseException | None = None
        self._closing = False
        ranks = [trainers.job_rank(rank) for rank in range(trainers.size)]
        self._group = sources(ranks, 0).trainers  # only its length matters, the same for all
        self._threads: list[threading.Thread] = []
        for replica, head in enumerate(self._heads):
            from_ranks = sources(ranks, replica)
            if job.rank not in from_ranks.trainers:
                continue
            self._place = from_ranks.trainers.index(job.rank)
            line = open_line(transport, job, head, f"{name}/{job.rank}-{head}", limit_s)
            serves = from_ranks.server == job.rank
            if serves:
                self._received[replica] = NOTHING
            thread = threading.Thread(
                target=self._work, args=(replica, line, serves), name=f"weights-{replica}", daemon=True
            )
            self._threads.append(thread)
        for thread in self._threads:
            thread.start()

    def publish(self, weights: Weights, version: int) -> Published:
        """Snapshot `weights()`, (name, full tensor) pairs in one order on all trainers, as `version`. Collective.

        Returns when the copy is made; it is sent from threads. The first call draws the weights twice, to learn their
        layout. Raises TransportError where sending has failed, or no slot became free within the limit; ValueError
        for weights of another layout, and a version that is not newer than the last.
        """
        begin = time.monotonic()
        if self._layout is None:
            self._prepare(Layout.of(weights()))
        slot = self._free_slot(version)
        waited_s = time.monotonic() - begin
        self._copy(weights(), slot)
        with self._changed:
            self._shelf.put(slot, version)
            self._changed.notify_all()
        return Published(version, waited_s, time.monotonic() - begin - waited_s)

    def wait(self, version: int) -> float:
        """Until every replica has received `version` or a newer one: a blocking update. Collective; the seconds.

        The replicas must have room: one that has not swapped to the version before cannot take the next.
        """
        begin = time.monotonic()
        with self._changed:
            arrived = self._changed.wait_for(
                lambda: self._error or min(self._received.values(), default=version) >= version, self._limit_s
            )
        self._check()
        if not arrived:
            late = [self._heads[replica] for replica, has in self._received.items() if has < version]
            raise TransportError(
                f"version {version} of the weights did not reach the replicas of ranks {late} in {self._limit_s:g} s"
            )
        with self._together():
            dist.barrier(group=self._trainers.control)
        return time.monotonic() - begin

    def forget(self, replica: int) -> None:
        """It is lost: nothing waits for it any more."""
        with self._changed:
            self._shelf.pins.pop(replica, None)
            self._received.pop(replica, None)
            self._changed.notify_all()

    def close(self) -> None:
        """Send nothing more; what is under way is sent to its end, for a few seconds at most."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(_JOIN_S)

    def _prepare(self, layout: Layout) -> None:
        agree(self._trainers, "the layout of the weights", layout.encode())
        self._layout = layout
        if not self._threads:  # no replica is served from here
            self._cuts = [[] for _ in layout.entries]
            return
        own = [b for b in buckets(layout.size, self._bucket_bytes, len(self._group)) if b.place == self._place]
        self._own, self._cuts = own, cuts(layout, own)
        size, slots = sum(b.end - b.begin for b in own), self._shelf.slots
        if self._device.type == "cuda":
            everything = torch.empty(slots * size, dtype=torch.uint8, pin_memory=True)
        else:
            self._window = Window(slots * size)
            everything = self._window.memory
        self._memory = list(everything.split(size)) if size else [everything] * slots

    def _free_slot(self, version: int) -> int:
        """The slot to overwrite, agreed by all trainers."""
        until = time.monotonic() + self._limit_s
        while True:
            with self._changed:
                pinned = torch.tensor([self._shelf.close() >> slot & 1 for slot in range(self._shelf.slots)])
                failed = self._error is not None
            facts = torch.cat([pinned, torch.tensor([int(failed), int(time.monotonic() > until)])])
            with self._together():
                dist.all_reduce(facts, op=dist.ReduceOp.MAX, group=self._trainers.control)
            self._check()
            if facts[-2]:
                raise TransportError(f"version {version} of the weights: another trainer could not send")
            bits = sum(int(bit) << slot for slot, bit in enumerate(facts[:-2]))
            with self._changed:
                slot = self._shelf.overwrite(bits)
                sending = [self._heads[replica] for replica in self._shelf.pins]
                self._changed.notify_all()
            if slot is not None:
                return slot
            if facts[-1]:
                raise TransportError(
                    f"version {version} of the weights found no room in {self._limit_s:g} s: all {self._shelf.slots} "
                    f"slots are being sent; from here to ranks {sending}"
                )
            time.sleep(_POLL_S)

    def _copy(self, weights: Iterable[tuple[str, Tensor]], slot: int) -> None:
        assert self._layout is not None
        for entry, parts, (name, tensor) in zip(self._layout.entries, self._cuts, weights, strict=True):
            if (name, tuple(tensor.shape), tensor.dtype) != (entry.name, entry.shape, entry.dtype):
                raise ValueError(
                    f"weight {name!r} {tuple(tensor.shape)} {tensor.dtype} comes where {entry.name!r} {entry.shape} "
                    f"{entry.dtype} came at first"
                )
            if parts:
                data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            for cut in parts:
                target = self._memory[slot][cut.target : cut.target + cut.size]
                target.copy_(data[cut.source : cut.source + cut.size], non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Around a collective. It fails where another trainer has ended because of a replica that is gone, which this
        one has noticed too: then that is what to say."""
        try:
            yield
        except RuntimeError:
            self._check()
            raise

    def _check(self) -> None:
        if self._error is not None:
            raise TransportError(f"weights were not sent: {self._error}") from self._error

    # ---- the threads, one per replica

    def _work(self, replica: int, line: Line, serves: bool) -> None:
        try:
            if serves:
                self._serve(replica, line)
            else:
                self._help(line)
        except BaseException as error:
            if self._tolerant:
                self.forget(replica)
                return
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _serve(self, replica: int, line: Line) -> None:
        """Give the replica the newest version whenever it can take one."""
        version = NOTHING
        while number(line.receive()) != BYE:
            with self._changed:
                grant = self._until(partial(self._grant, replica, version), f"a version newer than {version}")
            line.send(grant.encode())
            if grant.version == BYE:
                return
            self._send(line, grant.version)
            if number(line.receive()) != DONE:
                raise TransportError(f"rank {line.peer} did not confirm version {grant.version} of the weights")
            version = grant.version
            with self._changed:
                self._shelf.done(replica)
                self._received[replica] = version
                self._changed.notify_all()

    def _grant(self, replica: int, than: int) -> Grant | None:
        if self._closing:
            return Grant(BYE)
        version = self._shelf.give(replica, than)
        if version is None:
            return None
        assert self._layout is not None  # something was published
        return Grant(version, self._bucket_bytes, self._layout.encode().decode() if than == NOTHING else "")

    def _help(self, line: Line) -> None:
        """Send this trainer's share of what another trainer has given."""
        while (version := number(line.receive())) != BYE:
            with self._changed:  # its publication may not be over here
                self._until(partial(self._has, version), f"version {version}")
            self._send(line, version)

    def _has(self, version: int) -> bool:
        return self._shelf.slot(version) is not None

    def _until(self, true: Callable[[], T | None], what: str) -> T:
        found = self._changed.wait_for(true, self._limit_s)
        if not found:
            raise TransportError(f"rank {self._trainers.job_rank()} did not publish {what} in {self._limit_s:g} s")
        return found

    def _send(self, line: Line, version: int) -> None:
        with self._changed:
            slot = self._shelf.slot(version)
        assert slot is not None  # it is pinned
        if line not in self._seen:
            line.send((self._window.offer if self._window else Offer()).encode())
            self._seen[line] = bool(number(line.receive()))
        if self._seen[line]:
            line.send(word(slot))
            return
        begin = 0
        for bucket in self._own:
            end = begin + bucket.end - bucket.begin
            line.send(self._memory[slot][begin:end])
            begin = end
