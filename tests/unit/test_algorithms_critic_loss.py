"""The critic's loss as the engine calls it: independence of micro-batches, masks, NaN."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spmd_rl.algorithms.aggregate import local_counts
from spmd_rl.algorithms.critic_loss import CriticLoss
from spmd_rl.data.batch import Batch
from spmd_rl.engines.protocol import ValueTerms
from spmd_rl.observe.metrics import Metrics
from tests.algorithm_cases import make_batch

LENGTHS = [2, 0, 3, 1]
OLD_R, RETURN_R = torch.tensor([0.0, 1.0, 0.5, 0.2, 9.0, 2.0]), torch.tensor([1.0, 1.5, -1.0, 2.0, 9.0, 0.0])
VALUE_R, MASK_R = torch.tensor([0.4, 1.1, 0.0, 1.2, 5.0, 2.1]), torch.tensor([1.0, 1, 1, 1, 0, 1])


def batch_of(value_R: Tensor = OLD_R, return_R: Tensor = RETURN_R) -> Batch:
    return make_batch(LENGTHS, {"value": value_R, "return": return_R})


def run(
    clip: float, batch: Batch, value_R: Tensor, cuts: tuple[int, ...] = ()
) -> tuple[float, Tensor, dict[str, float]]:
    value_R = value_R.clone().requires_grad_()
    cu, metrics, total = batch["value"].offsets, Metrics(), 0.0
    bounds = [0, *cuts, len(batch)]
    for first, last in zip(bounds, bounds[1:], strict=False):
        tokens = slice(int(cu[first]), int(cu[last]))
        part = batch.select(torch.arange(first, last))
        terms = ValueTerms(
            value_R=value_R[tokens], batch=part, cu_seqlens=part["value"].offsets, mask_R=MASK_R[tokens],
            normalizers=local_counts(MASK_R, cu),
        )  # fmt: skip
        loss = CriticLoss(clip)(terms, metrics)
        loss.backward()
        total += float(loss.detach())
    assert value_R.grad is not None
    return total, value_R.grad, metrics.reduce()


@pytest.mark.parametrize("cuts", [(), (1,), (1, 2, 3)])
def test_a_mean_over_all_tokens_in_every_split(cuts: tuple[int, ...]) -> None:
    # Errors -0.6, -0.4, 1, -0.8, (masked), 2.1: squares 0.36, 0.16, 1, 0.64, 4.41; half of their mean over 5 tokens.
    loss, gradient_R, found = run(0.0, batch_of(), VALUE_R, cuts)
    assert loss == pytest.approx(6.57 / 10, rel=1e-6) and found == {}
    torch.testing.assert_close(gradient_R, torch.tensor([-0.6, -0.4, 1.0, -0.8, 0.0, 2.1]) / 5)


@pytest.mark.parametrize("cuts", [(), (1, 2, 3)])
def test_a_value_beyond_the_clip_is_held_where_that_is_worse(cuts: tuple[int, ...]) -> None:
    # Clip 0.25: 0.4 is held at 0.25 (error -0.75), 1.1 not; 0.0 at 0.25 (error 1.25); 1.2 at 0.45 (-1.55); 2.1 not.
    loss, gradient_R, found = run(0.25, batch_of(), VALUE_R, cuts)
    assert loss == pytest.approx((0.5625 + 0.16 + 1.5625 + 2.4025 + 4.41) / 10, rel=1e-6)
    torch.testing.assert_close(gradient_R, torch.tensor([0.0, -0.4, 0.0, 0.0, 0.0, 2.1]) / 5)
    assert found == {"value/clip_fraction": pytest.approx(3 / 5)}


def test_nan_is_named_where_it_counts_and_harmless_where_not() -> None:
    broken_R = RETURN_R.clone()
    broken_R[4] = float("nan")  # masked
    loss, gradient_R, _ = run(0.25, batch_of(return_R=broken_R), VALUE_R)
    assert loss == pytest.approx(run(0.25, batch_of(), VALUE_R)[0]) and bool(gradient_R.isfinite().all())
    broken_R[5] = float("inf")
    with pytest.raises(FloatingPointError, match=r"return is NaN or infinite in sample \(epoch 0, .*sample 3\)"):
        run(0.0, batch_of(return_R=broken_R), VALUE_R)
