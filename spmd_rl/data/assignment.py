"""Which slot gets which sample: a pure function of the gathered metadata, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from spmd_rl.data.balance import Balance, balance, imbalance
from spmd_rl.data.layout import Layout
from spmd_rl.data.metadata import Metadata, digest

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

    order_T: position in the metadata of each sample of the assignment; costs_T: float64, in the assignment's order;
    before, after: max / mean load of the source's and of the target's slots.
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
    spans = [int(span) + 1 for span in ids_T3.max(axis=0).astype(object) - low.astype(object)]
    if spans[0] * spans[1] * spans[2] < 2**63:  # one integer key sorts several times faster than three
        epoch, prompt, sample = (ids_T3 - low).T
        key = (epoch * spans[1] + prompt) * spans[2] + sample
        order = np.argsort(key)
        equal = np.flatnonzero(np.diff(key[order]) == 0)
    else:
        order = np.lexsort(ids_T3.T[::-1])
        equal = np.flatnonzero((np.diff(ids_T3[order], axis=0) == 0).all(axis=1))
    if equal.size:
        twice = tuple(ids_T3[order[equal[0]]].tolist())
        raise ValueError(f"sample (epoch, prompt, sample) = {twice} occurs more than once")
    return order


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
    order = identity_order(metadata.ids_T3)
    ids = metadata.ids_T3[order]
    here = metadata.source_T[order]
    lengths = metadata.cost_lengths(cost_columns)[order] if len(metadata) else np.empty(0, dtype=np.int64)
    costs = (rule or Balance()).costs(lengths)
    before = imbalance(costs, here, source.slots)
    if follow is not None:
        _check_follow(ids, follow, target)
        assignment = follow
    else:
        assignment = Assignment(target, ids, _slots(ids, here, costs, before, source, target, rule))
    return Decision(assignment, order, before, imbalance(costs, assignment.slot_T, target.slots))


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
