"""ReMax (Li et al. 2023, arXiv:2310.10505): the reward of the greedy response to a prompt is its samples' baseline.

The greedy response is drawn along with the samples and scored by the same rewards. It is no sample: it is not trained
on, and in none of the samples' metrics. Each sample of its prompt carries a copy, so that it may go anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from spmd_rl.algorithms.advantages import shaped_reward
from spmd_rl.data.batch import Batch, Column
from spmd_rl.engines.protocol import Completion
from spmd_rl.engines.reward.pool import Pending
from spmd_rl.engines.rollout.desk import Slip
from spmd_rl.graph.stage import Context, Deferred
from spmd_rl.recipes import stages
from spmd_rl.recipes.reward_model import judge

GREEDY = ("greedy_response", "greedy_logprob")
SCORED = ("prompt", "row", *GREEDY)


def rollout(context: Context, batch: Batch) -> Mapping[str, Column]:
    """Draw one response for every sample, and a greedy one for every prompt."""
    samples = stages.requests(context, batch, purpose="train")
    greedy = stages.requests(context, _one_per_prompt(context, batch), purpose="baseline")
    done = stages.complete(context, [*samples, *greedy])
    drawn = stages.counted(context, stages.columns_of(done[: len(samples)]))
    return {**drawn, **_greedy_columns(batch, done[len(samples) :])}


def stream_rollout(context: Context, batch: Batch) -> PendingRollout:
    """The same for one group among many that the engine draws at once: its columns come later."""
    greedy = stages.requests(context, _one_per_prompt(context, batch), purpose="baseline")
    return PendingRollout(batch, stages.stream_rollout(context, batch), context.engines["desk"].submit(greedy))


@dataclass
class PendingRollout:
    """Responses that are being drawn, the greedy one among them."""

    batch: Batch
    samples: stages.PendingRollout
    greedy: Slip

    def done(self) -> bool:
        return self.samples.done() and self.greedy.done()

    def result(self) -> Mapping[str, Column]:
        return {**self.samples.result(), **_greedy_columns(self.batch, self.greedy.result())}


def greedy_reward(context: Context, batch: Batch) -> Mapping[str, Column] | Deferred:
    """`greedy_reward`: what the greedy response to each sample's prompt got. A reward model is waited for."""
    greedy = _one_per_prompt(context, batch)
    columns = {"response": greedy["greedy_response"], "rollout_logprob": greedy["greedy_logprob"]}
    greedy = Batch(greedy.ids, {**greedy.only(("prompt", "row")).columns, **columns})
    pending = PendingReward(context, batch, greedy, stages.score(context, greedy))
    return pending.result() if context.config.reward_model.path else pending


@dataclass
class PendingReward:
    """Scores on their way."""

    context: Context
    batch: Batch
    greedy: Batch
    pending: Pending

    def done(self) -> bool:
        return self.pending.done()

    def result(self) -> Mapping[str, Column]:
        scores = self.pending.result(self.context.config.comm.stage_timeout_s)
        judged = judge(self.context, self.greedy.with_columns(stages.scored_columns(scores)))
        return _of_samples(self.context, self.batch, judged)


def _one_per_prompt(context: Context, batch: Batch) -> Batch:
    """The first sample of each prompt, in the order of `Batch.groups`, as the greedy one: numbered behind them."""
    places: dict[tuple[int, int], int] = {}
    for place, (epoch, prompt, _) in enumerate(batch.ids.tolist()):
        places.setdefault((epoch, prompt), place)
    first = batch.select(torch.tensor(list(places.values()), dtype=torch.int64))
    ids = first.ids.clone()
    ids[:, 2] = context.config.train.samples_per_prompt
    return Batch(ids, first.columns)


def _greedy_columns(batch: Batch, done: list[Completion]) -> dict[str, Column]:
    made, group_S = stages.columns_of(done), batch.groups()
    return {
        "greedy_response": made["response"].select(group_S),
        "greedy_logprob": made["rollout_logprob"].select(group_S),
    }


def _of_samples(context: Context, batch: Batch, judged: Batch) -> dict[str, Column]:
    """The reward of each sample's greedy response, shaped as the samples' are; and how they did, as metrics."""
    config = context.config
    reward_G = stages.valid_rewards(context, judged)
    if context.replica == 0:
        valid_G = reward_G[~reward_G.isnan()]
        context.metrics.mean("reward/greedy_mean", valid_G.double().sum(), len(valid_G))
        context.metrics.sum("tokens/greedy", int(judged["response"].lengths.sum()))
    shaped_G = shaped_reward(config.algorithm, reward_G, judged["response"].lengths, config.rollout.max_tokens)
    return {"greedy_reward": Column.scalars(shaped_G.float()[batch.groups()])}
