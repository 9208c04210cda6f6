"""The kernels against their references, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.ops.library import built
from spmd_rl.ops.padded import pad, unpad
from spmd_rl.ops.partition import partition, partition_reference
from spmd_rl.ops.rows import deliver, deliver_reference, lay_out, lay_out_reference
from spmd_rl.ops.segments import copy_segments, copy_segments_reference
from spmd_rl.ops.slices import copy_slices, copy_slices_reference

kernels = pytest.mark.skipif(not built(), reason="kernels are not built")


def noise(size: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def random_segments(rng: np.random.RandomState, sources: list[int], unit: int) -> tuple[torch.Tensor, int]:
    """Ranges in random sources at random offsets, placed one after the other with gaps, then shuffled."""
    count = rng.randint(0, 30)
    which = rng.randint(0, len(sources), count)
    longest = np.array(sources)[which] // unit
    size = (rng.randint(0, 10**6, count) % (longest + 1)) * (rng.rand(count) > 0.2)
    begin = rng.randint(0, 10**6, count) % (longest - size + 1)
    gaps = rng.randint(0, 3, count)
    place = np.cumsum(size + gaps) - size
    table = torch.from_numpy(np.stack([which, begin * unit, place * unit, size * unit]).astype(np.int64))
    return table[:, torch.from_numpy(rng.permutation(count))].contiguous(), int((size + gaps).sum() * unit)


@kernels
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), unit=st.sampled_from([1, 2, 4, 8]), shift=st.integers(0, 3))
def test_segments_equal_the_reference_and_touch_nothing_else(seed: int, unit: int, shift: int) -> None:
    rng = np.random.RandomState(seed)
    lengths = [int(n) for n in rng.choice([0, 1, 17, 300, 5000, 70000], rng.randint(1, 4))]
    sources = [noise(length + 4, seed % 1000 + i)[shift : shift + length] for i, length in enumerate(lengths)]
    table, room = random_segments(rng, lengths, unit)
    ours, theirs, slow = (torch.full((room + 8,), 0xEE, dtype=torch.uint8)[shift:] for _ in range(3))
    copy_segments(sources, ours, table)
    copy_segments_reference(sources, theirs, table)
    for source, begin, place, size in table.T.tolist():
        slow[place : place + size] = sources[source][begin : begin + size]
    assert torch.equal(ours, slow) and torch.equal(theirs, slow)


@kernels
def test_segments_are_the_same_with_several_threads() -> None:
    source, target = noise(3 << 20, 1), torch.zeros(3 << 20, dtype=torch.uint8)
    sizes = torch.arange(1, 2000)
    begin = sizes.cumsum(0) - sizes
    table = torch.stack([torch.zeros_like(sizes), begin, begin.flip(0).sort().values, sizes])
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        copy_segments([source], target, table.contiguous())
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(target[: int(sizes.sum())], source[: int(sizes.sum())])


BAD_SEGMENTS = [
    ([1, 0, 0, 1], "source"),
    ([-1, 0, 0, 1], "source"),
    ([0, 0, 0, 11], "source"),
    ([0, -1, 0, 1], "source"),
    ([0, 10, 0, 1], "source"),
    ([0, 0, 0, -1], "source"),
    ([0, 0, 20, 1], "target"),
    ([0, 0, -1, 1], "target"),
    ([0, 2**62, 2**62, 2**62], "source"),
]


@pytest.mark.parametrize(("segment", "where"), BAD_SEGMENTS)
@pytest.mark.parametrize("copy", [pytest.param(copy_segments, marks=kernels), copy_segments_reference])
def test_segments_outside_are_refused(copy, segment: list[int], where: str) -> None:
    target = torch.zeros(20, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match=where):
        copy([torch.zeros(10, dtype=torch.uint8)], target, torch.tensor(segment).reshape(4, 1))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=12),
    inner=st.sampled_from([(), (3,), (2, 2), (0,)]),
    dtype=st.sampled_from([torch.float32, torch.int64, torch.bfloat16, torch.bool, torch.uint8]),
    more=st.integers(0, 3),
)
def test_pad_and_unpad(lengths: list[int], inner: tuple[int, ...], dtype: torch.dtype, more: int) -> None:
    lengths_S = torch.tensor(lengths, dtype=torch.int64)
    values = torch.randint(0, 2, (sum(lengths), *inner)).to(dtype)
    padded = pad(values, lengths_S, 1, longest=max(lengths, default=0) + more)
    assert padded.shape == (len(lengths), max(lengths, default=0) + more, *inner)
    for row, want in zip(padded, values.split(lengths), strict=True):
        assert torch.equal(row[: len(want)], want) and bool((row[len(want) :] == 1).all())
    assert torch.equal(unpad(padded, lengths_S), values)


def test_pad_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="a row of length 3 does not fit into 2"):
        pad(torch.zeros(3), torch.tensor([3]), longest=2)
    with pytest.raises(ValueError, match=r"not in 0\.\.2"):
        unpad(torch.zeros(1, 2), torch.tensor([3]))
    with pytest.raises(ValueError, match="2 lengths for 1 rows"):
        unpad(torch.zeros(1, 2), torch.tensor([1, 1]))


def random_slices(rng: np.random.RandomState, tensors: int, room: int) -> torch.Tensor:
    """Slices that lie behind each other in the targets, with strides of their own."""
    entries, used = [], [0] * tensors
    for _ in range(rng.randint(1, 8)):
        target, rows, columns = rng.randint(tensors), rng.randint(0, 6), rng.randint(0, 2000) % (room // 8)
        stride = columns + rng.choice([0, 0, 5])
        span = (rows - 1) * stride + columns if rows else 0
        if used[target] + span > room:
            continue
        source_stride = columns + rng.choice([0, 0, 3])
        source_span = (rows - 1) * source_stride + columns if rows else 0
        begin = rng.randint(0, max(room - source_span, 0) + 1)
        if begin + source_span <= room:
            entries.append([rng.randint(tensors), begin, source_stride, target, used[target], stride, rows, columns])
            used[target] += span
    return torch.tensor(entries, dtype=torch.int64).reshape(-1, 8).T.contiguous()


@kernels
@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    pair=st.sampled_from(
        [
            (torch.float32, torch.bfloat16),
            (torch.float32, torch.float32),
            (torch.bfloat16, torch.bfloat16),
            (torch.uint8, torch.uint8),
            (torch.float64, torch.float64),
        ]
    ),
)
def test_slices_equal_the_reference(seed: int, pair: tuple[torch.dtype, torch.dtype]) -> None:
    rng, room = np.random.RandomState(seed), 9000
    sources = [noise(room * pair[0].itemsize, seed % 997 + i).view(pair[0]) for i in range(2)]
    if pair[1] == torch.bfloat16:  # a NaN's payload may differ
        sources = [torch.nan_to_num(source.float()).to(pair[0]) for source in sources]
    ours, theirs = ([torch.ones(room, dtype=pair[1]) for _ in range(2)] for _ in range(2))
    table = random_slices(rng, 2, room)
    copy_slices(sources, ours, table)
    copy_slices_reference(sources, theirs, table)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@kernels
def test_cast_rounds_as_torch_does() -> None:
    bits = torch.cat([torch.arange(2**16) << 16, (torch.arange(2**16) << 16) + 0x8000, torch.arange(0, 2**32, 65521)])
    values = bits.to(torch.int64).remainder(2**32).to(torch.uint32).view(torch.float32).contiguous()
    target = torch.zeros(values.numel(), dtype=torch.bfloat16)
    copy_slices([values], [target], torch.tensor([[0, 0, 0, 0, 0, 0, 1, values.numel()]]).T.contiguous())
    want = values.to(torch.bfloat16)
    number = ~values.isnan()
    assert torch.equal(target[number].view(torch.int16), want[number].view(torch.int16))
    assert bool(target[~number].isnan().all()) and int((~number).sum()) > 500


@pytest.mark.parametrize("copy", [pytest.param(copy_slices, marks=kernels), copy_slices_reference])
@pytest.mark.parametrize(
    "entry", [[0, 0, 4, 0, 0, 4, 3, 4], [0, 0, 4, 0, 1, 4, 2, 4], [0, -1, 4, 0, 0, 4, 2, 4], [0, 0, -4, 0, 0, 4, 2, 4]]
)
def test_slices_outside_are_refused(copy, entry: list[int]) -> None:
    with pytest.raises(RuntimeError, match="outside"):
        copy([torch.zeros(8)], [torch.zeros(8)], torch.tensor([entry]).T.contiguous())


@pytest.mark.parametrize("copy", [pytest.param(copy_slices, marks=kernels), copy_slices_reference])
def test_only_one_cast_is_offered(copy) -> None:
    with pytest.raises(RuntimeError, match="only float32 to bfloat16"):
        copy([torch.zeros(8)], [torch.zeros(8).half()], torch.tensor([[0, 0, 8, 0, 0, 8, 1, 8]]).T.contiguous())


@kernels
@settings(max_examples=150, deadline=None)
@given(
    costs=st.one_of(
        st.lists(st.integers(0, 20).map(float), max_size=60),
        st.lists(st.floats(0, 1e9, allow_subnormal=True), max_size=60),
    ),
    slots=st.integers(1, 9),
    equal_counts=st.booleans(),
)
def test_partition_equals_the_reference(costs: list[float], slots: int, equal_counts: bool) -> None:
    costs_N = np.array(costs, dtype=np.float64)
    slot_N = partition(costs_N, slots, equal_counts)
    assert slot_N.tolist() == partition_reference(costs_N, slots, equal_counts).tolist()


def random_rows(rng: np.random.RandomState) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]:
    """Lengths, bytes of a unit, an order of some of the samples, their bins (some in none), how many there are."""
    samples, columns, bins = rng.randint(0, 20), rng.randint(0, 5), rng.randint(1, 6)
    lengths = rng.choice([0, 1, 3, 40, 3000], (samples, columns)).astype(np.int64)
    order = rng.permutation(samples)[: rng.randint(0, samples + 1)]
    return (
        lengths,
        rng.choice([0, 1, 2, 4, 8, 24], columns).astype(np.int64),
        order,
        rng.randint(-1, bins, len(order)),
        bins,
    )


@kernels
@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_rows_are_laid_out_as_by_the_reference_and_do_not_overlap(seed: int) -> None:
    lengths, row_bytes, order, bin_of, bins = random_rows(np.random.RandomState(seed))
    places, starts = lay_out(lengths, row_bytes, order, bin_of, bins)
    slow = lay_out_reference(lengths, row_bytes, order, bin_of, bins)
    assert np.array_equal(places, slow[0]) and np.array_equal(starts, slow[1])
    for number in range(bins):
        touched = np.zeros(int(starts[number, -1]), dtype=np.int64)
        for row, place in zip(order[bin_of == number], places[bin_of == number], strict=True):
            for begin, size in zip(place.tolist(), (lengths[row] * row_bytes).tolist(), strict=True):
                touched[begin : begin + size] += 1
        assert touched.max(initial=0) <= 1 and (starts[number] % 16 == 0).all()
        assert int(touched.sum()) == int((lengths[order[bin_of == number]] * row_bytes).sum())
    assert (places[bin_of < 0] == -1).all()


@kernels
@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), threads=st.sampled_from([1, 3]))
def test_rows_are_delivered_as_by_the_reference_and_nothing_else_is_touched(seed: int, threads: int) -> None:
    rng = np.random.RandomState(seed)
    lengths, row_bytes, _, _, bins = random_rows(rng)
    order, bin_of = rng.permutation(len(lengths)), rng.randint(-1, bins, len(lengths))
    columns = [noise(int(size), seed % 1000) for size in (lengths * row_bytes).sum(axis=0)]
    places, starts = lay_out(lengths, row_bytes, order, bin_of, bins)
    target_S, place_SC = np.empty_like(bin_of), np.empty_like(places)
    target_S[order], place_SC[order] = bin_of, places
    ours, theirs = ([torch.full((int(size) + 8,), 0xEE, dtype=torch.uint8) for size in starts[:, -1]] for _ in range(2))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        deliver(columns, ours, lengths, row_bytes, target_S, place_SC)
    finally:
        torch.set_num_threads(before)
    deliver_reference(columns, theirs, lengths, row_bytes, target_S, place_SC)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    moved = sum(int((lengths[row] * row_bytes).sum()) for row in np.flatnonzero(target_S >= 0))
    assert moved == 0 or any((block != 0xEE).any() for block in ours)


@pytest.mark.parametrize("copy", [pytest.param(deliver, marks=kernels), deliver_reference])
@pytest.mark.parametrize(
    ("length", "target", "place", "where"),
    [
        (11, 0, 0, "row 0 lies outside column 0"),
        (-1, 0, 0, "row 0 lies outside column 0"),
        (4, 1, 0, "goes to target 1 of 1"),
        (4, 0, 5, "lies outside target 0"),
        (4, 0, -1, "lies outside target 0"),
    ],
)
def test_rows_outside_are_refused_and_nothing_is_copied(copy, length: int, target: int, place: int, where: str) -> None:
    block, one = torch.zeros(8, dtype=torch.uint8), np.array([[length]])
    good, to = np.array([[2], [length]]), np.array([0, target])
    with pytest.raises(RuntimeError, match=where):
        copy([noise(10, 0)], [block], one, np.array([1]), np.array([target]), np.array([[place]]))
    with pytest.raises(RuntimeError):
        copy([noise(10, 0)], [block], good, np.array([1]), to, np.array([[0], [place if place else 99]]))
    assert not block.any()


@pytest.mark.parametrize("place", [pytest.param(lay_out, marks=kernels), lay_out_reference])
def test_samples_and_bins_that_do_not_exist_are_refused(place) -> None:
    lengths, ones = np.ones((2, 1), dtype=np.int64), np.ones(1, dtype=np.int64)
    for order, bin_of in (([2], [0]), ([-1], [0]), ([0], [3])):
        with pytest.raises(RuntimeError):
            place(lengths, ones, np.array(order), np.array(bin_of), 3)


@kernels
def test_operators_keep_their_promises_to_torch() -> None:
    table = torch.tensor([[0, 0, 0, 4]]).T.contiguous()
    target = torch.zeros(8, dtype=torch.uint8)
    torch.library.opcheck(torch.ops.spmd_rl.copy_segments.default, ([noise(8, 0)], target, table, 0))
    slices = torch.tensor([[0, 0, 4, 0, 0, 4, 2, 4]]).T.contiguous()
    torch.library.opcheck(torch.ops.spmd_rl.copy_slices.default, ([torch.rand(8)], [torch.zeros(8)], slices, 0))
    lengths, two = torch.tensor([[2], [3]]), torch.tensor([0, 1])
    torch.library.opcheck(torch.ops.spmd_rl.lay_out.default, (lengths, two[1:], two, two, 2))
    ids, figures = torch.tensor([[0, 1, 0], [0, 0, 0]]), (1.0, 0.5, True, False, 1.02, True, 2, 2)
    torch.library.opcheck(torch.ops.spmd_rl.divide.default, (ids, two, two + 3, *figures))
    columns, places = [noise(5, 0)], torch.tensor([[0], [2]])
    torch.library.opcheck(torch.ops.spmd_rl.deliver.default, (columns, [target], lengths, two[1:], two * 0, places))
    torch.library.opcheck(torch.ops.spmd_rl.partition.default, (torch.rand(9).double(), 3, False))


@kernels
def test_partition_refuses_costs_that_are_no_costs() -> None:
    for bad in (float("nan"), float("inf"), -1.0):
        with pytest.raises(RuntimeError, match="negative or not finite"):
            torch.ops.spmd_rl.partition(torch.tensor([1.0, bad], dtype=torch.float64), 2, False)
    with pytest.raises(ValueError, match="0 slots"):
        partition(np.ones(3), 0)
