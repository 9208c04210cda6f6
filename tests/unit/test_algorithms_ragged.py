"""Segment and group arithmetic against plain loops."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spmd_rl.algorithms import ragged

LENGTHS = st.lists(st.integers(0, 7), min_size=1, max_size=9)


@given(LENGTHS, st.integers(0, 2**31))
@settings(deadline=None, max_examples=60)
def test_segments_equal_a_loop_over_the_samples(lengths: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    rows = [torch.randn(n, dtype=torch.float64) for n in lengths]
    masks = [torch.randint(0, 2, (n,)) for n in lengths]
    values_R, mask_R = torch.cat(rows), torch.cat(masks)
    cu = ragged.offsets_of(torch.tensor(lengths))
    assert ragged.lengths_of(cu).tolist() == lengths
    torch.testing.assert_close(ragged.segment_sum(values_R, cu), torch.stack([r.sum() for r in rows]))
    none = torch.zeros((), dtype=torch.float64)
    means = [r[m == 1].mean() if m.sum() else none for r, m in zip(rows, masks, strict=True)]
    torch.testing.assert_close(ragged.segment_mean(values_R, cu, mask_R), torch.stack(means))
    torch.testing.assert_close(ragged.segment_cumsum(values_R, cu), torch.cat([r.cumsum(0) for r in rows]))
    repeated = [torch.full((n,), float(i)) for i, n in enumerate(lengths)]
    assert torch.equal(ragged.expand(torch.arange(len(lengths)).float(), cu), torch.cat(repeated))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_expand_is_the_same_for_every_kind_of_value(dtype: torch.dtype) -> None:
    cu = torch.tensor([0, 2, 2, 5, 6])
    for values_S in (torch.tensor([3, 1, 0, 2]).to(dtype), torch.tensor([[1, 0], [2, 3], [0, 0], [4, 1]]).to(dtype)):
        wanted_R = values_S[[0, 0, 2, 2, 2, 3]]
        found_R = ragged.expand(values_S, cu, total=6)
        assert found_R.dtype == dtype and torch.equal(found_R, wanted_R)


def test_expand_passes_gradients() -> None:
    values_S = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    (ragged.expand(values_S, torch.tensor([0, 3, 3, 5])) * torch.arange(5.0)).sum().backward()
    assert values_S.grad is not None and values_S.grad.tolist() == [0 + 1 + 2, 0, 3 + 4]


def test_masked_nan_reaches_neither_value_nor_gradient() -> None:
    values_R = torch.tensor([1.0, float("nan"), 3.0, float("inf")], requires_grad=True)
    mask_R = torch.tensor([1, 0, 1, 0])
    mean_S = ragged.segment_mean(values_R, torch.tensor([0, 2, 4]), mask_R)
    assert mean_S.tolist() == [1.0, 3.0]
    mean_S.sum().backward()
    assert values_R.grad is not None and values_R.grad.tolist() == [1.0, 0.0, 1.0, 0.0]


def test_groups_may_lie_anywhere() -> None:
    values_S, group_S = torch.tensor([1.0, 10.0, 2.0, 30.0, 4.0]), torch.tensor([0, 1, 0, 1, 0])
    assert ragged.group_sum(values_S, group_S, 3).tolist() == [7.0, 40.0, 0.0]
    least, largest = ragged.group_extremes(values_S, group_S, 2)
    assert (least.tolist(), largest.tolist()) == ([1.0, 10.0], [4.0, 30.0])


@pytest.mark.parametrize("function", [ragged.segment_sum, ragged.segment_mean, ragged.segment_cumsum])
def test_gradients_of_segments(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    values_R = torch.randn(6, dtype=torch.float64, requires_grad=True)
    cu = torch.tensor([0, 2, 2, 6])
    assert torch.autograd.gradcheck(lambda v: function(v, cu), values_R)


def test_no_samples_at_all() -> None:
    nothing, cu = torch.empty(0), torch.tensor([0])
    assert ragged.segment_sum(nothing, cu).shape == (0,)
    assert ragged.segment_cumsum(nothing, cu).shape == (0,)
    assert ragged.expand(nothing, cu).shape == (0,)
