"""The files of a run that hold numbers and samples. Only rank 0 writes them."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from spmd_rl.config.errors import UserError
from spmd_rl.observe.samples import SampleRecord, to_json

_STEP = re.compile(rb'\{"step": (\d+)[,}]')


def cut_after(path: Path, step: int) -> bytes:
    """Remove all lines behind the last one of `step` or earlier, and a torn last line; returns the last one kept.

    Lines are in order of steps and begin with their step. With `step` 0 nothing is kept: the run starts anew.
    """
    if not path.exists():
        return b""
    kept, last = 0, b""
    with path.open("r+b") as file:
        for line in file:
            found = _STEP.match(line)
            if step <= 0 or not found or int(found[1]) > step or not line.endswith(b"\n"):
                break
            kept, last = kept + len(line), line
        file.truncate(kept)
    return last


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file, one at a time; a torn last line (of a run that was killed) is left out."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)


class MetricsFile:
    """`metrics.jsonl`: one object per step, in order. On resume, lines behind `restored_step` are cut.

    Every write reaches the operating system at once, so that it outlives a killed process. A second write for the
    last step (an evaluation after it) joins the first: a step never has two lines.
    """

    def __init__(self, path: Path, restored_step: int = 0) -> None:
        last = cut_after(path, restored_step)
        self._values: dict[str, Any] = json.loads(last) if last else {}
        self._file = path.open("r+b" if path.exists() else "w+b", buffering=0)
        self._start = self._file.seek(0, 2) - len(last)  # of the last line

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Raises ValueError where `step` is before the last one."""
        before = self._values.get("step", -1)
        if step < before:
            raise ValueError(f"metrics of step {step} come after those of step {before}")
        if step > before:
            self._values = {"step": step}
            self._start = self._file.seek(0, 2)
        self._values |= {name: value for name, value in values.items() if name != "step"}
        line = to_json(self._values).encode() + b"\n"
        self._file.seek(self._start)
        self._file.write(line)
        self._file.truncate(self._start + len(line))

    def close(self) -> None:
        self._file.close()


class SamplesFile:
    """`samples.jsonl`: UTF-8, one `SampleRecord` per line; on resume, lines behind `restored_step` are cut."""

    def __init__(self, path: Path, restored_step: int = 0) -> None:
        cut_after(path, restored_step)
        self._file = path.open("a", encoding="utf-8", newline="\n")

    def write(self, records: Sequence[SampleRecord]) -> None:
        self._file.write("".join(record.to_json() + "\n" for record in records))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardFile:
    """TensorBoard's event files; points behind `restored_step` of an earlier attempt are marked as purged."""

    def __init__(self, folder: Path, restored_step: int = 0) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise UserError(
                "observe.tensorboard=true needs the package tensorboard: install it or set observe.tensorboard=false"
            )
        self._folder = folder
        self._purge_step = restored_step + 1 if restored_step else 0
        self._writer: Any = None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is None:  # importing takes a second or two: not before there is something to write
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=self._purge_step)
        for name, value in values.items():
            if isfinite(value):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
