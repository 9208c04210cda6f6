"""One rank's part of an exchange: which bytes go where. Pure: every rank derives its own from the same metadata.

There are two ways for the bytes, by `plan_messages` and by `plan_delivery`; who sends, who receives and what comes out
is the same (`Part`).

A message from rank i to rank j holds, column by column, the rows of i's samples that j gets, in ascending order of
identity. A column's block starts at a multiple of 16 bytes. A rank's rows for itself are in no message: they are
copied straight from its columns to their place in the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.data.assignment import Decision
from spmd_rl.data.batch import Batch, Column
from spmd_rl.data.layout import Layout
from spmd_rl.data.metadata import WIRE_DTYPES, Metadata, Schema
from spmd_rl.ops.rows import lay_out

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Result:
    """Where the samples that a rank receives lie in one block of memory. ids_S3, lengths_SC: int64."""

    schema: Schema
    ids_S3: Int64
    lengths_SC: Int64
    column_start_C: Int64
    bytes: int

    @property
    def held(self) -> int:
        """Bytes of all rows."""
        return int((self.lengths_SC @ self.schema.row_bytes).sum())

    def batch(self, arena: Tensor) -> Batch:
        """Views of `arena` (uint8, at least [bytes]) as columns."""
        lengths_CS = torch.from_numpy(np.ascontiguousarray(self.lengths_SC.T)).unbind()
        sizes_C = self.lengths_SC.sum(axis=0) * self.schema.row_bytes
        gaps_C = np.diff(self.column_start_C, append=self.bytes) - sizes_C
        parts = arena[: self.bytes].split(np.stack([sizes_C, gaps_C], axis=1).reshape(-1).tolist())
        columns = {}
        for (name, dtype, inner), raw, lengths_S in zip(self.schema.columns, parts[::2], lengths_CS, strict=True):
            kind = WIRE_DTYPES[dtype]
            values = raw if kind is torch.uint8 else raw.view(kind)
            columns[name] = Column.known(values.reshape(int(lengths_S.sum()), *inner) if inner else values, lengths_S)
        return Batch(torch.from_numpy(self.ids_S3), columns)


@dataclass(frozen=True)
class Part:
    """What a rank has to do with an exchange, whichever way the bytes take.

    moves: some sample of some rank changes its rank; alone: none does, and each replica has all it needs; slot: of the
    target, None where the rank is not in it; own: the metadata's rows of the samples that the rank sends, in its own
    order (none where another rank of its slot sends them); mine_S: places in the assignment of the rank's samples of
    the target.
    """

    metadata: Metadata
    decision: Decision
    source: Layout
    target: Layout
    rank: int
    replicas_hold: bool

    @cached_property
    def moves(self) -> bool:
        return anything_moves(self.decision, self.metadata, self.source, self.target)

    @cached_property
    def alone(self) -> bool:
        return not self.moves and self.source == self.target and self.replicas_hold

    @cached_property
    def slot(self) -> int | None:
        return self.target.slot_of(self.rank)

    @cached_property
    def sends(self) -> bool:
        slot = self.source.slot_of(self.rank)
        return slot is not None and (self.alone or self.source.heads[slot] == self.rank)

    @cached_property
    def receives(self) -> bool:
        """From the senders: in a group of replicas, the head does."""
        return self.slot is not None and (self.alone or self.target.heads[self.slot] == self.rank)

    @cached_property
    def own(self) -> slice:
        slot = self.source.slot_of(self.rank)
        if not self.sends or slot is None:
            return slice(0, 0)
        begin, end = np.searchsorted(self.metadata.source_T, (slot, slot + 1)).tolist()
        return slice(begin, end)

    @cached_property
    def mine_S(self) -> Int64:
        return np.flatnonzero(self.decision.assignment.slot_T == self.slot)

    @cached_property
    def rows_S(self) -> Int64:
        """The metadata's rows of the samples `mine_S`."""
        return self.decision.order_T[self.mine_S]

    @cached_property
    def in_place(self) -> bool:
        """Whether the rank's own batch, as it stands, is what it shall have."""
        held = self.own.stop - self.own.start
        wanted = len(self.mine_S) == held and self.receives and self.sends
        return wanted and bool((self.rows_S == np.arange(self.own.start, self.own.stop)).all())

    def result(self, column_start_D: Int64) -> Result | None:
        """column_start_D: of the rank's slot, as `lay_out` gives it; the last entry is the size."""
        if self.slot is None:
            return None
        ids, lengths = self.decision.assignment.ids_T3[self.mine_S], self.metadata.lengths_TC[self.rows_S]
        return Result(self.metadata.schema, ids, lengths, column_start_D[:-1], int(column_start_D[-1]))


