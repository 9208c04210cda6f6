"""Importance weights for what the rollout engine and the trainer disagree on.

The rollout engine drew the tokens with probabilities `rollout_logprob`; the trainer, with the same weights, computes
`logprob` (other kernels, precision, or older weights). The policy gradient is right when each term carries
w = exp(logprob - rollout_logprob), without gradient; bounding w trades bias for variance.

| method   | weight used                                | source                                                 |
| -------- | ------------------------------------------ | ------------------------------------------------------ |
| `tis`    | min(w, cap)                                | truncated importance sampling, Ionides 2008            |
| `mis`    | w where w <= cap, else 0                   | masked importance sampling                             |
| `icepop` | w where floor <= w <= cap, else 0          | IcePop, arXiv:2510.18855                               |

Levels: `token` weighs each token by its own w; `sequence` by the product over the response (unbiased, heavy tail);
`geometric` by the geometric mean over the response. Masked tokens stay in the denominator of the loss.
`loss=decoupled_ppo` is `ppo_clip` with `tis` by token, where the samples may be older than the proximal policy.

Temperature: both log-probabilities must be at the sampling temperature (the trainer divides its logits by it). Top-p
and top-k: the rollout engine's log-probability is then that of the *cut and renormalised* distribution, larger than the
trainer's by -log(mass kept). No weight makes up for tokens that could not be drawn, and renormalising the trainer's
probabilities over the same set would take a sort of the whole vocabulary per token. So a correction is refused beside a
cut, and what is reported is the cut itself (`report_cut`) and no mismatch, which it would hide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spmd_rl.algorithms.kl import k3
from spmd_rl.algorithms.losses import MAX_LOG_RATIO, log_ratio
from spmd_rl.algorithms.ragged import expand, segment_mean, segment_sum, zero_where_masked

if TYPE_CHECKING:
    from spmd_rl.observe.metrics import Metrics

METHODS = ("none", "tis", "mis", "icepop")
LEVELS = ("token", "sequence", "geometric")


def importance_weights(
    logprob_R: Tensor, rollout_logprob_R: Tensor, mask_R: Tensor, cu_seqlens: Tensor, level: str
) -> Tensor:
    """[R], no gradient: trainer / rollout probability of the token, or of its whole response. Raises ValueError for an
    unknown level."""
    log_weight_R = zero_where_masked(log_ratio(logprob_R, rollout_logprob_R).detach(), mask_R)
    if level == "token":
        return log_weight_R.exp()
    if level not in LEVELS:
        raise ValueError(f"correction level {level!r} is unknown; there are {', '.join(LEVELS)}")
    if level == "sequence":
        log_weight_S = segment_sum(log_weight_R, cu_seqlens)
    else:
        log_weight_S = segment_mean(log_weight_R, cu_seqlens, mask_R)
    return expand(log_weight_S.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), cu_seqlens, logprob_R.shape[0])


def bound(weight_R: Tensor, method: str, cap: float, floor: float = 0.0) -> Tensor:
    """[R]: the weight that is used instead of `weight_R`. Raises ValueError for an unknown method."""
    if method == "tis":
        return weight_R.clamp(max=cap)
    if method == "mis":
        return torch.where(weight_R <= cap, weight_R, 0.0)
    if method == "icepop":
        return torch.where((weight_R >= floor) & (weight_R <= cap), weight_R, 0.0)
    raise ValueError(f"correction {method!r} is unknown; there are {', '.join(METHODS)}")


def report_mismatch(metrics: Metrics, logprob_R: Tensor, rollout_logprob_R: Tensor, mask_R: Tensor) -> None:
    """Adds `mismatch/kl` (k3 estimate of KL(rollout || trainer), nats per token), `mismatch/kl_k1`,
    `mismatch/logprob_difference` (mean absolute), `mismatch/ratio_mean` and `mismatch/ratio_max`.

    logprob_R: the trainer's, of the weights that are meant to have drawn the tokens.
    """
    trainer_R = zero_where_masked(logprob_R.detach(), mask_R)
    rollout_R = zero_where_masked(rollout_logprob_R, mask_R)
    ratio_R = zero_where_masked(log_ratio(trainer_R, rollout_R).exp(), mask_R)
    tokens = (mask_R != 0).sum()
    metrics.mean("mismatch/kl", k3(rollout_R, trainer_R).sum(), tokens)
    metrics.mean("mismatch/kl_k1", (rollout_R - trainer_R).sum(), tokens)
    metrics.mean("mismatch/logprob_difference", (rollout_R - trainer_R).abs().sum(), tokens)
    metrics.mean("mismatch/ratio_mean", ratio_R.sum(), tokens)
    if len(ratio_R):
        metrics.max("mismatch/ratio_max", ratio_R.max())


def report_cut(metrics: Metrics, logprob_R: Tensor, rollout_logprob_R: Tensor, mask_R: Tensor) -> None:
    """Adds `mismatch/kept_mass`, the mean probability that top-p and top-k leave: the trainer's probability of a
    token divided by the renormalised one that drew it (the engines' true mismatch is in it, too)."""
    log_mass_R = zero_where_masked(log_ratio(logprob_R.detach(), rollout_logprob_R), mask_R)
    metrics.mean("mismatch/kept_mass", zero_where_masked(log_mass_R.exp(), mask_R).sum(), (mask_R != 0).sum())
