"""`run.resume`: where a run starts, and whose folder it may write to. Deletes nothing."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from spmd_rl.checkpoint.files import (
    InvalidCheckpoint,
    candidates,
    is_unfinished,
    latest_valid,
    read_commit,
    write_durably,
)
from spmd_rl.checkpoint.identity import differences
from spmd_rl.checkpoint.lock import LOCK_FILE, lock_folder
from spmd_rl.config.errors import UserError

RUN_FILE = "run.json"  # in the run folder: the settings that define the training, its model, and where it ended
CHECKPOINTS = "checkpoints"
_LEAVING_S = 10.0  # within which the ranks of a run that was killed have gone
_SHOWN = 3  # differing settings in a message
log = logging.getLogger(__name__)


def resolve_resume(
    run_folder: Path, rule: str, identity: Mapping[str, Any], model: str, group: ProcessGroup, opened: ExitStack
) -> Path | None:
    """The checkpoint to start from, or None for a start from the model; claims the run folder for this run.

    rule: auto: the latest whole checkpoint in `run_folder`, which must be new, empty, or of a run with the same
    identity | none: `run_folder` must be new or empty | a path: that checkpoint, of whatever run; a folder of
    another run is refused all the same. identity: of `run_identity`. model: of `model_identity` (the same path may
    hold another one by now; rank 0's counts). opened: the folder is locked until it is closed.
    Collective over `group` (CPU): rank 0 looks and writes, all ranks return or raise the same UserError.
    """
    answer: list[tuple[str | None, str | None]] = [(None, None)]
    if dist.get_rank(group) == 0:
        try:
            found = _resolve(run_folder, rule, dict(identity), model, opened)
            answer = [(str(found) if found else None, None)]
        except UserError as error:
            answer = [(None, str(error))]
        except OSError as error:
            answer = [(None, f"run.folder={run_folder} can't be used: {error.strerror}: {error.filename}")]
    dist.broadcast_object_list(answer, group=group, group_src=0)
    path, problem = answer[0]
    if problem is not None:
        raise UserError(problem)
    return Path(path) if path else None


def step_of(checkpoint: Path | None) -> int:
    """Optimizer rounds that a checkpoint holds; 0 for None."""
    return read_commit(checkpoint).step if checkpoint else 0


def is_finished(run_folder: Path, step: int, group: ProcessGroup) -> bool:
    """Whether the run came to its end after `step` steps, with all that belongs to it. Collective over `group`."""
    answer = [dist.get_rank(group) == 0 and _read(run_folder).get("finished") == step]
    dist.broadcast_object_list(answer, group=group, group_src=0)
    return answer[0]


def mark_finished(run_folder: Path, step: int) -> None:
    """The last thing that a run does, on rank 0: one that was killed before goes through its end again."""
    _write(run_folder, _read(run_folder) | {"finished": step})


def _resolve(run_folder: Path, rule: str, identity: dict[str, Any], model: str, opened: ExitStack) -> Path | None:
    entries = sorted({path.name for path in run_folder.iterdir()} - {LOCK_FILE}) if run_folder.exists() else []
    found: Path | None = None
    if rule not in ("auto", "none"):
        found = _explicit(Path(rule))
    if entries and rule == "none":
        raise UserError(
            f"run.resume=none wants a new folder, but {run_folder} holds {_listed(entries)}: give another run.folder, "
            "or run.resume=auto to go on there"
        )
    if entries and RUN_FILE not in entries:
        raise UserError(
            f"{run_folder} is no folder of a run ({RUN_FILE} is missing, it holds {_listed(entries)}): "
            "give another run.folder"
        )
    if entries:
        _same_run(run_folder, identity, model)
        opened.enter_context(lock_folder(run_folder, _LEAVING_S))
        checkpoints = run_folder / CHECKPOINTS
        if checkpoints.exists() and not checkpoints.is_dir():
            raise UserError(f"{checkpoints} is a file: a folder for checkpoints is to be there")
        if rule == "auto":
            found = latest_valid(run_folder / CHECKPOINTS)
            if found is None:
                _refuse_damaged(run_folder / CHECKPOINTS)
    else:
        run_folder.mkdir(parents=True, exist_ok=True)
        _write(run_folder, {"settings": identity, "model": model})
        opened.enter_context(lock_folder(run_folder, _LEAVING_S))
    return found


def _refuse_damaged(folder: Path) -> None:
    """A run whose checkpoints were whole once and are no more does not start anew over its own records."""
    once = [path for path in candidates(folder) if not is_unfinished(path)]
    if once:
        try:
            read_commit(once[-1])
        except InvalidCheckpoint as error:
            raise UserError(
                f"no checkpoint in {folder} is whole any more ({once[-1].name}: {error}): bring one back, or start "
                "anew in another run.folder"
            ) from None


def _explicit(path: Path) -> Path:
    if not path.is_dir():
        raise UserError(f"run.resume={path}: no such checkpoint folder; auto, none or a checkpoint's path is wanted")
    try:
        read_commit(path)
    except InvalidCheckpoint as error:
        within = latest_valid(path / CHECKPOINTS) or latest_valid(path)
        hint = f"; did you mean {within}" if within else ""
        raise UserError(f"run.resume={path} is no whole checkpoint: {error}{hint}") from None
    return path


def _read(run_folder: Path) -> dict[str, Any]:
    try:
        content = json.loads((run_folder / RUN_FILE).read_text(encoding="utf-8"))
        return dict(content) | {"settings": dict(content["settings"])}
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{run_folder / RUN_FILE} is unreadable: give another run.folder") from None


def _write(run_folder: Path, content: Mapping[str, Any]) -> None:
    write_durably(run_folder / RUN_FILE, json.dumps(content, indent=1, sort_keys=True) + "\n")


def _same_run(run_folder: Path, identity: dict[str, Any], model: str) -> None:
    there = _read(run_folder)
    found = differences(there["settings"], json.loads(json.dumps(identity)))
    if there.get("model", model) != model:  # (older runs did not note it)
        found.append(f"the model in {identity.get('model.path')} is not the one that it began with")
    if found:
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise UserError(
            f"{run_folder} belongs to another run: {'; '.join(found[:_SHOWN])}{more}. Give another run.folder "
            "(run.resume=PATH starts it from a checkpoint of that run)"
        )


def _listed(entries: list[str]) -> str:
    return ", ".join(entries[:_SHOWN]) + (", …" if len(entries) > _SHOWN else "")
