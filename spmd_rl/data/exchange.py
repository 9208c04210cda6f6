"""`Coordinator`: moves batches along the edges between stages whose parallelism differs. No rank is special.

Every rank of an edge's source and target calls `start` for the same (step, edge) in the same order. What follows is
the same pure computation everywhere, over metadata that was gathered; then each rank moves its own bytes.
"""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from spmd_rl.comm.transport import Transport, TransportError
from spmd_rl.comm.world import World
from spmd_rl.data.agreement import NOTHING_KNOWN, Claim, ExchangeError, agree
from spmd_rl.data.assignment import Assignment, assign
from spmd_rl.data.balance import Balance
from spmd_rl.data.batch import Batch
from spmd_rl.data.buffers import Arenas
from spmd_rl.data.counters import EdgeCounters
from spmd_rl.data.exchange_plan import Part
from spmd_rl.data.lane import Lane
from spmd_rl.data.layout import Layout
from spmd_rl.data.movers import Moved, make_mover
from spmd_rl.observe.metrics import Metrics


@dataclass(frozen=True)
class Exchange:
    """One use of an edge, as its ranks describe it; all must describe it alike."""

    step: int
    edge: str
    source: Layout
    target: Layout
    balance: Balance | None = None
    cost: tuple[str, ...] = ()
    follow: Assignment | None = None

    @property
    def union(self) -> tuple[int, ...]:
        return tuple(sorted({*self.source.ranks, *self.target.ranks}))

    def describe(self) -> str:
        follow = f"follows {self.follow.digest:x}" if self.follow is not None else "follows nothing"
        return (
            f"step {self.step}, edge {self.edge}, {self.source} -> {self.target}, {self.balance}, "
            f"cost {'+'.join(self.cost) or 'none'}, {follow}"
        )


class Pending:
    """An exchange on its way."""

    def __init__(self, lane: Lane, future: Future[tuple[Batch, Assignment]], waited: Callable[[float], None]) -> None:
        self._lane = lane
        self._future = future
        self._waited = waited

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> tuple[Batch, Assignment]:
        """This rank's samples of the target (none where it is not in the target), and where all samples went.

        Raises ExchangeError, on every rank that takes part. Each transport call behind it has its own deadline, so
        this ends.
        """
        begin = time.perf_counter()
        try:
            batch, assignment = self._lane.result(self._future)
        finally:
            self._waited(time.perf_counter() - begin)
        self._lane.hand_over(batch)
        return batch, assignment


