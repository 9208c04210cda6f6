"""GRPO (Shao et al. 2024, arXiv:2402.03300) and its critic-free relatives, as a graph.

prompts -> rollout -> reward -> advantage -> update -> sync
                  \\-> old_logprob, ref_logprob -/        (where the settings need them)

With dynamic sampling the first three are one stage, `experience`, which goes through them in rounds. ReMax has a stage
`greedy_reward` beside `reward`.
"""

from __future__ import annotations

from spmd_rl.algorithms.check import check as check_algorithm
from spmd_rl.config.check import refuse_unused
from spmd_rl.config.schema import Config
from spmd_rl.graph.graph import Graph
from spmd_rl.graph.stage import Stage
from spmd_rl.recipes import parts, stages
from spmd_rl.recipes.contract import check_async


def graph(config: Config, world_size: int) -> Graph:
    """Rollout and training share all ranks and take turns; the world size only decides who holds which samples. In
    mode async they have ranks of their own (`placement`), and the job brings samples and weights from one to the other.
    """
    check_algorithm(config.algorithm, config.train, config.rollout)
    refuse_unused("critic", config.critic, "run.graph=spmd_rl.recipes.ppo:graph")
    places = parts.Places.of(config, world_size)
    if config.mode == "async":
        check_async(config)
    known = parts.logprobs(config, places)
    taxed = parts.produced(known) if parts.kl_in_reward(config) else ()
    baseline = ("greedy_reward",) if parts.compares_with_greedy(config) else ()
    judged = ("response", "reward", "finish", "rollout_logprob", *baseline, *taxed)
    trained = (*parts.SCORED, "turn", "rollout_logprob", "advantage", "loss_mask", *parts.produced(known))
    made = [
        *parts.generation(config, places),
        Stage("advantage", stages.advantage, judged, ("advantage", "loss_mask"), placement=places.judges),
        *known,
        Stage("update", stages.update, consumes=trained, placement=places.trainers),
        *parts.afterwards(config, places, "update"),
    ]
    return Graph(parts.spread(made, places), tuple(parts.engines(config, places)))
