"""What a rank is doing, and until when it should have done it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_RAISED_IN = "_spmd_rl_stage"  # attribute of an exception: where it was raised


@dataclass
class Stage:
    """began: time.monotonic(); deadline_s: seconds from then."""

    name: str
    step: int
    began: float
    deadline_s: float


class Stages:
    """The stages that the main thread is in, innermost last; read by other threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[Stage] = []
        self._resting = Stage("start", 0, time.monotonic(), math.inf)  # between stages: the last one, without deadline

    @contextmanager
    def entered(self, name: str, step: int, deadline_s: float) -> Iterator[None]:
        """An exception that leaves the block remembers the innermost stage: that is the one to name."""
        stage = Stage(name, step, time.monotonic(), deadline_s)
        with self._lock:
            self._open.append(stage)
        try:
            yield
        except BaseException as error:
            vars(error).setdefault(_RAISED_IN, (name, step))
            raise
        finally:
            with self._lock:
                self._open.remove(stage)
                self._resting = stage

    def now(self) -> Stage:
        with self._lock:
            return self._open[-1] if self._open else self._resting

    def overdue(self) -> Stage | None:
        """The innermost stage that is beyond its deadline."""
        now = time.monotonic()
        with self._lock:
            late = [stage for stage in self._open if now - stage.began > stage.deadline_s]
        return late[-1] if late else None

    def raised_in(self, error: BaseException) -> tuple[str, int]:
        """Name and step of the stage that the exception left first; the present one where it left none."""
        now = self.now()
        found: tuple[str, int] = vars(error).get(_RAISED_IN, (now.name, now.step))
        return found
