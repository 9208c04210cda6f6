"""The loss of a policy update, as the configuration says: ratio and bound, correction, KL, entropy, aggregation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spmd_rl.algorithms import losses
from spmd_rl.algorithms.aggregate import aggregate, counts, numerator, units
from spmd_rl.algorithms.correction import bound, importance_weights, report_cut, report_mismatch
from spmd_rl.algorithms.kl import k3, kl_loss
from spmd_rl.algorithms.losses import TokenLoss, log_ratio
from spmd_rl.algorithms.masks import refuse_nonfinite
from spmd_rl.algorithms.ragged import zero_where_masked

if TYPE_CHECKING:
    from spmd_rl.config.schema import AlgorithmConfig
    from spmd_rl.engines.protocol import LossTerms
    from spmd_rl.observe.metrics import Metrics

LOSSES = ("ppo_clip", "decoupled_ppo", "gspo", "cispo", "gmpo", "cpgd", "sapo", "reinforce")


@dataclass(frozen=True)
class _Tokens:
    """The columns of one micro-batch on the device of the log-probabilities, 0 where masked; None where absent."""

    logprob_R: Tensor
    old_logprob_R: Tensor
    advantage_R: Tensor
    ref_logprob_R: Tensor | None
    rollout_logprob_R: Tensor | None


def policy_loss(
    algorithm: AlgorithmConfig,
    *,
    updates_per_step: int,
    max_tokens: int,
    cut: bool = False,
) -> PolicyLoss:
    """The `LossFunction` of `algorithm`.

    updates_per_step: optimizer steps per round of rollouts; max_tokens: the longest response that rollout allows (what
    aggregation `constant` divides by, unless `loss_constant` is set); cut: rollout drew from a distribution
    cut by top-p or top-k.
    """
    return PolicyLoss(
        algorithm,
        on_policy=updates_per_step == 1,
        constant=algorithm.loss_constant or float(max_tokens),
        cut=cut,
    )


@dataclass(frozen=True)
class PolicyLoss:
    """Called with one micro-batch's `LossTerms`, returns its share of the step's loss and fills `Metrics`.

    The policy that the ratio refers to is the column `old_logprob`. Without it, and with one update per step, it is the
    current policy itself: the ratio is exactly 1 and the gradient is right. The rollout engine's own log-probabilities
    never take its place; they enter by `correction` or `loss=decoupled_ppo` and are reported as `mismatch/*`.

    Raises FloatingPointError, naming the samples, where a log-probability or advantage that counts is not finite, and
    ValueError where a column that the configuration needs is missing.

    Metrics: `loss/policy`, `loss/kl` (with its coefficient), `loss/entropy` (likewise; a bonus is negative), `entropy`,
    `ratio/mean`, `ratio/max`, `ratio/clip_fraction`, `ratio/kl` (k3 of KL(old || current)), with a reference `kl/ref`
    (k3 of KL(policy || reference), per token), with a correction `correction/weight_mean` and
    `correction/bounded_fraction`, and `mismatch/*`.
    """

    algorithm: AlgorithmConfig
    on_policy: bool
    constant: float
    cut: bool

    def __call__(self, terms: LossTerms, metrics: Metrics) -> Tensor:
        algorithm, mask_R, cu_seqlens = self.algorithm, terms.mask_R, terms.cu_seqlens.to(terms.mask_R.device)
        tokens = self._tokens(terms)
        token_loss = self._token_loss(tokens, mask_R, cu_seqlens, metrics)
        counted = counts(mask_R, cu_seqlens)
        weight = units(algorithm.aggregation, counted, self.constant)

        def add(name: str, values_R: Tensor, coef: float = 1.0) -> Tensor:
            """A term of the loss; its metric is averaged as the loss is."""
            share = numerator(values_R, mask_R, cu_seqlens, algorithm.aggregation)
            metrics.mean(name, coef * share.detach(), weight)
            return coef * aggregate(
                values_R, mask_R, cu_seqlens, algorithm.aggregation, terms.normalizers, self.constant
            )

        loss = add("loss/policy", self._corrected(token_loss.loss_R, tokens, mask_R, cu_seqlens, metrics))
        kl_coef = algorithm.kl_coef if algorithm.kl_in == "loss" else 0.0
        if kl_coef:
            loss = loss + add("loss/kl", self._kl(tokens), kl_coef)
        else:
            metrics.mean("loss/kl", 0.0, weight)
        if algorithm.entropy_coef:
            loss = loss + add("loss/entropy", terms.entropy_R, -algorithm.entropy_coef)
        self._report(tokens, token_loss, terms, counted["tokens"], metrics)
        return loss

    def rescale(self, tokens: float, sequences: float) -> float:
        """What to multiply gradients by that were made with normalizers of 1, in a step with these counts."""
        mode, constant = self.algorithm.aggregation, self.constant
        one = units(mode, {"tokens": 1.0, "sequences": 1.0}, constant)
        return one / units(mode, {"tokens": tokens, "sequences": sequences}, constant)

    def _tokens(self, terms: LossTerms) -> _Tokens:
        mask_R = terms.mask_R
        dtype = torch.promote_types(terms.logprob_R.dtype, torch.float32)

        def column(name: str) -> Tensor | None:
            return terms.batch[name].values.to(mask_R.device, dtype) if name in terms.batch else None

        old, advantage = column("old_logprob"), column("advantage")
        ref, rollout = column("ref_logprob"), column("rollout_logprob")
        if advantage is None:
            raise ValueError("the policy loss needs the column 'advantage'")
        if old is None and not self.on_policy:
            raise ValueError("several updates per step need the column 'old_logprob'")
        given = {"logprob": terms.logprob_R, "advantage": advantage, "old_logprob": old, "ref_logprob": ref}
        given["rollout_logprob"] = rollout
        present = {name: values for name, values in given.items() if values is not None}
        refuse_nonfinite(present, mask_R, terms.cu_seqlens, terms.batch.ids)

        def masked(values_R: Tensor | None) -> Tensor | None:
            return None if values_R is None else zero_where_masked(values_R, mask_R)

        # Masked tokens are set to 0 *before* any arithmetic: a NaN there would come back through the gradient.
        logprob_R = zero_where_masked(terms.logprob_R, mask_R).to(dtype)
        old_R = masked(old)
        return _Tokens(
            logprob_R,
            logprob_R.detach() if old_R is None else old_R,
            zero_where_masked(advantage, mask_R),
            masked(ref),
            masked(rollout),
        )

    def _token_loss(self, tokens: _Tokens, mask_R: Tensor, cu_seqlens: Tensor, metrics: Metrics) -> TokenLoss:
        algorithm = self.algorithm
        three = (tokens.logprob_R, tokens.old_logprob_R, tokens.advantage_R)
        low, high = algorithm.clip_low, algorithm.clip_high
        if algorithm.loss == "ppo_clip":
            return losses.ppo_clip(*three, low, high, algorithm.dual_clip)
        if algorithm.loss == "decoupled_ppo":
            weight_R = self._weight(tokens, mask_R, cu_seqlens, "tis", "token", metrics)
            return losses.decoupled_ppo(*three, weight_R, low, high)
        if algorithm.loss == "gspo":
            return losses.gspo(*three, mask_R, cu_seqlens, low, high)
        if algorithm.loss == "cispo":
            return losses.cispo(*three, low, high)
        if algorithm.loss == "gmpo":
            return losses.gmpo(*three, mask_R, cu_seqlens, low, high)
        if algorithm.loss == "cpgd":
            return losses.cpgd(*three, low, high, algorithm.drift_coef)
        if algorithm.loss == "sapo":
            return losses.sapo(*three, algorithm.sapo_tau_positive, algorithm.sapo_tau_negative)
        if algorithm.loss == "reinforce":
            return losses.reinforce(tokens.logprob_R, tokens.advantage_R)
        raise ValueError(f"loss {algorithm.loss!r} is unknown; there are {', '.join(LOSSES)}")

    def _corrected(
        self, loss_R: Tensor, tokens: _Tokens, mask_R: Tensor, cu_seqlens: Tensor, metrics: Metrics
    ) -> Tensor:
        algorithm = self.algorithm
        if algorithm.correction == "none":
            return loss_R
        method, level = algorithm.correction, algorithm.correction_level
        return loss_R * self._weight(tokens, mask_R, cu_seqlens, method, level, metrics)

    def _weight(
        self, tokens: _Tokens, mask_R: Tensor, cu_seqlens: Tensor, method: str, level: str, metrics: Metrics
    ) -> Tensor:
        """[R], no gradient: old (proximal) policy / the one that drew the tokens, bounded."""
        algorithm = self.algorithm
        if tokens.rollout_logprob_R is None:
            raise ValueError(f"correction {method!r} needs the column 'rollout_logprob'")
        weight_R = importance_weights(tokens.old_logprob_R, tokens.rollout_logprob_R, mask_R, cu_seqlens, level)
        bounded_R = bound(weight_R, method, algorithm.correction_cap, algorithm.correction_floor)
        count = (mask_R != 0).sum()
        metrics.mean("correction/weight_mean", zero_where_masked(bounded_R, mask_R).sum(), count)
        metrics.mean("correction/bounded_fraction", ((bounded_R != weight_R) & (mask_R != 0)).sum(), count)
        return bounded_R

    def _kl(self, tokens: _Tokens) -> Tensor:
        if tokens.ref_logprob_R is None:
            raise ValueError("kl_coef above 0 needs the column 'ref_logprob'")
        return kl_loss(tokens.logprob_R, tokens.old_logprob_R, tokens.ref_logprob_R, self.algorithm.kl_estimator)

    @torch.no_grad()
    def _report(
        self, tokens: _Tokens, token_loss: TokenLoss, terms: LossTerms, count: Tensor, metrics: Metrics
    ) -> None:
        mask_R = terms.mask_R
        ratio_R = zero_where_masked(log_ratio(tokens.logprob_R, tokens.old_logprob_R).exp(), mask_R)
        metrics.mean("entropy", zero_where_masked(terms.entropy_R, mask_R).sum(), count)
        metrics.mean("ratio/mean", ratio_R.sum(), count)
        metrics.mean("ratio/clip_fraction", (token_loss.clipped_R & (mask_R != 0)).sum(), count)
        metrics.mean("ratio/kl", k3(tokens.old_logprob_R, tokens.logprob_R).sum(), count)
        if len(ratio_R):
            metrics.max("ratio/max", ratio_R.max())
        if tokens.ref_logprob_R is not None:
            metrics.mean("kl/ref", k3(tokens.logprob_R, tokens.ref_logprob_R).sum(), count)
        if tokens.rollout_logprob_R is not None:
            report = report_cut if self.cut else report_mismatch
            report(metrics, tokens.old_logprob_R, tokens.rollout_logprob_R, mask_R)
