"""Bandwidth of packing and unpacking ragged rows, beside one plain copy of the same bytes (memmove; on a GPU, copy_).

    .venv/bin/python perf/kernels.py --check                  on this machine's CPU
    .venv/bin/python perf/kernels.py --device cuda --check    on a GPU

Rows of many columns, in the order in which an exchange takes them: those for one peer after the other, each time a
column from its start to its end. Best of the repeats, both by turns; threads as torch has them (OMP_NUM_THREADS). One
JSON object per line and a table; `--check` exits with 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # when run as a script, from a checkout that is not installed

from spmd_rl.ops.library import built  # noqa: E402
from spmd_rl.ops.segments import copy_segments  # noqa: E402
from spmd_rl.ops.slices import copy_slices  # noqa: E402

TARGET = {"cpu": 0.80, "cuda": 0.85}  # of the plain copy's bandwidth
ROWS = (256, 1024, 4096, 16384)  # mean bytes per row
COLUMNS, PEERS = 8, 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--megabytes", type=int, default=0, help="bytes moved; 0: 64 on a CPU, 1,024 on a GPU")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--check", action="store_true", help="exit with 1 where a target is missed")
    arguments = parser.parse_args()
    if not built():
        raise SystemExit("perf/kernels.py measures the kernels: build them first")
    device = torch.device(arguments.device)
    size = (arguments.megabytes or (64 if device.type == "cpu" else 1024)) << 20
    results = []
    for row in ROWS:
        for direction in ("pack", "unpack"):
            results.append(say(ragged(direction, row, size, device, arguments.repeats)))
    results.append(say(cast(size, device, arguments.repeats)))
    print()
    for line in results:
        mark = {True: "met", False: "MISSED", None: ""}[line["met"]]
        bandwidths = f"{line['ours_gb_s']:8.2f} GB/s  plain {line['plain_gb_s']:8.2f}"
        print(f"{line['case']:<40} {bandwidths}  {line['ratio']}  {mark}")
    return 1 if arguments.check and any(line["met"] is False for line in results) else 0


def rows_by_peer(row: int, total: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Column, offset in it, offset in the messages and bytes of each row; all int64 [K], in the order of reading.

    Rows are between half and one and a half times the mean, in units of 4 bytes; row k of a column is for peer k % 8.
    """
    generator = torch.Generator().manual_seed(row)
    count = total // row // COLUMNS
    sizes = torch.randint(row // 8, 3 * row // 8 + 1, (COLUMNS, count), generator=generator) * 4
    column = torch.arange(COLUMNS)[:, None].expand(-1, count)
    peer = (torch.arange(count) % PEERS).expand(COLUMNS, -1)
    # Message by message, within it column by column: as exchange_plan lays them out.
    order = (peer * COLUMNS + column).reshape(-1).argsort(stable=True)
    flat = sizes.reshape(-1)
    place = torch.empty_like(flat)
    place[order] = flat[order].cumsum(0) - flat[order]
    return column.reshape(-1), (sizes.cumsum(1) - sizes).reshape(-1), place, flat


def ragged(direction: str, row: int, total: int, device: torch.device, repeats: int) -> dict[str, Any]:
    column, begin, place, size = rows_by_peer(row, total)
    used = int(size.sum())
    if direction == "pack":
        lengths = torch.zeros(COLUMNS, dtype=torch.int64).index_add_(0, column, size)
        sources = [noise(int(length), device) for length in lengths]
        table = torch.stack([column, begin, place, size])
    else:  # column after column, each out of all messages
        sources = [noise(used, device)]
        table = torch.stack([torch.zeros_like(column), place, size.cumsum(0) - size, size])
    target = torch.empty(used, dtype=torch.uint8, device=device)
    plain_source, plain_target = noise(used, device), torch.empty_like(target)

    def plain_copy() -> None:
        if device.type == "cpu":
            ctypes.memmove(plain_target.data_ptr(), plain_source.data_ptr(), used)
        else:
            plain_target.copy_(plain_source)

    ours, plain = by_turns(lambda: copy_segments(sources, target, table), plain_copy, device, repeats)
    return line(f"{direction}, rows of about {row:,} bytes", used, ours, plain, TARGET[device.type])


def cast(total: int, device: torch.device, repeats: int) -> dict[str, Any]:
    """float32 to bfloat16 in slices of 1,024 x 1,024 out of a wider matrix, beside torch's own cast of the same."""
    rows = max(1, total // 4 // 2048)
    values = torch.randn(rows, 2048, device=device)
    packed, plain_target = (torch.empty(rows, 1024, dtype=torch.bfloat16, device=device) for _ in range(2))
    starts = torch.arange(0, rows, 1024)
    height = (rows - starts).clamp(max=1024)
    zero, ones = torch.zeros_like(starts), torch.ones_like(starts)
    table = torch.stack([zero, starts * 2048, 2048 * ones, zero, starts * 1024, 1024 * ones, height, 1024 * ones])
    ours, plain = by_turns(
        lambda: copy_slices([values], [packed], table),
        lambda: plain_target.copy_(values[:, :1024]),
        device,
        repeats,
    )
    assert torch.equal(packed, plain_target)
    return line("slices, float32 to bfloat16", rows * 1024 * 4, ours, plain, None)


def noise(size: int, device: torch.device) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)


def by_turns(
    ours: Callable[[], Any], plain: Callable[[], Any], device: torch.device, repeats: int
) -> tuple[float, float]:
    """Least seconds of each."""
    best = [float("inf")] * 2
    for _ in range(repeats):
        for number, action in enumerate((ours, plain)):
            best[number] = min(best[number], seconds(action, device))
    return best[0], best[1]


def seconds(action: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cpu":
        begin = time.perf_counter()
        action()
        return time.perf_counter() - begin
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    action()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def line(case: str, size: int, ours: float, plain: float, target: float | None) -> dict[str, Any]:
    return {
        "case": case,
        "megabytes": round(size / 1e6, 1),
        "ours_gb_s": round(size / ours / 1e9, 2),
        "plain_gb_s": round(size / plain / 1e9, 2),
        "ratio": round(plain / ours, 2),
        "target": target,
        "met": None if target is None else plain / ours >= target,
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }


def say(result: dict[str, Any]) -> dict[str, Any]:
    print(json.dumps(result), flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main())
