"""Where each weight lies in one flat piece of memory: the form in which weights travel and wait. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes: of every weight's begin, so that each may be viewed in its own dtype


@dataclass(frozen=True)
class Entry:
    """One weight: `size` bytes from `begin` on."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int
    size: int


@dataclass(frozen=True)
class Layout:
    """Weights one behind the other, in the order in which a trainer draws them."""

    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, weights: Iterable[tuple[str, Tensor]]) -> Layout:
        """The layout of (name, full tensor) pairs, of which only shape and dtype are looked at.

        Raises ValueError for a name that comes twice, and where there are none.
        """
        entries: list[Entry] = []
        end = 0
        for name, tensor in weights:
            begin = -(-end // ALIGNMENT) * ALIGNMENT
            end = begin + tensor.numel() * tensor.element_size()
            entries.append(Entry(name, tuple(tensor.shape), tensor.dtype, begin, end - begin))
        names = [entry.name for entry in entries]
        if len(set(names)) < len(names):
            raise ValueError(f"weight {next(n for n in names if names.count(n) > 1)!r} comes more than once")
        if not entries:
            raise ValueError("there are no weights to send")
        return cls(tuple(entries))

    @cached_property
    def size(self) -> int:
        """Bytes in all, the gaps included."""
        return self.entries[-1].begin + self.entries[-1].size

    def encode(self) -> bytes:
        """The same bytes on every rank that has this layout."""
        rows = [[e.name, e.shape, str(e.dtype).removeprefix("torch.")] for e in self.entries]
        return json.dumps(rows).encode()

    @classmethod
    def decode(cls, data: bytes) -> Layout:
        return cls.of(
            (name, torch.empty(shape, dtype=getattr(torch, dtype), device="meta"))
            for name, shape, dtype in json.loads(data)
        )

    def views(self, memory: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor in `memory`) for every weight; memory: uint8 [size]."""
        for entry in self.entries:
            yield entry.name, memory[entry.begin : entry.begin + entry.size].view(entry.dtype).reshape(entry.shape)

    def numbers(self) -> int:
        """Parameters in all."""
        return sum(prod(entry.shape) for entry in self.entries)
