"""Deals calls out to worker processes and gathers what they report; one thread of the rank.

Every call has a time limit of its own. A worker reports each call as it ends, so when one takes too long or takes the
worker down with it, the guilty sample is known: the worker is ended, that call has its error, and the calls behind it
go to another worker.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import wait

from spmd_rl.config.schema import RewardConfig
from spmd_rl.engines.reward.calls import Call, Outcome, too_late
from spmd_rl.engines.reward.functions import FunctionSpec
from spmd_rl.engines.reward.pending import Pending
from spmd_rl.engines.reward.process import WorkerProcess
from spmd_rl.engines.reward.worker import Done, Ready, Refused, Result, Work

GRACE_S = 1.0  # async calls keep the time limit themselves; their worker is ended where they don't
PARTS_PER_WORKER = 4  # the calls of a step are dealt out in so many parts: few messages, and no long wait for the last


class Manager:
    """Workers for the reward functions of `config`.

    known: set once it is clear whether the functions can be loaded; refusal: why they can't, or "".
    """

    def __init__(self, config: RewardConfig, specs: Sequence[FunctionSpec]) -> None:
        self.known = threading.Event()
        self.refusal = ""
        self._config, self._specs = config, specs
        self._arrived: deque[Pending] = deque()
        self._parts: deque[tuple[Pending, list[Call]]] = deque()
        self._workers: list[WorkerProcess] = []
        self._loaded = Ready((), ())
        self._closed = False
        self._lock = threading.Lock()  # of _closed and _arrived: nothing arrives after the end
        self._wake, self._waker = os.pipe()
        self._thread = threading.Thread(target=self._run, name="rewards", daemon=True)
        self._thread.start()

    def submit(self, pending: Pending) -> None:
        with self._lock:
            if self.refusal or self._closed:
                pending.fail(self.refusal or "the reward pool is closed")
                return
            self._arrived.append(pending)
            os.write(self._waker, b"x")

    def close(self) -> None:
        """End the workers; what is still being judged fails."""
        with self._lock:
            if self._waker < 0:
                return
            self._closed = True
            waker, self._waker = self._waker, -1
        os.write(waker, b"x")
        self._thread.join()
        os.close(waker)
        os.close(self._wake)

    def _run(self) -> None:
        reason = "the reward pool is closed"
        try:
            while not self._closed and not self.refusal:
                while len(self._workers) < self._config.workers:
                    self._workers.append(WorkerProcess(self._specs, self._config.timeout_s))
                self._assign()
                self._listen()
        except Exception as error:
            reason = f"the reward pool failed: {type(error).__name__}: {error}"
            raise
        finally:
            with self._lock:
                self._closed = True
                self.refusal = self.refusal or ("" if self.known.is_set() else reason)
            self.known.set()
            for pending in [*self._arrived, *(p for p, _ in self._parts), *(w.owner for w in self._workers if w.owner)]:
                pending.fail(self.refusal or reason)
            for worker in self._workers:
                worker.kill()

    def _assign(self) -> None:
        if self.known.is_set():
            while self._arrived:
                pending = self._arrived.popleft()
                parts = deal(self._specs, self._loaded.are_async, len(pending.samples), self._config.workers)
                self._parts.extend((pending, part) for part in parts)
        for worker in self._workers:
            while self._parts and worker.ready and worker.owner is None:
                pending, calls = self._parts.popleft()
                if not pending.done():
                    concerned = {place for call in calls for place in call.samples}
                    worker.give(pending, Work(calls, {place: pending.samples[place] for place in concerned}))

    def _listen(self) -> None:
        """Wait for messages, at most until a worker's time is over; take them in; end the workers that are late."""
        limits = [limit for worker in self._workers if (limit := self._limit(worker)) is not None]
        timeout_s = max(0.0, min(limits) - time.monotonic()) if limits else None
        connections = {worker.connection: worker for worker in self._workers}
        for ready in wait([self._wake, *connections], timeout_s):
            if ready == self._wake:
                os.read(self._wake, 4096)
            else:
                self._receive(connections[ready])  # type: ignore[index]
        for worker in list(self._workers):
            limit = self._limit(worker)
            # A message that is there but not read yet says that this thread was late, not the worker.
            if limit is not None and time.monotonic() >= limit and not worker.connection.poll():
                self._end_late(worker)

    def _limit(self, worker: WorkerProcess) -> float | None:
        if not worker.ready:
            return worker.heard + self._config.load_timeout_s
        if worker.owner is None:
            return None
        return worker.heard + self._config.timeout_s + (GRACE_S if self._is_async(worker.open) else 0.0)

    def _receive(self, worker: WorkerProcess) -> None:
        try:
            message = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            self._end_lost(worker)
            return
        worker.heard = time.monotonic()
        match message:
            case Result(call, outcomes):
                worker.open.remove(call)
                worker.owner.record(call, outcomes)
            case Done():
                worker.owner = None
            case Ready():
                worker.ready = True
                self._loaded = message
                self.known.set()
            case Refused(text):
                self._refuse(text)

    def _end_late(self, worker: WorkerProcess) -> None:
        if not worker.ready:
            self._refuse(
                f"reward functions {self._names()} took longer than reward.load_timeout_s="
                f"{self._config.load_timeout_s:g} to import: what does their module do then?"
            )
            return
        guilty = worker.open[0] if worker.open else None
        value = self._loaded.timeout_values[guilty.function] if guilty else None
        self._end(worker, too_late(self._config.timeout_s, value))

    def _end_lost(self, worker: WorkerProcess) -> None:
        code = worker.exit_code(timeout_s=5.0)
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        if not worker.ready:
            self._refuse(f"reward functions {self._names()} ended their process ({how}) while they were loaded")
            return
        self._end(worker, Outcome.failed(f"ended its process ({how})"))

    def _end(self, worker: WorkerProcess, outcome: Outcome) -> None:
        """Give the guilty call its outcome and the others of this worker to another one."""
        self._workers.remove(worker)
        worker.kill()
        if worker.owner is None or not worker.open:
            return
        if self._is_async(worker.open) and len(worker.open) > 1:
            # They ran side by side: only alone does the guilty one show.
            self._parts.extendleft((worker.owner, [call]) for call in reversed(worker.open))
            return
        guilty, *rest = worker.open
        worker.owner.record(guilty, [outcome] * len(guilty.samples))
        if rest:
            self._parts.appendleft((worker.owner, rest))

    def _refuse(self, message: str) -> None:
        with self._lock:
            self.refusal = message

    def _is_async(self, calls: Sequence[Call]) -> bool:
        return bool(calls) and self._loaded.are_async[calls[0].function]

    def _names(self) -> str:
        return ", ".join(repr(spec.name) for spec in self._specs)


def deal(specs: Sequence[FunctionSpec], are_async: Sequence[bool], samples: int, workers: int) -> list[list[Call]]:
    """All calls for `samples` samples, in parts for one worker each.

    A batched function is one call over all samples. The others are dealt by samples: ordinary ones in small parts,
    which a worker does one call after the other; async ones in one part per worker, which it does all at once.
    """
    batched = [[Call(f, tuple(range(samples)))] for f, spec in enumerate(specs) if spec.batched]
    single = [f for f, spec in enumerate(specs) if not spec.batched]
    ordinary = [f for f in single if not are_async[f]]
    at_once = [f for f in single if are_async[f]]
    return [
        *batched,
        *([Call(f, (i,)) for i in part for f in at_once] for part in _split(samples, workers) if at_once),
        *(
            [Call(f, (i,)) for i in part for f in ordinary]
            for part in _split(samples, workers * PARTS_PER_WORKER)
            if ordinary
        ),
    ]


def _split(count: int, parts: int) -> list[range]:
    """[0, count) as up to `parts` ranges of nearly equal size, none of them empty."""
    parts = min(parts, count)
    return [range(k * count // parts, (k + 1) * count // parts) for k in range(parts)]
