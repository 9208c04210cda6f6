"""Rollout replicas that fail or hang while a job runs: with `stream.tolerate_replica_loss` the others go on."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from spmd_rl.config.check import check
from spmd_rl.config.errors import UserError
from spmd_rl.config.load import load_config
from tests.integration.program import MAIN, metrics, samples, start, tiny_config
from tests.world.harness import ROOT

GRAPH = """
import os
import time
from dataclasses import replace

from spmd_rl.recipes import build, grpo


def graph(config, world_size):
    standard = grpo.graph(config, world_size)
    engines = (replace(e, build=rollout) if e.name == "rollout" else e for e in standard.engines)
    return replace(standard, engines=tuple(engines))


def rollout(context):
    engine = build.rollout(context)
    if context.world.rank == 1:  # of the replicas
        engine.step = Breaking(engine.step)
    return engine


class Breaking:
    def __init__(self, step):
        self.step, self.calls = step, 0

    def __call__(self):
        self.calls += 1
        if self.calls == 30:  # in its second step, while others of its groups have been sent
            FAIL
        return self.step()
"""
FAIL = {
    "kill": "os.kill(os.getpid(), 9)",
    "raise": "raise RuntimeError('device-side assert')",
    "hang": "time.sleep(3600)",
}
TOLERANT = ("mode=async", "placement.train=1", "stream.staleness=0", "stream.tolerate_replica_loss=true")


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory, model):
    folder = tmp_path_factory.mktemp("sync")
    start(tiny_config(folder, model, eval={"at_end": True}), "train.steps=4", launcher="single").check()
    return folder / "run"


@pytest.fixture
def broken(tmp_path, model, monkeypatch):
    """Writes the graph; the configuration and what selects the graph."""

    def make(how: str):
        (tmp_path / "breaking.py").write_text(GRAPH.replace("FAIL", FAIL[how]))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
        return tiny_config(tmp_path, model, eval={"at_end": True}), "run.graph=breaking:graph", "train.steps=4"

    return make


def same(run, synchronous):
    assert samples(run) == samples(synchronous)
    for ours, theirs in zip(metrics(run), metrics(synchronous), strict=True):
        for name in ("loss/policy", "grad_norm", "reward/mean", "samples", "eval/held_out/reward_mean"):
            if name in theirs:
                assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), (name, ours["step"])
    assert [line["stream/replicas"] for line in metrics(run) if "stream/replicas" in line][::3] == [2, 1]


@pytest.mark.parametrize("how", ["raise", "hang"])
def test_the_others_make_its_groups(tmp_path, broken, synchronous, how):
    """On-policy: the samples and losses of the run in which nothing failed, and all ranks end well."""
    trainers, own = (1, ["comm.stage_timeout_s=24"]) if how == "hang" else (2, ["placement.train=2"])
    done = start(*broken(how), *TOLERANT, *own, ranks=trainers + 2).check()
    same(tmp_path / "run", synchronous)
    why = "RuntimeError: device-side assert" if how == "raise" else "its engine hangs in stage 'rollout'"
    assert f"rollout replica 1 (rank {trainers + 1}) is lost: {why}" in done.stderr
    assert f"replica 1 (rank {trainers + 1}) is lost; 1 go on with its groups" in done.stdout


def test_a_killed_process_too_where_the_launcher_lets_the_others_live(tmp_path, broken, synchronous):
    """Started one by one: nobody ends the others."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = []
    for rank in range(3):
        own = {"SPMD_RL_RANK": str(rank), "SPMD_RL_SIZE": "3", "SPMD_RL_MASTER": f"127.0.0.1:{port}"}
        if rank == 0:
            config, *graph = broken("kill")
        command = [sys.executable, str(MAIN), str(config), *graph, *TOLERANT]
        said = (tmp_path / f"said-{rank}").open("w")
        ranks.append(subprocess.Popen(command, env={**os.environ, **own}, stdout=said, stderr=said, cwd=ROOT))
    assert [rank.wait(180) for rank in ranks] == [0, 0, -9], (tmp_path / "said-0").read_text()[-3000:]
    same(tmp_path / "run", synchronous)
    assert "rollout replica 1 (rank 2) is lost: " in (tmp_path / "said-0").read_text()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["mode=sync"], "needs mode=async"),
        (["rollout.tensor_parallel=2"], "it is for replicas of one rank"),
        (["stream.swap=rolling"], "set between_groups"),
        (["stream.on_stale=drop"], "set on_stale=wait"),
    ],
)
def test_where_it_cannot_be_it_is_refused(tmp_path, model, overrides, said):
    with pytest.raises(UserError, match=said) as error:
        check(load_config(tiny_config(tmp_path, model), [*TOLERANT, *overrides]))
    assert "stream.tolerate_replica_loss=true" in str(error.value)


def test_one_replica_alone_is_refused(tmp_path, model, capsys):
    from spmd_rl.main import main

    assert main([str(tiny_config(tmp_path, model)), "--dry-run", "--ranks", "2", *TOLERANT]) == 2
    assert "nobody to take over from it" in capsys.readouterr().err
