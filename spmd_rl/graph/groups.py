"""`GroupRun`: one group of samples on its way through the stages of a rollout replica, as far as it can go for now.

In synchronous training all samples of a step pass a stage together (`Runner`). Here every group goes at its own pace:
it waits only for what its next stage needs, while the engine draws for others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from spmd_rl.data.batch import Batch, Column
from spmd_rl.graph.stage import Context, Deferred, Stage


class GroupRun:
    """stages: of the replica, in order; the first ones, which consume nothing, are run at once.

    context: of this group alone (its `metrics` belong to it). Afterwards `batch` has what was made so far.
    """

    def __init__(self, stages: Sequence[Stage], context: Context) -> None:
        self.context = context
        self.batch = Batch.empty()
        self._left = list(stages)
        self._waiting: list[tuple[Stage, Deferred]] = []
        while self._left and not self._left[0].consumes:
            self._run(self._left.pop(0))

    def advance(self) -> bool:
        """Go on as far as possible without waiting; whether the group is through."""
        while True:
            for stage, deferred in list(self._waiting):
                if deferred.done():
                    self._waiting.remove((stage, deferred))
                    self._take(stage, deferred.result())
            if not self._left:
                return not self._waiting
            pending = {column for stage, _ in self._waiting for column in stage.produces}
            if pending & set(self._left[0].consumes):
                return False
            self._run(self._left.pop(0))

    @property
    def waiting(self) -> list[Deferred]:
        """What its stages have begun and not got yet."""
        return [deferred for _, deferred in self._waiting]

    def _run(self, stage: Stage) -> None:
        output = stage.run(self.context, self.batch.only(stage.consumes) if stage.consumes else Batch.empty())
        if isinstance(output, Batch):
            if set(output.columns) != set(stage.produces):
                raise ValueError(
                    f"stage {stage.name!r} declares {sorted(stage.produces)}, not {sorted(output.columns)}"
                )
            same = len(output) == len(self.batch) and torch.equal(output.ids, self.batch.ids)
            if self.batch.columns and not (stage.new_samples or same):
                raise ValueError(f"stage {stage.name!r} returned other samples than it got; declare new_samples=True")
            self.batch = self.batch.with_columns(output.columns) if same else output
        elif isinstance(output, Mapping):
            self._take(stage, output)
        elif output is not None and hasattr(output, "done"):
            self._waiting.append((stage, output))
        elif output is not None or stage.produces:
            raise TypeError(f"stage {stage.name!r} must return columns {', '.join(stage.produces)}, not {output!r}")

    def _take(self, stage: Stage, columns: Mapping[str, Column]) -> None:
        if set(columns) != set(stage.produces):
            raise ValueError(f"stage {stage.name!r} declares {sorted(stage.produces)}, but returned {sorted(columns)}")
        self.batch = self.batch.with_columns(columns)
