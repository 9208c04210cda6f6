"""What every recipe must bring, because the job uses it between the steps of the graph."""

from __future__ import annotations

from spmd_rl.algorithms.advantages import OVER_THE_BATCH
from spmd_rl.config.errors import UserError
from spmd_rl.config.schema import Config
from spmd_rl.data.stream.codec import largest_bytes
from spmd_rl.graph.graph import Graph

ENGINES = {
    "tokenizer": "samples are written as text",
    "loader": "it says when the data has ended, and has the prompts of evaluations",
    "rollout": "evaluations draw with it",
    "reward": "evaluations are scored by it",
    "actor": "its weights are exported at the end",
}
STAGES = {
    "sync": "after a resume it brings the weights to the rollout engine",
}


def check_contract(graph: Graph, mode: str = "sync") -> None:
    """Raises UserError where the job would miss an engine or a stage of the graph."""
    stages = STAGES if mode == "sync" else {}
    engines = ENGINES if mode == "sync" else {**ENGINES, "desk": "groups are drawn through it side by side"}
    declared = {engine.name for engine in graph.engines}, {stage.name for stage in graph.stages}
    for kind, wanted, names in zip(("engine", "stage"), (engines, stages), declared, strict=True):
        for name, purpose in wanted.items():
            if name not in names:
                raise UserError(f"the graph has no {kind} named {name!r}, which the job needs: {purpose}")


def check_async(config: Config) -> None:
    """Refuse settings that cannot be had with mode=async, for recipes that reward and judge each group by itself."""
    algorithm, stream, train = config.algorithm, config.stream, config.train
    by_group = stream.train_on != "step"
    if algorithm.advantage in OVER_THE_BATCH and by_group:
        raise UserError(
            f"algorithm.advantage={algorithm.advantage} compares the samples of a whole step, but with mode=async "
            "groups come one by one: set stream.train_on=step, or choose an advantage within the group, as grpo or rloo"
        )
    if algorithm.dynamic_sampling and stream.surplus:
        raise UserError(
            f"stream.surplus={stream.surplus} lets other groups go first, but algorithm.dynamic_sampling trains on "
            "them in their order: leave one out"
        )
    if algorithm.dynamic_sampling and stream.on_stale != "wait":
        raise UserError(
            f"algorithm.dynamic_sampling trains on groups in their order: with mode=async it needs "
            f"stream.on_stale=wait, not {stream.on_stale}"
        )
    if algorithm.kl_coef and algorithm.kl_in == "reward" and by_group:
        raise UserError(
            "algorithm.kl_in=reward needs the trainers before the advantage: with mode=async set stream.train_on=step, "
            "or kl_in=loss"
        )
    if train.updates_per_step > 1 and by_group:
        raise UserError(
            f"train.updates_per_step={train.updates_per_step} divides a whole step: with mode=async it needs "
            "stream.train_on=step"
        )
    tokens = config.data.max_prompt_tokens, config.rollout.max_tokens
    # prompt, response, rollout_logprob, advantage, loss_mask; the rest is small and unknown before it comes.
    columns = [(4, tokens[0]), (4, tokens[1]), (4, tokens[1]), (4, tokens[1]), (1, tokens[1])]
    least = largest_bytes(train.samples_per_prompt, columns)
    if least > stream.limit_mib * 2**20:
        raise UserError(
            f"stream.limit_mib={stream.limit_mib:g} is less than one group: {train.samples_per_prompt} samples of up "
            f"to {tokens[0]} + {tokens[1]} tokens are {least / 2**20:.3g} MiB"
        )
