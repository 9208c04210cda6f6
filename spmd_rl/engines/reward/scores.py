"""From the outcomes of reward functions to one reward per sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from spmd_rl.config.schema import RewardFunctionConfig
from spmd_rl.engines.reward.calls import Outcome

SampleId = tuple[int, int, int]


@dataclass(frozen=True)
class Scores:
    """Of S samples under F functions.

    reward: S weighted totals, NaN where a part is missing (the sample is excluded); parts: S lists of F values;
    errors: for each excluded sample, by its place, one line that names sample and function; extras: S mappings, what
    functions returned beside the reward, as `function/name`; late: calls that the time limit ended, whether they
    count as an error or as their function's `timeout_value`.
    """

    reward: list[float]
    parts: list[list[float]]
    errors: dict[int, str]
    extras: list[dict[str, float]]
    late: int


def labels(configs: Sequence[RewardFunctionConfig]) -> list[str]:
    """The functions' names in metrics and samples: `module:function` → `function`, the whole where two are alike."""
    short = [c.function.rpartition(":")[2] for c in configs]
    names = [s if short.count(s) == 1 else c.function for s, c in zip(short, configs, strict=True)]
    # One function may be named twice, with other arguments.
    return [n if names.count(n) == 1 else f"{n}#{names[:i].count(n) + 1}" for i, n in enumerate(names)]


def describe_sample(identity: SampleId) -> str:
    epoch, prompt, sample = identity
    return f"sample (epoch {epoch}, prompt {prompt}, sample {sample})"


def error_line(function: str, identity: SampleId, error: str) -> str:
    return f"reward function {function!r}, {describe_sample(identity)}: {error}"


def total(
    configs: Sequence[RewardFunctionConfig], outcomes: Sequence[Sequence[Outcome]], ids: Sequence[SampleId]
) -> Scores:
    """outcomes: one row per sample, one outcome per function in it."""
    names = labels(configs)
    rewards, errors, extras = [], {}, []
    for place, (row, identity) in enumerate(zip(outcomes, ids, strict=True)):
        # NaN times a weight of 0 is NaN: what could not be judged is excluded, whatever it would have weighed.
        rewards.append(math.fsum(c.weight * o.value for c, o in zip(configs, row, strict=True)))
        lines = [error_line(c.function, identity, o.error) for c, o in zip(configs, row, strict=True) if o.error]
        if lines:
            errors[place] = "; ".join(lines)
        extras.append({f"{n}/{key}": value for n, o in zip(names, row, strict=True) for key, value in o.extras.items()})
    parts = [[o.value for o in row] for row in outcomes]
    return Scores(rewards, parts, errors, extras, sum(o.late for row in outcomes for o in row))
