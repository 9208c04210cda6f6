"""`Desk`: many batches of requests in one engine at once; each batch has a slip that says when it is done.

The engine decodes all of them together, one token at a time; a batch that is done leaves, another takes its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from spmd_rl.engines.protocol import Completion, EngineFailure, Request, RolloutEngine, SampleId


@dataclass
class Slip:
    """Of one batch of requests. since: steps of the desk before it; aside: requests that are put aside, as far as
    they have come."""

    order: tuple[SampleId, ...]
    since: int = 0
    completions: dict[SampleId, Completion] = field(default_factory=dict)
    aside: tuple[Request, ...] = ()

    def done(self) -> bool:
        return len(self.completions) == len(self.order)

    def result(self) -> list[Completion]:
        """One completion per request, in the order of the requests; all must be there."""
        return [self.completions[sample] for sample in self.order]


class Desk:
    """Everything that is drawn by `engine` goes through here."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine
        self.steps = 0
        self._open: dict[SampleId, Slip] = {}
        self._requests: dict[SampleId, Request] = {}
        self._paused: list[Request] = []

    def submit(self, requests: Sequence[Request]) -> Slip:
        """Raises ValueError for a sample that is being drawn already."""
        slip = Slip(tuple(request.id for request in requests), self.steps)
        for request in requests:
            if request.id in self._open:
                raise ValueError(f"sample {request.id} is being drawn already")
        self._enter(slip, requests)
        return slip

    def _enter(self, slip: Slip, requests: Sequence[Request]) -> None:
        self._open.update((request.id, slip) for request in requests)
        self._requests.update((request.id, request) for request in requests)
        self.engine.submit(requests)

    def unfinished(self) -> int:
        return len(self._open)

    def step(self) -> None:
        """One more token for everything that is being drawn. Raises EngineFailure for a completion of nobody's, and
        where one does not come."""
        self.steps += 1
        for completion in self.engine.step():
            slip = self._open.pop(completion.id, None)
            if slip is None:
                raise EngineFailure(f"the rollout engine finished sample {completion.id}, which nobody asked for")
            slip.completions[completion.id] = completion
            del self._requests[completion.id]
        if self._open and not self.engine.unfinished():
            lost = next(iter(self._open))
            raise EngineFailure(f"the rollout engine lost sample {lost}: it has nothing to do, but did not finish it")

    def put_aside(self, slip: Slip) -> None:
        """Take what is unfinished of `slip` out of the engine, until `take_up`; nothing of it counts meanwhile.

        The engine must be an `InterruptibleEngine`.
        """
        engine: Any = self.engine
        begun = engine.abort([sample for sample in slip.order if sample in self._open])
        slip.aside = tuple(replace(self._requests.pop(one.id), begun=one) for one in begun)
        for one in begun:
            del self._open[one.id]

    def take_up(self, slip: Slip) -> None:
        """Go on with what was put aside, under the weights that the engine has now."""
        requests, slip.aside = slip.aside, ()
        self._enter(slip, requests)

    def pause(self) -> None:
        """Take everything out of the engine, which can then draw for others; `resume` goes on where it was.

        The engine must be an `InterruptibleEngine`.
        """
        assert not self._paused
        engine: Any = self.engine
        self._paused = [replace(self._requests[begun.id], begun=begun) for begun in engine.abort()]

    def resume(self) -> None:
        """Go on with what `pause` took out, under the weights that the engine has now."""
        requests, self._paused = self._paused, []
        self.engine.submit(requests)
