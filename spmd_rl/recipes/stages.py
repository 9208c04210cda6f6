"""The stages that recipes are made of. Each is one function of (context, samples on this rank)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.algorithms.advantages import compute_advantages
from spmd_rl.algorithms.check import is_cut
from spmd_rl.algorithms.masks import exclude, loss_mask, name_samples, nonfinite_samples, spread
from spmd_rl.algorithms.policy_loss import policy_loss
from spmd_rl.algorithms.ragged import segment_sum
from spmd_rl.config.schema import Config
from spmd_rl.data.batch import Batch, Column, Finish
from spmd_rl.engines.protocol import Completion, Request
from spmd_rl.engines.reward.pool import Pending
from spmd_rl.engines.reward.scores import Scores, labels
from spmd_rl.engines.rollout.desk import Slip
from spmd_rl.engines.rollout.generate import generate
from spmd_rl.engines.rollout.sampling import sampling_from
from spmd_rl.engines.rollout.seeds import sample_seed
from spmd_rl.graph.stage import Context
from spmd_rl.recipes.kl_control import algorithm_now


def prompts(context: Context, _: Batch) -> Batch:
    """The step's prompts of this slot, each `samples_per_prompt` times."""
    batch = context.engines["loader"].batch(context.own_slot, context.slots)
    # By identity, as an exchange orders them: samples that need not move are then handed over as they are.
    ids = batch.ids.tolist()
    return batch.select(torch.tensor(sorted(range(len(ids)), key=ids.__getitem__), dtype=torch.int64))


def rollout(context: Context, batch: Batch) -> Mapping[str, Column]:
    """Draw one response for every sample."""
    return counted(context, draw(context, batch, purpose="train"))


def stream_rollout(context: Context, batch: Batch) -> PendingRollout:
    """The same for one group among many that the engine draws at once: its columns come later."""
    return PendingRollout(context, context.engines["desk"].submit(requests(context, batch, purpose="train")))


@dataclass
class PendingRollout:
    """Responses that are being drawn."""

    context: Context
    slip: Slip

    def done(self) -> bool:
        return self.slip.done()

    def result(self) -> Mapping[str, Column]:
        done = self.slip.result()
        runs = [torch.tensor(c.versions, dtype=torch.int64).reshape(-1, 2) for c in done]
        versions = Column.from_rows(runs) if runs else Column(torch.empty(0, 2, dtype=torch.int64), _no_samples())
        return {**counted(self.context, columns_of(done)), "versions": versions}


def _no_samples() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


def counted(context: Context, made: dict[str, Column]) -> dict[str, Column]:
    """What was drawn, also in the metrics."""
    tokens = int(made["response"].lengths.sum())
    lengths = made["response"].lengths.double()
    if context.replica == 0:
        metrics, samples = context.metrics, len(lengths)
        metrics.sum("tokens/generated", tokens)
        metrics.sum("samples", samples)
        metrics.mean("response/length_mean", float(lengths.sum()), samples)
        metrics.max("response/length_max", float(lengths.max()) if samples else 0.0)
        truncated = made["finish"].values == Finish.LENGTH
        metrics.mean("response/truncated_fraction", float(truncated.sum()), samples)
    return made


def draw(context: Context, batch: Batch, purpose: str) -> dict[str, Column]:
    """One response per sample of `batch`, as columns; sampled as `purpose` (train or eval) says."""
    return columns_of(complete(context, requests(context, batch, purpose)))


def complete(context: Context, asked: Sequence[Request]) -> list[Completion]:
    """One completion per request, in their order. Where several ranks share an engine, all of them draw what the one
    with the samples asks for, and it gets the completions."""
    if context.peers is not None:
        shared = [asked]
        dist.broadcast_object_list(shared, group=context.peers, group_src=0)
        asked = shared[0]
    done = generate(context.engines["rollout"], asked, deadline_s=context.config.comm.stage_timeout_s)
    return [] if context.own_slot is None else done


