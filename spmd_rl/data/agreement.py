"""The opening of an exchange: all ranks learn whether all mean the same, then everybody's metadata."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from spmd_rl.comm.transport import Channel
from spmd_rl.data.batch import Batch
from spmd_rl.data.buffers import NO_LEASE
from spmd_rl.data.layout import Layout
from spmd_rl.data.metadata import (
    HEADER_WORDS,
    OFFER,
    Header,
    Int64,
    Metadata,
    Schema,
    decode_rows,
    digest,
    encode_rows,
    row_stride,
)

_SHARED = [0, 2, 3, 6]  # words of the header that are equal where all have columns, the last being 0: the usual case
TEXT_WORDS = 64  # of 8 bytes: room for a description or a fault when ranks disagree


class ExchangeError(RuntimeError):
    """An exchange that cannot be carried out. Raised on every rank that takes part in it."""


class Claim:
    """What one rank brings: its description of the exchange, and its batch if it is in the source. offer_W: words of
    the memory that others may write its results into."""

    def __init__(
        self, description: str, batch: Batch, source: Layout, rank: int, offer_W: Int64 = NO_LEASE.words_W
    ) -> None:
        self.description = description
        self.offer_W = offer_W
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
            schema_bytes=len(schema.encoded) if schema.columns else 0,
            ids=digest(batch.ids.numpy().tobytes()) if source.replicas > 1 else 0,
        )
        if schema.columns:
            self.schema = schema
        if slot is not None and source.heads[slot] == rank:
            self.rows = torch.from_numpy(rows)


@dataclass(frozen=True)
class Known:
    """What all ranks of a channel remember of the last exchange of an edge. room: bytes of rows that travel with the
    header, so that an exchange no larger than the last one costs a single round."""

    schema: Schema
    room: int = 0


NOTHING_KNOWN = Known(Schema(()))


@dataclass(frozen=True)
class Agreed:
    """replicas_hold: every rank of a source slot has the slot's samples; offers_NW: what each rank offered; bytes: of
    metadata that came in; known: for the next exchange of this edge."""

    metadata: Metadata
    replicas_hold: bool
    offers_NW: Int64
    bytes: int
    known: Known


def agree(channel: Channel, claim: Claim, source: Layout, known: Known) -> Agreed:
    """Compare the ranks' claims and gather the metadata of all samples.

    known: from the edge's last exchange over this channel. Raises ExchangeError on every rank where any rank brings a
    fault, or two disagree.
    """
    message = np.zeros(HEADER_WORDS + known.room // 8, dtype=np.int64)
    message[:HEADER_WORDS] = claim.header.encode(claim.offer_W)
    if claim.rows.numel() <= known.room:
        message[HEADER_WORDS:].view(np.uint8)[: claim.rows.numel()] = claim.rows.numpy()
    words = channel.all_gather(message)
    head_places = _places(channel.ranks, source.heads)
    shared = words[:, _SHARED]
    if (shared != shared[0]).any() or shared[0, -1]:
        _check(channel, claim, words, head_places)
    hold = source.replicas == 1 or _replicas_hold(channel, words, source)
    schema = _schema(channel, claim, words, known.schema)

    samples = words[head_places, 1]
    sizes = np.zeros(len(channel.ranks), dtype=np.int64)
    sizes[head_places] = samples * row_stride(len(schema.columns))
    largest, received = int(sizes.max()), words.nbytes
    if largest <= known.room:
        rows = _rows_beside_headers(words, sizes, head_places)
    else:
        rows = _in_slot_order(channel.all_gather_bytes(claim.rows, sizes).numpy(), sizes, head_places)
        received += rows.nbytes
    # Padding all ranks to the largest must not multiply the bytes: not where one rank holds most samples.
    even = largest * len(sizes) <= 2 * int(sizes.sum()) + 4096 * len(sizes)
    room = (largest + largest // 8 + 63) // 64 * 64 if even else 0
    return Agreed(decode_rows(rows, schema, samples), hold, words[:, OFFER], received, Known(schema, room))


@functools.lru_cache(maxsize=256)
def _places(ranks: tuple[int, ...], some: tuple[int, ...]) -> Int64:
    """int64: where in `ranks` each of `some` stands."""
    place_of = {rank: place for place, rank in enumerate(ranks)}
    return np.array([place_of[rank] for rank in some])


def _check(channel: Channel, claim: Claim, words: np.ndarray, head_places: np.ndarray) -> None:
    """Raises ExchangeError for a rank's own fault, and where ranks mean different exchanges or have other columns."""
    static, samples, columns, schemas, _, _, faults = words.T[:7]
    if faults.any():
        texts = _texts(channel, claim.fault)
        first = int(np.flatnonzero(faults)[0])
        others = int((faults != 0).sum()) - 1
        more = f" (and {others} more ranks)" if others else ""
        raise ExchangeError(f"rank {channel.ranks[first]}: {texts[first]}{more}")
    if (static != static[0]).any():
        raise ExchangeError(_disagreement(channel, _texts(channel, claim.description)))
    with_columns = np.flatnonzero(columns)
    odd = with_columns[schemas[with_columns] != schemas[with_columns[:1]]]
    bare = head_places[(samples[head_places] > 0) & (columns[head_places] == 0)] if with_columns.size else odd
    if odd.size or bare.size:
        texts = _texts(channel, claim.schema.encoded.decode() if claim.schema else "no columns")
        places = int(with_columns[0]), int(odd[0]) if odd.size else int(bare[0])
        one, two = (f"rank {channel.ranks[place]} has {texts[place]}" for place in places)
        raise ExchangeError(f"columns differ: {one}, {two}")


def _schema(channel: Channel, claim: Claim, words: np.ndarray, known: Schema) -> Schema:
    """The columns of the exchange: those of the edge's last one, or broadcast by the first rank that has any."""
    root = int(np.argmax(words[:, 2] > 0))
    if not words[root, 2]:
        return Schema(())
    header = Header.decode(words[root])
    if known.columns and known.digest == header.schema:
        return known
    data = torch.zeros(header.schema_bytes, dtype=torch.uint8)
    if claim.schema is not None:
        data = torch.frombuffer(bytearray(claim.schema.encoded), dtype=torch.uint8)
    channel.broadcast(data, channel.ranks[root])
    return Schema.decode(data.numpy().tobytes())


def _replicas_hold(channel: Channel, words: np.ndarray, source: Layout) -> bool:
    """Raises ExchangeError where a replica has other samples than its head (none at all is allowed)."""
    places = _places(channel.ranks, source.ranks).reshape(source.slots, source.replicas)
    samples, ids = words[places, 1], words[places, 5]
    same = (samples == samples[:, :1]) & (ids == ids[:, :1])
    wrong = np.argwhere(~same & (samples > 0))
    if wrong.size:
        slot, replica = wrong[0].tolist()
        head, other = channel.ranks[places[slot, 0]], channel.ranks[places[slot, replica]]
        raise ExchangeError(f"ranks {head} and {other} hold different samples, but both serve slot {slot} of {source}")
    return bool(same.all())


def _rows_beside_headers(words: np.ndarray, sizes_N: np.ndarray, head_places: np.ndarray) -> np.ndarray:
    """uint8: the rows of the source's slots, cut out of the padded messages."""
    padded = np.ascontiguousarray(words[head_places, HEADER_WORDS:]).view(np.uint8)
    sizes = sizes_N[head_places]
    if (sizes == padded.shape[1]).all():
        return padded.reshape(-1)
    return padded[np.arange(padded.shape[1]) < sizes[:, None]]


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
