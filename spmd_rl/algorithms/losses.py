"""Policy losses, one value per token: to be minimised, masked and aggregated by `aggregate.py`.

R tokens of S samples, flat. `logprob_R` is that of the current policy, with gradient; `old_logprob_R` that of the
policy at the start of the round; `advantage_R` carries no gradient. ratio = exp(logprob - old_logprob). Each function
returns the loss and, for the metrics, where its bound took the gradient away.
"""

from __future__ import annotations

from math import log, log1p
from typing import NamedTuple

import torch
from torch import Tensor

from spmd_rl.algorithms.ragged import expand, segment_mean

# exp(20) = 4.9e8: far outside every useful ratio, and its square is still finite in float32.
MAX_LOG_RATIO = 20.0


class TokenLoss(NamedTuple):
    """loss_R: float [R]; clipped_R: bool [R], where the bound is active and the token has no gradient."""

    loss_R: Tensor
    clipped_R: Tensor


def log_ratio(logprob_R: Tensor, old_logprob_R: Tensor) -> Tensor:
    """[R]: logprob - old_logprob, bounded so that its exponential and the gradients of that stay finite."""
    return (logprob_R - old_logprob_R).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ppo_clip(
    logprob_R: Tensor,
    old_logprob_R: Tensor,
    advantage_R: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> TokenLoss:
    """-min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A).

    PPO, arXiv:1707.06347; clip_high > clip_low is DAPO's clip-higher, arXiv:2503.14476. dual_clip c > 1 bounds the
    loss of negative advantages by -c A (arXiv:1912.09729); 0 switches it off.
    """
    loss_R, clipped_R = _clip(log_ratio(logprob_R, old_logprob_R).exp(), advantage_R, clip_low, clip_high)
    if dual_clip:
        cap_R = -dual_clip * advantage_R
        capped_R = (advantage_R < 0) & (loss_R > cap_R)
        loss_R, clipped_R = torch.where(capped_R, cap_R, loss_R), clipped_R | capped_R
    return TokenLoss(loss_R, clipped_R)


def gspo(
    logprob_R: Tensor,
    old_logprob_R: Tensor,
    advantage_R: Tensor,
    mask_R: Tensor,
    cu_seqlens: Tensor,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """PPO's bound on the sequence ratio s = exp(mean over the sequence's tokens of the log ratio).

    GSPO-token of arXiv:2507.18071 (section 4.3): a token's ratio has the value of s and the gradient s * grad logprob.
    With one advantage per sequence and `seq_mean_token_mean`, value and gradient are those of GSPO.
    """
    mean_S = segment_mean(log_ratio(logprob_R, old_logprob_R).detach(), cu_seqlens, mask_R)
    # The value of the sequence's log ratio with the gradient of the token's; the difference is exactly 0.
    log_ratio_R = expand(mean_S, cu_seqlens, logprob_R.shape[0]) + (logprob_R - logprob_R.detach())
    return _clip(log_ratio_R.exp(), advantage_R, clip_low, clip_high)


def cispo(
    logprob_R: Tensor, old_logprob_R: Tensor, advantage_R: Tensor, clip_low: float, clip_high: float
) -> TokenLoss:
    """-sg(clip(ratio, 1 - clip_low, 1 + clip_high)) A logprob. MiniMax-M1, arXiv:2506.13585.

    The *weight* is bounded, no token loses its gradient. clip_low = 1 leaves the weight without a lower bound, as in
    the paper. clipped_R tells where the weight was bounded.
    """
    ratio_R = log_ratio(logprob_R, old_logprob_R).detach().exp()
    weight_R = ratio_R.clamp(1 - clip_low, 1 + clip_high)
    return TokenLoss(-weight_R * advantage_R * logprob_R, weight_R != ratio_R)


def gmpo(
    logprob_R: Tensor,
    old_logprob_R: Tensor,
    advantage_R: Tensor,
    mask_R: Tensor,
    cu_seqlens: Tensor,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """-A * geometric mean over the sequence of the ratios, each bounded on the side that PPO bounds. arXiv:2507.20673.

    The bounds are exp(-clip_low) and exp(clip_high), as in the paper (0.4 there). The sequence's one loss is repeated
    over its tokens: `seq_mean_token_mean` gives the paper's objective. Advantages are averaged over the sequence.
    """
    log_ratio_R = log_ratio(logprob_R, old_logprob_R)
    bounded_R = torch.where(advantage_R >= 0, log_ratio_R.clamp(max=clip_high), log_ratio_R.clamp(min=-clip_low))
    ratio_S = segment_mean(bounded_R, cu_seqlens, mask_R).exp()
    loss_S = -segment_mean(advantage_R, cu_seqlens, mask_R) * ratio_S
    return TokenLoss(expand(loss_S, cu_seqlens, logprob_R.shape[0]), bounded_R != log_ratio_R)


def cpgd(
    logprob_R: Tensor,
    old_logprob_R: Tensor,
    advantage_R: Tensor,
    clip_low: float,
    clip_high: float,
    drift_coef: float,
) -> TokenLoss:
    """-min(l A, clip(l, ln(1 - clip_low), ln(1 + clip_high)) A) + drift_coef * drift, with l the *log* ratio.

    CPGD, arXiv:2505.12504: without the ratio as a factor a large one cannot blow up the gradient. The drift is
    KL(old || current), estimated by ratio - 1 - l; its gradient, (ratio - 1) * grad logprob, is bounded at 2.
    Requires clip_low < 1.
    """
    log_ratio_R = log_ratio(logprob_R, old_logprob_R)
    plain_R = -log_ratio_R * advantage_R
    bounded_R = -log_ratio_R.clamp(log1p(-clip_low), log1p(clip_high)) * advantage_R
    # Beyond ratio 3 the drift goes on along its tangent: same value and slope there, a slope of 2 after it.
    near_R = log_ratio_R.clamp(max=log(3))
    drift_R = near_R.exp() - 1 - near_R + 2 * (log_ratio_R - near_R)
    return TokenLoss(torch.maximum(plain_R, bounded_R) + drift_coef * drift_R, bounded_R > plain_R)


def sapo(
    logprob_R: Tensor, old_logprob_R: Tensor, advantage_R: Tensor, tau_positive: float, tau_negative: float
) -> TokenLoss:
    """-sigmoid(tau (ratio - 1)) * 4 / tau * A, with tau by the sign of A. Soft adaptive gate, arXiv:2511.20347.

    The gradient at ratio 1 is that of the plain policy gradient; it fades smoothly, so nothing counts as clipped.
    """
    ratio_R = log_ratio(logprob_R, old_logprob_R).exp()
    tau_R = torch.where(advantage_R > 0, tau_positive, tau_negative).to(ratio_R.dtype)
    gate_R = torch.sigmoid(tau_R * (ratio_R - 1)) * 4 / tau_R
    return TokenLoss(-gate_R * advantage_R, torch.zeros_like(ratio_R, dtype=torch.bool))


def reinforce(logprob_R: Tensor, advantage_R: Tensor) -> TokenLoss:
    """-A logprob (Williams 1992). Right on policy only: it has no ratio."""
    return TokenLoss(-advantage_R * logprob_R, torch.zeros_like(logprob_R, dtype=torch.bool))


def decoupled_ppo(
    logprob_R: Tensor,
    proximal_logprob_R: Tensor,
    advantage_R: Tensor,
    weight_R: Tensor,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """weight * PPO's bounded loss around the *proximal* policy, weight = proximal / behaviour probability.

    Batch size-invariance for policy optimization, arXiv:2110.00641, equation 5: the policy that bounds the step need
    not be the one that drew the samples; for stale samples of asynchronous training, AReaL, arXiv:2505.24298.
    weight_R: [R], no gradient, of `correction.importance_weights`, bounded by the caller.
    """
    loss_R, clipped_R = ppo_clip(logprob_R, proximal_logprob_R, advantage_R, clip_low, clip_high)
    return TokenLoss(weight_R * loss_R, clipped_R)


def value_loss(value_R: Tensor, old_value_R: Tensor, return_R: Tensor, clip: float = 0.0) -> TokenLoss:
    """(value - return)^2 / 2; with clip > 0 the larger of it and that of a value kept within old_value +- clip.

    PPO's value clipping (arXiv:2006.05990, section 3.2): a step beyond the bound is not rewarded, and never hidden.
    """
    plain_R = 0.5 * (value_R - return_R).square()
    if not clip:
        return TokenLoss(plain_R, torch.zeros_like(plain_R, dtype=torch.bool))
    near_R = old_value_R + (value_R - old_value_R).clamp(-clip, clip)
    bounded_R = 0.5 * (near_R - return_R).square()
    return TokenLoss(torch.maximum(plain_R, bounded_R), bounded_R > plain_R)


def _clip(ratio_R: Tensor, advantage_R: Tensor, clip_low: float, clip_high: float) -> TokenLoss:
    plain_R = -ratio_R * advantage_R
    bounded_R = -ratio_R.clamp(1 - clip_low, 1 + clip_high) * advantage_R
    return TokenLoss(torch.maximum(plain_R, bounded_R), bounded_R > plain_R)
