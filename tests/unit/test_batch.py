"""`Batch` and `Column`: ragged rows stay what they are through every operation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.data.batch import Batch, Column
from tests.exchanges import COLUMNS, make_samples, same_bytes

IDS = [(0, 3, 0), (0, 3, 1), (0, 1, 0), (1, 3, 0), (0, 1, 1)]


def rows_of(column: Column) -> list[list[object]]:
    return [row.tolist() for row in column.rows()]


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    picks=st.lists(st.integers(0, 100), max_size=12),
    inner=st.sampled_from([(), (2,), (0,)]),
    dtype=st.sampled_from([torch.int32, torch.uint8, torch.bfloat16, torch.float64]),
)
def test_select_takes_rows_in_the_order_asked_for(
    lengths: list[int], picks: list[int], inner: tuple[int, ...], dtype: torch.dtype
) -> None:
    values = torch.randint(0, 200, (sum(lengths), *inner)).to(dtype)
    column = Column(values, torch.tensor(lengths))
    index = torch.tensor([pick % len(lengths) for pick in picks], dtype=torch.int64)
    rows = rows_of(column)
    selected = column.select(index)
    assert rows_of(selected) == [rows[i] for i in index.tolist()]
    assert selected.values.dtype == dtype and selected.values.shape[1:] == inner


def test_consecutive_rows_are_views() -> None:
    column = Column(torch.arange(10), torch.tensor([2, 0, 3, 5]))
    part = column.select(torch.tensor([1, 2]))
    assert part.values.data_ptr() == column.values[2:].data_ptr() and rows_of(part) == [[], [2, 3, 4]]


def test_a_column_that_is_a_transposed_view_is_selected_by_value() -> None:
    values = torch.arange(12).reshape(3, 4).T
    assert rows_of(Column(values, torch.tensor([1, 3])).select(torch.tensor([1, 0]))) == [
        [[1, 5, 9], [2, 6, 10], [3, 7, 11]],
        [[0, 4, 8]],
    ]


def test_split_and_concat_are_inverse() -> None:
    batch = make_samples(IDS, COLUMNS)
    parts = batch.split([2, 0, 3])
    assert [len(part) for part in parts] == [2, 0, 3]
    assert same_bytes(Batch.concat([Batch.empty(), *parts]), batch)
    with pytest.raises(ValueError, match=r"\[2, 2\] samples do not add up to 5"):
        batch.split([2, 2])
    with pytest.raises(ValueError, match="columns differ"):
        Batch.concat([batch, batch.only(["row"])])


def test_padding_and_back() -> None:
    column = Column(torch.tensor([1, 2, 3]), torch.tensor([2, 0, 1]))
    padded = column.padded(fill=-1)
    assert padded.tolist() == [[1, 2], [-1, -1], [3, -1]]
    again = Column.from_padded(padded, column.lengths)
    assert rows_of(again) == rows_of(column)


def test_bytes_of_any_script_survive() -> None:
    texts = ["", "漢字", "👩‍🚀 é", "עברית", "\x00\xff"]
    column = Column.from_bytes([text.encode() for text in texts])
    assert [raw.decode() for raw in column.select(torch.tensor([4, 3, 2, 1, 0])).row_bytes()] == texts[::-1]
    assert Column.from_bytes([b"", b""]).row_bytes() == [b"", b""]
    with pytest.raises(TypeError, match="bytes wanted"):
        Column(torch.zeros(1), torch.tensor([1])).row_bytes()


def test_groups_are_numbered_by_first_appearance() -> None:
    assert make_samples(IDS, {}).groups().tolist() == [0, 0, 1, 2, 1]
    assert Batch.empty().groups().tolist() == []


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(ValueError, match="3 values, but the lengths add up to 4"):
        Column(torch.zeros(3), torch.tensor([2, 2]))
    with pytest.raises(ValueError, match="lengths must be int64"):
        Column(torch.zeros(3), torch.tensor([3], dtype=torch.int32))
    batch = make_samples(IDS, {"row": COLUMNS["row"]})
    with pytest.raises(ValueError, match="column 'x' has 1 samples, the batch has 5"):
        batch.with_columns({"x": Column(torch.zeros(1), torch.tensor([1]))})
    with pytest.raises(KeyError, match="no column 'rows'; there are row"):
        batch["rows"]
    with pytest.raises(ValueError, match=r"\(0, 3, 1\) occurs more than once"):
        make_samples([*IDS, (0, 3, 1)], {}).check_ids()
    with pytest.raises(ValueError, match="one value per sample"):
        batch["row"].as_scalars()
