"""One rank's part of an exchange: which bytes go where. Pure: every rank derives its own from the same metadata.

A message from rank i to rank j holds, column by column, the rows of i's samples that j gets, in ascending order of
identity. A column's block starts at a multiple of 16 bytes. A rank's rows for itself are in no message: they are
copied straight from its columns to their place in the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.data.assignment import Decision
from spmd_rl.data.batch import Batch, Column
from spmd_rl.data.layout import Layout
from spmd_rl.data.metadata import WIRE_DTYPES, Metadata, Schema

Int64 = NDArray[np.int64]
ALIGN = 16  # bytes; widest vector access of the copy kernels


def aligned(size: Any) -> Any:
    """The next multiple of ALIGN (int or array)."""
    return (size + ALIGN - 1) // ALIGN * ALIGN


@dataclass(frozen=True)
class Result:
    """Where the samples that a rank receives lie in one block of memory. ids_S3, lengths_SC: int64."""

    schema: Schema
    ids_S3: Int64
    lengths_SC: Int64
    column_start_C: Int64
    bytes: int

    def batch(self, arena: Tensor) -> Batch:
        """Views of `arena` (uint8 [bytes]) as columns."""
        columns = {}
        lengths_CS = torch.from_numpy(np.ascontiguousarray(self.lengths_SC.T))
        for place, (name, dtype, inner) in enumerate(self.schema.columns):
            total = int(self.lengths_SC[:, place].sum())
            start = int(self.column_start_C[place])
            raw = arena[start : start + total * int(self.schema.row_bytes[place])]
            columns[name] = Column(raw.view(WIRE_DTYPES[dtype]).reshape(total, *inner), lengths_CS[place])
        return Batch(torch.from_numpy(self.ids_S3), columns)


@dataclass(frozen=True)
class RankPlan:
    """What one rank does.

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


def anything_moves(decision: Decision, metadata: Metadata, source: Layout, target: Layout) -> bool:
    """Whether any sample changes its rank: the same answer on every rank."""
    here = np.array(source.heads)[metadata.source_T[decision.order_T]]
    there = np.array(target.heads)[decision.assignment.slot_T]
    return bool((here != there).any())


