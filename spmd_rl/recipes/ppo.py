"""PPO with a critic (Schulman et al. 2017, arXiv:1707.06347; for language models arXiv:2203.02155), as a graph.

prompts -> rollout -> reward ---------------------> advantage -> update_actor -> sync
                  \\-> old_logprob, ref_logprob, value -/   \\-> update_critic
"""

from __future__ import annotations

from spmd_rl.algorithms.check import check as check_algorithm
from spmd_rl.config.errors import UserError
from spmd_rl.config.schema import Config
from spmd_rl.graph.graph import Graph
from spmd_rl.graph.stage import EngineSpec, Stage
from spmd_rl.recipes import build, critic, parts
from spmd_rl.recipes.contract import check_async


def graph(config: Config, world_size: int) -> Graph:
    """The world size only decides who holds which samples. Advantages need no groups, so the trainers make them."""
    check_algorithm(config.algorithm, config.train, config.rollout, critic=True)
    _check(config)
    places = parts.Places.of(config, world_size)
    known, trainers = parts.logprobs(config, places), places.trainers
    taxed = parts.produced(known) if parts.kl_in_reward(config) else ()
    judged = ("response", "reward", "finish", "rollout_logprob", "value", *taxed)
    trained = (*parts.SCORED, "turn", "loss_mask")
    actor = (*trained, "rollout_logprob", "advantage", *parts.produced(known))
    made = [
        *parts.generation(config, places),
        *known,
        Stage("value", critic.value, parts.SCORED, ("value",), placement=trainers),
        Stage("advantage", critic.advantage, judged, ("advantage", "return", "loss_mask"), placement=trainers),
        Stage("update_critic", critic.update_critic, (*trained, "value", "return"), placement=trainers),
        Stage("update_actor", critic.update_actor, actor, placement=trainers),
        *parts.afterwards(config, places, "update_actor"),
    ]
    engines = (*parts.engines(config, places), EngineSpec("critic", build.critic, trainers))
    return Graph(parts.spread(made, places), engines)


def _check(config: Config) -> None:
    if config.train.steps and config.critic.warmup_steps >= config.train.steps:
        raise UserError(
            f"critic.warmup_steps={config.critic.warmup_steps} leaves no step of train.steps={config.train.steps} in "
            "which the actor is trained"
        )
    if config.mode == "async":
        if config.stream.train_on != "step":
            raise UserError("a critic judges whole steps, on the trainers: with mode=async set stream.train_on=step")
        check_async(config)
