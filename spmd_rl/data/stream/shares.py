"""`Shares`: which replica makes which group, also once replicas are lost. Pure: the same everywhere after the same
losses in the same order."""

from __future__ import annotations


class Shares:
    """Group g is made by replica `g % replicas`; the groups of one that is lost go round among the others."""

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self.alive = tuple(range(replicas))
        self._losses: list[tuple[int, tuple[int, ...]]] = []  # (who, who was left), in order

    def of(self, group: int) -> int:
        """The replica that makes the group."""
        replica = group % self.replicas
        for lost, left in self._losses:
            if replica == lost:
                replica = left[group // self.replicas % len(left)]
        return replica

    def lose(self, replica: int) -> None:
        """Raises ValueError for one that is lost already, or the last one."""
        left = tuple(other for other in self.alive if other != replica)
        if len(left) == len(self.alive) or not left:
            raise ValueError(f"replica {replica} cannot be lost: there are {self.alive}")
        self.alive = left
        self._losses.append((replica, left))
