"""Aggregation: hand-worked numbers, and independence of the split into micro-batches and ranks (N1, N2)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.algorithms.aggregate import AGGREGATIONS, aggregate, counts, local_counts, units
from spmd_rl.algorithms.ragged import offsets_of

# N1: responses of 1 and 3 tokens, ratio 1, advantages +1 and -1: the loss -adv * ratio per token.
N1_VALUES, N1_CU = torch.tensor([-1.0, 1.0, 1.0, 1.0]), torch.tensor([0, 1, 4])
N1_RIGHT = {"token_mean": 0.5, "seq_mean_token_sum": 1.0, "seq_mean_token_mean": 0.0, "constant": 0.25}


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_n1_by_hand(mode: str) -> None:
    mask_R = torch.ones(4)
    loss = aggregate(N1_VALUES, mask_R, N1_CU, mode, local_counts(mask_R, N1_CU), constant=4)
    assert float(loss) == pytest.approx(N1_RIGHT[mode], abs=1e-7)


LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=8)


@given(LENGTHS, st.integers(0, 2**31), st.sampled_from(AGGREGATIONS), st.data())
@settings(deadline=None, max_examples=100)
def test_any_split_adds_up_to_the_whole_in_value_and_gradient(
    lengths: list[int], seed: int, mode: str, data: st.DataObject
) -> None:
    torch.manual_seed(seed)
    total = sum(lengths)
    values_R = torch.randn(total, dtype=torch.float64, requires_grad=True)
    mask_R = torch.randint(0, 2, (total,)).float()
    cu = offsets_of(torch.tensor(lengths))
    whole_counts = local_counts(mask_R, cu)
    whole = aggregate(values_R, mask_R, cu, mode, whole_counts, 5.0)
    whole_gradient = torch.autograd.grad(whole, values_R)[0]

    cuts = sorted(data.draw(st.lists(st.integers(0, len(lengths)), max_size=5)))
    parts, summed = torch.zeros((), dtype=torch.float64), {"tokens": 0.0, "sequences": 0.0}
    for first, last in zip([0, *cuts], [*cuts, len(lengths)], strict=True):
        start, end = int(cu[first]), int(cu[last])
        part_cu = cu[first : last + 1] - start
        for name, count in local_counts(mask_R[start:end], part_cu).items():
            summed[name] += count
        parts = parts + aggregate(values_R[start:end], mask_R[start:end], part_cu, mode, whole_counts, 5.0)
    assert summed == whole_counts
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(torch.autograd.grad(parts, values_R)[0], whole_gradient)


def test_n2_constant_normaliser_as_one_by_eight_and_eight_by_one() -> None:
    torch.manual_seed(2)
    lengths_S = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
    values_R, cu = torch.randn(31, dtype=torch.float64), offsets_of(lengths_S)
    mask_R = torch.ones(31)
    normalizers = {"tokens": 31.0, "sequences": 8.0}
    whole = aggregate(values_R, mask_R, cu, "constant", normalizers, 16)
    single = sum(
        aggregate(row, torch.ones(len(row)), torch.tensor([0, len(row)]), "constant", normalizers, 16)
        for row in values_R.split(lengths_S.tolist())
    )
    assert float(whole) == pytest.approx(float(single), rel=1e-12)
    assert float(whole) == pytest.approx(float(values_R.sum()) / (8 * 16), rel=1e-12)


def test_masked_sequences_leave_numerator_and_denominator() -> None:
    # Samples of 2, 2 and 0 tokens; the second is masked, the third empty: only the first counts.
    values_R, cu = torch.tensor([1.0, 3.0, 100.0, float("nan")]), torch.tensor([0, 2, 4, 4])
    mask_R = torch.tensor([1.0, 1.0, 0.0, 0.0])
    assert local_counts(mask_R, cu) == {"tokens": 2.0, "sequences": 1.0}
    right = {"token_mean": 2.0, "seq_mean_token_mean": 2.0, "seq_mean_token_sum": 4.0, "constant": 1.0}
    for mode in AGGREGATIONS:
        assert float(aggregate(values_R, mask_R, cu, mode, local_counts(mask_R, cu), 4.0)) == right[mode]


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_nothing_counts(mode: str) -> None:
    values_R = torch.full((3,), float("nan"), requires_grad=True)
    mask_R, cu = torch.zeros(3), torch.tensor([0, 3])
    loss = aggregate(values_R, mask_R, cu, mode, local_counts(mask_R, cu), 4.0)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert values_R.grad is not None and values_R.grad.tolist() == [0.0, 0.0, 0.0]


def test_bad_input() -> None:
    mask_R, cu = torch.ones(4), N1_CU
    with pytest.raises(ValueError, match="token_sum.*there are token_mean"):
        aggregate(N1_VALUES, mask_R, cu, "token_sum", local_counts(mask_R, cu))
    with pytest.raises(ValueError, match="positive number of tokens"):
        units("constant", counts(mask_R, cu))