def anything_moves(decision: Decision, metadata: Metadata, source: Layout, target: Layout) -> bool:
    """Whether any sample changes its rank: the same answer on every rank."""
    here = np.array(source.heads)[metadata.source_T[decision.order_T]]
    there = np.array(target.heads)[decision.assignment.slot_T]
    return bool((here != there).any())


@dataclass(frozen=True)
class Delivery:
    """What one rank does where it can write into the results of all others.

    slot_S: the target slot of each sample of its batch; place_SC: where each row begins in that slot's results;
    lengths_SC: int64, as all these; turns: for each turn of writing, the rank that stands for each slot (replicas have
    results of their own); bytes_L: size of each slot's results; crosses: some rank writes into another's.
    """

    slot_S: Int64
    place_SC: Int64
    lengths_SC: Int64
    turns: tuple[tuple[int, ...], ...]
    bytes_L: Int64
    result: Result | None
    in_place: bool
    crosses: bool


def plan_delivery(part: Part) -> Delivery:
    """Every rank writes its samples' rows straight to where they belong, also into each replica's results."""
    metadata, order, slot_T = part.metadata, part.decision.order_T, part.decision.assignment.slot_T
    place_TC, start_LD = lay_out(metadata.lengths_TC, metadata.schema.row_bytes, order, slot_T, part.target.slots)
    own = part.own
    sent = np.flatnonzero((order >= own.start) & (order < own.stop))
    at = order[sent] - own.start
    slot_S, place_SC = np.empty(len(sent), dtype=np.int64), np.empty((len(sent), place_TC.shape[1]), dtype=np.int64)
    slot_S[at], place_SC[at] = slot_T[sent], place_TC[sent]
    ranks, replicas = part.target.ranks, part.target.replicas
    turns = [ranks[replica::replicas] for replica in range(replicas)]
    if part.alone:
        turns = [(part.rank,) * part.target.slots]
    if part.in_place:
        turns = turns[1:]
    crosses = part.moves or (replicas > 1 and not part.alone)
    result, lengths_SC = part.result(start_LD[part.slot or 0]), metadata.lengths_TC[own]
    return Delivery(slot_S, place_SC, lengths_SC, tuple(turns), start_LD[:, -1], result, part.in_place, crosses)


@dataclass(frozen=True)
class Messages:
    """What one rank does where bytes travel in messages.

    pack: segments from its columns (in schema order) into its messages; send_N, recv_N: bytes per rank of the union;
    unpack: segments from messages into the result, their source the place of the sender in the union, their offset
    counted from the message's beginning; keep: segments from its own columns into the result; in_place: its own batch
    is the result as it stands; share_with: replicas that the result is passed on to; share_from: the head that it
    comes from.
    """

    pack: Tensor
    send_N: Int64
    recv_N: Int64
    unpack: Tensor
    keep: Tensor
    result: Result | None
    in_place: bool
    share_with: tuple[int, ...]
    share_from: int | None


