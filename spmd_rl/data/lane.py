"""`Lane`: a channel and what runs on it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from spmd_rl.comm.transport import Channel
from spmd_rl.data.agreement import ExchangeError, Known
from spmd_rl.data.batch import Batch
from spmd_rl.data.movers import Mover


class Lane:
    """Runs jobs one by one in the order in which they were submitted, in a thread of its own or in the waiting one.

    The order is the same on all ranks of the channel, so its collectives cannot cross; and a late peer holds up no
    other lane. Whoever waits for a job that the thread has not begun runs it itself: that saves two thread switches,
    which cost more than a small exchange.
    """

    def __init__(self, channel: Channel, mover: Mover, device: torch.device) -> None:
        self.channel = channel
        self.mover = mover
        self.known: dict[str, Known] = {}  # by edge
        self.broken: str | None = None  # why nothing can be run any more
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._turn = threading.Lock()  # held by whoever runs a job
        self._submitted = threading.Semaphore(0)
        self._closed = False
        name = f"exchange-{'-'.join(map(str, channel.ranks[:4]))}"
        # A daemon: a process that ends because of an error elsewhere must not wait here for a peer.
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._jobs.append((future, job))
        self._submitted.release()
        return future

    def result(self, future: Future[Any]) -> Any:
        """The job's result, or its exception. Runs what is due before, and the job itself, unless the thread does."""
        while not future.done() and self._turn.acquire(blocking=False):
            try:
                self._run_next()
            finally:
                self._turn.release()
        return future.result()

    def close(self) -> None:
        """Ends the thread once all jobs are done."""
        self._closed = True
        self._submitted.release()
        self._thread.join()

    def _work(self) -> None:
        while True:
            self._submitted.acquire()
            with self._turn:
                if self._jobs:
                    self._run_next()
                elif self._closed:
                    return

    def _run_next(self) -> None:
        if not self._jobs:
            return
        future, job = self._jobs.popleft()
        try:
            if self.broken is not None:
                raise ExchangeError(f"the channel is unusable since {self.broken}")
            result = job()
        except BaseException as error:  # for whoever waits
            future.set_exception(error)
        else:
            future.set_result(result)

    def record(self, batch: Batch) -> torch.cuda.Event | None:
        """The point in the caller's CUDA stream at which the batch is complete. Its memory is not given to others
        while the lane's stream still reads it, even if the caller lets go of it."""
        if self._stream is None:
            return None
        _used_on(batch, self._stream)
        return torch.cuda.current_stream(self._device).record_event()

    def stream_after(self, ready: torch.cuda.Event | None) -> AbstractContextManager[Any]:
        """Kernels launched inside run on the lane's own stream, after `ready`."""
        if self._stream is None or ready is None:
            return nullcontext()
        self._stream.wait_event(ready)
        return torch.cuda.stream(self._stream)

    def hand_over(self, batch: Batch) -> None:
        """What the caller launches from now on comes after the lane's work, and may use the batch's memory."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            _used_on(batch, current)


def _used_on(batch: Batch, stream: torch.cuda.Stream) -> None:
    for column in batch.columns.values():
        if column.values.is_cuda:
            column.values.record_stream(stream)
