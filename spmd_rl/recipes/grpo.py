"""GRPO (Shao et al. 2024, arXiv:2402.03300) and its critic-free relatives, as a graph.

prompts -> rollout -> reward -> advantage -> update -> sync
                  \\-> old_logprob, ref_logprob -/        (where the settings need them)

With dynamic sampling the first three are one stage, `experience`, which goes through them in rounds.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from spmd_rl.algorithms.check import check as check_algorithm
from spmd_rl.config.schema import Config
from spmd_rl.data.balance import Balance
from spmd_rl.engines.rollout.sampling import check_model, model_tokens
from spmd_rl.graph.graph import Graph
from spmd_rl.graph.roles import roles_of
from spmd_rl.graph.stage import REST, EngineSpec, Placement, Stage, StageFunction
from spmd_rl.recipes import build, dynamic, kl_control, stages
from spmd_rl.recipes.contract import check_async


def graph(config: Config, world_size: int) -> Graph:
    """Rollout and training share all ranks and take turns; the world size only decides who holds which samples. In
    mode async they have ranks of their own (`placement`), and the job brings samples and weights from one to the other.
    """
    check_algorithm(config.algorithm, config.train, config.rollout)
    check_model(Path(config.model.path) / "config.json", config.rollout.tensor_parallel, model_tokens(config))
    roles = roles_of(config, world_size)
    if roles is not None:
        check_async(config)
    replicas = Placement(roles.rollout if roles else None, {"dp": REST, "tp": config.rollout.tensor_parallel})
    trainers = Placement(roles.train if roles else None)
    # Where a step comes to the trainers as a whole, it can be judged as a whole.
    judges = trainers if roles and config.stream.train_on == "step" else replicas
    scored = ("prompt", "response")
    trained = [*scored, "turn", "rollout_logprob", "advantage", "loss_mask"]
    nodes = generation(config, replicas)
    engines = [
        EngineSpec("tokenizer", build.tokenizer),
        EngineSpec("loader", build.loader, replicas),
        EngineSpec("reward", build.reward, replicas),
        EngineSpec("actor", build.actor, trainers),
        EngineSpec("rollout", build.rollout, replicas),
    ]
    if roles is not None:
        engines.append(EngineSpec("desk", build.desk, replicas))
    algorithm = config.algorithm
    if algorithm.dynamic_sampling:
        engines.append(EngineSpec("surplus", dynamic.surplus, replicas))
    in_reward = algorithm.kl_coef > 0 and algorithm.kl_in == "reward"
    on_trainers = []
    judged = ["response", "reward", "finish", "rollout_logprob"]
    if config.train.updates_per_step > 1 or in_reward:
        on_trainers.append(Stage("old_logprob", stages.old_logprob, scored, ("old_logprob",)))
        trained.append("old_logprob")
    if algorithm.kl_coef > 0:
        on_trainers.append(Stage("ref_logprob", stages.reference_logprob, scored, ("ref_logprob",)))
        trained.append("ref_logprob")
        engines.append(EngineSpec("reference", build.reference, trainers))
    if algorithm.kl_target > 0:
        engines.append(EngineSpec(kl_control.ENGINE, kl_control.coefficient))
    if in_reward:
        judged += ["old_logprob", "ref_logprob"]
    on_trainers.append(Stage("update", stages.update, consumes=tuple(trained)))
    # The first stage on the trainers spreads the samples evenly; the later ones find them there.
    on_trainers[0] = replace(on_trainers[0], balance=Balance(keep_groups=True))
    nodes += [
        Stage("advantage", stages.advantage, tuple(judged), ("advantage", "loss_mask"), placement=judges),
        *(replace(stage, placement=trainers) for stage in on_trainers),
    ]
    if roles is None:
        nodes.append(Stage("sync", stages.sync, after=("update",)))
    if algorithm.kl_target > 0:
        nodes.append(Stage("kl_control", kl_control.steer, after=("update",)))
    return Graph(tuple(nodes), tuple(engines))


def generation(config: Config, replicas: Placement) -> list[Stage]:
    """From nothing to judged responses."""
    drawn: tuple[str, ...] = ("response", "rollout_logprob", "finish", "version")
    judged = ("reward", "reward_parts")
    first = ("prompt", "row", "turn")
    if config.algorithm.dynamic_sampling:
        return [Stage("experience", dynamic.experience, produces=(*first, *drawn, *judged), placement=replicas)]
    draw: StageFunction = stages.rollout
    if config.mode == "async":
        draw, drawn = stages.stream_rollout, (*drawn, "versions")
    return [
        Stage("prompts", stages.prompts, produces=first, placement=replicas),
        Stage("rollout", draw, consumes=("prompt",), produces=drawn, placement=replicas),
        Stage("reward", stages.reward, ("prompt", "response", "row"), judged, placement=replicas),
    ]
