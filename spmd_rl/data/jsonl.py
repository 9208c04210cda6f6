"""Random access to the lines of a JSON Lines file: memory-mapped, with a sparse index."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spmd_rl.config.errors import UserError

STRIDE = 64  # every so many rows, the index keeps where one starts: 16 bytes per 64 rows
BLOCK = 1 << 22  # bytes looked at in one go while indexing
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class JsonLines:
    """The objects of a UTF-8 JSON Lines file, by number. Empty lines are no rows; only `\\n` ends a line.

    Opening reads the file once, to find its lines; they are parsed when asked for. Raises UserError where the file is
    missing or empty, and, naming file and line, where a line is not a JSON object in UTF-8.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror or error}") from None
        except ValueError:  # an empty file can't be mapped
            raise UserError(f"{path}: the file is empty") from None
        self._starts, self._lines, self._count = _index(np.frombuffer(self._map, dtype=np.uint8))
        if self._count == 0:
            raise UserError(f"{path}: no line holds anything")

    def __len__(self) -> int:
        return self._count

    def columns(self) -> list[str]:
        """Of the first row."""
        return list(self.row(0))

    def where(self, index: int) -> str:
        return f"{self.path}:{self._find(index)[2]}"

    def row(self, index: int) -> dict[str, Any]:
        begin, end, line = self._find(index)
        try:
            value = json.loads(self._map[begin:end].decode("utf-8"))
        except UnicodeDecodeError as error:
            raise UserError(f"{self.path}:{line}: not UTF-8 (byte {error.start + 1} of the line)") from None
        except json.JSONDecodeError as error:
            raise UserError(f"{self.path}:{line}: broken JSON ({error.msg}, column {error.colno})") from None
        except RecursionError:
            raise UserError(f"{self.path}:{line}: JSON nested too deeply") from None
        if not isinstance(value, dict):
            raise UserError(f"{self.path}:{line}: a JSON object is wanted, not {type(value).__name__}")
        return value

    def _find(self, index: int) -> tuple[int, int, int]:
        """(first byte, byte behind the last, line number from 1) of a row."""
        if not 0 <= index < self._count:
            raise IndexError(f"row {index} of {self._count}")
        entry, ahead = divmod(index, STRIDE)
        begin, line = int(self._starts[entry]), int(self._lines[entry])
        while True:
            end = self._map.find(b"\n", begin)
            end = len(self._map) if end < 0 else end
            if self._map[begin : begin + 1] not in (b"\n", b"\r"):
                if ahead == 0:
                    return begin, end, line
                ahead -= 1
            begin, line = end + 1, line + 1


def _index(data: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """(first byte, line number) of the rows 0, STRIDE, 2 STRIDE, …, and the number of rows."""
    begin = len(BYTE_ORDER_MARK) if data[:3].tobytes() == BYTE_ORDER_MARK else 0
    starts: list[NDArray[np.int64]] = []
    lines: list[NDArray[np.int64]] = []
    rows, line = 0, 1
    for block in range(0, data.size, BLOCK):
        ends = np.flatnonzero(data[block : block + BLOCK] == ord("\n")) + block
        if block + BLOCK >= data.size and (ends.size == 0 or ends[-1] != data.size - 1):
            ends = np.append(ends, data.size)  # the last line may lack its end
        if ends.size == 0:
            continue
        begins = np.concatenate(([begin], ends[:-1] + 1))
        begins = begins[begins < data.size]
        full = np.flatnonzero(~np.isin(data[begins], (ord("\n"), ord("\r"))))
        picked = full[-rows % STRIDE :: STRIDE]
        starts.append(begins[picked])
        lines.append(line + picked)
        rows, line, begin = rows + full.size, line + ends.size, int(ends[-1]) + 1
    return np.concatenate(starts or [np.empty(0, np.int64)]), np.concatenate(lines or [np.empty(0, np.int64)]), rows
