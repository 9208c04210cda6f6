"""Which slot works on which sample, so that all slots have the same amount of work. Pure and deterministic."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spmd_rl.ops.partition import partition

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Balance:
    """What the slots of the receiving stage should have equal amounts of.

    A sample of length L costs linear * L + quadratic * L**2 (the quadratic part: attention). keep_groups: all samples
    of one (epoch, prompt) stay together; equal_counts: the same number of samples (of groups, with keep_groups) in
    every slot, give or take one; slack: samples that already sit in the right layout are left there while the most
    loaded slot has at most `slack` times the mean.
    """

    linear: float = 1.0
    quadratic: float = 0.0
    keep_groups: bool = True
    equal_counts: bool = False
    slack: float = 1.02

    def costs(self, lengths_S: Int64) -> Float64:
        """float64 [S] from the lengths of samples."""
        lengths = lengths_S.astype(np.float64)
        return self.linear * lengths + self.quadratic * (lengths * lengths)


def balance(costs_S: Float64, groups_S: Int64 | None, slots: int, equal_counts: bool = False) -> Int64:
    """int64 [S]: a slot for each sample, the largest slot as small as a good heuristic gets it.

    costs_S: float64, finite and not negative; groups_S: int64 group numbers in 0..G-1 of samples that must share a
    slot, or None; equal_counts: slots receive equally many items (groups, where given), give or take one.
    Longest processing time first (R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969), then exchanges
    of pairs between the most and the least loaded slots. Equal input gives equal output on every machine.
    Raises ValueError for costs that are negative or not finite.
    """
    if costs_S.size and not (np.isfinite(costs_S).all() and costs_S.min() >= 0):
        raise ValueError("costs must be finite and not negative")
    if groups_S is None:
        return partition(costs_S, slots, equal_counts)
    items = int(groups_S.max()) + 1 if groups_S.size else 0
    group_costs = np.bincount(groups_S, weights=costs_S, minlength=items).astype(np.float64)
    return partition(group_costs, slots, equal_counts)[groups_S]


def imbalance(costs_S: Float64, slot_S: Int64, slots: int) -> float:
    """Load of the most loaded slot divided by the mean load; 1 where there is no load at all."""
    loads = np.bincount(slot_S, weights=costs_S, minlength=slots)
    mean = float(np.cumsum(loads)[-1]) / slots  # added up in order, as the kernel does
    return float(loads.max()) / mean if mean > 0 else 1.0
