"""What trainers and replicas say to each other beside the weights; each is one frame of a `Line`.

replica → server      READY            a buffer is free
server → replica      Grant            the version that comes next; at first also its layout
replica → others      the version      send yours of it
all → replica         their buckets, in the order of the layout
replica → server      DONE             all have arrived
replica → all         BYE              nothing more is wanted
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

READY, DONE, BYE = -1, -2, -3  # beside versions, which begin at 0


@dataclass(frozen=True)
class Grant:
    """version: BYE, where none will come any more; layout: `Layout.encode`, empty where the replica has it."""

    version: int
    bucket_bytes: int = 0
    layout: str = ""

    def encode(self) -> Tensor:
        return torch.frombuffer(bytearray(json.dumps(asdict(self)).encode()), dtype=torch.uint8)

    @classmethod
    def decode(cls, frame: Tensor) -> Grant:
        return cls(**json.loads(frame.numpy().tobytes()))


def word(number: int) -> Tensor:
    return torch.tensor([number], dtype=torch.int64).view(torch.uint8)


def number(frame: Tensor) -> int:
    return int(frame.view(torch.int64))
