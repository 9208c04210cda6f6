"""The opening of an exchange: all ranks learn whether all mean the same, then everybody's metadata."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from spmd_rl.comm.transport import Channel
from spmd_rl.data.batch import Batch
from spmd_rl.data.layout import Layout
from spmd_rl.data.metadata import HEADER_WORDS, Header, Metadata, Schema, decode_rows, digest, encode_rows, row_stride

TEXT_WORDS = 64  # of 8 bytes: room for a description or a fault when ranks disagree


class ExchangeError(RuntimeError):
    """An exchange that cannot be carried out. Raised on every rank that takes part in it."""


class Claim:
    """What one rank brings: its description of the exchange, and its batch if it is in the source."""

    def __init__(self, description: str, batch: Batch, source: Layout, rank: int) -> None:
        self.description = description
        slot = source.slot_of(rank)
        self.fault = ""
        self.schema: Schema | None = None
        self.rows = torch.empty(0, dtype=torch.uint8)
        header = Header(static=digest(description.encode()))
        try:
            if slot is None and len(batch):
                raise ValueError(f"{len(batch)} samples come from a rank that is not in the source {source}")
            schema = Schema.of(batch)
            rows = encode_rows(batch)
        except ValueError as fault:
            self.fault = str(fault)
            self.header = Header(static=header.static, fault=1)
            return
        self.header = Header(
            static=header.static,
            samples=len(batch),
            columns=len(schema.columns),
            schema=schema.digest if schema.columns else 0,
            schema_bytes=len(schema.encode()) if schema.columns else 0,
            ids=digest(batch.ids.numpy().tobytes()) if source.replicas > 1 else 0,
        )
        if schema.columns:
            self.schema = schema
        if slot is not None and source.heads[slot] == rank:
            self.rows = torch.from_numpy(rows)


@dataclass(frozen=True)
class Agreed:
    """replicas_hold: every rank of a source slot has the slot's samples; bytes: of metadata that came in."""

    metadata: Metadata
    replicas_hold: bool
    bytes: int


def agree(channel: Channel, claim: Claim, source: Layout, known: Schema | None) -> Agreed:
    """Compare the ranks' claims and gather the metadata of all samples.

    known: the schema of the edge's last exchange, the same on all ranks; another one is broadcast first.
    Raises ExchangeError on every rank where any rank brings a fault, or two disagree.
    """
    words = channel.all_gather(claim.header.encode())
    static, samples, columns, schemas, _, _, faults, _ = words.T
    if faults.any():
        texts = _texts(channel, claim.fault)
        first = int(np.flatnonzero(faults)[0])
        others = int((faults != 0).sum()) - 1
        more = f" (and {others} more ranks)" if others else ""
        raise ExchangeError(f"rank {channel.ranks[first]}: {texts[first]}{more}")
    if (static != static[0]).any():
        raise ExchangeError(_disagreement(channel, _texts(channel, claim.description)))

    place_of = {rank: place for place, rank in enumerate(channel.ranks)}
    head_places = np.array([place_of[rank] for rank in source.heads])
    head_samples = samples[head_places]
    hold = _replicas_hold(channel, words, source, place_of)
    with_columns = np.flatnonzero(columns)
    bare = head_places[(head_samples > 0) & (columns[head_places] == 0)]
    if not with_columns.size:
        schema = Schema(())
    else:
        root = int(with_columns[0])
        odd = with_columns[schemas[with_columns] != schemas[root]]
        if odd.size or bare.size:
            other = int(odd[0]) if odd.size else int(bare[0])
            texts = _texts(channel, claim.schema.encode().decode() if claim.schema else "no columns")
            one, two = (f"rank {channel.ranks[place]} has {texts[place]}" for place in (root, other))
            raise ExchangeError(f"columns differ: {one}, {two}")
        schema = _share_schema(channel, claim.schema, known, Header.decode(words[root]), channel.ranks[root])
    sizes = np.zeros(len(channel.ranks), dtype=np.int64)
    sizes[head_places] = head_samples * row_stride(len(schema.columns))
    rows = _in_slot_order(channel.all_gather_bytes(claim.rows, sizes).numpy(), sizes, head_places)
    received = int(sizes.sum()) + HEADER_WORDS * 8 * len(channel.ranks)
    return Agreed(decode_rows(rows, schema, head_samples), hold, received)


def _share_schema(channel: Channel, own: Schema | None, known: Schema | None, header: Header, root: int) -> Schema:
    """The schema that `header` announces: the edge's last one, or broadcast by `root`."""
    if known is not None and known.digest == header.schema:
        return known
    data = torch.zeros(header.schema_bytes, dtype=torch.uint8)
    if own is not None and own.digest == header.schema:
        data = torch.frombuffer(bytearray(own.encode()), dtype=torch.uint8)
    channel.broadcast(data, root)
    return Schema.decode(data.numpy().tobytes())


def _replicas_hold(channel: Channel, words: np.ndarray, source: Layout, place_of: dict[int, int]) -> bool:
    """Raises ExchangeError where a replica has other samples than its head (none at all is allowed)."""
    if source.replicas == 1:
        return True
    places = np.array([place_of[rank] for rank in source.ranks]).reshape(source.slots, source.replicas)
    samples, ids = words[places, 1], words[places, 5]
    same = (samples == samples[:, :1]) & (ids == ids[:, :1])
    wrong = np.argwhere(~same & (samples > 0))
    if wrong.size:
        slot, replica = wrong[0].tolist()
        head, other = channel.ranks[places[slot, 0]], channel.ranks[places[slot, replica]]
        raise ExchangeError(f"ranks {head} and {other} hold different samples, but both serve slot {slot} of {source}")
    return bool(same.all())


def _in_slot_order(data: np.ndarray, sizes_N: np.ndarray, head_places: np.ndarray) -> np.ndarray:
    """The gathered rows come in the order of ranks; slots may be placed on ranks in any order."""
    if (np.diff(head_places) > 0).all():
        return data
    starts = np.cumsum(sizes_N) - sizes_N
    return np.concatenate([data[starts[place] : starts[place] + sizes_N[place]] for place in head_places.tolist()])


def _texts(channel: Channel, text: str) -> list[str]:
    """A short text of every rank; only after something went wrong."""
    raw = text.encode()[: TEXT_WORDS * 8].ljust(TEXT_WORDS * 8, b"\0")
    words = channel.all_gather(np.frombuffer(raw, dtype=np.int64).copy())
    return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in words]


def _disagreement(channel: Channel, texts: Sequence[str]) -> str:
    """The minority's descriptions beside the most frequent one."""
    by_text: dict[str, list[int]] = {}
    for rank, text in zip(channel.ranks, texts, strict=True):
        by_text.setdefault(text, []).append(rank)
    common, *others = sorted(by_text, key=lambda text: (-len(by_text[text]), by_text[text][0]))
    parts = [f"ranks {by_text[other]} mean '{other}'" for other in others[:3]]
    return f"the ranks disagree: {'; '.join(parts)}; ranks {by_text[common]} mean '{common}'"
