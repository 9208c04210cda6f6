"""`Tails`: tail batching in one replica: groups with long responses are put aside and go on in rounds of their own.

A few long responses keep a replica from taking new weights, for which nothing may be being drawn, while most of its
engine is empty. So a group that turns out to be long is put aside, with the tokens that it has. What was put aside
goes on together, once the replica has nothing else to do or the trainers wait for a part of it (RollPacker,
arXiv:2509.21009, starts long responses anew; here they are continued, and nothing is drawn twice). Pure.
"""

from __future__ import annotations

from spmd_rl.data.stream.window import Window


class Tails:
    """aside: groups that are put aside; long: those of the long round that is under way, during which no other group
    is begun or put aside."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self.aside: set[int] = set()
        self.long: set[int] = set()

    def put_aside(self, group: int) -> None:
        """Raises ValueError during a long round."""
        if self.long:
            raise ValueError(f"group {group} is put aside during a long round")
        self.aside.add(group)

    def gather(self, version: int, idle: bool) -> list[int]:
        """The groups of the long round that begins now, if one does. version: of the replica's weights; idle: whether
        it has nothing else to do."""
        late = any(group < self._window.due(version + 1) for group in self.aside)
        if not self.aside or not (idle or late):
            return []
        self.long, self.aside = self.aside, set()
        return sorted(self.long)

    def finish(self, group: int) -> None:
        """A group of the long round has all its responses."""
        self.long.discard(group)
