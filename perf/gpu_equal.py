"""The CUDA kernels beside their references on a GPU: random rows and slices, every alignment, byte for byte."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # when run as a script, from a checkout that is not installed

from spmd_rl.data.batch import Batch  # noqa: E402
from spmd_rl.ops.padded import pad, unpad  # noqa: E402
from spmd_rl.ops.segments import copy_segments, copy_segments_reference  # noqa: E402
from spmd_rl.ops.slices import copy_slices, copy_slices_reference  # noqa: E402
from tests.exchanges import COLUMNS, make_samples, same_bytes  # noqa: E402


def noise(size: int) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")


def segments(rng: random.Random) -> None:
    sources = [noise(rng.randint(1, 200_000)) for _ in range(3)]
    rows, place = [], rng.randint(0, 16)
    for _ in range(rng.randint(1, 400)):
        which = rng.randrange(3)
        size = rng.randint(0, min(sources[which].numel(), rng.choice([3, 40, 5000, 60_000])))
        rows.append([which, rng.randint(0, sources[which].numel() - size), place, size])
        place += size + rng.randint(0, 3)
    table = torch.tensor(rows).T.contiguous()
    ours = torch.full((place + 16,), 7, dtype=torch.uint8, device="cuda")
    theirs = ours.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # not the default one: the handle must be the right one
        copy_segments(sources, ours, table)
    torch.cuda.current_stream().wait_stream(stream)
    copy_segments_reference(sources, theirs, table)
    assert torch.equal(ours, theirs)


def slices(rng: random.Random, source_dtype: torch.dtype, target_dtype: torch.dtype) -> None:
    rows, columns, gap = rng.randint(1, 60), rng.randint(1, 3000), rng.randint(0, 5)
    values = torch.randn(rows * (columns + gap) + 9, device="cuda").to(source_dtype)
    begin, place = rng.randint(0, 9), rng.randint(0, 9)
    ours = torch.ones(rows * columns + 9, device="cuda", dtype=target_dtype)
    theirs = ours.clone()
    table = torch.tensor([[0, begin, columns + gap, 0, place, columns, rows, columns]]).T.contiguous()
    if begin + (rows - 1) * (columns + gap) + columns > values.numel():
        return
    copy_slices([values], [ours], table)
    copy_slices_reference([values], [theirs], table)
    assert torch.equal(ours, theirs)


def padding(rng: random.Random) -> None:
    lengths_S = torch.tensor([rng.randint(0, 50) for _ in range(rng.randint(1, 30))])
    values = torch.randn(int(lengths_S.sum()), 3, device="cuda")
    padded = pad(values, lengths_S, fill=2.0)
    assert torch.equal(unpad(padded, lengths_S), values)
    assert int((padded == 2.0).sum()) >= 3 * int(lengths_S.max() * len(lengths_S) - lengths_S.sum())


def batches() -> None:
    ids = [(0, prompt, sample) for prompt in range(9) for sample in range(3)]
    batch = make_samples(ids, COLUMNS, longest=900)
    on_gpu = Batch(batch.ids, {n: type(c)(c.values.cuda(), c.lengths) for n, c in batch.columns.items()})
    index = torch.randperm(len(ids))
    back = {n: type(c)(c.values.cpu(), c.lengths) for n, c in on_gpu.select(index).columns.items()}
    assert same_bytes(Batch(batch.ids[index], back), batch.select(index))


def main() -> None:
    rng = random.Random(0)
    for _ in range(60):
        segments(rng)
        slices(rng, torch.float32, torch.bfloat16)
        slices(rng, torch.float32, torch.float32)
        slices(rng, torch.bfloat16, torch.bfloat16)
        padding(rng)
    batches()
    print("gpu_equal: kernels equal their references")


if __name__ == "__main__":
    main()
