"""Ranks started by a real Slurm's srun, without torchrun and without MPI: a one-machine cluster of two nodes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.world.harness import ROOT, run_world
from tests.world.test_bootstrap import place
from tests.world.test_liveness import alarms, kill_one, seconds_to_end

pytestmark = pytest.mark.root
UP = str(Path(__file__).with_name("slurm_up.sh"))


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which srun and sbatch talk to the cluster."""
    if os.geteuid() != 0 or shutil.which("bash") is None:
        pytest.skip("a Slurm of its own needs root")
    folder = tmp_path_factory.mktemp("slurm")
    up = subprocess.run([UP, str(folder)], capture_output=True, text=True, timeout=240)
    try:
        if up.returncode == 3:
            pytest.skip(up.stderr.strip())
        assert up.returncode == 0, up.stderr
        # The nodes' names lead nowhere here, so the meeting point is given; test_bootstrap.py derives it from them.
        yield {"SLURM_CONF": str(folder / "slurm.conf"), "MASTER_ADDR": "127.0.0.1"}
    finally:
        subprocess.run([UP, str(folder), "down"], timeout=60)


def test_srun_places_ranks_unevenly_on_two_nodes(slurm: dict[str, str]) -> None:
    launcher = ["srun", "-N2", "-n3", "--overcommit", "--kill-on-bad-exit=1"]
    result = run_world(place, ranks=3, launcher=launcher, env=slurm).check()
    places = [got["place"] for got in result.ranks]
    assert places == [[0, 3, 0, 2, 0, 2], [1, 3, 1, 2, 0, 2], [2, 3, 0, 1, 1, 2]]
    for rank, got in enumerate(result.ranks):
        assert got["source"] == "slurm" and got["sum"] == 3.0 and got["environ"][0] == str(rank)


def test_srun_a_killed_rank_is_named_and_all_end(slurm: dict[str, str]) -> None:
    """Also without --kill-on-bad-exit: the ranks end by themselves."""
    launcher = ["srun", "-N2", "-n4", "--overcommit", "--kill-on-bad-exit=0"]
    result = run_world(kill_one, ranks=4, launcher=launcher, args={"where": "collective"}, env=slurm)
    assert not result.timed_out and result.returncode != 0 and seconds_to_end(result) < 10
    assert any(re.match(r"rank 2 .* died in stage 'rollout' of step 7", line) for line in alarms(result))


PROGRAM = """
import os, sys, time, signal
restart = os.environ.get("SLURM_RESTART_COUNT", "0")
asked = []
signal.signal(signal.SIGUSR2, lambda *_: asked.append(1))
print("program", os.environ["SLURM_PROCID"], "restart", restart, sys.argv[1:], flush=True)
while restart == "0" and not asked:
    time.sleep(0.1)
"""


def test_a_batch_job_out_of_time_saves_requeues_and_resumes(slurm: dict[str, str], tmp_path: Path) -> None:
    """launch/slurm.sbatch around a small program in the place of main.py, which ends by SIGUSR2 in its first life."""
    (tmp_path / "spmd_rl").mkdir()
    (tmp_path / "spmd_rl" / "main.py").write_text(PROGRAM)
    sbatch = ["sbatch", "--parsable", "--nodes=2", "--ntasks=2", "--overcommit", f"--output={tmp_path}/log"]
    script = [str(ROOT / "launch" / "slurm.sbatch"), "c.yaml", "train.steps=3"]
    environ = {**os.environ, **slurm}
    job = subprocess.run([*sbatch, *script], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True)
    number = job.stdout.strip()
    log = tmp_path / "log"

    def wait_for(text: str, read: Callable[[], str]) -> None:
        deadline = time.monotonic() + 30
        while text not in read():
            assert time.monotonic() < deadline, f"no {text!r} in {read()!r}"
            time.sleep(0.2)

    def output() -> str:
        return log.read_text() if log.exists() else ""

    def state() -> str:
        queue = ["squeue", "-h", "-j", number, "-o", "%T"]
        return subprocess.run(queue, env=environ, capture_output=True, text=True).stdout

    try:
        for rank in (0, 1):
            wait_for(f"program {rank} restart 0 ['c.yaml', 'train.steps=3']", output)
        subprocess.run(["scancel", "--batch", "--signal=USR2", number], env=environ, check=True)  # as Slurm does
        wait_for("PENDING", state)
        # A requeued job is held back for two minutes.
        subprocess.run(["scontrol", "update", f"JobId={number}", "StartTime=now"], env=environ, check=True)
        for rank in (0, 1):
            wait_for(f"program {rank} restart 1 ['c.yaml', 'train.steps=3', 'run.resume=auto']", output)
    finally:
        subprocess.run(["scancel", number], env=environ)
