"""What every rank of an exchange learns about every sample: its identity, where it lies, how long its rows are.

Two rounds. A *header* of twelve words per rank tells counts and digests, so that a disagreement or a local fault is
known to all before anything else is sent. Then the *rows*: 24 bytes of identity and 4 bytes per column for a sample.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

from spmd_rl.data.batch import Batch, Column

Int64 = NDArray[np.int64]

WIRE_DTYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
}
_NAME_OF = {dtype: name for name, dtype in WIRE_DTYPES.items()}
LONGEST_ROW = 2**31 - 1  # lengths travel as int32


def digest(data: bytes) -> int:
    """63 bits of BLAKE2b: enough to compare, fits an int64."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True)
class Schema:
    """Names, dtypes and inner shapes of the columns, in alphabetical order."""

    columns: tuple[tuple[str, str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, batch: Batch) -> Schema:
        """Raises ValueError for a dtype or memory format that cannot be sent."""
        columns = []
        for name, column in sorted(batch.columns.items()):
            values = column.values
            if values.layout != torch.strided or values.dtype not in _NAME_OF:
                raise ValueError(f"column {name!r} holds {values.dtype} ({values.layout}), which cannot be sent")
            columns.append((name, _NAME_OF[values.dtype], tuple(values.shape[1:])))
        return _schema(tuple(columns))

    @cached_property
    def encoded(self) -> bytes:
        return json.dumps(self.columns).encode()

    @classmethod
    def decode(cls, data: bytes) -> Schema:
        return cls(tuple((name, dtype, tuple(inner)) for name, dtype, inner in json.loads(data)))

    @cached_property
    def digest(self) -> int:
        return digest(self.encoded)

    @cached_property
    def row_bytes(self) -> Int64:
        """int64 [C]: bytes of one unit of length."""
        return np.array([WIRE_DTYPES[d].itemsize * prod(inner) for _, d, inner in self.columns], dtype=np.int64)

    def empty(self, device: torch.device) -> dict[str, Column]:
        """Columns of no samples."""
        none = torch.empty(0, dtype=torch.int64)
        return {
            name: Column(torch.empty(0, *inner, dtype=WIRE_DTYPES[dtype], device=device), none)
            for name, dtype, inner in self.columns
        }


@functools.lru_cache(maxsize=256)
def _schema(columns: tuple[tuple[str, str, tuple[int, ...]], ...]) -> Schema:
    """One object for equal columns: what is derived from them is derived once."""
    return Schema(columns)


@dataclass(frozen=True)
class Header:
    """One rank's first message. `static`: digest of what the rank believes it is doing; `ids`: of its identities."""

    static: int = 0
    samples: int = 0
    columns: int = 0
    schema: int = 0
    schema_bytes: int = 0
    ids: int = 0
    fault: int = 0  # 1: this rank has found a fault of its own and will tell it next

    def encode(self, offer_W: Int64) -> Int64:
        words = [self.static, self.samples, self.columns, self.schema, self.schema_bytes, self.ids, self.fault, 0]
        return np.array([*words, *offer_W], dtype=np.int64)

    @classmethod
    def decode(cls, words_8: Int64) -> Header:
        return cls(*words_8[:7].tolist())


OFFER = slice(8, 12)  # words of the header: memory that others may write results into (`buffers.Lease`)
HEADER_WORDS = 12


@dataclass(frozen=True)
class Metadata:
    """All T samples of an exchange, in the order of the source's slots.

    ids_T3: int64; source_T: slot of the source layout; lengths_TC: int64 rows
    in the schema's column order.
    """

    schema: Schema
    ids_T3: Int64
    source_T: Int64
    lengths_TC: Int64

    def __len__(self) -> int:
        return self.ids_T3.shape[0]

    def cost_lengths(self, columns: tuple[str, ...]) -> Int64:
        """int64 [T]: sum of the lengths of the named columns. Raises ValueError where one does not exist."""
        names = [name for name, _, _ in self.schema.columns]
        missing = [name for name in columns if name not in names]
        if missing:
            raise ValueError(f"cost column {missing[0]!r} does not exist; there are {', '.join(names)}")
        return self.lengths_TC[:, [names.index(name) for name in columns]].sum(axis=1)


def encode_rows(batch: Batch) -> NDArray[np.uint8]:
    """uint8 [S * row_stride(C)]. Raises ValueError where lengths and values of a column disagree."""
    samples, names = len(batch), sorted(batch.columns)
    words = np.empty((samples, 6 + len(names)), dtype=np.int32)
    words[:, :6] = np.ascontiguousarray(batch.ids.numpy()).view(np.int32).reshape(samples, 6)
    lengths_CS = np.empty((len(names), samples), dtype=np.int64)
    for lengths_S, name in zip(lengths_CS, names, strict=True):
        lengths = batch.columns[name].lengths
        if len(lengths) != samples:
            raise ValueError(f"column {name!r} has {len(lengths)} lengths for {samples} samples")
        lengths_S[:] = lengths.numpy()
    if lengths_CS.size and not 0 <= lengths_CS.min() <= lengths_CS.max() <= LONGEST_ROW:
        place = int(np.flatnonzero((lengths_CS.min(axis=1) < 0) | (lengths_CS.max(axis=1) > LONGEST_ROW))[0])
        shortest, longest = lengths_CS[place].min(), lengths_CS[place].max()
        raise ValueError(f"column {names[place]!r} has a row of length {shortest} or {longest}; 0..2^31-1 fit")
    for total, name in zip(lengths_CS.sum(axis=1).tolist(), names, strict=True):
        held = batch.columns[name].values.shape[0]
        if total != held:
            raise ValueError(f"column {name!r} holds {held} values, but its lengths add up to {total}")
    words[:, 6:] = lengths_CS.T
    return words.reshape(-1).view(np.uint8)


def row_stride(columns: int) -> int:
    """Bytes of one sample's metadata."""
    return 4 * (6 + columns)


def decode_rows(data: NDArray[np.uint8], schema: Schema, counts_K: Int64) -> Metadata:
    """data: the rows of all source slots, in their order; counts_K: how many samples each has."""
    words = data.view(np.int32).reshape(-1, 6 + len(schema.columns))
    return Metadata(
        schema=schema,
        ids_T3=np.ascontiguousarray(words[:, :6]).view(np.int64).reshape(-1, 3),
        source_T=np.repeat(np.arange(len(counts_K)), counts_K),
        lengths_TC=words[:, 6:].astype(np.int64),
    )
