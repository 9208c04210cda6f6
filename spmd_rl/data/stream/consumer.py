"""`Consumer`: the trainers' end of the stream: takes in groups, agrees on what is trained on next, hands it out.

Every trainer calls it alike. Once per tick they gather the descriptors of what has come since the last one (48 bytes
per group); what follows is the same pure decision everywhere (`Ledger`).
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.comm.process import say
from spmd_rl.comm.transport import Channel, TransportError
from spmd_rl.comm.world import World
from spmd_rl.data.batch import Batch
from spmd_rl.data.metadata import Schema
from spmd_rl.data.stream.admission import Frontier
from spmd_rl.data.stream.channel import Bell, Inlet, Outlet
from spmd_rl.data.stream.frames import Frame, Kind, Message
from spmd_rl.data.stream.ledger import WIDTH, Descriptor, Ledger, Tick
from spmd_rl.data.stream.selection import SelectingLedger
from spmd_rl.data.stream.shares import Shares
from spmd_rl.data.stream.store import Store
from spmd_rl.observe.metrics import Metrics

Int64 = NDArray[np.int64]
_TURN_S = 0.005  # between two ticks of several trainers while nothing is ready; a single one is woken by its bell
_ALONE_S = 0.5
_FAREWELL_S = 5.0  # for a replica that is lost: its process may be there, and wait for the end


@dataclass(frozen=True)
class Portion:
    """What a tick hands out. batch: of its groups those that this trainer has; last: of the step."""

    batch: Batch
    last: bool


class Consumer:
    """world: of the trainers; channel: over them all, None for a single one; lines: to the replicas whose home this
    trainer is, by their number among `replicas`. limit_s: longest wait for a group; updates: optimizer steps of one
    step, among which groups take turns by their places, where the ledger gives them places; tolerant: a replica may be
    lost, and the others make its groups."""

    def __init__(
        self,
        world: World,
        channel: Channel | None,
        ledger: Ledger | SelectingLedger,
        store: Store,
        lines: Mapping[int, tuple[Inlet, Outlet]],
        bell: Bell,
        replicas: int,
        limit_s: float,
        updates: int = 1,
        tolerant: bool = False,
    ) -> None:
        self._world, self._channel, self._ledger, self._store = world, channel, ledger, store
        self._lines, self._bell, self._limit_s, self._tolerant = lines, bell, limit_s, tolerant
        self.shares = Shares(replicas)
        self._rounds = ledger.window.rounds
        self._updates = updates
        self._schemas: dict[tuple[int, int], Schema] = {}  # (replica, number)
        self._metrics: dict[int, Metrics] = {}  # by group
        self._empty: Schema | None = None  # of batches without a sample
        self._sender: dict[int, int] = {}  # group → replica, of those in the store
        self._gone: dict[int, str] = {}  # replicas of this trainer that are lost: why
        self._pending_rows: list[list[int]] = []  # come in, not yet told to the others
        self._notes: dict[int, list[Any]] = {}  # what replicas have said beside
        self.stop_asked_by: int | None = None  # the rank of the head of a replica that was asked to stop

    def portions(self, step: int, budget: int, whole: bool, metrics: Metrics) -> Iterator[Portion]:
        """The groups of `step` as they come, in portions of `budget` tokens over all trainers (whole: in one).

        Adds to `metrics` what the replicas measured for these groups, `staleness/*` and `stream/*`. The step's groups
        count as trained on once `acknowledge` is called. Raises TimeoutError, naming a group and its replica, and
        TransportError where a replica is gone.
        """
        waited = 0.0
        most_bytes, ready = 0, 0
        last = False
        while not last:
            begin = time.perf_counter()
            tick = self._tick(step, budget, whole)
            waited += time.perf_counter() - begin
            ready, most_bytes = len(self._ledger), max(most_bytes, self._store.bytes)
            self._answer(tick, metrics)
            last = tick.last
            if tick.handed or tick.last:
                yield self._hand_out(step, tick, metrics)
        metrics.mean("stream/wait_s", waited, 1.0)
        metrics.mean("stream/ready", ready, 1.0)
        metrics.sum("stream/bytes", most_bytes)
        if self._tolerant:
            metrics.set("stream/replicas", len(self.shares.alive))

    def acknowledge(self) -> Frontier:
        """The step's groups are in the weights now."""
        return self._ledger.acknowledge()

    def tell(self, replica: int, note: Any) -> None:
        """Anything that can be pickled, to a replica; only its home trainer does."""
        if replica in self._lines:
            body = torch.frombuffer(bytearray(pickle.dumps(note)), dtype=torch.uint8)
            self._send(replica, Message(Kind.NOTE, body.numel()), body)

    def await_note(self, replica: int) -> Any:
        """The next thing that a replica says; at its home trainer. None once it is lost. Raises TimeoutError."""
        until = time.monotonic() + self._limit_s
        while not self._notes.get(replica):
            if replica in self._gone:
                return None
            self._bell.wait(_TURN_S)
            self._collect()
            if time.monotonic() > until:
                raise TimeoutError(f"replica {replica}{self._peer(replica)} said nothing in {self._limit_s:g} s")
        return self._notes[replica].pop(0)

    def lost_meanwhile(self) -> bool:
        """Between two steps: take note of what has come, and whether a replica has been lost. Collective."""
        before = len(self.shares.alive)
        self._exchange()
        return len(self.shares.alive) < before

    def close(self, timeout_s: float) -> None:
        """End the stream: the replicas are told, and say goodbye."""
        for replica, (_, outlet) in self._lines.items():
            with suppress(TransportError) if replica in self._gone else nullcontext():
                outlet.close(min(timeout_s, _FAREWELL_S) if replica in self._gone else timeout_s)
        for replica, (inlet, _) in self._lines.items():
            if replica not in self._gone:
                inlet.join(timeout_s)

    def _tick(self, step: int, budget: int, whole: bool) -> Tick:
        begin = time.monotonic()
        while True:
            self._exchange()
            tick = self._ledger.tick(step, budget, whole)
            if tick is not None:
                return tick
            if time.monotonic() - begin > self._limit_s:
                raise TimeoutError(self._overdue(step))
            self._bell.wait(_ALONE_S if self._channel is None else _TURN_S)

    def _exchange(self) -> None:
        """Learn of all that has come to any trainer since the last time: groups, and replicas that are lost."""
        self._collect()
        rows, self._pending_rows = self._pending_rows, []
        table = self._agree(np.array(rows, dtype=np.int64).reshape(-1, WIDTH))
        if len(table):
            self._ledger.arrive(table[table[:, 0] >= 0])
            for row in table[table[:, 0] < 0].tolist():
                self._lose(-1 - row[0])

    def _lose(self, replica: int) -> None:
        """All trainers know of it now: what has come of its groups stays; the others make the rest."""
        if len(self.shares.alive) == 1:
            raise RuntimeError(f"replica {replica}{self._peer(replica)} was the last one; no replica is left to draw")
        self.shares.lose(replica)
        for other in self._lines:
            self.tell(other, ("lost", (replica, self._ledger.frontier.next, self._ledger.there())))

    def _report(self, replica: int, reason: str) -> None:
        """A replica of this trainer is lost: whatever still comes of it is not read any more."""
        if replica not in self._gone:
            self._gone[replica] = reason
            self._pending_rows.append([-1 - replica, *[0] * (WIDTH - 1)])
            reason = reason.partition(". ")[0]
            say(f"rollout replica {replica}{self._peer(replica)} is lost: {reason}; the others take over its groups")

    def _send(self, replica: int, message: Message, body: Tensor | None = None) -> None:
        """To a replica of this trainer, unless it is lost."""
        if replica not in self._gone:
            try:
                self._lines[replica][1].put(message, body)
            except TransportError as error:
                if not self._tolerant:
                    raise
                self._report(replica, str(error))

    def _collect(self) -> None:
        """Take in what has come to this trainer since the last call."""
        for replica, (inlet, _) in self._lines.items():
            if replica in self._gone:
                continue
            try:
                for frame in inlet.take():
                    self._read(replica, frame, self._pending_rows)
            except TransportError as error:
                if not self._tolerant:
                    raise
                self._report(replica, str(error))

    def _read(self, replica: int, frame: Frame, rows: list[list[int]]) -> None:
        blocks = frame.blocks()
        for place, row in enumerate(frame.table.tolist()):
            kind, _, group, version, samples, of, tokens, schema = row
            if kind == Kind.GROUP:
                described = self._store.add(
                    group, version, samples, of, tokens, blocks[place], self._schemas[replica, schema]
                )
                self._sender[group] = replica
                if described is not None:
                    rows.append(described)
            elif kind == Kind.SCHEMA:
                self._schemas[replica, schema] = Schema.decode(frame.body(place).numpy().tobytes())
            elif kind == Kind.METRICS:
                self._metrics[group] = pickle.loads(frame.body(place).numpy().tobytes())
            elif kind == Kind.STOP:
                self.stop_asked_by = self._lines[replica][0].peer
            elif kind == Kind.NOTE:
                self._notes.setdefault(replica, []).append(pickle.loads(frame.body(place).numpy().tobytes()))
            elif kind == Kind.LOST:
                self._report(replica, frame.body(place).numpy().tobytes().decode(errors="replace"))
                return

    def _agree(self, rows: Int64) -> Int64:
        """All trainers' new descriptors [N, 6], in the order of the trainers."""
        if self._channel is None:
            return rows
        counts = self._channel.all_gather(np.array([len(rows)], dtype=np.int64))[:, 0]
        if not counts.any():
            return rows
        sizes = counts * WIDTH * 8
        own = torch.from_numpy(rows.reshape(-1).view(np.uint8).copy())
        gathered = self._channel.all_gather_bytes(own, sizes)
        return gathered.numpy().view(np.int64).reshape(-1, WIDTH)

    def _agree_on_columns(self) -> Schema:
        """The columns of the first trainer that has seen any; some may have none of the first groups."""
        own = next((schema.encoded for schema in self._schemas.values()), b"")
        if self._channel is None:
            return Schema.decode(own)
        sizes = self._channel.all_gather(np.array([len(own)], dtype=np.int64))[:, 0]
        data = torch.frombuffer(bytearray(own), dtype=torch.uint8) if own else torch.empty(0, dtype=torch.uint8)
        texts = self._channel.all_gather_bytes(data, sizes).numpy().tobytes()
        return Schema.decode(texts[: int(sizes[np.flatnonzero(sizes)[0]])])

    def _answer(self, tick: Tick, metrics: Metrics) -> None:
        """Tell the replicas what their groups have come to."""
        self._pass_over(tick.flat, metrics)
        for d in tick.claimed:
            if d.trainer == self._world.rank:
                self._send(self._sender[d.group], Message(Kind.RELEASE, group=d.group))
        for d in tick.stale:
            if d.trainer == self._world.rank:
                self._store.discard(d.group)
                self._metrics.pop(d.group)
                self._send(self._sender.pop(d.group), Message(Kind.AGAIN, group=d.group))
        metrics.sum("stream/given_back", float(sum(d.trainer == self._world.rank for d in tick.stale)))

    def _pass_over(self, flat: Sequence[Descriptor], metrics: Metrics) -> None:
        """Groups that teach nothing: all replicas are told, what was measured of them counts."""
        for d in flat:
            if d.trainer == self._world.rank:
                self._store.discard(d.group)
                metrics.merge(self._metrics.pop(d.group))
                self._send(self._sender.pop(d.group), Message(Kind.RELEASE, group=d.group))
            for replica in self._lines:
                self._send(replica, Message(Kind.FLAT, group=d.group))

    def _hand_out(self, step: int, tick: Tick, metrics: Metrics) -> Portion:
        if self._empty is None:
            self._empty = self._agree_on_columns()
        mine = [d for d in tick.handed if d.trainer == self._world.rank]
        turns = {d.group: place % self._updates for d, place in zip(tick.handed, tick.places, strict=False)}
        batch = self._store.take((d.group for d in mine), turns)
        _token_ages(batch, step, metrics)
        for d in mine:
            del self._sender[d.group]
            metrics.merge(self._metrics.pop(d.group))
            age = step - 1 - d.version
            metrics.mean("staleness/mean", age * d.samples, d.samples)
            metrics.max("staleness/max", age if d.samples else 0)
            if not tick.places:
                late = step - 1 - self._rounds.of(d.group)
                metrics.sum("stream/late", float(late > 0))
                metrics.max("stream/late_steps_max", float(late))
                metrics.sum("stream/early", float(late < 0))
        return Portion(batch if batch.columns else self._without_samples(), tick.last)

    def _without_samples(self) -> Batch:
        """No samples, but the columns that the others' have: a trainer may have none of the claimed groups."""
        assert self._empty is not None
        return Batch(Batch.empty().ids, self._empty.empty(torch.device("cpu"))).only(self._store.wanted)

    def _overdue(self, step: int) -> str:
        missing = self._ledger.missing(step)
        replica = self.shares.of(missing[0])
        return (
            f"step {step} waits for {len(missing)} groups since {self._limit_s:g} s; the first is group {missing[0]} "
            f"of replica {replica}{self._peer(replica)}"
        )

    def _peer(self, replica: int) -> str:
        line = self._lines.get(replica)
        return f" (rank {line[0].peer})" if line else ""


def _token_ages(batch: Batch, step: int, metrics: Metrics) -> None:
    """`staleness/token_mean`, and the part of the tokens that newer weights drew than their response's first one."""
    if "versions" not in batch:
        return
    runs, lengths = batch["versions"].values.double(), batch["versions"].lengths
    version_N, tokens_N = runs[:, 0], runs[:, 1]
    total = tokens_N.sum()
    first_N = torch.repeat_interleave(batch["version"].as_scalars().double(), lengths)
    metrics.mean("staleness/token_mean", ((step - 1 - version_N) * tokens_N).sum(), total)
    metrics.mean("staleness/changed_fraction", tokens_N[version_N > first_N].sum(), total)
