"""Rewards of a reward model, alone or mixed with those of reward functions by weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from spmd_rl.algorithms.masks import name_samples
from spmd_rl.config.errors import UserError
from spmd_rl.config.schema import Config
from spmd_rl.data.batch import Batch, Column
from spmd_rl.graph.stage import Context, Placement, Stage
from spmd_rl.recipes.stages import report_rewards


def judgement(config: Config, functions: Stage, trainers: Placement) -> list[Stage]:
    """The stage of the reward functions, the reward model beside it, and their sum: where the functions' samples are,
    or with mode=async at the trainers, where the model is."""
    if config.algorithm.dynamic_sampling:
        raise UserError(
            "reward_model.path is not there yet with algorithm.dynamic_sampling=true, which rewards where it draws: "
            "leave one out"
        )
    at = trainers if config.mode == "async" else functions.placement
    return [
        functions,
        Stage("reward_model", model_score, ("prompt", "response", "row"), ("model_score",), placement=trainers),
        Stage("mix", mix, (*functions.produces, "model_score"), ("reward", "reward_parts"), placement=at),
    ]


def model_score(context: Context, batch: Batch) -> Mapping[str, Column]:
    """The reward model's number for each sample."""
    return {"model_score": Column.scalars(context.engines["reward_model"].score(batch))}


def mix(context: Context, batch: Batch) -> Mapping[str, Column]:
    """The weighted sum of functions and model; the model's score is the last of the parts."""
    made = _mixed(context.config, batch, batch["task_reward"], batch["task_parts"], batch["model_score"].as_scalars())
    report_rewards(context, made)
    return made


def judge(context: Context, batch: Batch) -> Batch:
    """`batch`, which has the functions' `reward` and `reward_parts`, with the model's in them, for an evaluation.
    Collective over the ranks of the reward model, where there is one."""
    if not context.config.reward_model.path:
        return batch
    score_S = context.engines["reward_model"].score(batch)
    if not len(batch):
        return batch
    return batch.with_columns(_mixed(context.config, batch, batch["reward"], batch["reward_parts"], score_S))


def _mixed(config: Config, batch: Batch, reward: Column, parts: Column, score_S: Tensor) -> dict[str, Column]:
    """Raises FloatingPointError, naming the samples, for a score that is not finite, unless it is to be excluded."""
    broken_S = ~score_S.isfinite()
    if config.reward.on_error == "stop" and bool(broken_S.any()):
        raise FloatingPointError(
            f"the reward model's score is NaN or infinite in sample {name_samples(batch.ids, broken_S)}"
        )
    score_S = score_S.masked_fill(broken_S, float("nan"))
    rows = [torch.cat([row, own[None]]) for row, own in zip(parts.rows(), score_S, strict=True)]
    return {
        "reward": Column.scalars(reward.as_scalars() + config.reward_model.weight * score_S),
        "reward_parts": Column.from_rows(rows, torch.float32),
    }