def requests(context: Context, batch: Batch, purpose: str) -> list[Request]:
    """One per sample of `batch`, drawn as `purpose` says (`sampling_from`)."""
    sampling = sampling_from(context.config, purpose)
    return [
        Request(
            id=tuple(identity),
            prompt=tuple(prompt.tolist()),
            sampling=sampling,
            seed=sample_seed(context.config.run.seed, purpose, *identity),
        )
        for identity, prompt in zip(batch.ids.tolist(), batch["prompt"].rows(), strict=True)
    ]


def columns_of(done: Sequence[Completion]) -> dict[str, Column]:
    """`response`, `rollout_logprob`, `finish` and `version`."""
    return {
        "response": Column.from_rows([torch.tensor(c.tokens, dtype=torch.int32) for c in done], torch.int32),
        "rollout_logprob": Column.from_rows([torch.tensor(c.logprobs) for c in done], torch.float32),
        "finish": Column.scalars(torch.tensor([c.finish for c in done], dtype=torch.uint8)),
        "version": Column.scalars(torch.tensor([c.version for c in done], dtype=torch.int64)),
    }


def reward(context: Context, batch: Batch) -> PendingReward:
    """Hand the responses to the reward workers; they work while this rank goes on."""
    return PendingReward(context, score(context, batch))


def score(context: Context, batch: Batch) -> Pending:
    """The responses of `batch` as text, with their rows, in the hands of the reward workers. Ranks that never have
    samples need none."""
    if not len(batch):
        return Pending(context.config.reward, [], [])
    tokenizer = context.engines["tokenizer"]
    return context.engines["reward"].score(
        prompts=_texts(tokenizer, batch["prompt"]),
        responses=_texts(tokenizer, batch["response"]),
        rows=[json.loads(row) for row in batch["row"].row_bytes()],
        ids=[tuple(identity) for identity in batch.ids.tolist()],
    )


def _texts(tokenizer: Any, tokens: Column) -> list[str]:
    """One by one: `batch_decode` takes an empty list for one empty sequence."""
    return [tokenizer.decode(row.tolist(), skip_special_tokens=True) for row in tokens.rows()]


@dataclass
class PendingReward:
    """Scores on their way; becomes the columns `reward` and `reward_parts`."""

    context: Context
    pending: Pending

    def done(self) -> bool:
        return self.pending.done()

    def result(self) -> Mapping[str, Column]:
        scores = self.pending.result(self.context.config.comm.stage_timeout_s)
        columns = scored_columns(scores)
        if self.context.replica == 0:
            metrics = self.context.metrics
            metrics.sum("reward/late", scores.late)
            for extras in scores.extras:
                for name, value in extras.items():
                    metrics.mean(f"reward/extra/{name}", value, 1)
        if self.context.config.reward_model.path:  # they are one part of the reward
            return {"task_reward": columns["reward"], "task_parts": columns["reward_parts"]}
        report_rewards(self.context, columns)
        return columns


def report_rewards(context: Context, columns: Mapping[str, Column]) -> None:
    """The totals and their parts as metrics."""
    if context.replica:
        return
    metrics, reward_S = context.metrics, columns["reward"].values
    metrics.moments("reward", reward_S[~reward_S.isnan()])
    metrics.sum("reward/excluded", reward_S.isnan().sum())
    names = part_names(context.config)
    for name, values_S in zip(names, columns["reward_parts"].values.reshape(-1, len(names)).T, strict=True):
        valid_S = values_S[~values_S.isnan()]
        metrics.mean(f"reward/part/{name}", valid_S.double().sum(), len(valid_S))


def part_names(config: Config) -> list[str]:
    """What the values of `reward_parts` are called: the reward functions in their order, then the reward model."""
    return [*labels(config.reward.functions), *(["reward_model"] if config.reward_model.path else [])]


def scored_columns(scores: Scores) -> dict[str, Column]:
    """`reward` and `reward_parts`."""
    parts = [torch.tensor(part, dtype=torch.float32) for part in scores.parts]
    return {
        "reward": Column.scalars(torch.tensor(scores.reward, dtype=torch.float32)),
        "reward_parts": Column.from_rows(parts, torch.float32),
    }