def plan_messages(part: Part, union: Sequence[int]) -> Messages:
    """union: all ranks of both layouts, ascending."""
    metadata, order, slot_T = part.metadata, part.decision.order_T, part.decision.assignment.slot_T
    lengths_TC, row_bytes = metadata.lengths_TC, metadata.schema.row_bytes
    place_of = {r: place for place, r in enumerate(union)}
    me, own = place_of[part.rank], part.own
    head_here_T = np.array([place_of[r] for r in part.source.heads])[metadata.source_T[order]]
    head_there_T = np.array([place_of[r] for r in part.target.heads])[slot_T]
    own_size = lengths_TC[own] * row_bytes
    own_start = np.cumsum(own_size, axis=0) - own_size

    # In the order of reading: a few messages grow side by side, and memory is read from end to end once.
    leaves_T = (order >= own.start) & (order < own.stop) & (head_there_T != me) & part.moves
    out = np.flatnonzero(leaves_T)
    offset, start_ND = lay_out(lengths_TC, row_bytes, order[out], head_there_T[out], len(union))
    send_N = start_ND[:, -1].copy()
    offset += (np.cumsum(send_N) - send_N)[head_there_T[out], None]
    read = np.argsort(order[out])
    sent = order[out][read] - own.start
    pack = segments(_column_numbers(own_size[sent]), own_start[sent], offset[read], own_size[sent])

    rows = part.rows_S
    place, start = lay_out(lengths_TC, row_bytes, rows, np.zeros_like(rows), 1)
    sizes = lengths_TC[rows] * row_bytes
    local = (rows >= own.start) & (rows < own.stop)
    unpack, keep, recv_N = _NOTHING, _NOTHING, np.zeros(len(union), dtype=np.int64)
    if part.receives:
        kept, came = np.flatnonzero(local), np.flatnonzero(~local)
        begin = own_start[rows[kept] - own.start]
        keep = segments(_column_numbers(begin), begin, place[kept], sizes[kept])
        came = came[np.argsort(head_here_T[part.mine_S][came], kind="stable")]
        sender = head_here_T[part.mine_S][came]
        begin, start_ND = lay_out(lengths_TC, row_bytes, rows[came], sender, len(union))
        recv_N = start_ND[:, -1].copy()
        unpack = segments(np.broadcast_to(sender[:, None], begin.shape), begin, place[came], sizes[came])

    share_with: tuple[int, ...] = ()
    share_from = None
    if part.slot is not None and part.target.replicas > 1 and not part.alone:
        head, *others = part.target.group(part.slot)
        share_with, share_from = (tuple(others), None) if head == part.rank else ((), head)
    result = part.result(start[0])
    return Messages(pack, send_N, recv_N, unpack, keep, result, part.in_place, share_with, share_from)


def segments(source_KC: Int64, begin_KC: Int64, place_KC: Int64, size_KC: Int64) -> Tensor:
    """int64 [4, M] for `ops.copy_segments`: column by column, without empty ranges, adjacent ranges joined."""
    table = np.stack([part.T.reshape(-1) for part in (source_KC, begin_KC, place_KC, size_KC)])
    table = table[:, table[3] > 0]
    if table.shape[1] == 0:
        return _NOTHING
    source, begin, place, size = table
    ends = size[:-1]
    joins = (source[1:] == source[:-1]) & (begin[1:] == begin[:-1] + ends) & (place[1:] == place[:-1] + ends)
    first = np.concatenate([[0], np.flatnonzero(~joins) + 1])
    joined = np.ascontiguousarray(table[:, first])
    joined[3] = np.add.reduceat(size, first)
    return torch.from_numpy(joined)


_NOTHING = torch.empty(4, 0, dtype=torch.int64)


def _column_numbers(sizes_KC: Int64) -> Int64:
    return np.broadcast_to(np.arange(sizes_KC.shape[1]), sizes_KC.shape)


def resolve(unpack: Tensor, source_N: Int64, start_N: Int64) -> Tensor:
    """The unpack segments as `ops.copy_segments` wants them, once it is known where each sender's message lies."""
    sender = unpack[0].numpy()
    return torch.stack([torch.from_numpy(source_N[sender]), unpack[1] + torch.from_numpy(start_N[sender]), *unpack[2:]])
