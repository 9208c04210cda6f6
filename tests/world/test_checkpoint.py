"""Checkpoints written and read by real ranks: other world sizes, full disks, killed writers."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from spmd_rl.checkpoint import checkpointer as checkpointer_module
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
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.steps = state["steps"]

    def values(self) -> dict[str, list[float]]:
        """Full weights and moments, to compare between worlds."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        flat: dict[str, Any] = dict(model)
        moments: Any = optimizer["state"]
        flat |= {f"{k}.{m}": v for k, s in moments.items() for m, v in s.items()}
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


def same_world(world: World, folder: str) -> dict[str, Any]:
    """Read back, then meet a checkpoint of another model and one with a flipped bit."""
    result = read(world, folder)
    path = latest_valid(Path(folder))
    assert path is not None
    result["foreign"] = refusal(world, path, width=20)
    if world.rank == 0:
        data = path / "__1_0.distcp"
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1  # the size stays
        data.write_bytes(content)
    dist.barrier(group=world.control)
    result["damaged"] = refusal(world, path, width=12)
    return result


def refusal(world: World, path: Path, width: int) -> str:
    try:
        load_checkpoint(path, {"trainer": Trainer(world, width).state_dict()}, world)
    except UserError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A folder with a checkpoint that 3 ranks wrote, and what each rank held."""
    folder = tmp_path_factory.mktemp("written")
    return folder, run_world(write, timeout_s=120, ranks=3, args={"folder": str(folder)}).check().ranks


def check_continues(got: dict[str, Any], saved: dict[str, Any]) -> None:
    """Loaded values are the saved ones bit for bit, and the next update is the same."""
    assert saved["values"] != saved["later"]
    assert got["values"] == saved["values"]
    assert got["meta"] == {"step": 3, "cursor": 24, "name": "日本"} and got["steps"] == 4
    for name, values in got["later"].items():
        assert values == pytest.approx(saved["later"][name], rel=1e-6, abs=1e-9), name


@pytest.mark.parametrize(("ranks", "launcher"), [(1, "single"), (4, "torchrun")])
def test_another_world_size_continues_exactly(
    written: tuple[Path, list[dict[str, Any]]], ranks: int, launcher: str
) -> None:
    folder, saved = written
    run = run_world(read, timeout_s=120, ranks=ranks, launcher=launcher, args={"folder": str(folder)}).check()
    for got in run.ranks:
        check_continues(got, saved[0])


def test_same_world_and_what_is_refused(written: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    folder, saved = written
    copy = shutil.copytree(folder, tmp_path / "copy")
    loaded = run_world(same_world, timeout_s=120, ranks=3, args={"folder": str(copy)}).check().ranks
    for got, before in zip(loaded, saved, strict=True):
        check_continues(got, before)
        assert got["draws"] == before["draws"]  # each rank's random generators go on where they were
        assert f"{copy / 'step_000003'} does not fit this run" in got["foreign"] and "\n" not in got["foreign"]
        assert "size mismatch" in got["foreign"].lower()
        assert "no usable checkpoint: the content of __1_0.distcp is not what was written" in got["damaged"]


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
    run = run_world(write_many, timeout_s=120, ranks=2, args={"folder": str(tmp_path)}).check()
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
    dist.barrier(group=world.control)
    checkpointer.save(3, {"a": small}, {})
    third = checkpointer.wait()
    assert first and second and third
    unwritable = Checkpointer(Path(folder) / "step_000003" / "meta.json" / "checkpoints", world)
    unwritable.save(1, {"a": small}, {})
    fourth = unwritable.wait()
    assert fourth and fourth.path is None
    errors = [first.error, second.error, third.error, fourth.error]
    return {"errors": errors, "left": left, "none": second.path is None}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "spmd_rl_test", tmp_path], check=True)
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.root
def test_full_disk_is_one_line_and_leaves_the_last_checkpoint(small_disk: Path) -> None:
    run = run_world(fill_disk, timeout_s=120, ranks=2, args={"folder": str(small_disk)}).check()
    assert run.ranks[0] == run.ranks[1]
    first, second, third, fourth = run.ranks[0]["errors"]
    assert first is None and third is None
    # Which rank is the first to find no room depends on timing.
    assert re.fullmatch(r"checkpoint of step 2 failed: rank [01]: No space left on device; .* are intact", second)
    assert "checkpoint of step 1 failed: rank 0: Not a directory" in fourth
    assert run.ranks[0]["left"] == ["step_000001"] and run.ranks[0]["none"]
    latest = latest_valid(small_disk)
    assert latest is not None and latest.name == "step_000003"


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
        checkpointer_module._Writer = DyingWriter  # type: ignore[assignment,misc]
    checkpointer.save(2, {"trainer": trainer.state_dict()}, {})
    outcome = checkpointer.wait()  # rank 0: the peer is gone
    assert outcome and outcome.error and "checkpoint of step 2 failed" in outcome.error
    time.sleep(30)  # the launcher ends this rank


def test_killed_writer_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    run = run_world(killed_while_saving, timeout_s=120, ranks=2, args={"folder": str(tmp_path)})
    assert run.returncode != 0 and not run.timed_out
    latest = latest_valid(tmp_path)
    assert latest is not None and latest.name == "step_000001"
    loaded = run_world(read, timeout_s=120, ranks=1, launcher="single", args={"folder": str(tmp_path)}).check().ranks
    assert loaded[0]["meta"] == {"step": 1}
