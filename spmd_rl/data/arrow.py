"""Random access to the rows of a folder written by `datasets.save_to_disk`: memory-mapped, with a small index.

`datasets` itself keeps an object for every record batch of 1,000 rows: 120 MB for 100 million rows.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.ipc

from spmd_rl.config.errors import UserError
from spmd_rl.data.tables import first_line


class ArrowFiles:
    """The rows of several files in Arrow's stream format, one after the other, by number.

    Opening reads where each record batch lies and how many rows it has: 24 bytes per batch are kept. Raises UserError
    for a file that is no such stream, and where there is no row. Values are Arrow's own: images and audio stay
    undecoded.
    """

    def __init__(self, path: Path, files: Sequence[Path]) -> None:
        self.path = path
        self._buffers: list[pyarrow.Buffer] = []
        self._schemas: list[pyarrow.Schema] = []
        places, sizes, owners = array("q"), array("q"), array("q")
        for number, file in enumerate(files):
            try:
                buffer = pyarrow.memory_map(str(file)).read_buffer()
                schema, found_B, size_B = _batches(buffer)
            except (pyarrow.ArrowException, OSError) as error:
                raise UserError(f"{file}: a damaged Arrow stream ({first_line(error)})") from None
            self._buffers.append(buffer)
            self._schemas.append(schema)
            places += found_B
            sizes += size_B
            owners += array("q", [number]) * len(found_B)
        self._place_B, self._file_B = np.array(places), np.array(owners)
        self._end_B = np.cumsum(np.array(sizes))
        if not len(self):
            raise UserError(f"{path}: the data set is empty")

    def __len__(self) -> int:
        return int(self._end_B[-1]) if self._end_B.size else 0

    def columns(self) -> list[str]:
        return list(self._schemas[0].names)

    def where(self, index: int) -> str:
        return f"{self.path}: row {index}"

    def row(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        batch = int(np.searchsorted(self._end_B, index, side="right"))
        file, place = int(self._file_B[batch]), int(self._place_B[batch])
        message = pyarrow.ipc.read_message(self._buffers[file].slice(place))
        rows = pyarrow.ipc.read_record_batch(message, self._schemas[file])
        return rows.slice(index - int(self._end_B[batch]) + rows.num_rows, 1).to_pylist()[0]


def saved_files(folder: Path) -> list[Path]:
    """The files of one data set in `folder`, in their order; none where `datasets` has to say what it is."""
    try:
        state = json.loads((folder / "state.json").read_text())
        files = [folder / entry["filename"] for entry in state["_data_files"]]
        plain = not state.get("_indices_data_files")  # of old versions: rows in another order than in the files
        return files if plain and all(map(_is_plain, files)) else []
    except (OSError, ValueError, TypeError, KeyError, pyarrow.ArrowException):
        return []


def _is_plain(file: Path) -> bool:
    """Whether each record batch can be read by itself: columns with dictionaries cannot."""
    with pyarrow.memory_map(str(file)) as source:
        schema = pyarrow.ipc.open_stream(source).schema
    return "dictionary<" not in str(schema.remove_metadata())


def _batches(buffer: pyarrow.Buffer) -> tuple[pyarrow.Schema, array[int], array[int]]:
    """The schema; of every record batch that has rows, the first byte and the number of rows."""
    source = pyarrow.BufferReader(buffer)
    reader = pyarrow.ipc.open_stream(source)
    places, sizes = array("q"), array("q")
    while True:
        place = source.tell()
        try:
            batch = reader.read_next_batch()
        except StopIteration:
            return reader.schema, places, sizes
        if batch.num_rows:
            places.append(place)
            sizes.append(batch.num_rows)
