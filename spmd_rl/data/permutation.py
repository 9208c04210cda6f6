"""A seeded pseudo-random order of any number of rows, in constant memory.

A balanced Feistel network is a bijection over [0, 4^h) whatever its round function is (Luby and Rackoff 1988);
following a value until it falls below `size` (cycle walking, Black and Rogaway 2002) restricts it to [0, size).
Every process computes the place of any row by itself: nothing is stored and nothing is sent.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8  # 4 make a network indistinguishable from random for large domains; small ones need more
WORD = 0xFFFF_FFFF_FFFF_FFFF


def mix(*values: int) -> int:
    """A 64-bit hash of integers (each taken modulo 2^64); the same on every machine and in every version."""
    state = 0
    for value in values:
        state = _scramble((state + 0x9E3779B97F4A7C15 + _scramble(value & WORD)) & WORD)
    return state


class Permutation:
    """A bijection of [0, size), different for every (seed, epoch).

    `permutation(index_K)` maps int64 [K] to int64 [K]. Raises ValueError for a negative size and IndexError for an
    index outside [0, size).
    """

    def __init__(self, size: int, seed: int, epoch: int = 0) -> None:
        if size < 0:
            raise ValueError(f"size {size}: at least 0 is wanted")
        self.size = size
        self._half = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))  # bits of each half of an index
        self._mask = np.uint64((1 << int(self._half)) - 1)
        self._keys = [np.uint64(mix(seed, epoch, r)) for r in range(ROUNDS)]

    def __call__(self, index_K: NDArray[np.int64]) -> NDArray[np.int64]:
        index_K = np.asarray(index_K, dtype=np.int64)
        if index_K.size and not 0 <= index_K.min() <= index_K.max() < self.size:
            raise IndexError(f"index outside [0, {self.size})")
        out_K = self._network(index_K.astype(np.uint64))
        # The domain is less than 4 * size, so this ends after a few turns.
        while (outside := np.flatnonzero(out_K >= np.uint64(self.size))).size:
            out_K[outside] = self._network(out_K[outside])
        return out_K.astype(np.int64)

    def _network(self, value_K: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = value_K >> self._half, value_K & self._mask
        for key in self._keys:
            left, right = right, left ^ (_scramble_array(right + key) & self._mask)
        return (left << self._half) | right


def _scramble(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)


def _scramble_array(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
