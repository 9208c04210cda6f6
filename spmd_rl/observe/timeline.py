"""Merges the ranks' spans into one file that Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

MAX_EVENTS = 1_000_000  # more make a trace that viewers can't hold


def rank_file(run_folder: Path, rank: int) -> Path:
    return run_folder / "timeline" / f"rank{rank}.jsonl"


def rank_files(run_folder: Path) -> dict[int, Path]:
    """The ranks' files that exist, by rank."""
    found = {}
    for path in (run_folder / "timeline").glob("rank*.jsonl"):
        if match := re.fullmatch(r"rank(\d+)\.jsonl", path.name):
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def merge_timeline(run_folder: Path, max_events: int = MAX_EVENTS) -> Path | None:
    """Write `timeline.json` (Trace Event Format: one process per rank) from `timeline/rank<k>.jsonl`.

    Streams: memory does not grow with the run. Where there are more than `max_events`, only every m-th step is
    kept, whole and on all ranks; `otherData` says which. None: there are no spans.
    """
    files = rank_files(run_folder)
    if not files:
        return None
    total = sum(_count_lines(path) for path in files.values())
    every = -(-total // max_events) if total > max_events else 1
    kept = "all" if every == 1 else f"steps divisible by {every}"
    target = run_folder / "timeline.json"
    aside = target.with_suffix(".json.part")
    with aside.open("w", encoding="utf-8") as out:
        out.write('{"displayTimeUnit": "ms",\n')
        out.write(f'"otherData": {{"events": {total}, "kept": "{kept}"}},\n"traceEvents": [')
        separator = "\n"
        for rank, path in files.items():
            for event in _rank_events(rank, path, every):
                out.write(separator + json.dumps(event))
                separator = ",\n"
        out.write("\n]}\n")
        _to_disk(out)
    aside.replace(target)
    return target


def _rank_events(rank: int, path: Path, every: int) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
    threads: dict[str, int] = {}
    for span in read_spans(path):
        step = span.get("step")
        if step is not None and step % every:
            continue
        thread = span["thread"]
        if thread not in threads:
            threads[thread] = len(threads)
            name = {"name": thread}
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": threads[thread], "args": name}
        yield {
            "ph": "X",
            "name": span["name"],
            "pid": rank,
            "tid": threads[thread],
            "ts": span["start_ns"] / 1000,  # microseconds
            "dur": span["duration_ns"] / 1000,
            "args": {key: span[key] for key in ("step", "error") if key in span},
        }


def read_spans(path: Path) -> Iterator[dict[str, Any]]:
    """A rank that was killed leaves a torn line behind, which is skipped."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue


def _count_lines(path: Path) -> int:
    with path.open("rb") as data:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: data.read(1 << 20), b""))


def _to_disk(out: TextIO) -> None:
    out.flush()
    os.fsync(out.fileno())
