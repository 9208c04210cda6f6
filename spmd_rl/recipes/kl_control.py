"""An adaptive KL coefficient (arXiv:1909.08593, section 2.2): an engine that keeps it, a stage that moves it.

Its measure is the metric `kl/ref` of the step that was trained last: nats per token, over all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from spmd_rl.algorithms.kl import AdaptiveCoefficient
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.data.batch import Batch
from spmd_rl.graph.stage import BuildContext, Context

ENGINE = "kl_coefficient"


class KLCoefficient:
    """The coefficient between the steps; the same on all ranks, and part of every checkpoint."""

    def __init__(self, value: AdaptiveCoefficient) -> None:
        self.value = value

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.value.coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.value = replace(self.value, coef=float(state["coef"]))


def coefficient(context: BuildContext) -> KLCoefficient:
    """The builder of the engine."""
    algorithm = context.config.algorithm
    return KLCoefficient(AdaptiveCoefficient(algorithm.kl_coef, algorithm.kl_target, algorithm.kl_horizon))


def steer(context: Context, _: Batch) -> None:
    """After the step's updates: `kl/coef` is what they used; the next step uses one nearer to the target. Collective
    over the world, with the last samples of the step."""
    if not context.last:
        return
    keeper: KLCoefficient = context.engines[ENGINE]
    context.metrics.set("kl/coef", keeper.value.coef)
    measured = context.metrics.average("kl/ref", context.world.control)
    train = context.config.train
    if measured is not None:  # no token counted
        keeper.value = keeper.value.update(measured, train.prompts_per_step * train.samples_per_prompt)


def algorithm_now(context: Context) -> AlgorithmConfig:
    """The settings, with the KL coefficient of this step."""
    algorithm = context.config.algorithm
    if ENGINE not in context.engines:
        return algorithm
    return replace(algorithm, kl_coef=context.engines[ENGINE].value.coef)
