"""Which prompt stands at which position of an epoch: a pure function of numbers, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from spmd_rl.data.permutation import Permutation, mix


class Order:
    """The order of all epochs over several sources.

    starts: number of the first row of each source, and the one behind the last; overlong: int64, for each source the
    rows that are left out, ascending, numbered as in `starts`.
    weights: a source of weight w is gone through w times per epoch (0.5: one half now, the other half in the next;
    at least one row). shuffle: each epoch has an order of its own, drawn from seed and epoch; false: row order.
    values_N: one number per row, in whose ascending order each epoch runs (curriculum), equal ones as `shuffle` says.

    A prompt's index is its row number; where an epoch takes a row more than once, the number of all rows is added
    for each further time, so that (epoch, prompt index) names a group and `index % rows` the row.
    """

    def __init__(
        self,
        starts: Sequence[int],
        overlong: Sequence[NDArray[np.int64]],
        weights: Sequence[float],
        seed: int,
        shuffle: bool,
        values_N: NDArray[np.float64] | None = None,
    ) -> None:
        self._starts, self._weights, self._values_N = starts, weights, values_N
        self._seed, self._shuffle = seed, shuffle
        self._usable = [starts[i + 1] - starts[i] - out.size for i, out in enumerate(overlong)]
        # The k-th usable row of a source is row k plus the overlong ones before it: those d with d - rank(d) <= k.
        self._skips = [out - starts[i] - np.arange(out.size) for i, out in enumerate(overlong)]
        self._taken = [max(1, round(w * n)) if n else 0 for w, n in zip(weights, self._usable, strict=True)]
        self._bounds = np.array([0, *accumulate(self._taken)])
        self._curriculum = lru_cache(maxsize=2)(self._sorted_epoch)
        self.length = sum(self._taken)  # prompts in an epoch

    def prompts(self, epoch: int, first: int, last: int) -> NDArray[np.int64]:
        """int64 [last - first]: the prompt indices at these positions of the epoch."""
        if self._values_N is not None:
            return self._curriculum(epoch)[first:last]
        return self._drawn(epoch, np.arange(first, last))

    def _drawn(self, epoch: int, position_K: NDArray[np.int64]) -> NDArray[np.int64]:
        place_K = Permutation(self.length, self._seed, epoch)(position_K) if self._shuffle else position_K
        prompt_K = np.empty_like(place_K)
        source_K = np.searchsorted(self._bounds, place_K, side="right") - 1
        for source in np.unique(source_K):
            here = source_K == source
            prompt_K[here] = self._of_source(int(source), epoch, place_K[here] - self._bounds[source])
        return prompt_K

    def _of_source(self, source: int, epoch: int, place_K: NDArray[np.int64]) -> NDArray[np.int64]:
        """Prompt indices of places within one source's part of an epoch."""
        usable, begun = self._usable[source], epoch * self._taken[source]
        if self._weights[source] == 1:
            usable_K, again_K = place_K, np.zeros_like(place_K)
        else:
            # The epochs follow each other on an endless repetition of the source; each pass has its own order.
            pass_K, usable_K = np.divmod(begun + place_K, usable)
            again_K = pass_K - begun // usable
            if self._shuffle:
                for number in np.unique(pass_K):
                    here = pass_K == number
                    usable_K[here] = Permutation(usable, mix(self._seed, source + 1), int(number))(usable_K[here])
        row_K = usable_K + np.searchsorted(self._skips[source], usable_K, side="right")
        return self._starts[source] + row_K + again_K * self._starts[-1]

    def _sorted_epoch(self, epoch: int) -> NDArray[np.int64]:
        assert self._values_N is not None
        prompt_M = self._drawn(epoch, np.arange(self.length))
        return prompt_M[np.argsort(self._values_N[prompt_M % self._starts[-1]], kind="stable")]