def plan_rank(
    metadata: Metadata,
    decision: Decision,
    source: Layout,
    target: Layout,
    union: Sequence[int],
    rank: int,
    replicas_hold: bool,
) -> RankPlan:
    """The part of `rank`.

    union: all ranks of both layouts, ascending; replicas_hold: every rank of a source slot has the slot's samples,
    so replicas can keep what stays in its slot.
    """
    here_T = metadata.source_T[decision.order_T]
    slot_T = decision.assignment.slot_T
    stays = not anything_moves(decision, metadata, source, target)
    alone = stays and source == target and replicas_hold  # each replica helps itself
    my_source, my_target = source.slot_of(rank), target.slot_of(rank)
    sends = my_source is not None and (alone or source.heads[my_source] == rank)
    receives = my_target is not None and (alone or target.heads[my_target] == rank)

    place_of = {r: place for place, r in enumerate(union)}
    head_here_T = np.array([place_of[r] for r in source.heads])[here_T]
    head_there_T = np.array([place_of[r] for r in target.heads])[slot_T]
    row_bytes = metadata.schema.row_bytes
    own_start = _own_offsets(metadata, my_source, row_bytes) if sends else np.empty((0, len(row_bytes)), dtype=np.int64)

    pack, send_N = _NOTHING, np.zeros(len(union), dtype=np.int64)
    if sends and not stays:
        out = np.flatnonzero((here_T == my_source) & (head_there_T != place_of[rank]))
        out = out[np.argsort(head_there_T[out], kind="stable")]
        rows = decision.order_T[out]
        sizes = metadata.lengths_TC[rows] * row_bytes
        offsets, send_N = message_offsets(sizes, head_there_T[out], len(union))
        # In the order of reading: a few messages grow side by side, and memory is read from end to end once.
        read = np.argsort(metadata.position_T[rows])
        begin, offsets, sizes = own_start[metadata.position_T[rows]][read], offsets[read], sizes[read]
        pack = segments(_column_numbers(sizes), begin, offsets, sizes)

    unpack, keep, recv_N, result, in_place = _NOTHING, _NOTHING, np.zeros(len(union), dtype=np.int64), None, False
    if my_target is not None:
        mine = np.flatnonzero(slot_T == my_target)
        rows = decision.order_T[mine]
        lengths = metadata.lengths_TC[rows]
        result = _result(metadata.schema, decision.assignment.ids_T3[mine], lengths)
        if receives:
            sizes = lengths * row_bytes
            local = (here_T[mine] == my_source) if sends else np.zeros(len(mine), dtype=bool)
            in_place = sends and bool(local.all()) and _in_place(metadata, rows, my_source)
            place = result.column_start_C + _before(sizes)
            kept = np.flatnonzero(local)
            begin = own_start[metadata.position_T[rows[kept]]]
            keep = segments(_column_numbers(begin), begin, place[kept], sizes[kept])
            came = np.flatnonzero(~local)
            came = came[np.argsort(head_here_T[mine][came], kind="stable")]
            sender = head_here_T[mine][came]
            begin, recv_N = message_offsets(sizes[came], sender, len(union))
            begin -= (np.cumsum(recv_N) - recv_N)[sender, None]
            unpack = segments(np.broadcast_to(sender[:, None], begin.shape), begin, place[came], sizes[came])

    share_with: tuple[int, ...] = ()
    share_from = None
    if my_target is not None and target.replicas > 1 and not alone:
        head, *others = target.group(my_target)
        share_with, share_from = (tuple(others), None) if head == rank else ((), head)
    return RankPlan(pack, send_N, recv_N, unpack, keep, result, in_place, share_with, share_from)


def message_offsets(sizes_KC: Int64, peer_K: Int64, peers: int) -> tuple[Int64, Int64]:
    """Byte offset in the buffer of each row [K, C], and bytes of each peer's message [peers].

    sizes_KC: bytes of rows that are sorted by peer_K, the place of the other rank in the union.
    """
    message_P = np.zeros(peers, dtype=np.int64)
    if not sizes_KC.size:
        return np.zeros_like(sizes_KC), message_P
    first = np.flatnonzero(np.diff(peer_K, prepend=-1))
    counts = np.diff(first, append=len(peer_K))
    blocks = aligned(np.add.reduceat(sizes_KC, first, axis=0))
    message_P[peer_K[first]] = blocks.sum(axis=1)
    starts = (np.cumsum(message_P) - message_P)[peer_K[first], None] + np.cumsum(blocks, axis=1) - blocks
    before = _before(sizes_KC)
    return before + np.repeat(starts - before[first], counts, axis=0), message_P


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


def _before(sizes_KC: Int64) -> Int64:
    """Exclusive running sum down the rows."""
    return np.cumsum(sizes_KC, axis=0) - sizes_KC


def _own_offsets(metadata: Metadata, slot: int | None, row_bytes: Int64) -> Int64:
    """int64 [S, C]: where each sample of the rank's batch starts in each column, in bytes."""
    return _before(metadata.lengths_TC[metadata.source_T == slot] * row_bytes)


def _in_place(metadata: Metadata, rows: Int64, slot: int | None) -> bool:
    """Whether the wanted rows are the rank's whole batch in its present order."""
    held = int((metadata.source_T == slot).sum())
    return len(rows) == held and bool((metadata.position_T[rows] == np.arange(held)).all())


def _result(schema: Schema, ids_S3: Int64, lengths_SC: Int64) -> Result:
    blocks = aligned(lengths_SC.sum(axis=0) * schema.row_bytes)
    return Result(schema, ids_S3, lengths_SC, np.cumsum(blocks) - blocks, int(blocks.sum()))
