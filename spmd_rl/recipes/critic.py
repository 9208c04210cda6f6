"""The stages of recipes with a critic. Each is one function of (context, samples on this rank)."""

from __future__ import annotations

from collections.abc import Mapping

from spmd_rl.algorithms.critic_loss import CriticLoss
from spmd_rl.algorithms.kl import k1
from spmd_rl.algorithms.masks import loss_mask, refuse_nonfinite
from spmd_rl.algorithms.token_advantages import compute_token_advantages
from spmd_rl.data.batch import Batch, Column
from spmd_rl.graph.stage import Context
from spmd_rl.recipes.kl_control import algorithm_now
from spmd_rl.recipes.stages import sum_over_slots, turns, update, valid_rewards


def value(context: Context, batch: Batch) -> Mapping[str, Column]:
    """What the critic expects before each token, as it is before the first update of the step."""
    return {"value": Column(context.engines["critic"].values(batch), batch["response"].lengths)}


def advantage(context: Context, batch: Batch) -> Mapping[str, Column]:
    """Advantage and return of each token (GAE); and which tokens count in the losses."""
    algorithm, lengths_S = algorithm_now(context), batch["response"].lengths
    reward_S = valid_rewards(context, batch)
    mask_R = loss_mask(lengths_S, reward_S, batch["finish"].as_scalars(), algorithm.mask_truncated)
    known = {name: batch[name].values for name in ("value", "old_logprob", "ref_logprob") if name in batch}
    refuse_nonfinite(known, mask_R, batch["response"].offsets, batch.ids)
    advantage_R, return_R = compute_token_advantages(
        algorithm,
        reward_S,
        lengths_S,
        known["value"],
        mask_R,
        max_tokens=context.config.rollout.max_tokens,
        kl_R=k1(known["old_logprob"], known["ref_logprob"]) if "ref_logprob" in known else None,
        total=lambda sums: sum_over_slots(context, sums),
        metrics=context.metrics if context.replica == 0 else None,
    )
    made = {"advantage": advantage_R, "return": return_R, "loss_mask": mask_R}
    return {name: Column(values_R, lengths_S) for name, values_R in made.items()}


def update_critic(context: Context, batch: Batch) -> None:
    """The critic's optimizer steps of this round."""
    settings = context.config.critic
    for _ in range(settings.epochs):
        for part in turns(context, batch):
            context.engines["critic"].update(part, CriticLoss(settings.value_clip), context.metrics)


def update_actor(context: Context, batch: Batch) -> None:
    """The policy's optimizer steps, once the critic has had its `warmup_steps` rounds."""
    frozen = context.step <= context.config.critic.warmup_steps
    context.metrics.set("train/actor_frozen", float(frozen))
    if not frozen:
        update(context, batch)
