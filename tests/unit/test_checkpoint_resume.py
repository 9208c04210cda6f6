"""Where a run starts and whose folder it may use."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from spmd_rl.checkpoint import resume
from spmd_rl.checkpoint.files import Commit, write_commit
from spmd_rl.checkpoint.identity import run_identity, unlike
from spmd_rl.checkpoint.resume import step_of
from spmd_rl.config.errors import UserError
from spmd_rl.config.load import load_config, to_yaml
from spmd_rl.config.schema import Config, DataConfig, OptimizerConfig, SourceConfig

ROOT = Path(__file__).parents[2]
IDENTITY: dict[str, Any] = {"train.prompts_per_step": 8, "model.path": "m", "data.train[0].params.min": 1}


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def resolve_resume(
    folder: Path, rule: str, identity: dict[str, Any], group: dist.ProcessGroup, model: str = "digest"
) -> Path | None:
    with ExitStack() as opened:
        return resume.resolve_resume(folder, rule, identity, model, group, opened)


def checkpoint(folder: Path, step: int, order: int) -> Path:
    path = folder / f"step_{step:06d}"
    path.mkdir(parents=True)
    write_commit(path, Commit(step, order, 1, {}))
    return path


def test_auto_starts_goes_on_and_refuses(tmp_path: Path, group: dist.ProcessGroup) -> None:
    run = tmp_path / "runs" / "a"
    assert resolve_resume(run, "auto", IDENTITY, group) is None  # new folder
    assert json.loads((run / "run.json").read_text())["settings"] == IDENTITY
    assert resolve_resume(run, "auto", IDENTITY, group) is None  # ended before its first checkpoint
    checkpoint(run / "checkpoints", 10, 1)
    latest = checkpoint(run / "checkpoints", 20, 2)
    (checkpoint(run / "checkpoints", 30, 3) / "COMMITTED").unlink()
    assert resolve_resume(run, "auto", IDENTITY, group) == latest
    assert step_of(latest) == 20 and step_of(None) == 0
    with pytest.raises(UserError, match=r"runs/a belongs to another run: train.prompts_per_step is 8 there and 16"):
        resolve_resume(run, "auto", IDENTITY | {"train.prompts_per_step": 16}, group)
    assert latest.exists()


def test_what_gives_a_checkpoint_other_contents_is_named() -> None:
    config = load_config(ROOT / "configs" / "quickstart.yaml", ["run.seed=1"])
    other = load_config(ROOT / "configs" / "quickstart.yaml", ["mode=async", "model.lora_rank=4", "train.steps=7"])
    assert unlike(to_yaml(config), config) == []
    assert unlike(to_yaml(config), other) == [
        "mode is 'sync' there and 'async' here",
        "model.lora_rank is 0 there and 4 here",
    ]


def test_a_run_without_a_whole_checkpoint_starts_anew_only_if_it_never_had_one(
    tmp_path: Path, group: dist.ProcessGroup
) -> None:
    resolve_resume(tmp_path, "auto", IDENTITY, group)
    (tmp_path / "checkpoints" / "step_000010.tmp-0a1b").mkdir(parents=True)  # killed while it was written
    assert resolve_resume(tmp_path, "auto", IDENTITY, group) is None
    (checkpoint(tmp_path / "checkpoints", 10, 1) / "COMMITTED").write_text("")
    with pytest.raises(UserError, match=r"no checkpoint in .* is whole any more \(step_000010: COMMITTED is unread"):
        resolve_resume(tmp_path, "auto", IDENTITY, group)


def test_a_file_in_the_place_of_the_checkpoints_is_refused(tmp_path: Path, group: dist.ProcessGroup) -> None:
    resolve_resume(tmp_path, "auto", IDENTITY, group)
    (tmp_path / "checkpoints").touch()
    with pytest.raises(UserError, match=r"checkpoints is a file: a folder"):
        resolve_resume(tmp_path, "auto", IDENTITY, group)


def test_a_run_of_an_older_version_goes_on(tmp_path: Path, group: dist.ProcessGroup) -> None:
    data = DataConfig(train=[SourceConfig(name="a", path="x")])
    now = run_identity(Config(data=data))
    without = ("stream.staleness", "train.optimizer.betas", "data.train[0].weight")  # as if they were new
    before = {key: value for key, value in now.items() if key not in without} | {"observe.nvtx": False}  # now free
    resolve_resume(tmp_path / "a", "auto", before, group)
    assert resolve_resume(tmp_path / "a", "auto", now, group) is None
    with pytest.raises(UserError, match=r"another run: stream.staleness is 1 there and 3 here\. "):
        resolve_resume(tmp_path / "a", "auto", now | {"stream.staleness": 3}, group)
    more = run_identity(Config(data=replace(data, train=[*data.train, SourceConfig(name="b", path="y")])))
    with pytest.raises(UserError, match=r"data.train\[1\].name is .* there and 'b' here"):
        resolve_resume(tmp_path / "a", "auto", more, group)
    with pytest.raises(UserError, match=r"train.gone is 3 there and None here"):
        resolve_resume(tmp_path / "b", "auto", before | {"train.gone": 3}, group)
        resolve_resume(tmp_path / "b", "auto", now, group)


def test_one_run_at_a_time(tmp_path: Path, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "_LEAVING_S", 0.1)
    with ExitStack() as opened:
        resume.resolve_resume(tmp_path / "a", "auto", IDENTITY, "digest", group, opened)
        with pytest.raises(
            UserError, match=rf"another run is at work in .*/a \(pid {os.getpid()} on .*\): wait for it"
        ):
            resolve_resume(tmp_path / "a", "auto", IDENTITY, group)
    resolve_resume(tmp_path / "a", "auto", IDENTITY, group)  # it has ended, or was killed
    with ExitStack() as opened:
        resume.resolve_resume(tmp_path / "a", "auto", IDENTITY, "digest", group, opened)
        with pytest.raises(UserError, match="another run is at work"):
            resolve_resume(tmp_path / "a", "auto", IDENTITY, group)


def test_a_folder_that_is_no_run_is_left_alone(tmp_path: Path, group: dist.ProcessGroup) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match=r"is no folder of a run \(run.json is missing, it holds thesis.tex\)"):
        resolve_resume(tmp_path, "auto", IDENTITY, group)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("text", ["", "[1]", '{"settings": [1]}', '{"settings": 3}'])
def test_an_unreadable_run_file_is_one_line(tmp_path: Path, group: dist.ProcessGroup, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(UserError, match=r"run.json is unreadable: give another run.folder"):
        resolve_resume(tmp_path, "auto", IDENTITY, group)


def test_none_wants_a_new_folder(tmp_path: Path, group: dist.ProcessGroup) -> None:
    run = tmp_path / "a"
    assert resolve_resume(run, "none", IDENTITY, group) is None
    with pytest.raises(UserError, match=r"run.resume=none wants a new folder, but .*a holds run.json: give anoth"):
        resolve_resume(run, "none", IDENTITY, group)
    assert (run / "run.json").exists()


def test_path_takes_any_runs_checkpoint_but_not_its_folder(tmp_path: Path, group: dist.ProcessGroup) -> None:
    resolve_resume(tmp_path / "a", "auto", IDENTITY, group)
    made = checkpoint(tmp_path / "a" / "checkpoints", 10, 1)
    checkpoint(tmp_path / "a" / "checkpoints", 20, 2)
    other = IDENTITY | {"train.prompts_per_step": 16}
    assert resolve_resume(tmp_path / "b", str(made), other, group) == made
    assert resolve_resume(tmp_path / "a", str(made), IDENTITY, group) == made  # back to an older one
    with pytest.raises(UserError, match="belongs to another run"):
        resolve_resume(tmp_path / "a", str(made), other, group)
    with pytest.raises(UserError, match=r"no such checkpoint folder; auto, none or a checkpoint's path is wanted"):
        resolve_resume(tmp_path / "c", "latest", IDENTITY, group)
    with pytest.raises(UserError, match=r"is no whole checkpoint: .*did you mean .*a/checkpoints/step_000020"):
        resolve_resume(tmp_path / "c", str(tmp_path / "a"), IDENTITY, group)
    assert not (tmp_path / "c").exists()


def test_identity_is_what_the_run_learns_from() -> None:
    def identity(**sections: Any) -> dict[str, Any]:
        config = Config()
        changed = {name: dataclasses.replace(getattr(config, name), **keys) for name, keys in sections.items()}
        return run_identity(dataclasses.replace(config, **changed))

    base = identity()
    json.dumps(base)
    assert identity(run={"folder": "elsewhere", "threads": 3}) == base
    assert identity(rollout={"kv_cache_gib": 9.0}, train={"tokens_per_microbatch": 1}) == base
    assert identity(checkpoint={"every": 7}, eval={"every": 3}, observe={"nvtx": True}) == base
    assert identity(run={"seed": 1}) != base
    assert identity(rollout={"temperature": 0.5}) != base
    assert identity(data={"train": [SourceConfig(name="a", path="x", params={"k": 1})]})["data.train[0].params.k"] == 1
    # A longer run is the same run, unless the learning rate's course depends on the length.
    assert identity(train={"steps": 5}) == base
    cosine = OptimizerConfig(schedule="cosine")
    assert identity(train={"steps": 5, "optimizer": cosine}) != identity(train={"steps": 6, "optimizer": cosine})


def test_another_model_of_the_same_path_and_where_the_run_ended(tmp_path: Path, group: dist.ProcessGroup) -> None:
    run = tmp_path / "a"
    resolve_resume(run, "auto", IDENTITY, group)
    assert not resume.is_finished(run, 0, group)
    resume.mark_finished(run, 20)
    assert resume.is_finished(run, 20, group) and not resume.is_finished(run, 10, group)
    resolve_resume(run, "auto", IDENTITY, group)  # the mark leaves the rest as it was
    with pytest.raises(UserError, match=r"a belongs to another run: the model in m is not the one that it began with"):
        resolve_resume(run, "auto", IDENTITY, group, model="another")
    content = json.loads((run / "run.json").read_text())
    del content["model"]  # of an older run
    (run / "run.json").write_text(json.dumps(content))
    resolve_resume(run, "auto", IDENTITY, group, model="another")
