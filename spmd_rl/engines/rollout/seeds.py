"""Randomness that depends on a sample's identity alone: never on the rank, the batch or the number of ranks."""

from __future__ import annotations

import struct
from hashlib import blake2b


def sample_seed(run_seed: int, purpose: str, epoch: int, prompt: int, sample: int) -> int:
    """63-bit seed of one sample; the same on every machine and in every version of Python.

    purpose: what the sample is for (`train`, `eval`), so that evaluation never repeats training's random numbers.
    """
    identity = f"{run_seed}/{purpose}/{epoch}/{prompt}/{sample}".encode()
    return int.from_bytes(blake2b(identity, digest_size=8).digest(), "little") >> 1


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1), of 53 bits, that draws token `position` of the response with this seed."""
    digest = blake2b(struct.pack("<QQ", seed, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def continued_seed(seed: int, position: int) -> int:
    """63-bit seed for the rest of a response, from token `position` on, in an engine that counts from the seed."""
    digest = blake2b(struct.pack("<QQ", seed, position), digest_size=8, person=b"continued").digest()
    return int.from_bytes(digest, "little") >> 1
