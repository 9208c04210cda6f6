"""A group of samples as one block of bytes, and back: metadata rows, then column after column, nothing padded but to
16 bytes, so that columns of the block are views."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from spmd_rl.data.batch import Batch, Column
from spmd_rl.data.metadata import WIRE_DTYPES, Schema, decode_rows, encode_rows, row_stride
from spmd_rl.ops.segments import as_bytes, copy_segments

ALIGN = 16


def aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def encode(batch: Batch) -> Tensor:
    """uint8 on the CPU, a multiple of 16 bytes. The schema (`Schema.of`) and the number of samples travel apart."""
    rows = torch.from_numpy(encode_rows(batch))
    columns = [as_bytes(column.values.contiguous()).cpu() for _, column in sorted(batch.columns.items())]
    sources = [rows, *columns]
    sizes = torch.tensor([source.numel() for source in sources])
    spaces = (sizes + ALIGN - 1) // ALIGN * ALIGN
    block = torch.zeros(int(spaces.sum()), dtype=torch.uint8)
    begins = spaces.cumsum(0) - spaces
    copy_segments(sources, block, torch.stack([torch.arange(len(sources)), torch.zeros_like(sizes), begins, sizes]))
    return block


def decode(block: Tensor, schema: Schema, samples: int) -> Batch:
    """What `encode` was given; columns are views of the block, which starts at a multiple of 16 bytes."""
    size = samples * row_stride(len(schema.columns))
    metadata = decode_rows(block[:size].numpy(), schema, np.array([samples]))
    ids, begin = torch.from_numpy(metadata.ids_T3), aligned(size)
    columns = {}
    for place, (name, dtype, inner) in enumerate(schema.columns):
        lengths = torch.from_numpy(metadata.lengths_TC[:, place].copy())
        count = int(lengths.sum())
        size = count * int(schema.row_bytes[place])
        if size:
            values = block[begin : begin + size].view(WIRE_DTYPES[dtype]).reshape(count, *inner)
        else:
            values = torch.empty(count, *inner, dtype=WIRE_DTYPES[dtype])
        columns[name] = Column(values, lengths)
        begin += aligned(size)
    return Batch(ids, columns)


def largest_bytes(samples: int, row_bytes: Sequence[tuple[int, int]]) -> int:
    """Bytes of the largest block with these columns. row_bytes: for each, (bytes of one unit, greatest length)."""
    size = aligned(samples * row_stride(len(row_bytes)))
    return size + sum(aligned(samples * unit * length) for unit, length in row_bytes)
