"""How long it takes to divide samples among slots, and how even the result is.

    .venv/bin/python perf/balance.py --check

Long-tailed lengths; one core. The reference is the same algorithm in Python, where it ends in reasonable time. One
JSON object per line and a table; `--check` exits with 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # when run as a script, from a checkout that is not installed

from spmd_rl.data.balance import Balance, balance, imbalance  # noqa: E402
from spmd_rl.ops.library import built  # noqa: E402
from spmd_rl.ops.partition import partition_reference  # noqa: E402

# samples, slots, samples per group (1: free), limit in milliseconds and of max / mean; None: no target
CASES = [
    (8_192, 64, 1, None, None),
    (32_768, 256, 1, None, None),
    (65_536, 512, 1, 20.0, 1.001),
    (1_000_000, 4_096, 1, 500.0, 1.001),
    (65_536, 512, 8, None, None),
]
REFERENCE_UP_TO = 65_536  # samples


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--check", action="store_true", help="exit with 1 where a target is missed")
    arguments = parser.parse_args()
    if not built():
        raise SystemExit("perf/balance.py measures the kernel: build it first")
    results = [measure(*case, repeats=arguments.repeats) for case in CASES]
    print()
    for line in results:
        mark = {True: "met", False: "MISSED", None: ""}[line["met"]]
        figures = f"{line['ours_ms']:8.2f} ms  max/mean {line['imbalance']:.5f}  reference {line['reference_ms']} ms"
        print(f"{line['case']:<44} {figures}  {mark}")
    return 1 if arguments.check and any(line["met"] is False for line in results) else 0


def measure(
    samples: int, slots: int, group: int, limit_ms: float | None, limit: float | None, repeats: int
) -> dict[str, Any]:
    rng = np.random.RandomState(0)
    lengths_S = np.clip(rng.lognormal(6.5, 0.9, samples), 1, 16_384).astype(np.int64)
    costs_S = Balance(1.0, 1e-4).costs(lengths_S)
    groups_S = np.arange(samples) // group if group > 1 else None
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        slot_S = balance(costs_S, groups_S, slots)
        times.append(1e3 * (time.perf_counter() - begin))
    reference_ms = None
    if group == 1 and samples <= REFERENCE_UP_TO:
        begin = time.perf_counter()
        assert (partition_reference(costs_S, slots, False) == slot_S).all()
        reference_ms = round(1e3 * (time.perf_counter() - begin), 1)
    ours, even = median(times), imbalance(costs_S, slot_S, slots)
    line = {
        "case": f"{samples:,} samples over {slots:,} slots" + (f", groups of {group}" if group > 1 else ""),
        "ours_ms": round(ours, 2),
        "imbalance": round(even, 6),
        "reference_ms": reference_ms,
        "target_ms": limit_ms,
        "target_imbalance": limit,
        "met": None if limit_ms is None or limit is None else ours <= limit_ms and even <= limit,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }
    print(json.dumps(line), flush=True)
    return line


if __name__ == "__main__":
    sys.exit(main())
