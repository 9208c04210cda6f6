"""`Layout`: how the ranks of a stage share its samples."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from spmd_rl.config.errors import UserError


@dataclass(frozen=True)
class Layout:
    """The ranks of a stage as data-parallel slots.

    ranks: in mesh order, the data-parallel axis outermost; replicas: consecutive ranks that need the same samples
    (a tensor- or sequence-parallel group). Slot k is `ranks[k * replicas : (k + 1) * replicas]`; its first rank, the
    *head*, sends and receives for it. shared: whether its other ranks get its samples too; else they take part without
    any. Raises UserError where the replicas do not divide the ranks.
    """

    ranks: tuple[int, ...]
    replicas: int = 1
    shared: bool = True

    def __post_init__(self) -> None:
        if not self.ranks:
            raise UserError("a layout needs at least one rank")
        if len(set(self.ranks)) != len(self.ranks) or min(self.ranks) < 0:
            raise UserError(f"the ranks of a layout must be distinct and not negative: {list(self.ranks)}")
        if self.replicas < 1 or len(self.ranks) % self.replicas:
            raise UserError(f"{len(self.ranks)} ranks cannot be divided into groups of {self.replicas}")

    @property
    def slots(self) -> int:
        return len(self.ranks) // self.replicas

    @cached_property
    def heads(self) -> tuple[int, ...]:
        """The first rank of each slot."""
        return self.ranks[:: self.replicas]

    @property
    def holders(self) -> Layout:
        """The ranks that have samples: all of them where they are shared, else the heads, each a slot of its own."""
        return self if self.shared else Layout(self.heads)

    @cached_property
    def _slot_of(self) -> dict[int, int]:
        return {rank: place // self.replicas for place, rank in enumerate(self.ranks)}

    def __contains__(self, rank: int) -> bool:
        return rank in self._slot_of

    def slot_of(self, rank: int) -> int | None:
        """The slot that `rank` belongs to; None where it has no part in this layout."""
        return self._slot_of.get(rank)

    def group(self, slot: int) -> tuple[int, ...]:
        """All ranks of a slot, the head first."""
        return self.ranks[slot * self.replicas : (slot + 1) * self.replicas]

    def __str__(self) -> str:
        ranks = ",".join(map(str, self.ranks)) if len(self.ranks) <= 8 else f"{self.ranks[0]}..{self.ranks[-1]}"
        return f"{self.slots}x{self.replicas}{'' if self.shared else ' heads'}[{ranks}]"
