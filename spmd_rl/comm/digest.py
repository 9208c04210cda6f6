"""Do all ranks hold the same value? One small all-reduce to know; a gather only to say who differs."""

from __future__ import annotations

import hashlib
from collections import Counter

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from spmd_rl.comm.world import World

_LISTED = 16  # ranks named in a message


class Disagreement(RuntimeError):
    """Ranks hold different values of what must be equal. Raised on every rank, with the same message."""


def agree(where: World | ProcessGroup, name: str, value: bytes | str) -> None:
    """Collective over `where` (a world's control group, or a group of CPU tensors): is `value` the same everywhere?

    Compares the first 126 bits of its SHA-256. Raises `Disagreement` on every rank otherwise, naming the ranks (in
    the world's numbering) that differ from the most frequent value.
    """
    group = where.control if isinstance(where, World) else where
    data = value.encode() if isinstance(value, str) else value
    digest = hashlib.sha256(data).digest()
    halves = [int.from_bytes(digest[start : start + 8], "big") >> 1 for start in (0, 8)]
    # The maximum of the negated halves is minus their minimum: one reduction gives both ends.
    ends = torch.tensor([*halves, *(-half for half in halves)], dtype=torch.int64)
    dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)
    if ends[0] == -ends[2] and ends[1] == -ends[3]:
        return
    ranks = (
        [where.job_rank(rank) for rank in range(where.size)]
        if isinstance(where, World)
        else dist.get_process_group_ranks(group)
    )
    raise Disagreement(_who_differs(group, ranks, name, digest.hex()[:12]))


def _who_differs(group: ProcessGroup, ranks: list[int], name: str, short: str) -> str:
    values: list[str] = [""] * len(ranks)
    dist.all_gather_object(values, short, group=group)
    common, votes = Counter(values).most_common(1)[0]
    others = [(rank, text) for rank, text in zip(ranks, values, strict=True) if text != common]
    named = ", ".join(f"rank {rank} ({text})" for rank, text in others[:_LISTED])
    named += ", …" if len(others) > _LISTED else ""
    return f"{name} is not the same on all ranks: {named} against {common} on {votes} of {len(ranks)} ranks"
