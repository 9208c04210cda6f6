"""The two ways that the bytes of an exchange take: straight into the memory of the ranks that shall have them, where
all ranks of the channel are on one machine, and in messages. What comes out is the same.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from spmd_rl.comm.transport import Channel, Peers, TransportError
from spmd_rl.data.buffers import NO_LEASE, Arenas, Lease
from spmd_rl.data.counters import EdgeCounters
from spmd_rl.data.exchange_plan import Delivery, Part, Result, plan_delivery, plan_messages, resolve
from spmd_rl.data.metadata import Int64
from spmd_rl.ops.rows import deliver
from spmd_rl.ops.segments import as_bytes, copy_segments


@dataclass(frozen=True)
class Moved:
    """result: this rank's samples of the target, if it is in it; memory: where they lie, except where its own batch is
    the result."""

    result: Result | None
    memory: Tensor


class Mover(Protocol):
    def offer(self, edge: str) -> Int64:
        """Words by which other ranks find memory for the next exchange's results; all 0: none."""
        ...

    def move(self, edge: str, part: Part, own: list[Tensor], offers_NW: Int64, counters: EdgeCounters) -> Moved:
        """Carry out this rank's part. own: its columns, contiguous, in schema order; offers_NW: what each rank offered.

        Raises TransportError where a rank is gone or late.
        """
        ...


def make_mover(channel: Channel, arenas: Arenas) -> Mover:
    """Over memory where the channel's ranks reach each other's, else in messages."""
    return ByMessages(channel, arenas) if channel.peers is None else ByMemory(channel, channel.peers, arenas)


class ByMessages:
    """Pack, all-to-all, unpack; the head of a group passes its samples on."""

    def __init__(self, channel: Channel, arenas: Arenas) -> None:
        self._channel = channel
        self._arenas = arenas

    def offer(self, edge: str) -> Int64:
        return NO_LEASE.words_W

    def move(self, edge: str, part: Part, own: list[Tensor], offers_NW: Int64, counters: EdgeCounters) -> Moved:
        channel, begin = self._channel, time.perf_counter()
        own = [as_bytes(values) for values in own]
        plan = plan_messages(part, channel.ranks)
        counters.plan_s += time.perf_counter() - begin
        flight = None
        if part.moves:
            begin = time.perf_counter()
            outbox = channel.outbox(int(plan.send_N.sum()))
            copy_segments(own, outbox, plan.pack)
            packed = time.perf_counter()
            flight = channel.all_to_all(outbox, plan.send_N, plan.recv_N)
            counters.copy_s += packed - begin
            counters.flight_s += time.perf_counter() - packed
            counters.bytes_sent += int(plan.send_N.sum())
            counters.bytes_received += int(plan.recv_N.sum())
        arena = self._arenas.get(0)
        if plan.result is not None and (not plan.in_place or plan.share_with):
            begin = time.perf_counter()
            arena = self._arenas.get(plan.result.bytes)
            copy_segments(own, arena, plan.keep)  # while the messages are under way
            counters.copy_s += time.perf_counter() - begin
            counters.bytes_local += int(plan.keep[3].sum())
        if flight is not None:
            begin = time.perf_counter()
            inbox = flight.wait()
            arrived = time.perf_counter()
            if arena.numel() and plan.share_from is None:
                copy_segments(inbox.sources, arena, resolve(plan.unpack, inbox.source_N, inbox.start_N))
            counters.flight_s += arrived - begin
            counters.copy_s += time.perf_counter() - arrived
        if plan.share_with and arena.numel():
            channel.send(arena, plan.share_with)
            counters.bytes_sent += arena.numel() * len(plan.share_with)
        if plan.share_from is not None and arena.numel():
            channel.receive(arena, plan.share_from)
            counters.bytes_received += arena.numel()
        return Moved(plan.result, arena)


