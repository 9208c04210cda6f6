"""KL: the gradient that each estimator has in expectation, by exact enumeration of a 3-action policy (N10)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from spmd_rl.algorithms.kl import LOSS_ESTIMATORS, AdaptiveCoefficient, k1, k2, k3, kl_loss
from tests.algorithm_cases import expectation, gradient

F64 = torch.float64
LOGITS = torch.tensor([0.3, -0.5, 0.9], dtype=F64, requires_grad=True)
REF_A = torch.tensor([0.6, 0.1, 0.3], dtype=F64)
OLD_A = torch.tensor([0.2, 0.5, 0.3], dtype=F64)


def kl(p_A: Tensor, q_A: Tensor) -> Tensor:
    return (p_A * (p_A.log() - q_A.log())).sum()


def forward() -> Tensor:
    """grad KL(policy || ref): what a KL penalty is meant to follow."""
    return gradient(kl(LOGITS.softmax(0), REF_A), LOGITS)


def reverse() -> Tensor:
    return gradient(kl(REF_A, LOGITS.softmax(0)), LOGITS)


def as_loss(drawn_by_A: Tensor, value: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """The expected gradient of `value(logprob, old_logprob, ref_logprob)` over actions drawn by `drawn_by_A`."""
    logprobs_A = LOGITS.log_softmax(0)
    old_A = drawn_by_A.detach().log()
    total = expectation(drawn_by_A, 1, lambda i: value(logprobs_A[list(i)], old_A[list(i)], REF_A.log()[list(i)]).sum())
    return gradient(total, LOGITS)


@pytest.mark.parametrize("estimator", ["k2", "k3_ratio"])
@pytest.mark.parametrize("on_policy", [True, False])
def test_n10_gradient_as_a_loss(estimator: str, on_policy: bool) -> None:
    drawn_by_A = LOGITS.softmax(0) if on_policy else OLD_A
    found = as_loss(drawn_by_A, lambda new, old, ref: kl_loss(new, old, ref, estimator))
    torch.testing.assert_close(found, forward())


def test_n10_k3_as_a_loss_is_the_reverse_direction() -> None:
    found = as_loss(LOGITS.softmax(0), lambda new, old, ref: kl_loss(new, old, ref, "k3"))
    torch.testing.assert_close(found, reverse())
    assert not torch.allclose(forward(), reverse(), rtol=0.05)


def test_n10_k1_as_a_loss_has_no_gradient_and_is_refused() -> None:
    found = as_loss(LOGITS.softmax(0), lambda new, old, ref: k1(new, ref))
    torch.testing.assert_close(found, torch.zeros(3, dtype=F64))
    with pytest.raises(ValueError, match="k1 as a loss has gradient 0.*use k2"):
        kl_loss(LOGITS, LOGITS, LOGITS, "k1")
    with pytest.raises(ValueError, match="there are k2, k3, k3_ratio"):
        kl_loss(LOGITS, LOGITS, LOGITS, "k4")


@pytest.mark.parametrize(("estimator", "right"), [(k1, True), (k2, False), (k3, False)])
def test_n10_gradient_as_a_reward(estimator: Callable[[Tensor, Tensor], Tensor], right: bool) -> None:
    """A reward is a constant: the gradient comes through grad logprob. Only k1 is right there."""
    found = as_loss(LOGITS.softmax(0), lambda new, old, ref: estimator(new, ref).detach() * new)
    assert torch.allclose(found, forward(), rtol=1e-9) == right


def test_values() -> None:
    logprobs_A = LOGITS.detach().log_softmax(0)
    right = kl(logprobs_A.exp(), REF_A)
    for estimator in (k1, k3):
        torch.testing.assert_close((logprobs_A.exp() * estimator(logprobs_A, REF_A.log())).sum(), right)
    # logprob - ref = ln 2: k1 = ln 2, k2 = ln(2)^2 / 2, k3 = 1/2 - 1 + ln 2.
    two = torch.tensor([2.0], dtype=F64).log()
    zero = torch.zeros(1, dtype=F64)
    assert float(k1(two, zero)) == pytest.approx(0.6931471805599453)
    assert float(k2(two, zero)) == pytest.approx(0.2402265069591007)
    assert float(k3(two, zero)) == pytest.approx(0.1931471805599453)


def test_k3_does_not_cancel_near_zero() -> None:
    difference = torch.tensor([1e-4], dtype=torch.float32)
    assert float(k3(torch.zeros(1), difference)) == pytest.approx(5e-9, rel=0.02)
    assert float(k3(torch.zeros(1), torch.zeros(1))) == 0.0


@pytest.mark.parametrize("estimator", LOSS_ESTIMATORS)
def test_absurd_distances_stay_finite(estimator: str) -> None:
    logprob_R = torch.tensor([-1e4, -0.1], requires_grad=True)
    value_R = kl_loss(logprob_R, logprob_R.detach(), torch.tensor([-0.1, -1e4]), estimator)
    assert bool(value_R.isfinite().all()) and bool(gradient(value_R.sum(), logprob_R).isfinite().all())


def test_gradcheck() -> None:
    torch.manual_seed(0)
    new_R, old_R, ref_R = torch.randn(3, 5, dtype=F64)
    for estimator in ("k3", "k3_ratio"):
        assert torch.autograd.gradcheck(lambda n, e=estimator: kl_loss(n, old_R, ref_R, e), new_R.requires_grad_())
    assert torch.autograd.gradcheck(lambda n: k2(n, ref_R), new_R)


def test_adaptive_coefficient() -> None:
    controller = AdaptiveCoefficient(coef=0.1, target=6.0, horizon=10_000)
    assert controller.update(6.6, 1000).coef == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    assert controller.update(60.0, 1000).coef == pytest.approx(0.1 * (1 + 0.2 * 0.1))  # the error is cut at 20 %
    assert controller.update(0.0, 1000).coef == pytest.approx(0.1 * (1 - 0.2 * 0.1))
    # It settles: a system whose KL falls with the coefficient comes to the target.
    for _ in range(3000):
        controller = controller.update(0.9 / controller.coef, 100)
    assert 0.9 / controller.coef == pytest.approx(6.0, rel=0.05)
