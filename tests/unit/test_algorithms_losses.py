"""Policy losses: values by hand, gradients by exact enumeration and against independent definitions, gradcheck."""

from __future__ import annotations

from math import exp, log

import pytest
import torch
from torch import Tensor

from spmd_rl.algorithms import losses
from spmd_rl.algorithms.aggregate import aggregate, local_counts
from spmd_rl.algorithms.ragged import offsets_of
from tests.algorithm_cases import expectation, gradient

F64 = torch.float64


def logs(*ratios: float) -> tuple[Tensor, Tensor]:
    """(logprob, old_logprob) with these ratios."""
    old_R = torch.linspace(-2, -0.5, len(ratios), dtype=F64)
    return old_R + torch.tensor(ratios, dtype=F64).log(), old_R


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)


def test_ppo_clip_by_hand() -> None:
    logprob_R, old_R = logs(1.5, 1.5, 0.5, 0.5, 1.1, 1.0)
    loss_R, clipped_R = losses.ppo_clip(logprob_R, old_R, tensor(2, -2, 2, -2, 2, -3), 0.2, 0.3)
    torch.testing.assert_close(loss_R, tensor(-2 * 1.3, 2 * 1.5, -2 * 0.5, 2 * 0.8, -2 * 1.1, 3.0))
    assert clipped_R.tolist() == [True, False, False, True, False, False]


def test_dual_clip_by_hand() -> None:
    logprob_R, old_R = logs(10.0, 10.0, 2.0)
    loss_R, clipped_R = losses.ppo_clip(logprob_R, old_R, tensor(-2, 2, -2), 0.2, 0.2, dual_clip=3.0)
    torch.testing.assert_close(loss_R, tensor(6.0, -2.4, 4.0))  # 20 is cut to 3 * 2; positive advantages are left alone
    assert clipped_R.tolist() == [True, True, False]


def test_gspo_by_hand() -> None:
    # One response with ratios e and 1 (and a masked one): s = exp(1/2) = 1.65; the other one with ratio 1.
    old_R = tensor(-1, -1, -1, -1)
    logprob_R, mask_R = old_R + tensor(1, 0, 5, 0), tensor(1, 1, 0, 1)
    cu = torch.tensor([0, 3, 4])
    loss_R, clipped_R = losses.gspo(logprob_R, old_R, tensor(-2, -2, -2, 3), mask_R, cu, 0.1, 0.1)
    torch.testing.assert_close(loss_R[[0, 1, 3]], tensor(2 * exp(0.5), 2 * exp(0.5), -3))
    assert clipped_R[[0, 1, 3]].tolist() == [False, False, False]
    loss_R, clipped_R = losses.gspo(logprob_R, old_R, tensor(2, 2, 2, 3), mask_R, cu, 0.1, 0.1)
    torch.testing.assert_close(loss_R[[0, 1, 3]], tensor(-2 * 1.1, -2 * 1.1, -3))
    assert clipped_R[[0, 1, 3]].tolist() == [True, True, False]


def test_gspo_value_and_gradient_are_those_of_the_sequence_definition() -> None:
    torch.manual_seed(0)
    lengths = [1, 4, 2, 3]
    cu, mask_R = offsets_of(torch.tensor(lengths)), torch.ones(10, dtype=F64)
    old_R, advantage_S = torch.randn(10, dtype=F64), torch.randn(4, dtype=F64)
    logprob_R = (old_R + 0.3 * torch.randn(10, dtype=F64)).requires_grad_()
    rows = zip(logprob_R.split(lengths), old_R.split(lengths), advantage_S, strict=True)
    terms = []
    for new, old, a in rows:
        s = (new.sum().exp() / old.sum().exp()) ** (1 / len(new))
        terms.append(-torch.minimum(s * a, s.clamp(0.9, 1.2) * a))
    right = torch.stack(terms).mean()
    advantage_R = advantage_S.repeat_interleave(torch.tensor(lengths))
    loss_R = losses.gspo(logprob_R, old_R, advantage_R, mask_R, cu, 0.1, 0.2).loss_R
    found = aggregate(loss_R, mask_R, cu, "seq_mean_token_mean", local_counts(mask_R, cu))
    torch.testing.assert_close(found, right)
    torch.testing.assert_close(gradient(found, logprob_R), gradient(right, logprob_R))


