"""The service API: programs with engines of their own."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spmd_rl.config.errors import UserError
from spmd_rl.service import Settings, init_engines
from tests.world.harness import ROOT, run_world

PROGRAM = Path(__file__).with_name("service_program.py")


def test_the_example_learns() -> None:
    result = run_world(ROOT / "examples" / "own_engines.py", ranks=3, timeout_s=120).check()
    steps = re.findall(r"step (\d+): mean reward ([\d.]+) of (\d+) words", result.stdout)
    assert [(int(step), int(words)) for step, _, words in steps] == [(step, 8 * 16) for step in range(1, 21)]
    assert float(steps[0][1]) < 0.3 and float(steps[-1][1]) > 0.9
    assert len((ROOT / "examples" / "own_engines.py").read_text().splitlines()) < 100


@pytest.mark.parametrize("done", [0, 2])
def test_every_group_is_trained_on_once_within_the_bound(tmp_path: Path, done: int) -> None:
    """On two trainers; from the beginning, and from where another run has ended."""
    run_world(PROGRAM, ranks=4, timeout_s=120, args=[str(tmp_path), str(done)]).check()
    seen: list[Any] = [entry for rank in (0, 3) for entry in json.loads((tmp_path / f"{rank}.json").read_text())]
    first = {0: 0, 2: 6}[done]
    assert sorted({row[1] for _, _, row, _ in seen}) == list(range(first, 14))
    assert len(seen) == sum(1 + group % 3 for group in range(first, 14))
    for step, (epoch, index, _), (letter, group), version in seen:
        assert (epoch, index) == divmod(group, 7) and chr(letter) == "abcdefg"[index]
        assert step == 1 + epoch * 3 + index // 3
        assert step - 2 <= version <= step - 1


def test_an_engine_that_fails_is_named_and_ends_all(tmp_path: Path) -> None:
    result = run_world(PROGRAM, ranks=4, timeout_s=120, args=[str(tmp_path), "fails"])
    assert result.returncode != 0 and not result.timed_out
    assert re.search(r"rank 2 \(.*failed.*OSError: the engine is broken", result.stderr), result.stderr[-2000:]


SETTINGS = Settings(train=[0], rollout=[1], columns=("text",), steps=1, prompts_per_step=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (replace(SETTINGS, staleness=-1), "staleness=-1: 0 .on-policy. or more"),
        (replace(SETTINGS, limit_mib=0.5), "limit_mib=0.5 is less than one group of group_mib=1"),
        (replace(SETTINGS, columns=("version",)), "'version' is put by the service itself"),
        (replace(SETTINGS, rollout=[0]), "there is no rank|rank 0 is in role|job has"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: Settings, message: str) -> None:
    with pytest.raises(UserError, match=message):
        init_engines(settings)
