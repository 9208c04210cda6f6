"""Which folders count as checkpoints, which is the latest, and what may be deleted."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from spmd_rl.checkpoint.files import (
    MARKER,
    Commit,
    InvalidCheckpoint,
    damaged,
    fingerprint,
    latest_valid,
    prune,
    read_commit,
    valid_checkpoints,
    write_commit,
)
from spmd_rl.checkpoint.rng import capture_rng, restore_rng


def make(folder: Path, step: int, order: int, name: str = "") -> Path:
    path = folder / (name or f"step_{step:06d}")
    path.mkdir(parents=True)
    (path / "data").write_bytes(b"x" * 100 * step)
    write_commit(path, Commit(step, order, 2, {"data": fingerprint(path / "data")}))
    return path


def test_fingerprint_is_size_and_crc(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"123456789")
    assert fingerprint(tmp_path / "f") == (9, 0xCBF43926)  # the check value of CRC-32


def test_latest_is_the_last_commit_not_the_highest_step(tmp_path: Path) -> None:
    make(tmp_path, 10, 1)
    make(tmp_path, 30, 2)
    newest = make(tmp_path, 20, 3)
    assert latest_valid(tmp_path) == newest
    assert [commit.step for _, commit in valid_checkpoints(tmp_path)] == [10, 30, 20]
    assert latest_valid(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda path: (path / MARKER).unlink(), "not written to the end"),
        (lambda path: (path / MARKER).write_text("{"), "unreadable"),
        (lambda path: (path / MARKER).write_text("[]"), "unreadable"),
        (
            lambda path: (path / MARKER).write_text('{"step": 20, "order": "b", "world_size": 2, "files": {}}'),
            "unreadable",
        ),
        (lambda path: ((path / MARKER).unlink(), (path / MARKER).mkdir()), "unreadable"),
        (lambda path: (path / "data").write_bytes(b"short"), "data has 5 bytes, 2000 were written"),
        (lambda path: (path / "data").unlink(), "data is missing"),
    ],
)
def test_partial_ones_are_passed_over_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture, harm, reason) -> None:
    good = make(tmp_path, 10, 1)
    bad = make(tmp_path, 20, 2)
    harm(bad)
    with pytest.raises(InvalidCheckpoint, match=reason):
        read_commit(bad)
    with caplog.at_level(logging.WARNING):
        assert latest_valid(tmp_path) == good
    assert str(bad) in caplog.text and reason in caplog.text and str(good) not in caplog.text


def test_a_flipped_bit_is_found_by_the_rank_whose_share_it_is(tmp_path: Path) -> None:
    path = make(tmp_path, 10, 1)
    commit = read_commit(path)
    assert damaged(path, commit) is None
    (path / "data").write_bytes(b"y" + b"x" * 999)
    assert read_commit(path) == commit  # the size is right
    assert damaged(path, commit) == "data"
    assert damaged(path, commit, part=0, parts=2) == "data" and damaged(path, commit, part=1, parts=2) is None


def test_prune_keeps_the_last_commits_and_what_a_kill_left_whole(tmp_path: Path) -> None:
    first, second = make(tmp_path, 10, 1), make(tmp_path, 30, 2)
    whole = make(tmp_path, 20, 3, name="step_000020.tmp-0a1b")  # killed between marker and rename
    half = tmp_path / "step_000040.tmp-ffff"
    half.mkdir()
    foreign = tmp_path / "notes"
    foreign.mkdir()
    prune(tmp_path, keep=0)
    assert first.exists() and second.exists() and whole.exists() and not half.exists()
    prune(tmp_path, keep=2)
    assert not first.exists() and second.exists() and whole.exists() and foreign.exists()
    prune(tmp_path, keep=1, spare=[second])
    assert second.exists() and latest_valid(tmp_path) == whole


def test_rng_continues() -> None:
    state = capture_rng(torch.device("cpu"))
    draws = [random.random(), float(np.random.rand()), torch.rand(1).item()]
    restore_rng(state, torch.device("cpu"))
    assert [random.random(), float(np.random.rand()), torch.rand(1).item()] == draws