def test_gmpo_value_and_gradient_are_those_of_the_paper() -> None:
    torch.manual_seed(1)
    lengths = [1, 4, 2, 3]
    cu, mask_R = offsets_of(torch.tensor(lengths)), torch.ones(10, dtype=F64)
    old_R, advantage_S = torch.randn(10, dtype=F64), torch.randn(4, dtype=F64)
    logprob_R = (old_R + 0.5 * torch.randn(10, dtype=F64)).requires_grad_()
    terms = []
    for new, old, a in zip(logprob_R.split(lengths), old_R.split(lengths), advantage_S, strict=True):
        ratio = (new - old).exp()
        least = torch.minimum(ratio * a, ratio.clamp(exp(-0.3), exp(0.4)) * a)
        terms.append(-(least.abs().prod() ** (1 / len(new))) * a.sign())
    right = torch.stack(terms).mean()
    advantage_R = advantage_S.repeat_interleave(torch.tensor(lengths))
    loss_R = losses.gmpo(logprob_R, old_R, advantage_R, mask_R, cu, 0.3, 0.4).loss_R
    found = aggregate(loss_R, mask_R, cu, "seq_mean_token_mean", local_counts(mask_R, cu))
    torch.testing.assert_close(found, right)
    torch.testing.assert_close(gradient(found, logprob_R), gradient(right, logprob_R))


def test_gmpo_by_hand() -> None:
    # Log ratios 1 and 0.2, bounded above at 0.5 where the advantage is positive; -1 and 0.2, below at -0.3 where not.
    old_R = tensor(-1, -1, -1, -1)
    logprob_R, advantage_R = old_R + tensor(1, 0.2, -1, 0.2), tensor(2, 2, -3, -3)
    loss_R, clipped_R = losses.gmpo(logprob_R, old_R, advantage_R, torch.ones(4), torch.tensor([0, 2, 4]), 0.3, 0.5)
    torch.testing.assert_close(loss_R, tensor(*[-2 * exp(0.35)] * 2, *[3 * exp(-0.05)] * 2))
    assert clipped_R.tolist() == [True, False, True, False]


def test_gmpo_zero_advantage_is_zero() -> None:
    logprob_R, old_R = logs(3.0, 0.1)
    loss_R = losses.gmpo(logprob_R, old_R, tensor(0, 0), tensor(1, 1), torch.tensor([0, 2]), 0.4, 0.4).loss_R
    assert loss_R.tolist() == [0.0, 0.0]


def test_cispo_by_hand() -> None:
    logprob_R, old_R = logs(1.5, 0.5, 1.1)
    logprob_R.requires_grad_()
    loss_R, clipped_R = losses.cispo(logprob_R, old_R, tensor(2, -1, 3), 0.2, 0.3)
    torch.testing.assert_close(loss_R, tensor(-1.3 * 2, 0.8, -1.1 * 3) * logprob_R)
    assert clipped_R.tolist() == [True, True, False]
    # Every token keeps a gradient, of the bounded weight.
    torch.testing.assert_close(gradient(loss_R.sum(), logprob_R), tensor(-2.6, 0.8, -3.3))


