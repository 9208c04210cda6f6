"""Which rows are left out, agreed by all ranks before the first step.

Overlong prompts would leave the ranks with different counts (each tokenises only its own rows). So at start every
rank checks its share of the rows and one all-gather brings the verdicts together: all ranks know the same rows to be
out, and number, content and order of the batches follow from that alone, on any number of ranks.

Sets of more than `SCREEN_ROWS` rows are not read at start (a few rows per source are). There, an overlong prompt is
left out of its batch when it is met: the schedule is fixed by row numbers alone, so the ranks still agree, and the
step is smaller by that prompt. A broken row is then reported when it is met, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import ProcessGroup

from spmd_rl.config.errors import UserError
from spmd_rl.data.prompts import PromptEncoder
from spmd_rl.data.sources import Sources, row_bytes

SCREEN_ROWS = 100_000
PROBE_ROWS = 100  # per source, of sets that are not screened


@dataclass(frozen=True)
class Screening:
    """overlong: int64, for each source the rows (numbered over all sources) that are left out, ascending; values_N:
    float64, each row's value in the column that orders the curriculum, or None without one."""

    overlong: list[NDArray[np.int64]]
    values_N: NDArray[np.float64] | None


def screen(rows: Sources, encoder: PromptEncoder, curriculum: str = "", group: ProcessGroup | None = None) -> Screening:
    """Collective over `group` (None: this process alone). A curriculum is screened whatever the size.

    Raises UserError, the same on every rank: the first row that can't be used, a source whose prompts are all too long.
    """
    if len(rows) > SCREEN_ROWS and not curriculum:
        _probe(rows, encoder)
        return Screening([np.empty(0, np.int64)] * len(rows.parts), None)
    rank, size = (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)
    mine = range(rank * len(rows) // size, (rank + 1) * len(rows) // size)
    overlong: list[int] = []
    values: list[float] = []
    error = ""
    try:
        for index in mine:
            source, i = rows.locate(index)
            row = source.row(i)
            where = source.where(i)
            row_bytes(row, where)
            if encoder.is_overlong(source, row, where):
                overlong.append(index)
            if curriculum:
                values.append(_number(row, curriculum, where))
    except UserError as caught:
        error = str(caught)
    shares = [(overlong, values, error)]
    if size > 1:
        shares = shares * size
        dist.all_gather_object(shares, (overlong, values, error), group=group)
    for _, _, found in shares:
        if found:
            raise UserError(found)
    overlong_D = np.array([index for share, _, _ in shares for index in share], dtype=np.int64)
    by_source = np.split(overlong_D, np.searchsorted(overlong_D, rows.starts[1:-1])) if rows.parts else []
    for part, out in zip(rows.parts, by_source, strict=True):
        if out.size == part.size:
            raise _nothing_left(part.config.name, f"all {out.size} prompts are")
    values_N = np.array([value for _, share, _ in shares for value in share]) if curriculum else None
    return Screening(by_source, values_N)


def _probe(rows: Sources, encoder: PromptEncoder) -> None:
    """Look at rows spread over each source until one can be used."""
    for part in rows.parts:
        probes = np.unique(np.linspace(0, part.size - 1, PROBE_ROWS).astype(int)).tolist()
        if all(encoder.is_overlong(part, part.row(i), part.where(i)) for i in probes):
            raise _nothing_left(part.config.name, f"{len(probes)} of {len(probes)} prompts looked at are")


def _nothing_left(name: str, found: str) -> UserError:
    return UserError(f"source {name!r}: {found} longer than data.max_prompt_tokens; raise it")


def _number(row: dict[str, object], column: str, where: str) -> float:
    value = row.get(column)
    if isinstance(value, int | float) and value == value:
        return float(value)
    found = type(value).__name__ if column in row else "nothing"
    raise UserError(f"{where}: data.curriculum={column!r} wants a number there, not {found}")