class ByMemory:
    """Each rank writes its rows to where they belong; then all meet, which says that everything is there.

    What a rank offers for its results travels with the metadata: as much as the edge's last exchange took. Only where
    that is too little for some rank there is a round more.
    """

    def __init__(self, channel: Channel, peers: Peers, arenas: Arenas) -> None:
        self._channel = channel
        self._peers = peers
        self._arenas = arenas
        self._place_of = {rank: place for place, rank in enumerate(channel.ranks)}
        self._taken: dict[str, int] = {}  # bytes that the last exchange of an edge brought to this rank
        self._offered = NO_LEASE
        self._unsafe: list[Lease] = []

    def offer(self, edge: str) -> Int64:
        self._offered = self._arenas.lease(self._taken.get(edge, 0))
        return self._offered.words_W

    def move(self, edge: str, part: Part, own: list[Tensor], offers_NW: Int64, counters: EdgeCounters) -> Moved:
        begin = time.perf_counter()
        plan = plan_delivery(part)
        planned = time.perf_counter()
        counters.plan_s += planned - begin
        offered, self._offered = self._offered, NO_LEASE
        needed = 0 if plan.result is None else plan.result.bytes
        self._taken[edge] = needed if plan.crosses else 0
        if plan.crosses:
            lease = self._cross(plan, part, own, offered, offers_NW, counters)
        elif plan.in_place:
            lease = NO_LEASE
        else:
            lease = offered if offered.data.numel() >= needed else self._arenas.lease(needed)
            self._write(plan, part, own, lease, offers_NW, counters)
            counters.copy_s += time.perf_counter() - planned
        return Moved(plan.result, lease.data)

    def _cross(
        self,
        plan: Delivery,
        part: Part,
        own: list[Tensor],
        offered: Lease,
        offers_NW: Int64,
        counters: EdgeCounters,
    ) -> Lease:
        begin, local = time.perf_counter(), counters.bytes_local
        lease, offers_NW = self._settle(plan, part, offered, offers_NW)
        settled = time.perf_counter()
        fault = ""
        try:
            self._write(plan, part, own, lease, offers_NW, counters)
        except (OSError, RuntimeError) as error:
            fault = f"rank {part.rank} cannot write into the others' memory: {error}"
        written = time.perf_counter()
        try:
            faults_N = self._channel.all_gather(np.array([bool(fault)], dtype=np.int64))[:, 0]
            if faults_N.any():
                which = [rank for rank, bad in zip(self._channel.ranks, faults_N.tolist(), strict=True) if bad]
                raise TransportError(fault or f"ranks {which} cannot write into the others' memory")
        except TransportError:
            self._unsafe.append(lease)  # a late peer may still write there: nobody else may have it
            raise
        counters.direct += 1
        if plan.result is not None and not plan.in_place:
            counters.bytes_received += plan.result.held - (counters.bytes_local - local)
        counters.copy_s += written - settled
        counters.flight_s += time.perf_counter() - written + settled - begin
        return lease

    def _settle(self, plan: Delivery, part: Part, offered: Lease, offers_NW: Int64) -> tuple[Lease, Int64]:
        """Memory for this rank's results, and everybody's. All see whether what was offered is enough for all."""
        needed_N = np.zeros(len(self._channel.ranks), dtype=np.int64)
        places = [self._place_of[rank] for rank in part.target.ranks]
        needed_N[places] = np.repeat(plan.bytes_L, part.target.replicas)
        if (offers_NW[:, -1] >= needed_N).all():
            return offered, offers_NW
        needed = int(needed_N[self._place_of[part.rank]])
        if offered.data.numel() < needed:
            offered = self._arenas.lease(needed)
        return offered, self._channel.all_gather(offered.words_W)

    def _write(
        self,
        plan: Delivery,
        part: Part,
        own: list[Tensor],
        lease: Lease,
        offers_NW: Int64,
        counters: EdgeCounters,
    ) -> None:
        """This rank's samples, into its own results and into others'."""
        row_bytes = part.metadata.schema.row_bytes
        bytes_L = np.bincount(plan.slot_S, (plan.lengths_SC @ row_bytes), part.target.slots).astype(np.int64)
        for ranks in plan.turns:
            targets = [NO_LEASE.data] * len(ranks)
            for slot in np.flatnonzero(bytes_L).tolist():
                mine = ranks[slot] == part.rank
                targets[slot] = lease.data if mine else self._peers.block(offers_NW[self._place_of[ranks[slot]]])
                counters.bytes_local += int(bytes_L[slot]) * mine
                counters.bytes_sent += int(bytes_L[slot]) * (not mine)
            if len(plan.slot_S):
                deliver(own, targets, plan.lengths_SC, row_bytes, plan.slot_S, plan.place_SC)
