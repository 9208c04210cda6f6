"""Batch in, Batch out, between data-parallel ranks: metadata, balance, pack, all-to-all, unpack.

    perf/peer_env.sh tq && .venv/bin/python perf/exchange.py --check

Beside the bare all-to-all of the same bytes over the same transport, in the same processes by turns; beside
TransferQueue's put and get of the same samples (simple storage, its own virtual environment); payload per rank for
growing worlds; time of a plan among thousands of virtual ranks. Times are medians; of all ranks, the slowest counts.
One JSON object per line and a table; `--check` exits with 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # when run as a script, from a checkout that is not installed

from tests.world.harness import run_world  # noqa: E402

CASES = {"512 x 1,024": (512, 1024), "256 x 4,096": (256, 4096), "2,048 x 4,096": (2048, 4096)}
LAUNCHER = {"torch": "torchrun", "mpi": "mpirun"}
BARE_TARGET = 1.5  # times the bare collective, at most, from 20 MB on
PEER_TARGET = {"512 x 1,024": 10.0, "256 x 4,096": 10.0, "2,048 x 4,096": 5.0}  # times faster than put + get
PLAN_TARGET_S = 0.2
GROWTH_TARGET = 1.05


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--transports", nargs="+", choices=list(LAUNCHER), default=list(LAUNCHER))
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--largest", type=int, default=64, help="ranks of the largest real world for payload per rank")
    parser.add_argument("--only", choices=["bare", "peer", "growth", "plan"], help="one of the four comparisons")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a target is missed")
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []
    ours: dict[str, float] = {}
    if arguments.only in (None, "bare", "peer"):
        for case in arguments.cases:
            for transport in arguments.transports:
                for ranks in arguments.worlds:
                    results.append(say(beside_bare(case, transport, ranks, arguments.repeats)))
                    ours[case] = min(ours.get(case, float("inf")), results[-1]["ours_ms"])
    if arguments.only in (None, "peer"):
        results += [say(beside_peer(case, ours[case])) for case in arguments.cases]
    if arguments.only in (None, "growth"):
        results += map(say, growth(arguments.largest))
    if arguments.only in (None, "plan"):
        from perf.exchange_rank import plan_seconds

        for ranks in (64, 512, 4096):
            line = plan_seconds(ranks, 16)
            met = line["plan_s"] <= PLAN_TARGET_S
            results.append(
                say({"case": f"plan among {ranks} virtual ranks", **line, "target_s": PLAN_TARGET_S, "met": met})
            )
    table(results)
    return 1 if arguments.check and any(line.get("met") is False for line in results) else 0


def beside_bare(case: str, transport: str, ranks: int, repeats: int) -> dict[str, Any]:
    samples, tokens = CASES[case]
    arguments = {"transport": transport, "samples": samples, "tokens": tokens, "repeats": repeats}
    world = run_world("perf.exchange_rank:exchange", ranks, LAUNCHER[transport], timeout_s=600, args=arguments).check()
    first = world.ranks[0]
    ours, bare = (1e3 * median(first[name]) for name in ("ours_s", "bare_s"))
    megabytes = first["total_bytes"] / 1e6
    return {
        "case": f"{case} over {transport}, {ranks} ranks",
        "megabytes": round(megabytes, 1),
        "ours_ms": round(ours, 2),
        "bare_ms": round(bare, 2),
        "ratio": round(ours / bare, 2),
        "target": BARE_TARGET,
        "met": megabytes < 20 or ours <= BARE_TARGET * bare,
        "parts_ms": first["parts_ms"],
        "versions": versions("torch", "mpi4py"),
    }


def beside_peer(case: str, ours_ms: float) -> dict[str, Any]:
    samples, tokens = CASES[case]
    python = ROOT / ".venvs" / "tq" / "bin" / "python"
    if not python.exists():
        raise SystemExit("perf/exchange.py: run perf/peer_env.sh tq first")
    command = [str(python), str(ROOT / "perf" / "exchange_peer.py"), str(samples), str(tokens), "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not found:
        raise SystemExit(f"TransferQueue did not finish:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    times = json.loads(found[0].removeprefix("RESULT "))
    put, get = (1e3 * median(times[name]) for name in ("put_s", "get_s"))
    return {
        "case": f"{case} beside TransferQueue",
        "ours_ms": ours_ms,
        "put_ms": round(put, 1),
        "get_ms": round(get, 1),
        "ratio": round((put + get) / ours_ms, 1),
        "target": PEER_TARGET[case],
        "met": put + get >= PEER_TARGET[case] * ours_ms,
        "versions": {"TransferQueue": "0.1.11", **versions("torch")},
    }


def growth(largest: int) -> list[dict[str, Any]]:
    """Payload per rank, half of the ranks giving all they hold to the other half."""
    world = run_world("perf.exchange_rank:bytes_by_world", largest, timeout_s=900, args={"transport": "torch"}).check()
    lines: list[dict[str, Any]] = []
    for size in (2, 4, 8, 16, 32, 64):
        moved = [rank[str(size)] for rank in world.ranks if str(size) in rank]
        if moved:
            sent, received = (max(pair[side] for pair in moved) for side in (0, 1))
            smallest = lines[0]["sent"] if lines else sent
            line = {
                "case": f"payload of a rank among {size}",
                "sent": sent,
                "received": received,
                "target": GROWTH_TARGET,
            }
            lines.append({**line, "met": max(sent, received) <= GROWTH_TARGET * smallest})
    return lines


def versions(*packages: str) -> dict[str, str]:
    return {package: importlib.metadata.version(package) for package in packages}


def say(line: dict[str, Any]) -> dict[str, Any]:
    print(json.dumps(line), flush=True)
    return line


def table(results: list[dict[str, Any]]) -> None:
    print()
    for line in results:
        figures = {k: v for k, v in line.items() if k not in ("case", "met", "versions", "parts_ms")}
        mark = {True: "met", False: "MISSED", None: ""}[line.get("met")]
        print(f"{line['case']:<44} {'  '.join(f'{k} {v}' for k, v in figures.items())}  {mark}")


if __name__ == "__main__":
    sys.exit(main())
