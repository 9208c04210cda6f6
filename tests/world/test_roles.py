"""Ranks that do different work: each role is a whole world to libraries, and the job stays one."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoTokenizer

from spmd_rl.checkpoint.checkpointer import Checkpointer
from spmd_rl.comm.bootstrap import describe
from spmd_rl.comm.digest import Disagreement, agree
from spmd_rl.comm.liveness import Liveness
from spmd_rl.comm.stop import StopFlag
from spmd_rl.comm.transport import TransportError, make_transport
from spmd_rl.comm.world import World
from spmd_rl.config.schema import CommConfig, Config, DataConfig, ModelConfig, RolloutConfig
from spmd_rl.engines.rollout.build import build_rollout
from spmd_rl.engines.rollout.generate import generate
from spmd_rl.engines.train.engine import TrainEngine
from spmd_rl.job_async import share
from spmd_rl.observe.metrics import Metrics
from tests.rollout_cases import make_model, make_requests, reference_logprobs
from tests.world import train_cases
from tests.world.harness import find_mpirun, run_world

ROLES = {"train": [0, 3], "rollout": [2, 1]}
NEEDS_MPI = [pytest.mark.mpi, pytest.mark.skipif(find_mpirun() is None, reason="no mpirun in this environment")]


def everything(job: World, mine: World, transport: str, folder: str) -> dict[str, Any]:
    """What the program does on the job and on a role, with roles in no simple order."""
    found: dict[str, Any] = {"role": mine.role, "place": [mine.rank, mine.size, mine.job_rank()], "job": job.rank}
    found["sums"] = []
    for group in (job.control, job.data, mine.control, mine.data, None):
        total = torch.tensor([1 << job.rank])
        dist.all_reduce(total, group=group)
        found["sums"].append(int(total))
    with Liveness(job, CommConfig()) as watch, StopFlag() as stop:
        with watch.stage("work", 1):
            found["stops"] = [stop.agreed(job), stop.agreed(mine)]
            if job.rank == 2:
                stop.set()
            found["stops"] += [stop.agreed(job), stop.agreed(mine)]
        agree(job, "the plan", "same")
        agree(mine, "the plan", mine.role)
        found["differ"] = [_message(lambda: agree(job, "the plan", mine.role))]
        found["differ"].append(_message(lambda: agree(mine, "the plan", str(job.rank == 1))))
        channel = make_transport(transport, mine, share_memory=False).open(range(mine.size))
        assert channel is not None
        found["gathered"] = channel.all_gather(np.array([job.rank])).tolist()
        checkpointer = Checkpointer(Path(folder) / mine.role, mine)
        checkpointer.save(1, {"state": {"x": torch.tensor([job.rank])}}, {})
        outcome = checkpointer.wait()
        found["saved"] = outcome is not None and outcome.path is not None and outcome.path.is_dir()
        if transport == "torch":
            found["absent"] = _absent(job, mine)
            found["engine"] = _engines(job, mine, folder)
    found["line"] = describe(job)
    return found


def _absent(job: World, mine: World) -> str:
    """Rank 3 does not come to its role's collective."""
    channel = make_transport("torch", mine, timeout_s=1.5, share_memory=False).open(range(mine.size))
    assert channel is not None
    said = "" if job.rank == 3 else _message(lambda: channel.all_gather(np.zeros(1, dtype=np.int64)))
    dist.barrier(group=job.control)
    return said


def _engines(job: World, mine: World, folder: str) -> Any:
    """FSDP2 on one role, vLLM with tensor parallelism on the other, at the same time."""
    if mine.role == "train":
        engine = TrainEngine(train_cases.config(folder), mine, mine.mesh(range(2), {"dp": 2}), total_steps=2)
        engine.update(train_cases.share(train_cases.samples(), mine), train_cases.aggregated("token_mean"), Metrics())
        return engine.version
    settings = RolloutConfig(dtype="float32", max_tokens=20, kv_cache_gib=0.125, tensor_parallel=2)
    config = Config(model=ModelConfig(path=folder), data=DataConfig(max_prompt_tokens=40), rollout=settings)
    mesh = mine.mesh(range(2), {"dp": 1, "tp": 2})
    rollout = build_rollout(config, mine, mesh, AutoTokenizer.from_pretrained(folder))
    requests = make_requests()
    done = generate(rollout, requests, deadline_s=60)
    expected = reference_logprobs(Path(folder), requests, done)
    rollout.close()
    return max(float((torch.tensor(c.logprobs) - e_R).abs().max()) for c, e_R in zip(done, expected, strict=True))


def _message(action: Any) -> str:
    try:
        action()
    except (Disagreement, TransportError) as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize(
    ("transport", "launcher"), [("torch", "torchrun"), pytest.param("mpi", "mpirun", marks=NEEDS_MPI)]
)
def test_a_role_is_a_world_and_the_job_stays_one(transport: str, launcher: str, tmp_path: Path) -> None:
    arguments = {"transport": transport, "folder": str(make_model(tmp_path / "model"))}
    ranks = run_world(everything, 4, launcher, timeout_s=240, args=arguments, roles=ROLES).check().ranks
    for role, members in ROLES.items():
        inside = sum(1 << rank for rank in members)
        for place, rank in enumerate(members):
            got = ranks[rank]
            assert (got["role"], got["place"], got["job"]) == (role, [place, 2, rank], rank)
            assert got["sums"] == [15, 15, inside, inside, inside]
            assert got["stops"] == [False, False, True, role == "rollout"]
            assert got["gathered"] == [[member] for member in members]
            assert got["saved"]
            assert "4 ranks on 1 node" in got["line"]
            assert "rank 1 (" in got["differ"][0] and "rank 2 (" in got["differ"][0]  # two against two
    assert "rank 1 (" in ranks[1]["differ"][1] and ranks[1]["differ"][1] == ranks[2]["differ"][1]
    assert ranks[0]["differ"][1] == "nothing was raised"
    if transport == "torch":
        assert "failed on rank 0" in ranks[0]["absent"] and "rank 3 did not come" in ranks[0]["absent"]
        assert ranks[1]["absent"] == ranks[2]["absent"] == "nothing was raised"
        assert [ranks[rank]["engine"] for rank in ROLES["train"]] == [1, 1]
        assert all(ranks[rank]["engine"] < 1e-4 for rank in ROLES["rollout"])


def die(job: World, mine: World) -> None:
    with Liveness(job, CommConfig()) as watch, watch.stage("generate", 1):
        if job.rank == 1:
            os._exit(9)
        dist.barrier(group=mine.control if mine.role == "train" else job.control)
        dist.barrier(group=job.control)


def test_a_dead_rank_of_one_role_ends_the_other() -> None:
    result = run_world(die, 3, roles={"train": [0, 2], "rollout": [1]}, timeout_s=60)
    assert result.returncode != 0 and not result.timed_out
    assert "rank 1 (" in result.stderr and "died" in result.stderr


def late(world: World) -> dict[str, Any]:
    """Rank 1 still builds its engine for longer than a collective may take."""
    job = replace(world, control=dist.new_group(backend="gloo", timeout=timedelta(seconds=4)))
    time.sleep(6 * job.rank)
    return share(job, 60.0, **({} if job.rank else {"done": 4}))


def test_roles_meet_once_the_slowest_rank_has_built_its_engine() -> None:
    ranks = run_world(late, 2).check().ranks
    assert ranks == [{"done": 4}] * 2
