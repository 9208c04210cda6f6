"""`compute_advantages`: from the rewards of complete groups to one advantage per sample, as the configuration says."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spmd_rl.algorithms import group_advantages as by_group
from spmd_rl.algorithms.shaping import kl_penalized, overlong_tokens, soft_overlong
from spmd_rl.algorithms.whiten import local_sums, whiten

if TYPE_CHECKING:
    from spmd_rl.config.schema import AlgorithmConfig
    from spmd_rl.observe.metrics import Metrics

ADVANTAGES = (
    "grpo",
    "grpo_no_std",
    "grpo_leave_one_out",
    "dr_grpo",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "opo",
    "passk",
    "cpgd",
    "remax",
)
# Their statistics are those of the whole batch: `total` is called, on every rank, also by one without samples.
OVER_THE_BATCH = ("reinforce_pp", "reinforce_pp_baseline", "cpgd")


def compute_advantages(
    algorithm: AlgorithmConfig,
    reward_S: Tensor,
    group_S: Tensor,
    lengths_S: Tensor,
    *,
    max_tokens: int,
    kl_S: Tensor | None = None,
    greedy_S: Tensor | None = None,
    total: Callable[[Tensor], Tensor] = lambda sums: sums,
    metrics: Metrics | None = None,
) -> Tensor:
    """float32 [S]: the advantage of every sample; 0 where the reward is NaN (excluded).

    reward_S: float [S], the task's reward; group_S: int64 [S], dense (`Batch.groups()`), groups complete;
    lengths_S: int64 [S], tokens of each response; max_tokens: the longest response that rollout allows;
    kl_S: float [S], the summed k1 of each response, needed where `kl_in` is `reward`; greedy_S: float [S], the reward
    of the greedy response to the same prompt, shaped as `shaped_reward` does, needed by remax; total: the sum of a
    float64 tensor over all ranks (identity: one rank alone); metrics: gets `reward/zero_variance_fraction`, of the
    task's reward, before any shaping.

    Raises ValueError for an infinite reward, an unknown name, and where kl_S or greedy_S is needed and missing.
    """
    if metrics is not None:
        flat, present = by_group.group_counts(reward_S, group_S).unbind()
        metrics.mean("reward/zero_variance_fraction", flat, present)
    shaped_S = shaped_reward(algorithm, reward_S, lengths_S, max_tokens)
    if algorithm.kl_coef and algorithm.kl_in == "reward":
        if kl_S is None:
            raise ValueError("algorithm.kl_in=reward needs the KL of every response")
        shaped_S = kl_penalized(shaped_S, kl_S, algorithm.kl_coef)
    if algorithm.advantage == "remax":
        if greedy_S is None:
            raise ValueError("algorithm.advantage=remax needs the reward of a greedy response to every prompt")
        return by_group.remax(shaped_S, greedy_S).float()
    return _estimate(algorithm, shaped_S, group_S, lengths_S, total).float()


def shaped_reward(algorithm: AlgorithmConfig, reward_S: Tensor, lengths_S: Tensor, max_tokens: int) -> Tensor:
    """float64 [S]: the task's reward with the penalty for overlong responses, where there is one."""
    if not algorithm.overlong_buffer:
        return reward_S.double()
    buffer = overlong_tokens(algorithm.overlong_buffer, max_tokens)
    return reward_S.double() + algorithm.overlong_penalty * soft_overlong(lengths_S, max_tokens, buffer)


def _estimate(
    algorithm: AlgorithmConfig,
    reward_S: Tensor,
    group_S: Tensor,
    lengths_S: Tensor,
    total: Callable[[Tensor], Tensor],
) -> Tensor:
    name = algorithm.advantage
    if name in ("grpo", "grpo_leave_one_out"):
        return by_group.grpo(reward_S, group_S, leave_one_out=name == "grpo_leave_one_out")
    if name in ("grpo_no_std", "dr_grpo"):
        return by_group.grpo(reward_S, group_S, std=False)
    if name == "rloo":
        return by_group.rloo(reward_S, group_S)
    if name == "opo":
        return by_group.opo(reward_S, group_S, lengths_S)
    if name == "passk":
        return by_group.passk(reward_S, group_S, algorithm.pass_k)
    if name == "cpgd":
        return by_group.cpgd(reward_S, group_S, total(by_group.group_counts(reward_S, group_S)))
    # REINFORCE++, arXiv:2501.03262: no critic; the batch itself normalises.
    if name == "reinforce_pp":
        return whiten(reward_S, total(local_sums(reward_S, lengths_S)))
    if name == "reinforce_pp_baseline":
        # Centred by group and then only scaled, so that a group without variance keeps its exact 0.
        centred_S = by_group.grpo(reward_S, group_S, std=False)
        sums = local_sums(torch.where(reward_S.isnan(), reward_S, centred_S), lengths_S)
        return whiten(centred_S, total(sums), centre=False)
    raise ValueError(f"advantage {name!r} is unknown; there are {', '.join(ADVANTAGES)}")
