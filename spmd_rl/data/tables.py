"""Rows of parquet files and Hugging Face data sets (memory-mapped Arrow), and of reasoning-gym generators."""

from __future__ import annotations

import dataclasses
import difflib
import json
import sys
from pathlib import Path
from typing import Any

from spmd_rl.config.errors import UserError

# Tasks of reasoning-gym 0.1 that iterate over sets of strings: their rows depend on Python's hash seed.
HASH_DEPENDENT = {"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"}


class ArrowTable:
    """Rows of a parquet file, by way of the Arrow cache of `datasets`, or of a folder that `ArrowFiles` can't read.

    Raises UserError where there is no such data set. Values are Arrow's own: images and audio stay undecoded.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = (_open_folder(path) if path.is_dir() else _open_parquet(path)).with_format("arrow")
        if len(self._data) == 0:
            raise UserError(f"{path}: the data set is empty")

    def __len__(self) -> int:
        return len(self._data)

    def columns(self) -> list[str]:
        return list(self._data.column_names)

    def where(self, index: int) -> str:
        return f"{self.path}: row {index}"

    def row(self, index: int) -> dict[str, Any]:
        return self._data[index].to_pylist()[0]


class Generator:
    """Rows that a reasoning-gym task makes on demand: row i depends on (task, params, seed, i) alone.

    A row is the task's entry (`question`, `answer`, `metadata`) plus `generator`, from which its scorer is made.
    Raises UserError for an unknown task or parameters that it refuses.
    """

    def __init__(self, task: str, params: dict[str, Any], size: int, seed: int) -> None:
        from reasoning_gym.factory import DATASETS, create_dataset

        if task not in DATASETS:
            raise UserError(f"generator {task!r}: no such reasoning-gym task{nearest(task, DATASETS)}")
        if size <= 0:
            raise UserError(f"generator {task!r}: size={size}; the number of rows to generate is wanted")
        if task in HASH_DEPENDENT and sys.flags.hash_randomization:
            raise UserError(
                f"generator {task!r}: its rows depend on Python's hash seed; start with PYTHONHASHSEED=0 in the "
                "environment, so that all ranks and a resumed run see the same rows"
            )
        known = {f.name for f in dataclasses.fields(DATASETS[task][1])} - {"seed", "size"}
        for key in params:
            if key in ("seed", "size"):
                raise UserError(f"generator {task!r}: {key} belongs beside params, not into them")
            if key not in known:
                raise UserError(f"generator {task!r}: no parameter {key!r}{nearest(key, known)}")
        self.task, self.params, self._size = task, params, size
        try:
            self._data = create_dataset(task, seed=seed, size=size, **params)
            self.row(0)
        except Exception as error:
            raise UserError(f"generator {task!r} refuses its parameters {params}: {first_line(error)}") from None

    def __len__(self) -> int:
        return self._size

    def columns(self) -> list[str]:
        return list(self.row(0))

    def where(self, index: int) -> str:
        return f"generator {self.task!r}: row {index}"

    def row(self, index: int) -> dict[str, Any]:
        return {**self._data[index], "generator": {"task": self.task, "params": self.params}}


def nearest(name: str, known: Any) -> str:
    """`; did you mean …?`, or, where nothing is near, the names if they are few."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; there are {', '.join(sorted(known)) or 'none'}" if len(known) <= 12 else ""


def first_line(error: BaseException) -> str:
    """`ValueError: what it says`, cut to one line."""
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _open_folder(path: Path) -> Any:
    import datasets

    state = path / "state.json"
    try:
        empty = state.is_file() and not json.loads(state.read_text()).get("_data_files", True)
        data = None if empty else datasets.load_from_disk(str(path))
    except Exception as error:
        raise UserError(f"{path}: not a folder made by datasets.save_to_disk ({first_line(error)})") from None
    if data is None:  # datasets itself can't load one without rows
        raise UserError(f"{path}: the data set is empty")
    if isinstance(data, dict):
        splits = ", ".join(f"{path}/{name}" for name in data)
        raise UserError(f"{path}: holds several splits; name one of them: {splits}")
    return data


def _open_parquet(path: Path) -> Any:
    import datasets
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_metadata(path).num_rows
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable parquet file ({first_line(error)})") from None
    if rows == 0:
        raise UserError(f"{path}: the data set is empty")
    datasets.disable_progress_bars()
    try:
        # Parquet can't be read by single rows; the cache holds the same rows as Arrow, which is mapped, not loaded.
        return datasets.Dataset.from_parquet(str(path))
    except Exception as error:
        raise UserError(f"{path}: could not be converted to Arrow ({first_line(error)})") from None
