"""`Spans`: one context manager that says what a rank is doing, and for how long.

    with spans("rollout", step=3):
        ...

feeds the `time/*` metrics, NVTX ranges and the rank's part of the timeline.

Names of metrics: a span below `step` gives `time/<name>`; one within another gives `time/<outer>/<name>`; one outside
of any `step` gives `time/between/<name>` and is counted with the step that follows; one in another thread than the one
that made the `Spans` gives `time/background/<name>`. So the `time/<name>` without a further slash never overlap on one
rank, and `time/step` is their sum and a rest.
"""

from __future__ import annotations

import importlib.util
import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from spmd_rl.config.errors import UserError
from spmd_rl.observe.metrics import Metrics

_FLUSH_AT = 512  # events held in memory
STEP = "step"  # the span around all stages of one step
BETWEEN, BACKGROUND = "between", "background"


def nvtx_functions() -> tuple[Callable[[str], Any], Callable[[], Any]]:
    """(push, pop) of NVTX ranges: torch's on CUDA, else those of the package `nvtx`."""
    if torch.cuda.is_available():
        return torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop
    if importlib.util.find_spec("nvtx") is None:
        raise UserError("observe.nvtx=true needs CUDA or the package nvtx: pip install nvtx, or set observe.nvtx=false")
    import nvtx

    return nvtx.push_range, nvtx.pop_range


class Spans:
    """Spans of one rank. May be used from any thread.

    file: where events are appended as JSON lines {name, start_ns, duration_ns, thread, step?, error?}, None: nowhere.
    Start times are wall-clock nanoseconds, measured on the monotonic clock from one common reading, so that durations
    and order within a rank are exact; between nodes they are as good as the nodes' clocks.
    """

    def __init__(self, rank: int = 0, file: Path | None = None, nvtx: bool = False) -> None:
        self.rank = rank
        self._file = file
        self._nvtx = nvtx_functions() if nvtx else None
        self._wall_ns = time.time_ns() - time.perf_counter_ns()
        self._home = threading.get_ident()
        self._stacks: defaultdict[int, list[str]] = defaultdict(list)
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._events: list[str] = []
        self._lock = threading.Lock()
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def __call__(self, name: str, step: int | None = None) -> Iterator[None]:
        """Time the block. An exception passes through, and its type is noted in the timeline."""
        thread = threading.get_ident()
        stack = self._stacks[thread]
        stack.append(name)
        if self._nvtx:
            self._nvtx[0](name)
        error = ""
        start = time.perf_counter_ns()
        try:
            yield
        except BaseException as exception:
            error = type(exception).__name__
            raise
        finally:
            duration = time.perf_counter_ns() - start
            if self._nvtx:
                self._nvtx[1]()
            path = self._path(thread)
            stack.pop()
            if not stack:
                del self._stacks[thread]  # threads come and go
            self._record(name, path, start, duration, step, error)

    def where(self) -> str:
        """What the main thread is in the middle of, outermost first: `step > rollout`. Empty: nothing."""
        return " > ".join(self._stacks.get(self._home, ()))

    def collect(self, metrics: Metrics, slowest: bool = False) -> None:
        """Move the seconds since the last call into `metrics` as `time/<name>`, the mean over the ranks that have
        such a span; with `slowest` also `time_max/<name>`, the slowest rank's."""
        with self._lock:
            seconds, self._seconds = self._seconds, defaultdict(float)
        for path, value in seconds.items():
            metrics.mean(f"time/{path}", value, 1.0)
            if slowest:
                metrics.max(f"time_max/{path}", value)

    def flush(self) -> None:
        """Write the events that are still in memory."""
        with self._lock:
            events, self._events = self._events, []
            if self._file is not None and events:
                with self._file.open("a", encoding="utf-8") as out:
                    out.write("".join(events))

    def _path(self, thread: int) -> str:
        stack = self._stacks[thread]
        inner = [name for name in stack if name != STEP]
        if thread != self._home:
            inner.insert(0, BACKGROUND)
        elif STEP not in stack:
            inner.insert(0, BETWEEN)
        return "/".join(inner or [STEP])

    def _record(self, name: str, path: str, start: int, duration: int, step: int | None, error: str) -> None:
        event = {
            "name": name,
            "start_ns": self._wall_ns + start,
            "duration_ns": duration,
            "thread": threading.current_thread().name,
        }
        if step is not None:
            event["step"] = step
        if error:
            event["error"] = error
        with self._lock:
            self._seconds[path] += duration / 1e9
            if self._file is not None:
                self._events.append(json.dumps(event) + "\n")
        if len(self._events) >= _FLUSH_AT:
            self.flush()
