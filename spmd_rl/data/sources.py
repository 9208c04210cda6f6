"""Data sources: rows by number, whatever they are stored in; several of them are one numbered sequence."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, time
from decimal import Decimal
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from spmd_rl.config.errors import UserError
from spmd_rl.config.schema import SourceConfig
from spmd_rl.data.arrow import ArrowFiles, saved_files
from spmd_rl.data.jsonl import JsonLines
from spmd_rl.data.tables import ArrowTable, Generator


class Table(Protocol):
    """Rows by number. `where` names a row in messages; `columns` are those of the first row."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> dict[str, Any]: ...

    def where(self, index: int) -> str: ...

    def columns(self) -> list[str]: ...


@dataclass(frozen=True)
class Source:
    """One open data set. prompt_column, answer_column: as they are named in the rows ("": there is none)."""

    config: SourceConfig
    table: Table
    size: int
    prompt_column: str
    answer_column: str

    @classmethod
    def open(cls, config: SourceConfig, key: str) -> Source:
        """Opens what `config` (found at `key` of the configuration) names; UserError where that can't be used."""
        key = f"{key} ({config.name})"
        if bool(config.path) == bool(config.generator):
            raise UserError(f"{key}: exactly one of path and generator is wanted")
        if "{prompt}" not in config.prompt_template:
            raise UserError(f"{key}: prompt_template lacks the place {{prompt}}")
        if any(len(example) != 2 for example in config.examples):
            raise UserError(f"{key}: each of examples is a list of two texts, [prompt, response]")
        if config.weight <= 0:
            raise UserError(f"{key}: weight={config.weight}; a number above 0 is wanted")
        table = _open_table(config, key)
        columns = table.columns()
        prompt = prompt_column_of(config)
        answer = config.answer_column if config.answer_column in columns else ""
        for name in (prompt, config.answer_column if config.answer_column != "answer" else prompt):
            if name not in columns:
                raise UserError(f"{table.where(0)}: no column {name!r} ({key}); there are {', '.join(columns)}")
        return cls(config, table, min(config.size or len(table), len(table)), prompt, answer)

    def row(self, index: int) -> dict[str, Any]:
        """The row, with two names set: `source`, its label, and `answer`, whatever column the answer stands in."""
        row = self.table.row(index)
        for name in filter(None, (self.prompt_column, self.answer_column)):
            if name not in row:
                raise UserError(f"{self.where(index)}: no column {name!r}; there are {', '.join(row)}")
        if self.answer_column:
            row["answer"] = row[self.answer_column]
        row["source"] = self.config.name
        return row

    def where(self, index: int) -> str:
        return self.table.where(index)


class Sources:
    """Several sources as one sequence of rows: the rows of the first, then those of the second, and so on."""

    def __init__(self, parts: Sequence[Source]) -> None:
        self.parts = list(parts)
        self.starts = [0, *accumulate(part.size for part in self.parts)]

    @classmethod
    def open(cls, configs: Sequence[SourceConfig], key: str) -> Sources:
        """`key`: where the configuration has them (data.train, data.eval), for messages. Raises UserError."""
        return cls([Source.open(config, f"{key}[{i}]") for i, config in enumerate(configs)])

    def __len__(self) -> int:
        return self.starts[-1]

    def locate(self, index: int) -> tuple[Source, int]:
        """Row `index` of all is row … of source …."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        part = bisect_right(self.starts, index) - 1
        return self.parts[part], index - self.starts[part]


def prompt_column_of(config: SourceConfig) -> str:
    """The schema's default names are those of plain data sets; reasoning-gym calls its prompt `question`."""
    return "question" if config.generator and config.prompt_column == "prompt" else config.prompt_column


def check_apart(train: Sequence[SourceConfig], held_out: Sequence[SourceConfig]) -> None:
    """Refuse generators whose evaluation rows are trained on: reasoning-gym makes row i from seed + i, so near seeds
    share rows."""
    for i, t in enumerate(train):
        for j, e in enumerate(held_out):
            same = t.generator and t.generator == e.generator and t.params == e.params
            if same and t.seed < e.seed + e.size and e.seed < t.seed + t.size:
                raise UserError(
                    f"data.eval[{j}] ({e.name}): shares rows with data.train[{i}] ({t.name}), because row i of a "
                    f"generator is made from seed + i; set its seed to {t.seed + t.size} or more"
                )


def row_bytes(row: dict[str, Any], where: str) -> bytes:
    """The row as UTF-8 JSON, every character as itself. Raises UserError, naming the row, where JSON can't hold it."""
    try:
        return json.dumps(row, ensure_ascii=False, default=_plain).encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"{where}: half of a surrogate pair stands alone; UTF-8 can't hold it") from None
    except (TypeError, ValueError, RecursionError):
        column = next((name for name, value in row.items() if not _fits_json(value)), "?")
        raise UserError(
            f"{where}: column {column!r} holds {type(row.get(column)).__name__}, which JSON can't hold"
        ) from None


def _open_table(config: SourceConfig, key: str) -> Table:
    if config.generator:
        return Generator(config.generator, dict(config.params), config.size, config.seed)
    path = Path(config.path)
    if not path.exists():
        raise UserError(f"{key}: no file or folder {path}")
    if not path.is_dir() and not path.is_file():
        raise UserError(f"{key}: {path} is neither a file nor a folder")  # opening a pipe would wait for its writer
    if path.is_dir() and (files := saved_files(path)):
        return ArrowFiles(path, files)
    if path.is_dir() or path.suffix == ".parquet":
        return ArrowTable(path)
    if path.suffix == ".jsonl":
        return JsonLines(path)
    raise UserError(f"{key}: {path} is neither *.jsonl nor *.parquet nor a folder made by datasets.save_to_disk")


def _plain(value: Any) -> Any:
    """What json.dumps calls for a value it does not know."""
    if isinstance(value, date | time):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    raise TypeError(type(value).__name__)


def _fits_json(value: Any) -> bool:
    try:
        json.dumps(value, default=_plain)
    except (TypeError, ValueError, RecursionError):
        return False
    return True
