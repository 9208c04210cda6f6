"""Builders of the engines that recipes declare: from configuration, world and mesh to the thing itself."""

from __future__ import annotations

from typing import Any

from spmd_rl.data.loader import PromptLoader
from spmd_rl.engines.reward.model import RewardModel
from spmd_rl.engines.reward.pool import RewardPool
from spmd_rl.engines.rollout.build import build_rollout
from spmd_rl.engines.rollout.desk import Desk
from spmd_rl.engines.train.critic import CriticEngine
from spmd_rl.engines.train.engine import TrainEngine
from spmd_rl.engines.train.lora_engine import BasePolicy, LoraEngine
from spmd_rl.engines.train.model import load_tokenizer
from spmd_rl.engines.train.reference import Reference
from spmd_rl.graph.stage import BuildContext


def tokenizer(context: BuildContext) -> Any:
    return load_tokenizer(context.config.model.path)


def loader(context: BuildContext) -> PromptLoader:
    return PromptLoader(context.config, context.engines["tokenizer"], context.world)


def reward(context: BuildContext) -> RewardPool:
    """The workers load the reward functions at once, so that one that cannot be loaded is known before any model is."""
    pool = RewardPool(context.config.reward)
    pool.check()
    return pool


def actor(context: BuildContext) -> TrainEngine:
    train = context.config.train
    steps = (train.steps - context.config.critic.warmup_steps) * train.updates_per_step
    engine = LoraEngine if context.config.model.lora_rank else TrainEngine
    return engine(context.config, context.world, context.mesh, total_steps=steps)


def critic(context: BuildContext) -> CriticEngine:
    train = context.config.train
    steps = train.steps * train.updates_per_step * context.config.critic.epochs
    return CriticEngine(context.config, context.world, context.mesh, total_steps=steps)


def reference(context: BuildContext) -> TrainEngine | BasePolicy:
    """The model as it is on disk, never trained. Beside an actor with adapters it is that one without them."""
    if context.config.model.lora_rank and "actor" in context.engines:
        return BasePolicy(context.engines["actor"])
    return Reference(context.config, context.world, context.mesh)


def reward_model(context: BuildContext) -> RewardModel:
    return RewardModel(context.config, context.world, context.mesh, context.engines["tokenizer"])


def desk(context: BuildContext) -> Desk:
    return Desk(context.engines["rollout"])


def rollout(context: BuildContext) -> Any:
    return build_rollout(context.config, context.world, context.mesh, context.engines["tokenizer"])
