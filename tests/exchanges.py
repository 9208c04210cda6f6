"""Exchanges for tests: random samples whose bytes tell what they are, and whole worlds run in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from zlib import crc32

import numpy as np
import torch

from spmd_rl.data.assignment import Assignment, assign
from spmd_rl.data.balance import Balance
from spmd_rl.data.batch import Batch, Column
from spmd_rl.data.exchange_plan import Messages, Part, plan_delivery, plan_messages
from spmd_rl.data.layout import Layout
from spmd_rl.data.metadata import WIRE_DTYPES, Schema, decode_rows, encode_rows
from spmd_rl.ops.rows import deliver
from spmd_rl.ops.segments import as_bytes, copy_segments

COLUMNS: dict[str, tuple[str, tuple[int, ...]]] = {
    "prompt": ("int32", ()),
    "row": ("uint8", ()),
    "logprob": ("float32", ()),
    "hidden": ("bfloat16", (3,)),
    "mask": ("bool", ()),
    "version": ("int64", ()),
    "nothing": ("float64", (0,)),
}


def make_samples(
    ids: Sequence[tuple[int, int, int]], columns: Mapping[str, tuple[str, tuple[int, ...]]], longest: int = 9
) -> Batch:
    """A batch whose contents follow from the identities alone, whoever makes it; every third row is empty."""
    made = {}
    for name, (dtype, inner) in sorted(columns.items()):
        rows = []
        for sample in ids:
            seed = hash((*sample, crc32(name.encode()))) & 0x7FFFFFFF
            rng = np.random.RandomState(seed)
            length = 1 if name == "version" else int(rng.randint(0, longest + 1)) * (seed % 3 > 0)
            width = WIRE_DTYPES[dtype].itemsize * int(np.prod(inner))
            noise = rng.randint(0, 2 if dtype == "bool" else 256, length * width)
            raw = torch.tensor(noise.tolist(), dtype=torch.uint8)
            rows.append(raw.view(WIRE_DTYPES[dtype]).reshape(length, *inner))
        made[name] = (
            Column.from_rows(rows, WIRE_DTYPES[dtype])
            if rows
            else Column(torch.empty(0, *inner, dtype=WIRE_DTYPES[dtype]), torch.empty(0, dtype=torch.int64))
        )
    return Batch(torch.tensor(list(ids), dtype=torch.int64).reshape(-1, 3), made)


def same_bytes(one: Batch, two: Batch) -> bool:
    """Equal identities in equal order, equal columns, equal bits (also of NaN)."""
    if not torch.equal(one.ids, two.ids) or set(one.columns) != set(two.columns):
        return False
    return all(
        one[name].values.dtype == two[name].values.dtype
        and one[name].values.shape == two[name].values.shape
        and torch.equal(one[name].lengths, two[name].lengths)
        and torch.equal(as_bytes(one[name].values.contiguous()), as_bytes(two[name].values.contiguous()))
        for name in one.columns
    )


def virtual_exchange(
    batches: Mapping[int, Batch],
    source: Layout,
    target: Layout,
    rule: Balance | None,
    cost: tuple[str, ...] = (),
    follow: Assignment | None = None,
    replicas_hold: bool = True,
) -> tuple[dict[int, Batch], Assignment, dict[int, Messages]]:
    """All ranks' plans carried out in this process. batches: of every source rank. The message that i plans to send
    to j must be the one that j plans to receive from i."""
    union = sorted({*source.ranks, *target.ranks})
    heads = [batches[rank] for rank in source.heads]
    schema = next((Schema.of(batch) for batch in heads if batch.columns), Schema(()))
    rows = np.concatenate([encode_rows(batch) for batch in heads])
    metadata = decode_rows(rows, schema, np.array([len(batch) for batch in heads]))
    decision = assign(metadata, source, target, rule, cost, follow)
    parts = {r: Part(metadata, decision, source, target, r, replicas_hold) for r in union}
    plans = {r: plan_messages(part, union) for r, part in parts.items()}
    own = {
        r: [as_bytes(column.values.contiguous()) for _, column in sorted(batches.get(r, Batch.empty()).columns.items())]
        for r in union
    }
    moves = parts[union[0]].moves
    messages: dict[tuple[int, int], torch.Tensor] = {}
    for r in union:
        send = torch.full((int(plans[r].send_N.sum()),), 0xA5, dtype=torch.uint8)
        copy_segments(own[r], send, plans[r].pack)
        assert moves or send.numel() == 0
        for peer, part in zip(union, send.split(plans[r].send_N.tolist()), strict=True):
            messages[r, peer] = part
    results, arenas = {}, {}
    for r in union:
        incoming = [messages[peer, r] for peer in union]
        assert [part.numel() for part in incoming] == plans[r].recv_N.tolist()
        result = plans[r].result
        if result is None:
            results[r] = Batch.empty()
            continue
        arenas[r] = torch.full((result.bytes,), 0x5A, dtype=torch.uint8)
        if plans[r].share_from is None:
            copy_segments(own[r], arenas[r], plans[r].keep)
            copy_segments(incoming, arenas[r], plans[r].unpack)
    for r, plan in plans.items():
        for other in plan.share_with:
            assert plans[other].share_from == r
            arenas[other].copy_(arenas[r])
    for r, arena in arenas.items():
        result = plans[r].result
        assert result is not None
        results[r] = batches[r] if plans[r].in_place else result.batch(arena)
    written = _written(parts, own)
    for r, arena in arenas.items():
        assert plans[r].in_place or torch.equal(written[r], arena), f"rank {r}: the two ways differ"
    return results, decision.assignment, plans


def _written(parts: Mapping[int, Part], own: Mapping[int, list[torch.Tensor]]) -> dict[int, torch.Tensor]:
    """What the same exchange leaves in the memory for results where ranks write into each other's."""
    plans = {r: plan_delivery(part) for r, part in parts.items()}
    schema = parts[min(parts)].metadata.schema
    arenas = {
        r: torch.full((0 if plan.result is None else plan.result.bytes,), 0x5A, dtype=torch.uint8)
        for r, plan in plans.items()
    }
    for r, plan in plans.items():
        assert plan.crosses == plans[min(parts)].crosses
        if not len(plan.slot_S):
            continue
        for ranks in plan.turns:
            assert plan.crosses or {ranks[slot] for slot in plan.slot_S} <= {r}
            targets = [arenas[rank] for rank in ranks]
            deliver(own[r], targets, plan.lengths_SC, schema.row_bytes, plan.slot_S, plan.place_SC)
    return arenas
