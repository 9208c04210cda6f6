"""Who sends which bytes to whom: every byte of a replica's weights is sent once, by one trainer. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spmd_rl.weights.layout import Layout

WIDEST = 8  # trainers that share the sending to one replica: more connections bring no more speed


@dataclass(frozen=True)
class Bucket:
    """Bytes [begin, end) of the layout, sent as one message by the trainer in this place among the replica's."""

    begin: int
    end: int
    place: int


@dataclass(frozen=True)
class Cut:
    """Bytes [source, source + size) of one weight, which lie at `target` in the sender's memory."""

    source: int
    size: int
    target: int


@dataclass(frozen=True)
class Sources:
    """The trainers that send to one replica, by their rank; `server`: the one of them that the replica asks."""

    trainers: tuple[int, ...]
    server: int


def sources(trainers: Sequence[int], replica: int) -> Sources:
    """Who serves replica number `replica`. The trainers are divided into groups of equal size, at most `WIDEST`, each
    of which holds all weights; replicas take the groups in turn, and within a group the servers in turn."""
    width = max(n for n in range(1, min(WIDEST, len(trainers)) + 1) if len(trainers) % n == 0)
    groups = len(trainers) // width
    first = replica % groups * width
    group = tuple(trainers[first : first + width])
    return Sources(group, group[replica // groups % width])


def buckets(size: int, bucket_bytes: int, width: int) -> tuple[Bucket, ...]:
    """`size` bytes cut into buckets, which the `width` trainers of a group take in turn, in the order of sending."""
    begins = range(0, size, bucket_bytes)
    return tuple(Bucket(b, min(b + bucket_bytes, size), number % width) for number, b in enumerate(begins))


def cuts(layout: Layout, own: Sequence[Bucket]) -> list[list[Cut]]:
    """For every weight, in order: what of it goes where in memory that holds the buckets `own` one behind the other."""
    found: list[list[Cut]] = []
    first, target_of_first = 0, 0
    for entry in layout.entries:
        while first < len(own) and own[first].end <= entry.begin:
            target_of_first += own[first].end - own[first].begin
            first += 1
        here, target = [], target_of_first
        for bucket in own[first:]:
            if bucket.begin >= entry.begin + entry.size:
                break
            begin = max(bucket.begin, entry.begin)
            end = min(bucket.end, entry.begin + entry.size)
            here.append(Cut(begin - entry.begin, end - begin, target + begin - bucket.begin))
            target += bucket.end - bucket.begin
        found.append(here)
    return found
