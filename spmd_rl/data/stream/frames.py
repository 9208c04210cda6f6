"""Messages of a stream, many to a frame: one table for all of them, then their bodies, one behind the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.data.stream.codec import aligned

Int64 = NDArray[np.int64]


class Kind(IntEnum):
    """What a message says; the first ones go from replica to trainer, the next ones back, the last ones both ways."""

    SCHEMA = 1  # body: the columns of the groups that name it by number
    GROUP = 2  # body: samples of a group (codec.py), all of them or a part
    METRICS = 3  # body: pickled `Metrics` of a group; comes before the group
    STOP = 4  # this rank was asked to stop
    LOST = 5  # body: why; the replica will make nothing more
    RELEASE = 11  # the group's room is free again
    AGAIN = 12  # the group is too old: its room is free, and it is to be drawn again
    FLAT = 13  # a group, of any replica, teaches nothing: another one takes its place
    NOTE = 21  # body: anything pickled
    CLOSE = 22  # nothing comes after this


class Message(NamedTuple):
    """size: bytes of the body; group, version, tokens: see `Descriptor`; samples, of: how many samples the body holds,
    of so many in the group; schema: number of the sender's schema."""

    kind: int
    size: int = 0
    group: int = 0
    version: int = 0
    samples: int = 0
    of: int = 0
    tokens: int = 0
    schema: int = 0


WIDTH = len(Message._fields)


def pack(messages: Sequence[Message], bodies: Sequence[Tensor | None]) -> Tensor:
    """uint8: one frame. A message's `size` must be that of its body."""
    words = chain((len(messages), 0), chain.from_iterable(messages))
    head = torch.from_numpy(np.fromiter(words, np.int64, 2 + WIDTH * len(messages)).view(np.uint8))
    parts = [head]
    for body in bodies:
        if body is not None and body.numel():
            parts.append(body)
            if body.numel() % 16:
                parts.append(torch.zeros(aligned(body.numel()) - body.numel(), dtype=torch.uint8))
    return torch.cat(parts) if len(parts) > 1 else head


class Block(NamedTuple):
    """A part of a frame. Holds on to the whole of it."""

    data: Tensor
    begin: int
    size: int

    def tensor(self) -> Tensor:
        return self.data[self.begin : self.begin + self.size]


@dataclass(frozen=True)
class Frame:
    """table: int64 [N, 8], one `Message` per row; begin_N: where each body starts in `data`."""

    table: Int64
    begin_N: Int64
    data: Tensor

    def body(self, place: int) -> Tensor:
        begin = int(self.begin_N[place])
        return self.data[begin : begin + int(self.table[place, 1])]

    def blocks(self) -> list[Block]:
        """The bodies, without the cost of a tensor for each."""
        return [
            Block(self.data, begin, size)
            for begin, size in zip(self.begin_N.tolist(), self.table[:, 1].tolist(), strict=True)
        ]


def unpack(data: Tensor) -> Frame:
    """Views of `data`."""
    count = int(data[:8].view(torch.int64))
    head = 8 * (2 + WIDTH * count)
    table = data[16:head].view(torch.int64).numpy().reshape(count, WIDTH)
    spaces = (table[:, 1] + 15) // 16 * 16
    return Frame(table, head + np.cumsum(spaces) - spaces, data)