def test_cpgd_by_hand() -> None:
    logprob_R, old_R = logs(1.5, 1.5, 0.5, 0.5, 1.1)
    logprob_R.requires_grad_()
    loss_R, clipped_R = losses.cpgd(logprob_R, old_R, tensor(2, -2, 2, -2, 2), 0.2, 0.3, drift_coef=0.0)
    torch.testing.assert_close(loss_R, tensor(-2 * log(1.3), 2 * log(1.5), -2 * log(0.5), 2 * log(0.8), -2 * log(1.1)))
    assert clipped_R.tolist() == [True, False, False, True, False]
    torch.testing.assert_close(gradient(loss_R.sum(), logprob_R), tensor(0, 2, -2, 0, -2))


def test_cpgd_drift_gradient_is_bounded() -> None:
    logprob_R, old_R = logs(0.5, 1.0, 2.0, 3.0, 50.0)
    logprob_R.requires_grad_()
    loss_R = losses.cpgd(logprob_R, old_R, torch.zeros(5, dtype=F64), 0.2, 0.2, drift_coef=1.0).loss_R
    torch.testing.assert_close(loss_R[:4], tensor(*(r - 1 - log(r) for r in (0.5, 1.0, 2.0, 3.0))))
    torch.testing.assert_close(gradient(loss_R.sum(), logprob_R), tensor(-0.5, 0, 1, 2, 2))


def test_sapo_by_hand() -> None:
    logprob_R, old_R = logs(1.5, 1.5, 1.0)
    loss_R, clipped_R = losses.sapo(logprob_R, old_R, tensor(2, -2, 1), 1.0, 2.0)
    gates = (4 / (1 + exp(-0.5)), 2 / (1 + exp(-1.0)), 2.0)
    torch.testing.assert_close(loss_R, tensor(-2 * gates[0], 2 * gates[1], -gates[2]))
    assert not bool(clipped_R.any())


def test_decoupled_ppo_by_hand() -> None:
    proximal_R = tensor(-1, -1, -1)
    logprob_R = proximal_R + tensor(1.5, 1.1, 1.5).log()
    loss_R, clipped_R = losses.decoupled_ppo(logprob_R, proximal_R, tensor(1, 1, -1), tensor(0.5, 1.6, 1), 0.2, 0.2)
    torch.testing.assert_close(loss_R, tensor(-0.5 * 1.2, -1.6 * 1.1, 1.5))
    assert clipped_R.tolist() == [True, False, False]


def test_value_loss_by_hand() -> None:
    value_R, old_R, return_R = tensor(3, 3, 0.1), tensor(1, 1, 0), tensor(4, 0, 1)
    torch.testing.assert_close(losses.value_loss(value_R, old_R, return_R).loss_R, tensor(0.5, 4.5, 0.405))
    loss_R, clipped_R = losses.value_loss(value_R, old_R, return_R, clip=0.5)
    # Kept within 1.5: (1.5 - 4)^2 / 2 is larger than the plain loss and has no gradient; the second is the plain one.
    torch.testing.assert_close(loss_R, tensor(3.125, 4.5, 0.405))
    assert clipped_R.tolist() == [True, False, False]


ALL = {
    "ppo_clip": lambda lp, old, a: losses.ppo_clip(lp, old, a, 0.2, 0.2),
    "dual_clip": lambda lp, old, a: losses.ppo_clip(lp, old, a, 0.2, 0.2, 3.0),
    "gspo": lambda lp, old, a: losses.gspo(lp, old, a, torch.ones_like(lp), torch.arange(len(lp) + 1), 0.2, 0.2),
    "cispo": lambda lp, old, a: losses.cispo(lp, old, a, 0.2, 0.2),
    "gmpo": lambda lp, old, a: losses.gmpo(lp, old, a, torch.ones_like(lp), torch.arange(len(lp) + 1), 0.4, 0.4),
    "cpgd": lambda lp, old, a: losses.cpgd(lp, old, a, 0.2, 0.2, 0.5),
    "sapo": lambda lp, old, a: losses.sapo(lp, old, a, 1.0, 1.05),
    "reinforce": lambda lp, old, a: losses.reinforce(lp, a),
    "decoupled_ppo": lambda lp, old, a: losses.decoupled_ppo(lp, old, a, torch.ones_like(a), 0.2, 0.2),
}
LOGITS = torch.tensor([0.3, -0.5, 0.9], dtype=F64, requires_grad=True)
ADVANTAGE = torch.tensor([0.7, -1.1, 0.2], dtype=F64)


