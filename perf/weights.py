"""What a weight update costs a rollout replica: blocking, and while it generates.

    .venv/bin/python perf/weights.py --check

Two ranks: one trains a real model with FSDP2, the other generates with vLLM (or transformers). Blocking: both stop,
the weights are sent, generation waits. Background: the trainer takes a snapshot and trains on; the replica receives
into its second buffer while it generates, and swaps between two engine steps. What a replica loses to a transfer is
what it waits, and by how much its steps are longer while bytes come in; the engine's own load step is counted apart,
as it is the same in both. Where all cores compute, as on a small machine, the longer steps are the copying itself,
which then has no core of its own. One JSON object and a table; `--check` exits with 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # when run as a script, from a checkout that is not installed

from tests.world.harness import run_world  # noqa: E402

WAIT_TARGET = 0.1  # of the blocking transfer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--engine", choices=["vllm", "transformers"], default="vllm")
    parser.add_argument("--transport", choices=["torch", "mpi"], default="torch")
    parser.add_argument("--rounds", type=int, default=8, help="versions per way")
    parser.add_argument("--sequences", type=int, default=8, help="that the replica draws at a time")
    parser.add_argument("--trainer", choices=["trains", "idle"], default="trains", help="what it does between versions")
    parser.add_argument("--send", action="store_true", help="as between machines: no look into the trainer's memory")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a target is missed")
    arguments = parser.parse_args()
    settings = {
        key: getattr(arguments, key)
        for key in ("model", "engine", "transport", "rounds", "sequences", "trainer", "send")
    }
    launcher = {"torch": "torchrun", "mpi": "mpirun"}[arguments.transport]
    roles = {"train": [0], "rollout": [1]}
    world = run_world("perf.weights_rank:updates", 2, launcher, timeout_s=900, args=settings, roles=roles).check()
    trainer, replica = world.ranks
    blocking = median(replica["blocking_s"])
    waited, slower = median(replica["waited_s"]), median(replica["slower_s"])
    case = f"{arguments.engine}, {replica['megabytes']:.0f} MB over {arguments.transport}, trainer {arguments.trainer}"
    line: dict[str, Any] = {
        "case": case + (", sent" if arguments.send else ", same machine"),
        "cores": os.cpu_count(),
        "blocking_s": round(blocking, 4),
        "background_s": round(median(replica["background_s"]), 4),
        "replica_waits_s": round(waited, 4),
        "replica_slower_s": round(slower, 4),
        "load_s": round(median(replica["load_s"]), 4),
        "load_blocking_s": round(median(replica["load_blocking_s"]), 4),
        "trainer_blocking_s": round(median(trainer["blocking_s"]), 4),
        "trainer_snapshot_s": round(median(trainer["snapshot_s"]), 4),
        "trainer_waits_s": round(median(trainer["waited_s"]), 4),
        "waits_ratio": round(waited / blocking, 3),
        "exposed_ratio": round((waited + max(slower, 0.0)) / blocking, 3),
        "target": WAIT_TARGET,
        "met": waited + max(slower, 0.0) <= WAIT_TARGET * blocking,
    }
    print(json.dumps(line))
    for key, value in line.items():
        print(f"{key:<20} {value}")
    return 1 if arguments.check and not line["met"] else 0


if __name__ == "__main__":
    sys.exit(main())
