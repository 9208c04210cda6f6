"""Which versions a trainer keeps, and which of them a replica is given: a pure state machine.

A snapshot lies in a slot until a newer one takes it. A slot is pinned while a replica is being sent its version. The
trainers publish together, so they agree on the slot to overwrite; between publications each replica's server decides
for it alone, and always gives the newest. So no version is refused to a replica that can take one, the newest reaches
every replica, older ones are passed over, and memory is bounded by the number of slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field

NOTHING = -1  # version of an empty slot


@dataclass
class Shelf:
    """versions: of each slot; pins: replica → the slot that it is being sent; closed: a publication is under way, and
    nothing is given until it is over."""

    slots: int
    versions: list[int] = field(default_factory=list)
    pins: dict[int, int] = field(default_factory=dict)
    closed: bool = False

    def __post_init__(self) -> None:
        self.versions = [NOTHING] * self.slots

    @property
    def newest(self) -> int:
        return max(self.versions)

    def slot(self, version: int) -> int | None:
        """Where `version` lies; None while it does not."""
        return self.versions.index(version) if version in self.versions else None

    def close(self) -> int:
        """A publication begins. Bits of the slots that are pinned here; all trainers' together go to `overwrite`."""
        self.closed = True
        return sum(1 << slot for slot in set(self.pins.values()))

    def overwrite(self, pinned: int) -> int | None:
        """Empty and return the slot of the oldest version that no trainer has pinned; None where all are pinned, and
        the publication is put off: what is pinned is under way, and will be done."""
        free = [slot for slot in range(self.slots) if not pinned >> slot & 1]
        if not free:
            self.closed = False
            return None
        slot = min(free, key=lambda free_slot: self.versions[free_slot])
        self.versions[slot] = NOTHING
        return slot

    def put(self, slot: int, version: int) -> None:
        """The publication is over."""
        if version <= self.newest:
            raise ValueError(f"version {version} is published after version {self.newest}")
        self.versions[slot] = version
        self.closed = False

    def give(self, replica: int, than: int) -> int | None:
        """Pin the newest version for a replica that has version `than`; None while there is none that is newer."""
        if self.closed or self.newest <= than:
            return None
        self.pins[replica] = self.versions.index(self.newest)
        return self.newest

    def done(self, replica: int) -> None:
        """The replica has all of what it was given."""
        del self.pins[replica]