@pytest.mark.parametrize("name", ALL)
def test_on_policy_every_loss_is_the_policy_gradient(name: str) -> None:
    """Exact enumeration of a 3-action policy: the gradient of the expected loss is -grad E[A]."""
    logprobs_A = LOGITS.log_softmax(0)

    def loss(actions: tuple[int, ...]) -> Tensor:
        index = list(actions)
        return ALL[name](logprobs_A[index], logprobs_A[index].detach(), ADVANTAGE[index]).loss_R.mean()

    found = gradient(expectation(logprobs_A.exp(), 2, loss), LOGITS)
    torch.testing.assert_close(found, -gradient((LOGITS.softmax(0) * ADVANTAGE).sum(), LOGITS))


@pytest.mark.parametrize("name", ["ppo_clip", "cispo", "decoupled_ppo"])
def test_off_policy_without_active_bounds_the_ratio_makes_it_right(name: str) -> None:
    wide = {
        "ppo_clip": lambda lp, old, a: losses.ppo_clip(lp, old, a, 1.0, 1e6),
        "cispo": lambda lp, old, a: losses.cispo(lp, old, a, 1.0, 1e6),
        # Behaviour != proximal: the weight times the ratio around the proximal policy is the whole ratio.
        "decoupled_ppo": lambda lp, old, a: losses.decoupled_ppo(lp, old + 0.3 * a, a, (0.3 * a).exp(), 1.0, 1e6),
    }[name]
    old_A, logprobs_A = torch.tensor([0.5, 0.2, 0.3], dtype=F64), LOGITS.log_softmax(0)
    found = gradient(
        expectation(
            old_A, 1, lambda i: wide(logprobs_A[list(i)], old_A.log()[list(i)], ADVANTAGE[list(i)]).loss_R.sum()
        ),
        LOGITS,
    )
    torch.testing.assert_close(found, -gradient((LOGITS.softmax(0) * ADVANTAGE).sum(), LOGITS))


@pytest.mark.parametrize("name", ["ppo_clip", "dual_clip", "gmpo", "cpgd", "sapo", "reinforce"])
def test_gradcheck(name: str) -> None:
    """Losses without a constant weight, at ratios on both sides of every bound and away from its kink."""
    logprob_R, old_R = logs(0.3, 0.9, 1.05, 1.7, 4.5, 0.3, 0.9, 1.05, 1.7, 4.5)
    advantage_R = tensor(*[1.3] * 5, *[-0.7] * 5)
    assert torch.autograd.gradcheck(lambda lp: ALL[name](lp, old_R, advantage_R).loss_R, logprob_R.requires_grad_())


@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_gradcheck_value_loss(clip: float) -> None:
    value_R = tensor(0.1, 0.9, 2.0, -1.0).requires_grad_()
    old_R, return_R = tensor(0, 0.5, 0.5, -0.9), tensor(1, 1, 0, 2)
    assert torch.autograd.gradcheck(lambda v: losses.value_loss(v, old_R, return_R, clip).loss_R, value_R)


@pytest.mark.parametrize("name", ALL)
def test_absurd_ratios_stay_finite(name: str) -> None:
    logprob_R = torch.tensor([-1000.0, -0.1, -1e4, -0.1], requires_grad=True)
    old_R, advantage_R = torch.tensor([-0.1, -1000.0, -0.1, -1e4]), torch.tensor([1.0, 1.0, -1.0, -1.0])
    loss_R = ALL[name](logprob_R, old_R, advantage_R).loss_R
    assert bool(loss_R.isfinite().all()) and bool(gradient(loss_R.sum(), logprob_R).isfinite().all())
