"""Which slot gets which sample: a pure function of the gathered metadata, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from spmd_rl.data.balance import Balance, balance, imbalance
from spmd_rl.data.layout import Layout
from spmd_rl.data.metadata import Metadata, digest
from spmd_rl.ops.divide import can_divide, divide_kernel

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Assignment:
    """T samples on the slots of a layout. ids_T3: int64, ascending; slot_T: int64, the slot of each.

    Within a slot the samples stand in ascending order of identity, whatever the world they came from.
    """

    layout: Layout
    ids_T3: Int64
    slot_T: Int64

    def __len__(self) -> int:
        return len(self.slot_T)

    def of_slot(self, slot: int) -> Int64:
        """int64 [S, 3]: identities in that slot, in order."""
        return self.ids_T3[self.slot_T == slot]

    @cached_property
    def digest(self) -> int:
        layout = f"{self.layout.ranks} {self.layout.replicas}".encode()
        return digest(layout + self.ids_T3.tobytes() + self.slot_T.tobytes())


@dataclass(frozen=True)
class Decision:
    """An assignment together with what it was made from.

    order_T: position in the metadata of each sample of the assignment; before, after: max / mean load of the source's
    and of the target's slots.
    """

    assignment: Assignment
    order_T: Int64
    before: float
    after: float


def identity_order(ids_T3: Int64) -> Int64:
    """int64 [T]: the permutation that puts (epoch, prompt, sample) in ascending order.

    Raises ValueError where two are equal.
    """
    if len(ids_T3) == 0:
        return np.empty(0, dtype=np.int64)
    low = ids_T3.min(axis=0)
    spans = [last - first + 1 for last, first in zip(ids_T3.max(axis=0).tolist(), low.tolist(), strict=True)]
    if spans[0] * spans[1] * spans[2] < 2**63:  # one integer key sorts several times faster than three
        epoch, prompt, sample = (ids_T3 - low).T
        key = (epoch * spans[1] + prompt) * spans[2] + sample
        order = np.argsort(key)
        equal = np.flatnonzero(np.diff(key[order]) == 0)
    else:
        order = np.lexsort(ids_T3.T[::-1])
        equal = np.flatnonzero((np.diff(ids_T3[order], axis=0) == 0).all(axis=1))
    if equal.size:
        raise _twice(ids_T3[order[equal[0]]])
    return order


def _twice(id_3: Int64) -> ValueError:
    return ValueError(f"sample (epoch, prompt, sample) = {tuple(id_3.tolist())} occurs more than once")


def group_numbers(sorted_ids_T3: Int64) -> Int64:
    """int64 [T]: 0, 1, ... per (epoch, prompt) of identities in ascending order."""
    if len(sorted_ids_T3) == 0:
        return np.empty(0, dtype=np.int64)
    new = (np.diff(sorted_ids_T3[:, :2], axis=0) != 0).any(axis=1)
    return np.concatenate([[0], np.cumsum(new)])


def contiguous_slots(samples: int, slots: int) -> Int64:
    """int64 [samples]: equal consecutive parts, the first ones longer by one where it does not divide."""
    least, extra = divmod(samples, slots)
    return np.repeat(np.arange(slots), [least + (slot < extra) for slot in range(slots)])


def assign(
    metadata: Metadata,
    source: Layout,
    target: Layout,
    rule: Balance | None,
    cost_columns: tuple[str, ...],
    follow: Assignment | None,
) -> Decision:
    """Decide where each sample goes.

    follow: as that assignment says. rule: balanced by cost, unless the layouts are equal and what is there is good
    enough. Neither: samples stay in their slots where the layouts are equal, else they are cut into consecutive parts
    of equal counts. Raises ValueError for repeated identities, and where `follow` has other samples or another layout.
    """
    lengths = metadata.cost_lengths(cost_columns) if len(metadata) else np.empty(0, dtype=np.int64)
    if rule is not None and follow is None and can_divide():
        order, slot_T, before, after = divide_by_kernel(metadata, source, target, rule, lengths)
    else:
        order, slot_T, before, after = divide_reference(metadata, source, target, rule, lengths, follow)
    assignment = Assignment(target, metadata.ids_T3[order], slot_T) if follow is None else follow
    return Decision(assignment, order, before, after)


def divide_by_kernel(
    metadata: Metadata,
    source: Layout,
    target: Layout,
    rule: Balance,
    lengths_T: Int64,
) -> tuple[Int64, Int64, float, float]:
    """As `divide_reference` with a rule, and nothing to follow."""
    order, slot_T, before, after, twice = divide_kernel(
        metadata.ids_T3, metadata.source_T, lengths_T, (rule.linear, rule.quadratic),
        (rule.keep_groups, rule.equal_counts), rule.slack if source == target else None, (source.slots, target.slots),
    )  # fmt: skip
    if twice >= 0:
        raise _twice(metadata.ids_T3[order[twice]])
    return order, slot_T, before, after


def divide_reference(
    metadata: Metadata,
    source: Layout,
    target: Layout,
    rule: Balance | None,
    lengths_T: Int64,
    follow: Assignment | None = None,
) -> tuple[Int64, Int64, float, float]:
    """In the order of identities, the row and the slot of each sample; max / mean load before and after."""
    order = identity_order(metadata.ids_T3)
    ids, here = metadata.ids_T3[order], metadata.source_T[order]
    costs = (rule or Balance()).costs(lengths_T[order])
    before = imbalance(costs, here, source.slots)
    if follow is not None:
        _check_follow(ids, follow, target)
        slot_T = follow.slot_T
    else:
        slot_T = _slots(ids, here, costs, before, source, target, rule)
    return order, slot_T, before, imbalance(costs, slot_T, target.slots)


def _slots(
    ids: Int64,
    here: Int64,
    costs: NDArray[np.float64],
    before: float,
    source: Layout,
    target: Layout,
    rule: Balance | None,
) -> Int64:
    if rule is None:
        return here if source == target else contiguous_slots(len(ids), target.slots)
    groups = group_numbers(ids) if rule.keep_groups else None
    if source == target and before <= rule.slack and _acceptable(groups, here, source.slots, rule.equal_counts):
        return here
    return balance(costs, groups, target.slots, rule.equal_counts)


def _acceptable(groups: Int64 | None, here: Int64, slots: int, equal_counts: bool) -> bool:
    """Whether samples that stay where they are keep the rule's constraints."""
    items = here
    if groups is not None and len(groups):
        first = np.flatnonzero(np.diff(groups, prepend=-1))
        items = here[first]
        if not (items[groups] == here).all():
            return False
    counts = np.bincount(items, minlength=slots)
    return not equal_counts or bool(counts.max() - counts.min() <= 1)


def _check_follow(ids: Int64, follow: Assignment, target: Layout) -> None:
    if follow.layout != target:
        raise ValueError(f"the assignment to follow is for {follow.layout}, not for {target}")
    if len(ids) != len(follow) or not (ids == follow.ids_T3).all():
        theirs, ours = ({tuple(row) for row in rows.tolist()} for rows in (follow.ids_T3, ids))
        for what, odd in (("is missing", theirs - ours), ("is not in the assignment to follow", ours - theirs)):
            if odd:
                raise ValueError(f"sample (epoch, prompt, sample) = {min(odd)} {what}")
