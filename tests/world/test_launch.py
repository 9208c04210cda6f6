"""The scripts of launch/, around a small program in the place of main.py."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.world.harness import ROOT, find_mpirun

PROGRAM = f"""
import sys
sys.path[:] = [{str(ROOT)!r}] + sys.path[1:]
from spmd_rl.comm.bootstrap import bootstrap, leave, shutdown
from spmd_rl.config.schema import CommConfig
world = bootstrap(CommConfig())
print(f"{{world.source}} {{world.rank}} of {{world.size}} {{sys.argv[1:]}}\\n", end="", flush=True)
shutdown(world)
leave(0)
"""
SCRIPTS = ["torchrun.sh", "mpirun.sh", "nsys.sh"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    (tmp_path / "spmd_rl").mkdir()
    (tmp_path / "spmd_rl" / "main.py").write_text(PROGRAM)
    if (ROOT / ".venv").exists():
        (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    return tmp_path


@pytest.mark.parametrize(
    ("script", "ranks", "source"),
    [
        ("torchrun.sh", "NPROC", "torchrun"),
        pytest.param(
            "mpirun.sh",
            "NP",
            "openmpi",
            marks=[pytest.mark.mpi, pytest.mark.skipif(find_mpirun() is None, reason="no mpirun in this environment")],
        ),
    ],
)
def test_arguments_reach_every_rank_as_they_are(root: Path, script: str, ranks: str, source: str) -> None:
    arguments = ["my config.yaml", "data.train=[{name: a b}]", "run.name=日本"]
    environ = {**os.environ, ranks: "2"}
    command = [str(root / "launch" / script), *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line)
    assert lines == [f"{source} {rank} of 2 {arguments}" for rank in range(2)]


@pytest.mark.parametrize(
    ("end", "status", "last"),
    [
        ("print('error: no such key', file=sys.stderr, flush=True); os._exit(2)", 2, "error: no such key"),
        ("os.kill(os.getpid(), 9)", 137, r"launcher: rank 1 \(pid \d+\) was ended by SIGKILL \(is the memory full\?\)"),
    ],
)
def test_what_torchrun_says_of_itself_buries_no_error(root: Path, end: str, status: int, last: str) -> None:
    program = f"import os, sys, time\nif os.environ['RANK'] == '1':\n    {end}\ntime.sleep(60)\n"
    (root / "spmd_rl" / "main.py").write_text(program)
    command = [str(root / "launch" / "torchrun.sh"), "c.yaml"]
    done = subprocess.run(command, env={**os.environ, "NPROC": "2"}, capture_output=True, text=True, timeout=60)
    assert done.returncode == status
    assert re.fullmatch(last, done.stderr.strip()), done.stderr


@pytest.mark.skipif(not (ROOT / ".venv").exists(), reason="the quickstart's own environment is wanted")
def test_the_quickstart_sets_up_prepares_and_starts_two_ranks(root: Path) -> None:
    (root / "launch" / "setup.sh").write_text("#!/bin/sh\necho set up\n")
    (root / "launch" / "prepare_model.py").write_text("print('prepared')\n")
    command = [str(root / "launch" / "quickstart.sh"), "train.steps=4"]
    done = subprocess.run(command, env={**os.environ, "NPROC": "2"}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, second, *ranks = done.stdout.splitlines()
    assert (first, second) == ("set up", "prepared")
    wanted = [f"torchrun {rank} of 2 ['configs/quickstart.yaml', 'train.steps=4']" for rank in range(2)]
    assert sorted(filter(None, ranks)) == wanted


@pytest.mark.parametrize("script", SCRIPTS)
def test_without_a_config_they_say_how_to_use_them(script: str) -> None:
    done = subprocess.run([str(ROOT / "launch" / script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"launch/{script} CONFIG [section.key=value ...]" in done.stderr and "#!" not in done.stderr


@pytest.mark.mpi
@pytest.mark.skipif(find_mpirun() is None, reason="no mpirun in this environment")
@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGTERM], [signal.SIGTERM, signal.SIGTERM]])
def test_ranks_of_mpirun_are_asked_once_before_they_are_killed(root: Path, signals: list[signal.Signals]) -> None:
    (root / "spmd_rl" / "main.py").write_text(
        "import signal, sys, time\n"
        "def stop(*_):\n    print('asked', flush=True)\n    time.sleep(float(sys.argv[1]))\n    sys.exit(0)\n"
        "signal.signal(signal.SIGUSR1, stop)\nprint('ready', flush=True)\ntime.sleep(60)\n"
    )
    command = [str(root / "launch" / "mpirun.sh"), "60" if len(signals) > 1 else "2"]
    job = subprocess.Popen(
        command,
        env={**os.environ, "NP": "2"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # tests in the background of a shell have inherited that SIGINT is ignored, which no trap can undo
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert job.stdout is not None
    assert [job.stdout.readline().strip() for _ in range(2)] == ["ready"] * 2
    os.killpg(job.pid, signals[0])  # to the whole group, as a terminal does
    assert [job.stdout.readline().strip() for _ in range(2)] == ["asked"] * 2
    for number in signals[1:]:
        os.killpg(job.pid, number)
    assert (job.wait(30) == 0) == (len(signals) == 1)


def test_several_machines_need_to_know_the_first() -> None:
    environ = {name: value for name, value in os.environ.items() if name != "MASTER_ADDR"}
    command = [str(ROOT / "launch" / "torchrun.sh"), "c.yaml"]
    done = subprocess.run(
        command, env={**environ, "NNODES": "2", "NODE_RANK": "0"}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0 and "MASTER_ADDR: the name or address of machine 0" in done.stderr


def test_shellcheck_finds_nothing() -> None:
    folders = ("launch", "tests/world", "perf")
    scripts = [path for folder in folders for path in sorted((ROOT / folder).glob("*.s*"))]
    program = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([program, *scripts], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
