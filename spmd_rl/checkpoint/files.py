"""Checkpoint folders on disk: which are whole, which is the latest, which may go.

    checkpoints/step_000010/             a checkpoint
        COMMITTED                        written last: sizes and checksums of all other files; without it, no checkpoint
        meta.json                        loader cursor and the like
        .metadata, __0_0.distcp, ...     written by torch.distributed.checkpoint
    checkpoints/step_000020.tmp-3f9a/    being written, or left by a run that was killed while writing

The marker alone decides: a folder is a checkpoint if it holds one and every file has the size that it states. The
name is for people.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARKER = "COMMITTED"
META = "meta.json"
_NAME = re.compile(r"step_(\d+)(\.[\w-]+)?$")
_BLOCK = 1 << 22
log = logging.getLogger(__name__)


class InvalidCheckpoint(Exception):
    """A folder that is no whole checkpoint; the message says why, in a few words."""


@dataclass(frozen=True)
class Commit:
    """What the marker states. order: counts the commits of a run, so that the latest one is known also after a run
    went back to an older step; files: name → (bytes, CRC-32)."""

    step: int
    order: int
    world_size: int
    files: dict[str, tuple[int, int]]


def folder_name(step: int) -> str:
    return f"step_{step:06d}"


def fingerprint(file: Path) -> tuple[int, int]:
    """Size in bytes and CRC-32 of a file."""
    size = checksum = 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            size += len(block)
            checksum = zlib.crc32(block, checksum)
    return size, checksum


def write_durably(file: Path, text: str) -> None:
    """Write the whole file or nothing, and have it on the disk on return."""
    partial = file.with_name(f"{file.name}.partial")
    with partial.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    partial.rename(file)
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Have the folder's entries (new files, renames) on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_commit(folder: Path, commit: Commit) -> None:
    entries = {name: {"bytes": size, "crc32": crc} for name, (size, crc) in sorted(commit.files.items())}
    marker = {"step": commit.step, "order": commit.order, "world_size": commit.world_size, "files": entries}
    write_durably(folder / MARKER, json.dumps(marker, indent=1) + "\n")


def read_commit(folder: Path) -> Commit:
    """The commit of a whole checkpoint, by marker and sizes. Raises InvalidCheckpoint."""
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        files = {name: (int(entry["bytes"]), int(entry["crc32"])) for name, entry in marker["files"].items()}
        commit = Commit(int(marker["step"]), int(marker["order"]), int(marker["world_size"]), files)
    except (FileNotFoundError, NotADirectoryError):
        raise InvalidCheckpoint(f"{MARKER} is missing: it was not written to the end") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise InvalidCheckpoint(f"{MARKER} is unreadable") from None
    for name, (size, _) in commit.files.items():
        try:
            found = (folder / name).stat().st_size
        except OSError:
            raise InvalidCheckpoint(f"{name} is missing") from None
        if found != size:
            raise InvalidCheckpoint(f"{name} has {found} bytes, {size} were written")
    return commit


def damaged(folder: Path, commit: Commit, part: int = 0, parts: int = 1) -> str | None:
    """The first file whose content differs from what was written, among every `parts`-th one from `part` on."""
    for name in sorted(commit.files)[part::parts]:
        if fingerprint(folder / name) != commit.files[name]:
            return name
    return None


def read_meta(folder: Path) -> dict[str, Any]:
    return json.loads((folder / META).read_text(encoding="utf-8"))


def candidates(folder: Path) -> list[Path]:
    """Every folder below that looks like a checkpoint, whole or not, by name."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and _NAME.match(path.name))


def is_unfinished(path: Path) -> bool:
    """Whether the folder never got its final name."""
    return ".tmp-" in path.name


def valid_checkpoints(folder: Path, complain: bool = False) -> list[tuple[Path, Commit]]:
    """The whole checkpoints below `folder`, in the order of their commits. complain: log why others do not count."""
    found = []
    for path in candidates(folder):
        try:
            found.append((path, read_commit(path)))
        except InvalidCheckpoint as error:
            if complain:
                log.warning("checkpoint %s does not count: %s", path, error)
    return sorted(found, key=lambda entry: entry[1].order)


def latest_valid(folder: Path) -> Path | None:
    """The whole checkpoint that was committed last, or None. Logs every folder that does not count, and why."""
    found = valid_checkpoints(folder, complain=True)
    return found[-1][0] if found else None


def remove(folder: Path) -> None:
    """Delete a checkpoint, its marker first: what a kill leaves half deleted is no checkpoint."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        (folder / MARKER).unlink()
    shutil.rmtree(folder, ignore_errors=True)


def prune(folder: Path, keep: int, spare: Iterable[Path] = ()) -> None:
    """Delete all but the `keep` (0: all) checkpoints committed last, and what killed runs left unfinished."""
    spared = set(spare)
    whole = [path for path, _ in valid_checkpoints(folder)]
    superfluous = whole[:-keep] if keep else []
    unfinished = [path for path in candidates(folder) if path not in whole and is_unfinished(path)]
    for path in superfluous + unfinished:
        if path not in spared:
            remove(path)
