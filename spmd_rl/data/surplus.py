"""Complete groups that wait for a later step: kept by identity, saved with every checkpoint, never dropped.

Each slot keeps the groups that it generated. Which of them a step takes is a pure function of the keys of all slots'
groups, so that every rank knows it and the number of slots does not matter.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from spmd_rl.data.batch import Batch, Column

Key = tuple[int, int, int]  # epoch, the prompt's place in it, prompt index: oldest first
CURSOR = "cursor"  # column, int64 scalar per sample: the second part of the key


def keys_of(batch: Batch) -> list[Key]:
    """The key of every sample's group; `batch` has the column `cursor`."""
    if not len(batch):
        return []
    return [(e, c, p) for (e, p, _), c in zip(batch.ids.tolist(), batch[CURSOR].as_scalars().tolist(), strict=True)]


def choose(keys: Sequence[Key], wanted: int) -> dict[Key, int]:
    """The groups that a step takes, with their places in it: the oldest `wanted` of all slots' groups. Pure.

    Raises ValueError where two slots have one group.
    """
    ordered = sorted(keys)
    if len(set(ordered)) != len(ordered):
        raise ValueError("a group is kept by two slots")
    return {key: place for place, key in enumerate(ordered[:wanted])}


class Surplus:
    """The waiting groups of one slot. An engine: its state is part of every checkpoint.

    slot, slots: of the layout that generates; first: whether this rank is the one of its slot that has the samples.
    group: of all ranks, for CPU tensors; `state_dict` is collective over it.
    """

    def __init__(self, slot: int, slots: int, first: bool, group: ProcessGroup) -> None:
        self._slot, self._slots, self._first, self._group = slot, slots, first, group
        self._batch = Batch.empty()
        self.count = 0  # groups of all slots

    @property
    def exhausted(self) -> bool:
        """Whether no slot keeps any; the run may then end with its prompts."""
        return self.count == 0

    def take(self) -> Batch:
        """All samples of this slot, in order of their keys; it keeps none then."""
        batch, self._batch, self.count = self._batch, Batch.empty(), 0
        return batch

    def put(self, batch: Batch, count: int) -> None:
        """Keep complete groups, with the column `cursor`; count: groups that all slots put now."""
        self._batch, self.count = batch, count

    def state_dict(self) -> dict[str, Any]:
        """The groups of all slots, the same on every rank."""
        parts: list[bytes] = [b""] * dist.get_world_size(self._group)
        mine = _encode(self._batch) if len(self._batch) else b""
        dist.all_gather_object(parts, mine, group=self._group)
        merged = Batch.concat([_decode(part) for part in parts if part])
        order = sorted(range(len(merged)), key=[*zip(keys_of(merged), merged.ids.tolist(), strict=True)].__getitem__)
        return {"groups": _encode(merged.select(torch.tensor(order, dtype=torch.int64))), "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes this slot's share of what any number of slots had saved."""
        everything = _decode(state["groups"])
        self.count = int(state["count"])
        if not self._first:
            return
        first, last = (slot * self.count // self._slots for slot in (self._slot, self._slot + 1))
        mine = sorted(set(keys_of(everything)))[first:last]
        chosen = [i for i, key in enumerate(keys_of(everything)) if key in mine]
        self._batch = everything.select(torch.tensor(chosen, dtype=torch.int64))


def _encode(batch: Batch) -> bytes:
    columns = {name: (column.values, column.lengths) for name, column in batch.columns.items()}
    buffer = io.BytesIO()
    torch.save({"ids": batch.ids, "columns": columns}, buffer)
    return buffer.getvalue()


def _decode(data: bytes) -> Batch:
    content = torch.load(io.BytesIO(data), weights_only=True)
    return Batch(content["ids"], {name: Column(*pair) for name, pair in content["columns"].items()})
