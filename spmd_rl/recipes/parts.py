"""Pieces of graphs that recipes have in common: how samples come to be, and what is known of them before an update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from spmd_rl.config.errors import UserError
from spmd_rl.config.schema import Config
from spmd_rl.data.balance import Balance
from spmd_rl.engines.rollout.sampling import check_model, model_tokens
from spmd_rl.graph.roles import ACCEPTED, roles_of
from spmd_rl.graph.stage import REST, EngineSpec, Placement, Stage, StageFunction
from spmd_rl.recipes import build, dynamic, kl_control, remax, reward_model, stages

SCORED = ("prompt", "response")


@dataclass(frozen=True)
class Places:
    """Where samples are drawn, and where models are trained: on all ranks in turns, or (mode async) each on its own.

    Of the ranks that share one engine only the first has samples: it reads, tokenises and rewards them for all.
    heads: these first ones. judges: where groups are compared: at the trainers, if a step comes to them as a whole,
    rewards are made there, or groups are selected.
    """

    replicas: Placement
    heads: Placement
    trainers: Placement
    judges: Placement

    @classmethod
    def of(cls, config: Config, world_size: int) -> Places:
        """Raises UserError for a model that the rollout engine cannot hold."""
        check_model(Path(config.model.path) / "config.json", config.rollout.tensor_parallel, model_tokens(config))
        roles = roles_of(config, world_size)
        drawing, together = roles.rollout if roles else tuple(range(world_size)), config.rollout.tensor_parallel
        replicas = Placement(drawing if roles else None, {"dp": REST, "tp": together}, shared=False)
        trainers = Placement(roles.train if roles else None)
        at_trainers = (
            config.stream.train_on == "step" or bool(config.reward_model.path) or config.algorithm.dynamic_sampling
        )
        return cls(replicas, Placement(drawing[::together]), trainers, trainers if roles and at_trainers else replicas)


def engines(config: Config, places: Places) -> list[EngineSpec]:
    """What every recipe needs; what the settings ask for beside it."""
    algorithm = config.algorithm
    made = [
        EngineSpec("tokenizer", build.tokenizer),
        EngineSpec("loader", build.loader, places.replicas),
        EngineSpec("reward", build.reward, places.heads),
        EngineSpec("actor", build.actor, places.trainers),
        EngineSpec("rollout", build.rollout, places.replicas),
    ]
    if config.mode == "async":
        made.append(EngineSpec("desk", build.desk, places.replicas))
    if algorithm.dynamic_sampling and config.mode == "sync":
        made.append(EngineSpec("surplus", dynamic.surplus, places.replicas))
    if algorithm.kl_coef > 0:
        made.append(EngineSpec("reference", build.reference, places.trainers))
    if config.reward_model.path:
        made.append(EngineSpec("reward_model", build.reward_model, places.trainers))
    if algorithm.kl_target > 0:
        made.append(EngineSpec(kl_control.ENGINE, kl_control.coefficient, places.trainers))
    return made


def generation(config: Config, places: Places) -> list[Stage]:
    """From nothing to judged responses."""
    drawn: tuple[str, ...] = ("response", "rollout_logprob", "finish", "version")
    with_model = bool(config.reward_model.path)
    judged = ("task_reward", "task_parts") if with_model else ("reward", "reward_parts")
    first = ("prompt", "row", "turn")
    at = places.replicas
    reward = Stage("reward", stages.reward, ("prompt", "response", "row"), judged, placement=at)
    scoring = reward_model.judgement(config, reward, places.trainers) if with_model else [reward]
    if config.algorithm.dynamic_sampling and config.mode == "sync":
        return [Stage("experience", dynamic.experience, produces=(*first, *drawn, *judged), placement=at)]
    with_greedy = compares_with_greedy(config)
    if with_greedy and with_model and config.mode == "async":
        raise UserError(
            "algorithm.advantage=remax is not there yet with reward_model.path and mode=async: its greedy responses "
            "are judged where they are drawn, but the model is at the trainers; leave one out"
        )
    draw: StageFunction = remax.rollout if with_greedy else stages.rollout
    if config.mode == "async":
        draw, drawn = remax.stream_rollout if with_greedy else stages.stream_rollout, (*drawn, "versions")
    if with_greedy:
        drawn = (*drawn, *remax.GREEDY)
        scoring.append(Stage("greedy_reward", remax.greedy_reward, remax.SCORED, ("greedy_reward",), placement=at))
    if config.algorithm.dynamic_sampling:
        scoring.append(Stage("accept", dynamic.accept, ("reward", "rollout_logprob"), (ACCEPTED,), placement=at))
    return [
        Stage("prompts", stages.prompts, produces=first, placement=at),
        Stage("rollout", draw, consumes=("prompt",), produces=drawn, placement=at),
        *scoring,
    ]


def compares_with_greedy(config: Config) -> bool:
    return config.algorithm.advantage == "remax"


def logprobs(config: Config, places: Places) -> list[Stage]:
    """`old_logprob` and `ref_logprob`, where the settings need them."""
    made, at = [], places.trainers
    if config.train.updates_per_step > 1 or kl_in_reward(config):
        made.append(Stage("old_logprob", stages.old_logprob, SCORED, ("old_logprob",), placement=at))
    if config.algorithm.kl_coef > 0:
        made.append(Stage("ref_logprob", stages.reference_logprob, SCORED, ("ref_logprob",), placement=at))
    return made


def kl_in_reward(config: Config) -> bool:
    return config.algorithm.kl_coef > 0 and config.algorithm.kl_in == "reward"


def produced(made: Sequence[Stage]) -> tuple[str, ...]:
    return tuple(column for stage in made for column in stage.produces)


def afterwards(config: Config, places: Places, update: str) -> list[Stage]:
    """What follows the policy's stage `update`. In mode async the job itself brings the weights to the replicas."""
    made = []
    if config.mode == "sync":
        made.append(Stage("sync", stages.sync, after=(update,)))
    if config.algorithm.kl_target > 0:
        made.append(Stage("kl_control", kl_control.steer, after=(update,), placement=places.trainers))
    return made


def spread(made: Sequence[Stage], places: Places) -> tuple[Stage, ...]:
    """The first pass of a model over the samples spreads them evenly; the later ones find them there."""
    passes = (
        i for i, stage in enumerate(made) if stage.placement is places.trainers and {*SCORED} <= {*stage.consumes}
    )
    first = next(passes)
    return (*made[:first], replace(made[first], balance=Balance(keep_groups=True)), *made[first + 1 :])
