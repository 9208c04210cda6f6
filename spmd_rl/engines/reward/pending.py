"""Samples on their way through the reward functions."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from spmd_rl.config.errors import UserError
from spmd_rl.config.schema import RewardConfig
from spmd_rl.engines.reward.calls import Call, Outcome, Sample
from spmd_rl.engines.reward.scores import SampleId, Scores, describe_sample, error_line, total

log = logging.getLogger(__name__)


class Pending:
    """Samples that are being judged; made by `RewardPool.score`."""

    def __init__(self, config: RewardConfig, samples: Sequence[Sample], ids: Sequence[SampleId]) -> None:
        self.samples = samples
        self._config, self._ids = config, ids
        self._outcomes: list[list[Outcome | None]] = [[None] * len(config.functions) for _ in samples]
        self._left = len(samples) * len(config.functions)
        self._failure = ""
        self._finished = threading.Event()
        if self._left == 0:
            self._finished.set()

    def done(self) -> bool:
        return self._finished.is_set()

    def record(self, call: Call, outcomes: Sequence[Outcome]) -> None:
        """A call has ended: one outcome per sample of it."""
        for place, outcome in zip(call.samples, outcomes, strict=True):
            self._left -= self._outcomes[place][call.function] is None
            self._outcomes[place][call.function] = outcome
            if outcome.error and self._config.on_error == "stop":
                name = self._config.functions[call.function].function
                self.fail(error_line(name, self._ids[place], outcome.error))
        if self._left == 0:
            self._finished.set()

    def fail(self, message: str) -> None:
        """There will be no scores; the first message counts."""
        self._failure = self._failure or message
        self._finished.set()

    def result(self, deadline_s: float | None = None) -> Scores:
        """The scores, waited for up to `deadline_s` seconds.

        Raises UserError for the first sample that could not be judged, with `on_error: stop`; with `exclude` such
        samples have the reward NaN. Raises TimeoutError, naming a sample that is missing, at the deadline.
        """
        if not self._finished.wait(deadline_s):
            missing = [i for i, row in enumerate(self._outcomes) if None in row]
            first = f"; the first is {describe_sample(self._ids[missing[0]])}" if missing else ""
            raise TimeoutError(f"rewards of {len(missing)} samples are not there after {deadline_s:g} s{first}")
        if self._failure:
            raise UserError(self._failure)
        outcomes = [[outcome for outcome in row if outcome is not None] for row in self._outcomes]
        scores = total(self._config.functions, outcomes, self._ids)
        if scores.errors:
            first = next(iter(scores.errors.values()))
            log.warning("%d of %d samples excluded; the first: %s", len(scores.errors), len(self._ids), first)
        return scores
