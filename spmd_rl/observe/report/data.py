"""Reads a run folder into what a report shows, in bounded memory however long the run was."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil, isfinite
from pathlib import Path
from typing import Any

import yaml

from spmd_rl.config.errors import UserError
from spmd_rl.observe.samples import SampleRecord
from spmd_rl.observe.spans import BETWEEN, STEP
from spmd_rl.observe.writers import read_lines

MAX_POINTS = 300  # of one curve
MAX_BARS = 60  # of the step-time breakdown
OVERLAPPING = ("_total", "_exposed")  # ends of `time/` names that are measured across stages: no parts of a step


@dataclass
class Curve:
    """A metric over steps. Where it has more than `MAX_POINTS` values, neighbours are put together: `mean` with
    `low` and `high`, at the step of the last one. Values that are not finite are counted and left out."""

    steps: list[int] = field(default_factory=list)
    mean: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    width: int = 1  # values per point
    total: float = 0.0
    count: int = 0
    not_finite: int = 0
    first: float = 0.0
    last: float = 0.0
    _bucket: list[float] = field(default_factory=list)

    def add(self, step: int, value: float) -> None:
        if not self.count:
            self.first = value
        self.last = value
        self.total += value
        self.count += 1
        if not self._bucket:
            for column in (self.mean, self.low, self.high):
                column.append(value)
            self.steps.append(step)
        self._bucket.append(value)
        self.steps[-1] = step
        self.mean[-1] = sum(self._bucket) / len(self._bucket)
        self.low[-1], self.high[-1] = min(self.low[-1], value), max(self.high[-1], value)
        if len(self._bucket) == self.width:
            self._bucket = []


@dataclass
class Bar:
    """Mean seconds per step of each stage, from step `first` to `last`."""

    first: int
    last: int
    seconds: dict[str, float]


@dataclass(frozen=True)
class Pair:
    """The same sample of one prompt early and late in the run; either may be missing."""

    before: SampleRecord | None
    after: SampleRecord | None


@dataclass(frozen=True)
class RunData:
    folder: Path
    name: str
    config: str  # text of config.yaml
    steps: int  # last step that was written
    planned_steps: int  # of the configuration; 0: unknown
    curves: Mapping[str, Curve]
    bars: list[Bar]
    pairs: list[Pair]
    held_out: bool  # whether the pairs are of evaluations
    attempts: list[dict[str, Any]]  # environment of each start

    def eval_sets(self) -> list[str]:
        """Names that have `eval/<set>/pass@…`."""
        sets = [n.split("/")[1] for n in self.curves if n.startswith("eval/") and "/pass@" in n]
        return list(dict.fromkeys(sets))

    def between_steps(self) -> dict[str, float]:
        """Total seconds of what is done between steps, longest first."""
        start = f"time/{BETWEEN}/"
        found = {n[len(start) :]: c.total for n, c in self.curves.items() if n.startswith(start) and n.count("/") == 2}
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def rate(self, name: str) -> float | None:
        """Total of a counter metric divided by the total of the step times, per second."""
        seconds = self.curves.get("time/step")
        if name not in self.curves or seconds is None or not seconds.total:
            return None
        return self.curves[name].total / seconds.total


def read_run(folder: Path) -> RunData:
    """Raises UserError where `folder` holds no metrics or a file that is not what it should be."""
    metrics = folder / "metrics.jsonl"
    if not metrics.exists():
        raise UserError(f"{folder} holds no metrics.jsonl: give the folder of a run")
    try:
        curves, bars, last = _read_metrics(metrics)
        pairs, held_out = _read_pairs(folder / "samples.jsonl")
        attempts = read_attempts(folder)
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(f"a file in {folder} is damaged: {error}") from error
    config = folder / "config.yaml"
    text = config.read_text(encoding="utf-8") if config.exists() else ""
    settings = yaml.safe_load(text) or {}
    name = str(settings.get("run", {}).get("name", "") or folder.name)
    planned = int(settings.get("train", {}).get("steps", 0))
    return RunData(folder, name, text, last, planned, curves, bars, pairs, held_out, attempts)


def read_attempts(folder: Path) -> list[dict[str, Any]]:
    path = folder / "environment.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def _stages(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The parts that a step's time is made of: `time/<stage>`, but not their own parts."""
    for name, value in line.items():
        parts = name.split("/")
        stage = parts[0] == "time" and len(parts) == 2 and parts[1] != STEP and not parts[1].endswith(OVERLAPPING)
        if stage and value is not None:
            yield parts[1], value


def _read_metrics(path: Path) -> tuple[dict[str, Curve], list[Bar], int]:
    counts: defaultdict[str, int] = defaultdict(int)
    timed: list[int] = [0, 0]  # first and last step with times
    last = 0
    for line in read_lines(path):
        last = line["step"]
        for name, value in line.items():
            if value is not None:
                counts[name] += 1
        if "time/step" in line:
            timed = [timed[0] or last, last]
    curves = {n: Curve(width=ceil(c / MAX_POINTS)) for n, c in counts.items() if n != "step"}
    per_bar = max(1, ceil((timed[1] - timed[0] + 1) / MAX_BARS))
    bars: list[Bar] = []
    lines_in_bar = 0
    for line in read_lines(path):
        step = line["step"]
        for name, value in line.items():
            if name == "step":
                continue
            if value is None or not isfinite(value):
                curves.setdefault(name, Curve()).not_finite += 1
            else:
                curves[name].add(step, value)
        if "time/step" not in line or line["time/step"] is None:
            continue
        if not bars or step >= bars[-1].first + per_bar:
            bars.append(Bar(step, step, {}))
            lines_in_bar = 0
        bar = bars[-1]
        bar.last = step
        lines_in_bar += 1
        shares = dict(_stages(line))
        shares["other"] = max(0.0, line["time/step"] - sum(shares.values()))
        for stage in bar.seconds.keys() | shares.keys():
            old = bar.seconds.get(stage, 0.0)
            bar.seconds[stage] = old + (shares.get(stage, 0.0) - old) / lines_in_bar
    return curves, bars, last


def _read_pairs(path: Path) -> tuple[list[Pair], bool]:
    """Held-out samples of the first and the last evaluation; without evaluations, the first and the last step's."""
    ends: dict[bool, tuple[list[SampleRecord], list[SampleRecord]]] = {True: ([], []), False: ([], [])}
    for line in read_lines(path):
        record = SampleRecord.from_fields(line)
        first, last = ends[record.eval]
        if not first or first[0].step == record.step:
            first.append(record)
        else:
            if last and last[0].step != record.step:
                last.clear()
            last.append(record)
    held_out = bool(ends[True][0])
    first, last = ends[held_out]
    after = {(r.source, r.id[1], r.id[2]): r for r in last}
    pairs = [Pair(r, after.pop((r.source, r.id[1], r.id[2]), None)) for r in first]
    if held_out:
        return pairs, True
    # Training prompts rarely come twice: early samples, then late ones.
    return [p for p in pairs if p.after] or [*pairs, *(Pair(None, r) for r in last)], False
