"""Distance from the reference model. log r = ref - logprob of the sampled token, r = exp(log r).

| estimator | value per token | as a term of the *reward*     | as a term of the *loss*                          |
| --------- | --------------- | ----------------------------- | ------------------------------------------------ |
| k1        | -log r          | gradient of KL(policy || ref) | gradient 0 in expectation: refused               |
| k2        | (log r)^2 / 2   | another objective: refused    | gradient of KL(policy || ref)                    |
| k3        | r - 1 - log r   | another objective: refused    | gradient of KL(ref || policy), the *reverse*     |
| k3_ratio  | ratio * k3      | -                             | gradient of KL(policy || ref)                    |

k1 and k3 have the expectation KL(policy || ref), k2 approximates it (J. Schulman, "Approximating KL divergence", 2020).
A loss differentiates the value and not the sampling, hence the right column: grad k2 = -log r * grad logprob is the
score-function gradient of the KL; grad k3 = (1 - r) * grad logprob averages to that of KL(ref || policy), what the GRPO
paper (arXiv:2402.03300) does. k3_ratio, ratio = policy / old policy with its gradient (arXiv:2512.02556), is right too.
The expectations are over samples of the *current* policy. Where an older one drew them, k2 carries its ratio as a
constant weight, so that its gradient stays right; k3 is left as published.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spmd_rl.algorithms.losses import log_ratio

LOSS_ESTIMATORS = ("k2", "k3", "k3_ratio")


def k1(logprob_R: Tensor, ref_logprob_R: Tensor) -> Tensor:
    """[R]: logprob - ref. For the reward, and for reports."""
    return logprob_R - ref_logprob_R


def k2(logprob_R: Tensor, ref_logprob_R: Tensor) -> Tensor:
    """[R]: (logprob - ref)^2 / 2."""
    return 0.5 * (logprob_R - ref_logprob_R).square()


def k3(logprob_R: Tensor, ref_logprob_R: Tensor) -> Tensor:
    """[R]: exp(ref - logprob) - 1 - (ref - logprob) >= 0, without cancellation near 0."""
    return torch.expm1(log_ratio(ref_logprob_R, logprob_R)) - (ref_logprob_R - logprob_R)


def kl_loss(logprob_R: Tensor, old_logprob_R: Tensor, ref_logprob_R: Tensor, estimator: str) -> Tensor:
    """[R]: the term whose gradient the table above states. old_logprob_R: of the policy that drew the tokens.

    Raises ValueError for k1, whose gradient as a loss averages to 0, and for unknown names.
    """
    if estimator == "k2":
        return log_ratio(logprob_R, old_logprob_R).detach().exp() * k2(logprob_R, ref_logprob_R)
    if estimator == "k3":
        return k3(logprob_R, ref_logprob_R)
    if estimator == "k3_ratio":
        return log_ratio(logprob_R, old_logprob_R).exp() * k3(logprob_R, ref_logprob_R)
    if estimator == "k1":
        raise ValueError("k1 as a loss has gradient 0 in expectation: use k2 (or k1 in the reward)")
    raise ValueError(f"KL estimator {estimator!r} is unknown; in the loss there are {', '.join(LOSS_ESTIMATORS)}")


@dataclass(frozen=True)
class AdaptiveCoefficient:
    """The KL coefficient that steers towards a target KL. Fine-tuning language models from human preferences,
    arXiv:1909.08593, section 2.2: a proportional controller in log space, with the error cut at 20 %.

    coef: now; target: wanted KL in nats; horizon: samples over which a full error changes coef by its size.
    A value: keep it with the training state so that it survives a resume.
    """

    coef: float
    target: float
    horizon: float

    def update(self, kl: float, samples: int) -> AdaptiveCoefficient:
        """After a step that measured `kl` over `samples` samples."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        return replace(self, coef=self.coef * (1 + error * samples / self.horizon))
