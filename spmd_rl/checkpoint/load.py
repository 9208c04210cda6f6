"""Reads a checkpoint into this run's states, whatever world size and layout wrote it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from spmd_rl.checkpoint.checkpointer import RNG
from spmd_rl.checkpoint.files import InvalidCheckpoint, damaged, read_commit, read_meta, valid_checkpoints
from spmd_rl.checkpoint.rng import capture_rng, restore_rng
from spmd_rl.comm.world import World
from spmd_rl.config.errors import UserError

log = logging.getLogger(__name__)


def load_checkpoint(path: Path, states: Mapping[str, Any], world: World) -> dict[str, Any]:
    """Fill `states` (as given to `Checkpointer.save`, of this run's shapes) from the checkpoint; returns its meta.

    Tensors are filled in place, other values replaced inside their dicts; hand each state dict back to its owner
    afterwards. The random generators continue where the world has the size that it had, and keep their seeds else.
    Collective. Raises UserError on every rank: no whole checkpoint, damaged content, or of another model.
    A checkpoint holds pickled values: load only what you trust.
    """
    _verify(path, world)
    rank = f"rank_{world.rank}"
    reader = dcp.FileSystemReader(path)
    commit = read_commit(path)
    everything = dict(states)
    if commit.world_size == world.size:
        everything[RNG] = {rank: capture_rng(world.device)}
    elif world.rank == 0:
        log.info("checkpoint %s is of %d ranks: random generators keep their seeds", path, commit.world_size)
    try:
        dcp.load(everything, storage_reader=reader, process_group=world.control)
    except CheckpointException as error:
        raise UserError(f"{path} does not fit this run: {_first_failure(error)}") from None
    if RNG in everything:
        restore_rng(everything[RNG][rank], world.device)
    return read_meta(path)


def _verify(path: Path, world: World) -> None:
    """Every file against its checksum, each rank its share; all ranks raise the same."""
    problem: str | None
    try:
        name = damaged(path, read_commit(path), world.rank, world.size)
        problem = name and f"the content of {name} is not what was written"
    except (InvalidCheckpoint, OSError) as error:
        problem = str(error)
    problems: list[str | None] = [None] * world.size
    dist.all_gather_object(problems, problem, group=world.control)
    found = next(filter(None, problems), None)
    if found:
        others = [other for other, _ in valid_checkpoints(path.parent) if other.name != path.name]
        hint = f"run.resume={others[-1]} goes on from the one before" if others else "there is no other beside it"
        raise UserError(f"{path} is no usable checkpoint: {found}; {hint}")


def _first_failure(error: CheckpointException) -> str:
    rank, (failure, _) = next(iter(error.failures.items()))
    return f"{(str(failure).strip().splitlines() or [type(failure).__name__])[0]} (rank {rank})"
