"""`Desk`: many batches of requests in one engine at once; each batch has a slip that says when it is done.

The engine decodes all of them together, one token at a time; a batch that is done leaves, another takes its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from spmd_rl.engines.protocol import Completion, Request, RolloutEngine, SampleId


@dataclass
class Slip:
    """Of one batch of requests."""

    order: tuple[SampleId, ...]
    completions: dict[SampleId, Completion] = field(default_factory=dict)

    def done(self) -> bool:
        return len(self.completions) == len(self.order)

    def result(self) -> list[Completion]:
        """One completion per request, in the order of the requests; all must be there."""
        return [self.completions[sample] for sample in self.order]


class Desk:
    """Everything that is drawn by `engine` goes through here."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine
        self._open: dict[SampleId, Slip] = {}

    def submit(self, requests: Sequence[Request]) -> Slip:
        """Raises ValueError for a sample that is being drawn already."""
        slip = Slip(tuple(request.id for request in requests))
        for request in requests:
            if request.id in self._open:
                raise ValueError(f"sample {request.id} is being drawn already")
        self._open.update(dict.fromkeys(slip.order, slip))
        self.engine.submit(requests)
        return slip

    def unfinished(self) -> int:
        return len(self._open)

    def step(self) -> None:
        """One more token for everything that is being drawn. Raises RuntimeError for a completion of nobody's."""
        for completion in self.engine.step():
            slip = self._open.pop(completion.id, None)
            if slip is None:
                raise RuntimeError(f"the rollout engine finished sample {completion.id}, which nobody asked for")
            slip.completions[completion.id] = completion
        if self._open and not self.engine.unfinished():
            lost = next(iter(self._open))
            raise RuntimeError(f"the rollout engine lost sample {lost}: it has nothing to do, but did not finish it")