class Coordinator:
    """Exchanges of one process.

    edges: the (source, target) layouts of all exchanges to come; a channel for each distinct union of ranks is opened
    here, once, in this order: collective over the whole world.

    Any number of exchanges may be alive, keyed by (step, edge). Those of one channel are carried out one by one, in
    the order of `start`, which is the same on all its ranks (see `Lane`).
    """

    def __init__(self, world: World, transport: Transport, edges: Iterable[tuple[Layout, Layout]]) -> None:
        self.world = world
        self.counters: defaultdict[str, EdgeCounters] = defaultdict(EdgeCounters)
        self._reported: dict[str, EdgeCounters] = {}
        self._alive: set[tuple[int, str]] = set()
        self._arenas = Arenas(world.device)
        self._lanes: dict[tuple[int, ...], Lane] = {}
        unions = (tuple(sorted({*source.ranks, *target.ranks})) for source, target in edges)
        for union in dict.fromkeys(unions):
            channel = transport.open(union)
            if channel is not None:
                self._lanes[union] = Lane(channel, make_mover(channel, self._arenas), world.device)

    def start(
        self,
        step: int,
        edge: str,
        batch: Batch,
        source: Layout,
        target: Layout,
        balance: Balance | None = None,
        cost: str | Sequence[str] = (),
        follow: Assignment | None = None,
    ) -> Pending:
        """Begin to move `batch` from the slots of `source` to those of `target`; returns at once.

        Called by every rank of either layout; ranks outside the source pass `Batch.empty()`. The first rank of a
        source slot sends for it. balance and cost: see `Balance`; the length of a sample is the sum of its lengths in
        the columns `cost`. follow: send these samples where another producer's already went. The batch's tensors must
        not be written before `wait` has returned.
        """
        names = (cost,) if isinstance(cost, str) else tuple(cost)
        exchange = Exchange(step, edge, source, target, balance, names, follow)
        lane = self._lanes.get(exchange.union)
        if lane is None:
            ranks = list(exchange.union)
            raise ExchangeError(f"edge {edge!r}: rank {self.world.rank} has no channel over ranks {ranks}")
        if (step, edge) in self._alive:
            raise ExchangeError(f"edge {edge!r} is already in use in step {step}")
        self._alive.add((step, edge))
        begun = time.perf_counter()
        ready = lane.record(batch)

        def run() -> tuple[Batch, Assignment]:
            try:
                with lane.stream_after(ready):
                    return self._run(exchange, batch, lane)
            finally:
                self.counters[edge].total_s += time.perf_counter() - begun

        def waited(seconds: float) -> None:
            self.counters[edge].exposed_s += seconds
            self._alive.discard((step, edge))

        return Pending(lane, lane.submit(run), waited)

    @property
    def allocated(self) -> int:
        """Buffers made so far; stands still once the largest exchange has been seen."""
        return self._arenas.allocated + sum(lane.channel.allocated for lane in self._lanes.values())

    def metrics(self, metrics: Metrics) -> None:
        """Add what the exchanges since the last call have cost. Call it when none is on its way."""
        exposed = total = 0.0
        for edge, counters in sorted(self.counters.items()):
            new = counters.since(self._reported.get(edge, EdgeCounters()))
            self._reported[edge] = copy.copy(counters)
            exposed, total = exposed + new.exposed_s, total + new.total_s
            if not new.exchanges:
                continue
            metrics.sum(f"exchange/{edge}/bytes_sent", new.bytes_sent)
            metrics.sum(f"exchange/{edge}/bytes_received", new.bytes_received)
            metrics.max(f"exchange/{edge}/bytes_sent_max", new.bytes_sent)
            metrics.mean(f"exchange/{edge}/local_hit_fraction", new.local_hits, new.exchanges)
            metrics.mean(f"exchange/{edge}/imbalance_before", new.before, new.exchanges)
            metrics.mean(f"exchange/{edge}/imbalance_after", new.after, new.exchanges)
            metrics.mean(f"exchange/{edge}/time_copy", new.copy_s, new.exchanges)
            metrics.mean(f"exchange/{edge}/time_flight", new.flight_s, new.exchanges)
        metrics.mean("time/exchange_exposed", exposed, 1)
        metrics.mean("time/exchange_total", total, 1)

    def close(self) -> None:
        """End the threads, after what they have been given."""
        for lane in self._lanes.values():
            lane.close()

    def _run(self, exchange: Exchange, batch: Batch, lane: Lane) -> tuple[Batch, Assignment]:
        where = f"exchange {exchange.edge!r} of step {exchange.step}"
        counters = self.counters[exchange.edge]
        source, target = exchange.source.holders, exchange.target.holders
        begin = time.perf_counter()
        try:
            offer_W = lane.mover.offer(exchange.edge)
            claim = Claim(exchange.describe(), batch, source, self.world.rank, offer_W)
            agreed = agree(lane.channel, claim, source, lane.known.get(exchange.edge, NOTHING_KNOWN))
            lane.known[exchange.edge] = agreed.known
            met = time.perf_counter()
            try:
                decision = assign(agreed.metadata, source, target, exchange.balance, exchange.cost, exchange.follow)
            except ValueError as fault:  # the same on every rank: it was found in what all have gathered
                raise ExchangeError(str(fault)) from None
            part = Part(agreed.metadata, decision, source, target, self.world.rank, agreed.replicas_hold)
            counters.plan_s += time.perf_counter() - met
            own = [batch.columns[name].values.to(self.world.device).contiguous() for name in sorted(batch.columns)]
            moved = lane.mover.move(exchange.edge, part, own, agreed.offers_NW, counters)
        except ExchangeError as error:
            raise ExchangeError(f"{where}: {error}") from None
        except TransportError as error:
            lane.broken = f"{where} failed"
            raise ExchangeError(f"{where} among ranks {list(lane.channel.ranks)}: {error}") from None
        counters.exchanges += 1
        counters.metadata_bytes += agreed.bytes
        counters.metadata_s += met - begin
        counters.before += decision.before
        counters.after += decision.after
        result = self._result(part, moved, batch, exchange.target, counters)
        counters.samples_out += len(result)
        return result, decision.assignment

    def _result(self, part: Part, moved: Moved, batch: Batch, target: Layout, counters: EdgeCounters) -> Batch:
        if moved.result is None:  # ranks of the target whose head has the samples know at least the columns
            columns = part.metadata.schema.empty(self.world.device) if self.world.rank in target else {}
            return Batch(Batch.empty().ids, columns)
        if part.in_place:
            counters.local_hits += 1
            return batch if batch.columns else Batch(batch.ids, part.metadata.schema.empty(self.world.device))
        return moved.result.batch(moved.memory)
