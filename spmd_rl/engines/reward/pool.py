"""`RewardPool`: prompts, responses and rows in; rewards out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from spmd_rl.config.errors import UserError
from spmd_rl.config.schema import RewardConfig
from spmd_rl.engines.reward.calls import Sample, run_calls
from spmd_rl.engines.reward.functions import FunctionSpec, RewardFunction
from spmd_rl.engines.reward.manager import Manager, deal
from spmd_rl.engines.reward.pending import Pending
from spmd_rl.engines.reward.scores import SampleId, labels

__all__ = ["Pending", "RewardPool"]


class RewardPool:
    """The reward functions of `config`, in `config.workers` processes of this rank, or in the rank itself (0).

    Making it starts the workers and does not wait for them; `check` does. In the rank itself, functions are loaded
    at once (UserError where one can't be) and only async calls have a time limit.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._specs = [FunctionSpec(f.function, dict(f.args), f.batched) for f in config.functions]
        self._functions = [RewardFunction.load(spec) for spec in self._specs] if config.workers == 0 else []
        self._manager = Manager(config, self._specs) if config.workers else None

    @property
    def names(self) -> list[str]:
        """One for each function, no two alike: what its column of `reward_parts` is called."""
        return labels(self._config.functions)

    def check(self) -> None:
        """Wait until the functions are loaded. Raises UserError where one can't be within `reward.load_timeout_s`."""
        if self._manager is None:
            return
        self._manager.known.wait()  # its thread keeps the deadline, and sets this also where it fails
        if self._manager.refusal:
            raise UserError(self._manager.refusal)

    def score(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        rows: Sequence[dict[str, Any]],
        ids: Sequence[SampleId],
    ) -> Pending:
        """Hand over S samples. Returns at once; without workers, when they are judged."""
        if not len(prompts) == len(responses) == len(rows) == len(ids):
            raise ValueError(f"{len(prompts)} prompts, {len(responses)} responses, {len(rows)} rows, {len(ids)} ids")
        samples = [Sample(*sample) for sample in zip(prompts, responses, rows, strict=True)]
        pending = Pending(self._config, samples, list(ids))
        if self._manager is not None:
            if not pending.done():
                self._manager.submit(pending)
            return pending
        parts = deal(self._specs, [f.is_async for f in self._functions], len(samples), workers=1)
        with asyncio.Runner() as runner:
            for part in parts:
                run_calls(
                    self._functions, part, dict(enumerate(samples)), runner, self._config.timeout_s, pending.record
                )
        return pending

    def close(self) -> None:
        """End the workers; samples that are still being judged fail."""
        if self._manager is not None:
            self._manager.close()
