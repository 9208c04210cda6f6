"""Saves checkpoints in the background: all or nothing, and with one outcome that every rank agrees on."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from spmd_rl.checkpoint.files import (
    META,
    Commit,
    fingerprint,
    folder_name,
    prune,
    remove,
    sync_folder,
    valid_checkpoints,
    write_commit,
    write_durably,
)
from spmd_rl.checkpoint.rng import capture_rng
from spmd_rl.comm.world import World

T = TypeVar("T")
RNG = "rng"  # states[RNG][f"rank_{r}"]: the generators of rank r


@dataclass(frozen=True)
class Outcome:
    """How a save ended, the same on every rank. path: of the checkpoint, None where it failed; error: one line then
    (the checkpoints before it are untouched); seconds: from `save` to the commit."""

    step: int
    path: Path | None
    error: str | None
    seconds: float


class Checkpointer:
    """Writes `folder/step_<step>` with torch.distributed.checkpoint. Made and used collectively by all ranks.

    keep: checkpoints to keep, the last ones; 0 keeps all. Older ones go only after a newer one is committed.
    timeout_s: longest wait for the slowest rank's part of a save; default: the world's own.
    Several checkpointers may live at once: each has its own process group, on which its background thread talks.
    """

    def __init__(self, folder: Path, world: World, keep: int = 0, timeout_s: float | None = None) -> None:
        self.folder = Path(folder)
        self._world = world
        self._keep = keep
        self._timeout_s = timeout_s or world.timeout_s
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._timeout_s))
        self._pending: Future[Outcome] | None = None
        self._committed: int | None = None  # the step that this object committed last
        cuda = world.device.type == "cuda"
        self._staging = StagingOptions(
            use_pinned_memory=cuda, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=cuda
        )

    def save(
        self, step: int, states: Mapping[str, Any], meta: Mapping[str, Any], again: bool = False
    ) -> Outcome | None:
        """Start saving; returns as soon as the states are copied. Collective.

        states: name → state dict of tensors, DTensors and picklable values (`rng` is added here); meta: anything that
        JSON can carry, the same on all ranks. Waits for the save before, if it still runs, and returns its outcome.
        Where that was of this very step and succeeded, there is nothing more to save, unless `again`.
        """
        before = self.wait()
        if self._committed == step and not again:
            return before
        begin = time.monotonic()
        rank = self._world.rank
        everything = {**states, RNG: {f"rank_{rank}": capture_rng(self._world.device)}}
        stager = DefaultStager(self._staging)
        staged, problem = _attempt(lambda: stager.stage(everything), rank)
        temporary = self._open(step, meta, problem)
        outcome: Future[Outcome] = Future()
        self._pending = outcome
        if isinstance(temporary, str):
            outcome.set_result(Outcome(step, None, temporary, time.monotonic() - begin))
            return before

        def work() -> None:
            try:
                path, error = self._write(step, staged, temporary)
            except BaseException as failure:  # a peer is gone: the failure detection will end this process
                path, error = None, f"checkpoint of step {step} failed: {_reason(failure, rank)}"
            stager.close()
            outcome.set_result(Outcome(step, path, error, time.monotonic() - begin))

        # A daemon: a process that must end at once does not wait for peers that may be dead.
        threading.Thread(target=work, name=f"checkpoint-{step}", daemon=True).start()
        return before

    def wait(self) -> Outcome | None:
        """Wait for the save in progress; its outcome, once. None where there is none."""
        if self._pending is None:
            return None
        # Each wait inside is bounded by the group's deadline; there are about ten of them.
        limit = 10 * self._timeout_s
        try:
            outcome = self._pending.result(timeout=limit)
        except TimeoutError:
            who = f"rank {self._world.rank}"
            raise TimeoutError(f"{who} waited {limit:g} s for the checkpoint being written to {self.folder}") from None
        self._pending = None
        if outcome.error is None:
            self._committed = outcome.step
        return outcome

    def _open(self, step: int, meta: Mapping[str, Any], problem: str | None) -> Path | str:
        """Make the temporary folder (rank 0); its path, or one line that says what failed on which rank."""
        temporary = self.folder / f"{folder_name(step)}.tmp-{secrets.token_hex(4)}"

        def make() -> None:
            temporary.mkdir(parents=True)
            write_durably(temporary / META, json.dumps({"step": step, **meta}, indent=1, allow_nan=False) + "\n")

        if self._world.rank == 0 and problem is None:
            _, problem = _attempt(make, 0)
        answers = self._gather((str(temporary), problem))
        error = self._first_problem(step, [problem for _, problem in answers])
        if error and self._world.rank == 0:
            remove(temporary)
        return error or Path(answers[0][0])

    def _write(self, step: int, staged: Any, temporary: Path) -> tuple[Path | None, str | None]:
        """In the background thread: write, compare notes, commit."""
        rank = self._world.rank

        def write() -> dict[str, tuple[int, int]]:
            dcp.save(staged, storage_writer=_Writer(temporary, sync_files=True), process_group=self._group)
            mine = [*temporary.glob(f"__{rank}_*"), *([temporary / ".metadata", temporary / META] if rank == 0 else [])]
            return {file.name: fingerprint(file) for file in mine}

        files, problem = _attempt(write, rank)
        answers = self._gather((files, problem))
        error = self._first_problem(step, [problem for _, problem in answers])
        path = self.folder / folder_name(step)
        if rank == 0:
            if error is None:
                merged = {name: print_ for files, _ in answers for name, print_ in files.items()}
                _, problem = _attempt(lambda: self._commit(step, merged, temporary, path), rank)
                error = self._first_problem(step, [problem])
            if error is not None:
                remove(temporary)
        error = self._gather(error)[0]
        return (None, error) if error else (path, None)

    def _commit(self, step: int, files: dict[str, tuple[int, int]], temporary: Path, path: Path) -> None:
        """On rank 0: the marker makes it a checkpoint; then its name; then older ones may go."""
        order = 1 + max((commit.order for _, commit in valid_checkpoints(self.folder)), default=0)
        sync_folder(temporary)
        write_commit(temporary, Commit(step, order, self._world.size, files))
        if path.exists():  # of this step, from before the run went back to an older one
            path.rename(path.with_name(f"{path.name}.old-{secrets.token_hex(4)}"))
        temporary.rename(path)
        sync_folder(self.folder)
        prune(self.folder, self._keep, spare=[path])

    def _first_problem(self, step: int, problems: list[str | None]) -> str | None:
        problem = next(filter(None, problems), None)
        return problem and f"checkpoint of step {step} failed: {problem}; the ones before it are intact"

    def _gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self._world.size
        dist.all_gather_object(values, value, group=self._group)
        return values


class _Writer(dcp.FileSystemWriter):
    """Lets the operating system's error through (a full disk), which torch's zip writer follows by one of its own;
    the failure is pickled on its way to the other ranks, and there the first one would be lost."""

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().write_data(*args, **kwargs)
        except Exception as error:
            raise _root(error) from None


def _attempt(action: Callable[[], T], rank: int) -> tuple[T | None, str | None]:
    """(result, None), or (None, why it failed): so that all ranks can go on to say so to each other."""
    try:
        return action(), None
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        return None, _reason(error, rank)


def _root(error: BaseException) -> BaseException:
    """The operating system's error behind another one, or the error itself."""
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, OSError) and cause.strerror):
        cause = cause.__cause__ or cause.__context__
    return cause or error


def _reason(error: BaseException, rank: int) -> str:
    """One line: which rank, and why."""
    if isinstance(error, CheckpointException):  # raised on every rank for the failures of some
        rank, (error, _) = next(iter(error.failures.items()))
    error = _root(error)
    if isinstance(error, OSError) and error.strerror:
        return f"rank {rank}: {error.strerror}" + (f" ({error.filename})" if error.filename else "")
    return f"rank {rank}: {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
