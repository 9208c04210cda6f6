"""`compute_token_advantages`: from rewards and a critic's values to one advantage and one return per token (GAE)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spmd_rl.algorithms.advantages import shaped_reward
from spmd_rl.algorithms.gae import gae, terminal_rewards
from spmd_rl.algorithms.ragged import offsets_of, zero_where_masked
from spmd_rl.algorithms.whiten import local_sums, variance, whiten

if TYPE_CHECKING:
    from spmd_rl.config.schema import AlgorithmConfig
    from spmd_rl.observe.metrics import Metrics


def compute_token_advantages(
    algorithm: AlgorithmConfig,
    reward_S: Tensor,
    lengths_S: Tensor,
    value_R: Tensor,
    mask_R: Tensor,
    *,
    max_tokens: int,
    kl_R: Tensor | None = None,
    total: Callable[[Tensor], Tensor] = lambda sums: sums,
    metrics: Metrics | None = None,
) -> tuple[Tensor, Tensor]:
    """float32 [R], float32 [R]: advantage and return of every token; 0 where `mask_R` is 0.

    The reward stands at the last token; with `kl_in: reward`, each token also pays `kl_coef` times its k1
    (arXiv:1909.08593, equation 2). Nothing comes after the last token, also where the response was cut off at the
    token limit: the limit is part of the task, and the reward of what was cut off is all that it returns.

    reward_S: float [S], NaN where excluded; lengths_S: int64 [S]; value_R: float32 [R], the critic's before each token;
    mask_R: [R], 0 where a token does not count, as all of an excluded sample's; max_tokens: the longest response that
    rollout allows; kl_R: float [R], logprob - ref_logprob, needed where `kl_in` is `reward`; total: the sum of a
    float64 tensor over all ranks, called on every rank; metrics: gets `value/mean` and `value/explained_variance`,
    1 - var(return - value) / var(return) over the counted tokens of all ranks (left out where all returns are equal).

    Advantages are whitened over the same tokens unless `gae_whiten` is off. Raises ValueError for an infinite reward,
    and where kl_R is needed and missing.
    """
    if bool(reward_S.isinf().any()):
        raise ValueError(f"infinite reward of sample {int(reward_S.isinf().nonzero()[0])} of this batch")
    shaped_S = shaped_reward(algorithm, reward_S, lengths_S, max_tokens)
    shaped_S = torch.where(shaped_S.isnan(), 0.0, shaped_S)  # excluded, so masked: anything that is finite
    cu_seqlens = offsets_of(lengths_S)
    reward_R = terminal_rewards(shaped_S.to(value_R.dtype), cu_seqlens)
    if algorithm.kl_coef and algorithm.kl_in == "reward":
        if kl_R is None:
            raise ValueError("algorithm.kl_in=reward needs the KL of every token")
        reward_R = reward_R - algorithm.kl_coef * kl_R
    advantage_R, return_R = gae(reward_R, value_R, cu_seqlens, algorithm.gae_gamma, algorithm.gae_lambda)

    # NaN marks what sums and whitening leave out.
    counted = [x_R.masked_fill(mask_R == 0, float("nan")) for x_R in (advantage_R, return_R, return_R - value_R)]
    one_R = torch.ones(len(mask_R), dtype=torch.int64)
    own = torch.stack([local_sums(x_R, one_R) for x_R in counted])
    of_advantage, of_return, of_error = total(own)
    if metrics is not None:
        metrics.mean("value/mean", zero_where_masked(value_R, mask_R).double().sum(), own[0, 0])
        if variance(of_return) > 0:
            metrics.set("value/explained_variance", 1 - variance(of_error) / variance(of_return))
    if algorithm.gae_whiten:
        advantage_R = whiten(counted[0], of_advantage)
    return zero_where_masked(advantage_R, mask_R).float(), zero_where_masked(return_R, mask_R).float()
