"""What harness.py starts on every rank: a function with a bootstrapped `World`, or a script as `__main__`.

usage: runner.py FOLDER function MODULE:FUNCTION '{"args": {...}, "timeout_s": 60, "roles": {}}'
       runner.py FOLDER script PATH [ARGUMENT...]

SIGQUIT makes the rank write its Python stacks to FOLDER/<pid>.stacks, in C, even while a collective holds it.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import runpy
import signal
import sys
import traceback
from functools import reduce
from pathlib import Path
from typing import Any


def main() -> None:
    folder, kind, target, *rest = sys.argv[1:]
    stacks = (Path(folder) / f"{os.getpid()}.stacks").open("w")
    faulthandler.register(signal.SIGQUIT, file=stacks, all_threads=True)
    if kind == "function":
        run_function(Path(folder), target, json.loads(rest[0]))
    else:
        sys.argv = [target, *rest]
        sys.path[0] = str(Path(target).parent)  # as if the script had been started directly
        runpy.run_path(target, run_name="__main__")


def run_function(folder: Path, target: str, task: dict[str, Any]) -> None:
    from spmd_rl.comm.bootstrap import bootstrap_roles, leave, shutdown
    from spmd_rl.config.schema import CommConfig

    sys.path.pop(0)  # this folder: its files are imported as tests.world.*, if at all
    limit_s = float(task["timeout_s"])
    job, mine = bootstrap_roles(CommConfig(timeout_s=limit_s, init_timeout_s=limit_s), 1, task["roles"])
    result: dict[str, Any] = {}
    try:
        module, _, name = target.partition(":")
        function: Any = reduce(getattr, name.split("."), importlib.import_module(module))
        result["value"] = function(*([job, mine] if task["roles"] else [job]), **task["args"])
    except BaseException:
        result["error"] = traceback.format_exc()
        raise
    finally:
        partial = folder / f"rank-{job.rank}.part"
        partial.write_text(json.dumps(result))
        partial.rename(folder / f"rank-{job.rank}.json")
    shutdown(job)
    leave(0)


if __name__ == "__main__":
    main()
