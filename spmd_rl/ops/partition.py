"""Divide items of known cost among slots: the reference in Python, and the choice between it and the kernel."""

from __future__ import annotations

import heapq

import numpy as np
import torch
from numpy.typing import NDArray

from spmd_rl.ops.library import built

GOOD_ENOUGH = 1.0002  # max / mean at which exchanging pairs stops


def partition(costs_N: NDArray[np.float64], slots: int, equal_counts: bool = False) -> NDArray[np.int64]:
    """int64 [N]: a slot in 0..slots-1 for each item of cost float64 [N] >= 0; see `data.balance.balance`."""
    if slots < 1:
        raise ValueError(f"items cannot be divided among {slots} slots")
    costs = np.ascontiguousarray(costs_N, dtype=np.float64)
    if not built():
        return partition_reference(costs, slots, equal_counts)
    return torch.ops.spmd_rl.partition(torch.from_numpy(costs), slots, equal_counts).numpy()


def partition_reference(costs_N: NDArray[np.float64], slots: int, equal_counts: bool) -> NDArray[np.int64]:
    """The same numbers as the kernel: each float64 sum is made in the same order."""
    slot_N = np.zeros(len(costs_N), dtype=np.int64)
    order = np.argsort(-costs_N, kind="stable")
    least, extra = divmod(len(costs_N), slots)
    loads = [0.0] * slots
    members: list[list[int]] = [[] for _ in range(slots)]
    heap = [(0.0, 0, slot) for slot in range(slots)]
    for item in order.tolist():
        load, count, slot = heapq.heappop(heap)
        while equal_counts and count >= least + (extra > 0):  # the slot is full
            load, count, slot = heapq.heappop(heap)
        if count == least:
            extra -= 1
        loads[slot] = load + float(costs_N[item])
        members[slot].append(item)
        heapq.heappush(heap, (loads[slot], count + 1, slot))
    _exchange_pairs(costs_N.tolist(), loads, members, equal_counts)
    for slot, items in enumerate(members):
        slot_N[items] = slot
    return slot_N


def _exchange_pairs(costs: list[float], loads: list[float], members: list[list[int]], equal_counts: bool) -> None:
    """Between the most and the least loaded slot, move one item or swap two, so as to halve their difference."""
    slots = len(loads)
    total = 0.0
    for load in loads:  # not `sum`, which newer Pythons round differently
        total += load
    mean = total / slots
    for _ in range(2 * slots):
        high = max(range(slots), key=lambda s: (loads[s], -s))
        low = min(range(slots), key=lambda s: (loads[s], s))
        gap = loads[high] - loads[low]
        if loads[high] <= GOOD_ENOUGH * mean:
            return
        best, give, take = gap, -1, -1  # best: how far from gap / 2 the moved cost is, doubled
        for place, item in enumerate(members[high]):
            for other in range(0 if equal_counts else -1, len(members[low])):
                moved = costs[item] - (costs[members[low][other]] if other >= 0 else 0.0)
                if abs(gap - 2 * moved) < best:
                    best, give, take = abs(gap - 2 * moved), place, other
        if give < 0:
            return
        item = members[high].pop(give)
        moved = costs[item]
        if take >= 0:
            back = members[low].pop(take)
            moved -= costs[back]
            members[high].append(back)
        members[low].append(item)
        loads[high] -= moved
        loads[low] += moved
