"""`Store`: the columns of groups that have come to one trainer and are not trained on yet.

A group may come in parts: some of its samples, some of its columns, in any order and from any stage. It is *ready*
when every sample has every column that is wanted; until then nobody sees it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spmd_rl.data.assignment import identity_order
from spmd_rl.data.batch import Batch, Column
from spmd_rl.data.metadata import Schema
from spmd_rl.data.stream.codec import decode, encode
from spmd_rl.data.stream.frames import Block

_SMALL = 4096  # bytes that may keep a frame alive


@dataclass(slots=True)
class _Group:
    """parts: (block, schema, samples), not decoded before they are wanted; have: samples per column."""

    of: int
    version: int
    tokens: int = 0
    bytes: int = 0
    parts: tuple[tuple[Block, Schema, int], ...] = ()
    have: dict[str, int] | None = None  # None: the first part had everything


class Store:
    """wanted: the columns that make a group ready; trainer: this trainer's place, for descriptors."""

    def __init__(self, wanted: Sequence[str], trainer: int = 0) -> None:
        self.wanted = tuple(wanted)
        self.bytes = 0
        self._trainer = trainer
        self._groups: dict[int, _Group] = {}
        self._complete: dict[int, bool] = {}  # schema digest → whether it has all that is wanted

    def __len__(self) -> int:
        return len(self._groups)

    def add(
        self, group: int, version: int, samples: int, of: int, tokens: int, block: Block, schema: Schema
    ) -> list[int] | None:
        """A part of a group; the group's descriptor where it is ready with it. version: the oldest in this part;
        of: samples of the whole group; tokens: in this part, counted in one of its parts only."""
        held = self._groups.get(group)
        if held is None:
            held = self._groups[group] = _Group(of, version)
        held.version = min(held.version, version)
        if block.size > _SMALL and 2 * block.size < block.data.numel():
            block = Block(block.tensor().clone(), 0, block.size)  # lets go of the other groups of the frame
        held.tokens += tokens
        held.bytes += block.size
        self.bytes += block.size
        held.parts = (*held.parts, (block, schema, samples))
        complete = self._complete.get(schema.digest)
        if complete is None:
            names = {name for name, _, _ in schema.columns}
            complete = self._complete[schema.digest] = set(self.wanted) <= names
        if not (complete and samples == of):
            held.have = {} if held.have is None else held.have
            for name, _, _ in schema.columns:
                held.have[name] = held.have.get(name, 0) + samples
            if any(held.have.get(name, 0) != of for name in self.wanted):
                return None
        return [group, held.version, of, held.tokens, held.bytes, self._trainer]

    def fill(self, group: int, part: Batch, tokens: int = 0) -> list[int] | None:
        """Columns that a stage on this rank has made for a group that is here already."""
        held, block = self._groups[group], encode(part)
        return self.add(
            group, held.version, len(part), held.of, tokens, Block(block, 0, block.numel()), Schema.of(part)
        )

    def take(self, groups: Iterable[int], turns: Mapping[int, int] | None = None) -> Batch:
        """The wanted columns of these groups, in ascending order of identity; they leave the store. turns: what a
        group's column `turn` is to be, where it has one."""
        parts = []
        for group in groups:
            held = self._groups.pop(group)
            self.bytes -= held.bytes
            part = _assemble(held, self.wanted)
            if turns and "turn" in part:
                turn_S = torch.full((len(part),), turns[group], dtype=torch.int32)
                part = part.with_columns({"turn": Column.scalars(turn_S)})
            parts.append(part)
        whole = Batch.concat([part for part in parts if len(part)])
        order = identity_order(whole.ids.numpy())
        return whole.select(torch.from_numpy(order))

    def discard(self, group: int) -> None:
        self.bytes -= self._groups.pop(group).bytes


def _assemble(held: _Group, wanted: tuple[str, ...]) -> Batch:
    batches = [decode(block.tensor(), schema, samples) for block, schema, samples in held.parts]
    if len(batches) == 1:
        return batches[0].only(wanted)
    columns: Mapping[str, Column] = {name: _column(name, batches)[1] for name in wanted}
    return Batch(_column(wanted[0], batches)[0], columns)


def _column(name: str, batches: list[Batch]) -> tuple[Tensor, Column]:
    """(ids, values) of one column from all parts that have it, by identity. Raises ValueError for a repeated sample."""
    having = Batch.concat([batch.only([name]) for batch in batches if name in batch])
    ordered = having.select(torch.from_numpy(identity_order(having.ids.numpy())))
    return ordered.ids, ordered[name]
