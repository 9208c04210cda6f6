"""All-gather through memory that all ranks of a channel map: each leaves its bytes, they meet, each reads all.

The rounds of a loopback network cost a wake-up per pair of ranks; with more ranks than cores that is most of the time
of an exchange. Here a round is one meeting.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.comm.transport import TransportError
from spmd_rl.ops.meet import meet

Int64 = NDArray[np.int64]
Bytes = NDArray[np.uint8]

SHARE = 1 << 20  # bytes that a rank can leave; of the memory, pages that were never written to cost nothing
_LINE = 64  # bytes of a cache line
_PARITIES = 2  # a rank writes round r + 2 where r was: it has met all in r + 1, so all have read r


class Board:
    """One rank's use of it. memory: uint8, of `Board.size` bytes, zero at first, the same on all ranks."""

    def __init__(self, memory: Tensor, ranks: tuple[int, ...], place: int, timeout_s: float) -> None:
        count = len(ranks)
        self._ranks, self._place, self._timeout_s = ranks, place, timeout_s
        self._counter = memory[:4].view(torch.int32)
        rounds_end = _LINE * (1 + count)
        bytes_ = memory.numpy()
        self._rounds = bytes_[_LINE:rounds_end].view(np.int64)[:: _LINE // 8]
        self._shares = bytes_[rounds_end:].reshape(_PARITIES, count, SHARE)
        self._round = 0

    @staticmethod
    def size(count: int) -> int:
        return _LINE * (1 + count) + _PARITIES * count * SHARE

    def all_gather(self, data: Tensor, sizes_N: Int64) -> Tensor:
        """uint8 [sum(sizes)]: every rank's bytes, in the order of the ranks; no size may be above SHARE.

        Raises TransportError, naming the ranks that did not come, after the time limit.
        """
        shares = self._meet(data.numpy())
        parts = [share[:size] for share, size in zip(shares, sizes_N.tolist(), strict=True)]
        return torch.from_numpy(np.concatenate(parts))

    def all_gather_equal(self, data_B: Bytes) -> Bytes:
        """uint8 [N, B]: the same number of bytes from every rank, at most SHARE; otherwise as `all_gather`."""
        return self._meet(data_B)[:, : len(data_B)].copy()

    def _meet(self, data: Bytes) -> Bytes:
        """uint8 [N, SHARE]: what all ranks have left in this round; valid until the next one."""
        shares = self._shares[self._round % _PARITIES]
        shares[self._place, : len(data)] = data
        self._round += 1
        self._rounds[self._place] = self._round
        if not meet(self._counter, self._round * len(self._ranks), self._timeout_s):
            behind = np.flatnonzero(self._rounds < self._round).tolist()
            names = ", ".join(str(self._ranks[place]) for place in behind)
            raise TransportError(
                f"all_gather not complete within {self._timeout_s:g} s on rank {self._ranks[self._place]}; "
                f"rank{'s' if len(behind) > 1 else ''} {names} did not come"
            )
        return shares