def valid_rewards(context: Context, batch: Batch) -> Tensor:
    """float32 [S]: the task's reward, NaN where the sample is excluded: by its reward, or by a log-probability of the
    rollout engine that is not finite (FloatingPointError instead, where `nonfinite_logprob` says stop)."""
    broken_S = nonfinite_samples(batch["rollout_logprob"].values, batch["rollout_logprob"].offsets)
    if context.config.algorithm.nonfinite_logprob == "stop" and bool(broken_S.any()):
        raise FloatingPointError(
            f"the rollout engine's log-probability is NaN or infinite in sample {name_samples(batch.ids, broken_S)}"
        )
    return exclude(batch["reward"].as_scalars(), broken_S)


def advantage(context: Context, batch: Batch) -> Mapping[str, Column]:
    """Advantages within each group, one per token; and which tokens count in the loss."""
    algorithm = algorithm_now(context)
    lengths_S, offsets = batch["response"].lengths, batch["response"].offsets
    reward_S = valid_rewards(context, batch)
    kl_S = greedy_S = None
    if "greedy_reward" in batch:  # without its baseline, a sample teaches nothing
        greedy_S = batch["greedy_reward"].as_scalars()
        reward_S = exclude(reward_S, greedy_S.isnan())
    if algorithm.kl_coef and algorithm.kl_in == "reward":
        kl_S = segment_sum(batch["old_logprob"].values - batch["ref_logprob"].values, offsets)
    advantage_S = compute_advantages(
        algorithm,
        reward_S,
        batch.groups(),
        lengths_S,
        max_tokens=context.config.rollout.max_tokens,
        kl_S=kl_S,
        greedy_S=greedy_S,
        total=lambda sums: sum_over_slots(context, sums),
        metrics=context.metrics if context.replica == 0 else None,
    )
    mask_R = loss_mask(lengths_S, reward_S, batch["finish"].as_scalars(), algorithm.mask_truncated)
    return {"advantage": Column(spread(advantage_S, lengths_S), lengths_S), "loss_mask": Column(mask_R, lengths_S)}


def sum_over_slots(context: Context, sums: Tensor) -> Tensor:
    """float64 sums over all samples of the step; ranks that repeat a slot's samples add nothing."""
    total = sums.clone() if context.replica == 0 else torch.zeros_like(sums)
    dist.all_reduce(total, group=context.world.control)
    return total


def old_logprob(context: Context, batch: Batch) -> Mapping[str, Column]:
    """Log-probabilities under the policy as it is before the first update of the step."""
    return {"old_logprob": _logprobs(context.engines["actor"], batch)}


def reference_logprob(context: Context, batch: Batch) -> Mapping[str, Column]:
    """Log-probabilities under the reference model."""
    return {"ref_logprob": _logprobs(context.engines["reference"], batch)}


def _logprobs(engine: Any, batch: Batch) -> Column:
    return Column(engine.logprobs(batch), batch["response"].lengths)


def update(context: Context, batch: Batch) -> None:
    """The optimizer steps of this round; the groups are divided among them by the column `turn`."""
    updates, rollout = context.config.train.updates_per_step, context.config.rollout
    loss = policy_loss(
        algorithm_now(context), updates_per_step=updates, max_tokens=rollout.max_tokens, cut=is_cut(rollout)
    )
    for part in turns(context, batch):
        context.engines["actor"].update(part, loss, context.metrics, last=context.last)


def turns(context: Context, batch: Batch) -> Iterator[Batch]:
    """The samples of each optimizer step of this round."""
    count = context.config.train.updates_per_step
    turn_S = batch["turn"].as_scalars()
    for turn in range(count):
        yield batch if count == 1 else batch.select((turn_S == turn).nonzero().flatten())


def sync(context: Context, _: Batch) -> None:
    """Bring the rollout engine's weights to the trainer's version."""
    actor = context.engines["actor"]
    context.engines["rollout"].load_weights(actor.named_weights(), actor.version)
