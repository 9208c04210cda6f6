"""Keys and values of the running sequences, one slot (row) each, for single-token decoding with transformers.

A sequence's token i lies in column i of its slot, whatever the other sequences are: nothing shifts when one joins or
leaves, and what a row computes does not depend on its neighbours beyond the rounding of a matrix product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache


class SlotCache(Cache):
    """Slots 0 … count-1 are in use; `advance` says where the next token of each goes."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=SlotLayer)
        self.count = 0

    def add(self, prefix: DynamicCache, columns: int) -> None:
        """Take the keys and values of one sequence, [1, heads, length, dim] per layer, into a new last slot.

        columns: how many tokens that sequence may come to have. The buffers grow where needed.
        """
        while len(self.layers) < len(prefix.layers):
            self.layers.append(SlotLayer())
        for layer, source in zip(self.layers, prefix.layers, strict=True):
            layer.write(self.count, source.keys[0], source.values[0], columns)
        self.count += 1

    def remove(self, slot: int) -> None:
        """Free a slot; the last one moves into it."""
        self.count -= 1
        if slot != self.count:
            for layer in self.layers:
                layer.keys[slot].copy_(layer.keys[self.count])
                layer.values[slot].copy_(layer.values[self.count])

    def advance(self, column_B: Tensor) -> None:
        """The next forward pass brings one token per slot, to go into these columns (int64 [count])."""
        width = int(column_B.max()) + 1
        for layer in self.layers:
            layer.column_B, layer.width = column_B, width

    def clear(self) -> None:
        """Forget everything, and give the memory back."""
        self.layers.clear()
        self.count = 0


class SlotLayer(CacheLayerMixin):
    """keys, values: [slots, heads, columns, dim]; column_B, width: of the coming token, see `SlotCache.advance`."""

    is_sliding = False
    keys: Tensor | None
    values: Tensor | None
    column_B: Tensor
    width: int = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is made before the first `write`, which knows the sizes."""

    def write(self, slot: int, key_HLD: Tensor, value_HLD: Tensor, columns: int) -> None:
        self.keys = _grown(self.keys, key_HLD, slot + 1, columns)
        self.values = _grown(self.values, value_HLD, slot + 1, columns)
        length = key_HLD.shape[1]
        for buffer, new_HLD in ((self.keys, key_HLD), (self.values, value_HLD)):
            buffer[slot, :, :length] = new_HLD
            # A masked column has weight 0, but 0 times a NaN that an earlier sequence left there would be NaN.
            buffer[slot, :, length:] = 0
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store one token per slot ([slots, heads, 1, dim]); views of all columns in use."""
        assert self.keys is not None and self.values is not None
        slots = torch.arange(key_states.shape[0], device=key_states.device)
        self.keys[slots, :, self.column_B] = key_states[:, :, 0]
        self.values[slots, :, self.column_B] = value_states[:, :, 0]
        return self.keys[: len(slots), :, : self.width], self.values[: len(slots), :, : self.width]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.width, 0

    def get_seq_length(self) -> int:
        return self.width - 1  # before the coming token

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:  # the same, as older transformers call it
        return -1


def _grown(buffer: Tensor | None, like_HLD: Tensor, slots: int, columns: int) -> Tensor:
    """`buffer` with at least that many slots and columns, zero where new. Growth is in large steps: it copies all."""
    heads, _, dim = like_HLD.shape
    old_slots, old_columns = (0, 0) if buffer is None else (buffer.shape[0], buffer.shape[2])
    if slots <= old_slots and columns <= old_columns:
        assert buffer is not None
        return buffer
    slots = old_slots if slots <= old_slots else max(slots, 2 * old_slots)
    columns = max(old_columns, -(-columns // 64) * 64)
    grown = like_HLD.new_zeros(slots, heads, columns, dim)
    if buffer is not None:
        grown[:old_slots, :, :old_columns] = buffer
    return grown
