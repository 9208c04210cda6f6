"""The stream between a rollout replica and a trainer, as two real processes: groups per second, whatever is waiting.

    perf/peer_env.sh tq && .venv/bin/python perf/stream.py --check

Groups of one sample and one number go through the whole path but for engines: message, frame, line, store, descriptor,
ledger, tick, claim, and the room back to the replica. Then how long a put takes while a consumer waits, and until that
one wakes. Beside it TransferQueue (its own virtual environment): requests for metadata with as many rows waiting, and
a put while a consumer waits. One JSON object per line; `--check` exits with 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # when run as a script, from a checkout that is not installed

from tests.world.harness import run_world  # noqa: E402

LAUNCHER = {"torch": "torchrun", "mpi": "mpirun"}
RATE_TARGET = 50_000.0  # groups per second
SPREAD_TARGET = 0.10  # between the rates with the least and the most waiting
PUT_TARGET_MS = 1.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", nargs="+", choices=list(LAUNCHER), default=["torch"])
    parser.add_argument("--backlogs", nargs="+", type=int, default=[1_024, 10_240, 102_400])
    parser.add_argument("--groups", type=int, default=200 * 256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--without-peer", action="store_true")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a target is missed")
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []
    for transport in arguments.transports:
        rates = []
        for backlog in arguments.backlogs:
            results.append(say(flow(transport, backlog, arguments.groups, arguments.repeats)))
            rates.append(results[-1]["groups_per_s"])
        spread = max(rates) / min(rates) - 1
        results.append(
            say({"case": f"rate by what waits, {transport}", "spread": round(spread, 3), "target": SPREAD_TARGET,
                 "met": spread < SPREAD_TARGET})
        )  # fmt: skip
        results.append(say(delay(transport)))
    if not arguments.without_peer:
        results.append(say(peer(arguments.backlogs)))
    return 1 if arguments.check and any(line.get("met") is False for line in results) else 0


def flow(transport: str, backlog: int, groups: int, repeats: int) -> dict[str, Any]:
    runs = []
    for _ in range(repeats):
        task = {"transport": transport, "backlog": backlog, "groups": groups}
        trainer, replica = run_world("perf.stream_rank:flow", 2, LAUNCHER[transport], 600, task).check().ranks
        runs.append({**trainer, **replica})
    rate = median(run["groups_per_s"] for run in runs)
    return {
        "case": f"{backlog} groups waiting, {transport}",
        "groups_per_s": round(rate),
        "put_us": round(median(run["put_us"] for run in runs), 2),
        "tick_us": round(median(run["tick_us"] for run in runs), 1),
        "target": RATE_TARGET,
        "met": rate >= RATE_TARGET,
    }


def delay(transport: str) -> dict[str, Any]:
    task = {"transport": transport, "puts": 200}
    trainer, replica = run_world("perf.stream_rank:delay", 2, LAUNCHER[transport], 120, task).check().ranks
    return {
        "case": f"a put while a consumer waits, {transport}",
        "put_ms": round(replica["median_ms"], 4),
        "put_ms_max": round(replica["max_ms"], 3),
        "until_awake_ms": round(trainer["median_ms"], 3),
        "target": PUT_TARGET_MS,
        "met": replica["median_ms"] < PUT_TARGET_MS,
    }


def peer(backlogs: list[int]) -> dict[str, Any]:
    python = ROOT / ".venvs" / "tq" / "bin" / "python"
    if not python.exists():
        raise SystemExit("perf/stream.py: run perf/peer_env.sh tq first, or give --without-peer")
    command = [str(python), str(ROOT / "perf" / "stream_peer.py"), *map(str, backlogs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not found:
        raise SystemExit(f"TransferQueue did not finish:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return {"case": "TransferQueue 0.1.11", **json.loads(found[0].removeprefix("RESULT "))}


def say(line: dict[str, Any]) -> dict[str, Any]:
    print(json.dumps(line), flush=True)
    return line


if __name__ == "__main__":
    sys.exit(main())
