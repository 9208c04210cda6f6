"""Checkpoints written and read by real ranks: other world sizes, full disks, killed writers."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from spmd_rl.checkpoint.checkpointer import Checkpointer
from spmd_rl.checkpoint.files import candidates, latest_valid
from spmd_rl.checkpoint.load import load_checkpoint
from spmd_rl.comm.world import World
from spmd_rl.config.errors import UserError
from tests.world.harness import run_world


class Trainer:
    """A sharded model with AdamW, as a train engine holds it; `step` is deterministic on any world size."""

    def __init__(self, world: World, width: int = 12, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3))
        mesh = world.mesh(range(world.size), {"data": world.size})
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.steps = 0

    def step(self) -> None:
        x = torch.linspace(-1, 1, 20).reshape(4, 5) + self.steps
        self.model(x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        kind = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **kind)
        self.steps = state["steps"]

    def values(self) -> dict[str, list[float]]:
        """Full weights and moments, to compare between worlds."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        flat = dict(model)
        flat |= {f"{k}.{m}": v for k, s in optimizer["state"].items() for m, v in s.items()}
        full = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in flat.items() if torch.is_tensor(v)}
        return {k: v.flatten().tolist() for k, v in full.items()}


def write(world: World, folder: str) -> dict[str, Any]:
    trainer = Trainer(world)
    for _ in range(3):
        trainer.step()
    random.seed(world.rank)
    torch.manual_seed(world.rank)
    at_save = trainer.values()
    checkpointer = Checkpointer(Path(folder), world)
    assert checkpointer.save(3, {"trainer": trainer.state_dict()}, {"cursor": 24, "name": "日本"}) is None
    draws = [random.random(), torch.rand(1).item()]
    trainer.step()  # goes on while the copy is written: the checkpoint must not see it
    outcome = checkpointer.wait()
    assert outcome and outcome.error is None
    return {"values": at_save, "later": trainer.values(), "draws": draws, "path": str(outcome.path)}


def read(world: World, folder: str) -> dict[str, Any]:
    trainer = Trainer(world, seed=9)
    path = latest_valid(Path(folder))
    assert path is not None
    state = trainer.state_dict()
    meta = load_checkpoint(path, {"trainer": state}, world)
    trainer.load_state_dict(state)
    draws = [random.random(), torch.rand(1).item()]
    loaded = trainer.values()
    trainer.step()
    return {"values": loaded, "later": trainer.values(), "draws": draws, "meta": meta, "steps": trainer.steps}


def test_another_world_size_continues_exactly(tmp_path: Path) -> None:
    saved = run_world(write, ranks=3, args={"folder": str(tmp_path)}).check().ranks
    assert saved[0]["values"] != saved[0]["later"]
    for ranks in (1, 3, 4):
        loaded = run_world(read, ranks=ranks, args={"folder": str(tmp_path)}).check().ranks
        for got in loaded:
            assert got["values"] == saved[0]["values"]
            assert got["meta"] == {"step": 3, "cursor": 24, "name": "日本"} and got["steps"] == 4
            for name, values in got["later"].items():
                assert values == pytest.approx(saved[0]["later"][name], rel=1e-6, abs=1e-9), name
        if ranks == 3:  # the same world: random generators go on where they were
            assert [got["draws"] for got in loaded] == [each["draws"] for each in saved]


def write_many(world: World, folder: str) -> list[str]:
    trainer = Trainer(world)
    checkpointer = Checkpointer(Path(folder), world, keep=2)
    for step in (1, 2, 3, 2):  # back to 2: such a checkpoint is the latest, though not the highest
        trainer.step()
        checkpointer.save(step, {"trainer": trainer.state_dict()}, {})
    outcome = checkpointer.wait()
    assert outcome and outcome.path and checkpointer.wait() is None
    return [path.name for path in candidates(Path(folder))]


def test_keeps_the_last_ones(tmp_path: Path) -> None:
    (tmp_path / "step_000009.tmp-dead").mkdir()
    run = run_world(write_many, ranks=2, args={"folder": str(tmp_path)}).check()
    assert run.ranks[0] == ["step_000002", "step_000003"]
    latest = latest_valid(tmp_path)
    assert latest is not None and latest.name == "step_000002"


