"""Back-pressure in bytes between one replica and its home trainer. A pure state machine, kept by the replica.

Room for the largest result is reserved before a group is started, so whatever has been started can always be
delivered: nothing is dropped, and no finished group waits behind a later one. Once the group is there, only its real
size counts; when the trainers have taken it (or thrown it away), its room is free again.
"""

from __future__ import annotations


class Credits:
    """limit: bytes of groups that may be alive: being generated, on their way, or waiting at the trainer."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self._of: dict[int, int] = {}

    def reserve(self, group: int, largest: int, urgent: bool = False) -> bool:
        """Room for a group of at most `largest` bytes; False where there is none at present. urgent: beyond the limit,
        if need be.

        Raises ValueError for a group that has some already, or one that can never fit.
        """
        if group in self._of:
            raise ValueError(f"group {group} is started twice")
        if largest > self.limit:
            raise ValueError(f"a group of up to {largest} bytes never fits into {self.limit} bytes")
        if self.held + largest > self.limit and not urgent:
            return False
        self._of[group] = largest
        self.held += largest
        return True

    def settle(self, group: int, size: int) -> None:
        """The group is there and has `size` bytes. Raises ValueError where that is more than was reserved."""
        if size > self._of[group]:
            raise ValueError(f"group {group} has {size} bytes, {self._of[group]} were reserved")
        self.held += size - self._of[group]
        self._of[group] = size

    def release(self, group: int) -> None:
        """The trainers have it, or do not want it. Raises KeyError for a group that holds nothing."""
        self.held -= self._of.pop(group)

    def __len__(self) -> int:
        return len(self._of)