def fill_disk(world: World, folder: str) -> dict[str, Any]:
    small = {"x": torch.full((1000,), 1.0 + world.rank)}
    large = {f"rank_{world.rank}": torch.zeros(500_000 if world.rank == 1 else 10)}  # 2 MB, on rank 1 alone
    checkpointer = Checkpointer(Path(folder), world, keep=1)
    checkpointer.save(1, {"a": small}, {})
    first = checkpointer.save(2, {"a": small, "b": large}, {})
    second = checkpointer.wait()
    left = [path.name for path in candidates(Path(folder))]
    checkpointer.save(3, {"a": small}, {})
    third = checkpointer.wait()
    assert first and second and third
    return {"errors": [first.error, second.error, third.error], "left": left, "none": second.path is None}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "spmd_rl_test", tmp_path], check=True)
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.root
def test_full_disk_is_one_line_and_leaves_the_last_checkpoint(small_disk: Path) -> None:
    run = run_world(fill_disk, ranks=2, args={"folder": str(small_disk)}).check()
    assert run.ranks[0] == run.ranks[1]
    first, second, third = run.ranks[0]["errors"]
    assert first is None and third is None
    assert second == (
        "checkpoint of step 2 failed: rank 1: No space left on device; the ones before it are intact"
    )
    assert run.ranks[0]["left"] == ["step_000001"] and run.ranks[0]["none"]
    latest = latest_valid(small_disk)
    assert latest is not None and latest.name == "step_000003"


def unwritable(world: World, folder: str) -> list[Any]:
    checkpointer = Checkpointer(Path(folder) / "file" / "checkpoints", world)
    (Path(folder) / "file").touch()
    assert checkpointer.save(1, {"a": {"x": torch.zeros(3)}}, {}) is None
    outcome = checkpointer.wait()
    assert outcome is not None
    return [outcome.error, outcome.path]


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    for error, path in run_world(unwritable, ranks=2, args={"folder": str(tmp_path)}).check().ranks:
        assert error.startswith("checkpoint of step 1 failed: rank 0: Not a directory") and path is None


class DyingWriter(dcp.FileSystemWriter):
    """Dies by SIGKILL in the middle of its file."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        with open(Path(self.path) / "__1_0.distcp", "wb") as stream:
            stream.write(b"half")
        os.kill(os.getpid(), signal.SIGKILL)


def killed_while_saving(world: World, folder: str) -> None:
    trainer = Trainer(world)
    checkpointer = Checkpointer(Path(folder), world, keep=1, timeout_s=20)
    trainer.step()
    checkpointer.save(1, {"trainer": trainer.state_dict()}, {})
    trainer.step()
    checkpointer.wait()
    if world.rank == 1:
        dcp.FileSystemWriter = DyingWriter  # type: ignore[misc]
    checkpointer.save(2, {"trainer": trainer.state_dict()}, {})
    outcome = checkpointer.wait()  # rank 0: the peer is gone
    assert outcome and outcome.error and "checkpoint of step 2 failed" in outcome.error
    time.sleep(30)  # the launcher ends this rank


def test_killed_writer_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    run = run_world(killed_while_saving, ranks=2, args={"folder": str(tmp_path)})
    assert run.returncode != 0 and not run.timed_out
    latest = latest_valid(tmp_path)
    assert latest is not None and latest.name == "step_000001"
    loaded = run_world(read, ranks=2, args={"folder": str(tmp_path)}).check().ranks
    assert loaded[0]["meta"] == {"step": 1}


def read_wrong(world: World, folder: str, width: int) -> str:
    trainer = Trainer(world, width)
    try:
        load_checkpoint(Path(folder), {"trainer": trainer.state_dict()}, world)
    except UserError as error:
        return str(error)
    return ""


def test_damaged_or_foreign_checkpoints_are_refused_on_every_rank(tmp_path: Path) -> None:
    path = Path(run_world(write, ranks=2, args={"folder": str(tmp_path)}).check().ranks[0]["path"])
    for message in run_world(read_wrong, ranks=2, args={"folder": str(path), "width": 20}).check().ranks:
        assert f"{path} does not fit this run" in message and "\n" not in message
        assert "size mismatch" in message.lower(), message
    data = path / "__1_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1  # one bit: the size stays
    data.write_bytes(content)
    for message in run_world(read_wrong, ranks=2, args={"folder": str(path), "width": 12}).check().ranks:
        assert "is no usable checkpoint: the content of __1_0.distcp is not what was written" in message
