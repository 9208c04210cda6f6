"""A polite request to stop (a signal, or the program's own), which all ranks follow at the same step."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from spmd_rl.comm.process import in_forked_children
from spmd_rl.comm.world import World

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)  # USR1, USR2: what schedulers send


class StopFlag:
    """Raised by a signal on any rank; read by all ranks together at step borders. Make it in the main thread.

        with StopFlag() as stop:
            for step in ...:
                if stop.agreed(world): break

    A second SIGINT ends the process at once (exit status 130), whatever the main thread is doing.
    """

    def __init__(self, signals: Sequence[signal.Signals] = STOP_SIGNALS) -> None:
        self.reason = ""  # what raised the flag here, e.g. "SIGTERM"; empty where only another rank was asked
        self._interrupts = 0
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._previous: dict[int, Any] = {number: signal.signal(number, self._handle) for number in signals}
        self._previous_fd = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        in_forked_children(self._restore)  # a forked worker must end by SIGTERM as usual
        threading.Thread(target=self._count, name="signals", daemon=True).start()

    @property
    def is_set(self) -> bool:
        """Whether *this* rank was asked to stop. Act on `agreed` alone, or ranks part ways."""
        return bool(self.reason)

    def set(self, reason: str = "a request") -> None:
        self.reason = self.reason or reason

    def agreed(self, world: World) -> bool:
        """Whether any rank was asked to stop. Collective: one small all-reduce over the control group."""
        flag = torch.tensor([int(self.is_set)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=world.control)
        return bool(flag.item())

    def close(self) -> None:
        """Put back the handlers that were there before."""
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._write.close()  # ends the counting thread

    def __enter__(self) -> StopFlag:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _restore(self) -> None:
        if self._write.fileno() >= 0:
            with contextlib.suppress(ValueError):  # forked off the main thread
                self.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, once it is back in Python."""
        self.set(signal.Signals(number).name)

    def _count(self) -> None:
        """In a thread of its own, told by the C half of Python's signal handling: works during a long collective."""
        with self._read, contextlib.suppress(OSError):
            while numbers := self._read.recv(64):
                for number in numbers:
                    if number in self._previous:
                        self.set(signal.Signals(number).name)
                    self._interrupts += number == signal.SIGINT
                if self._interrupts >= 2:
                    os.write(2, b"spmd_rl: interrupted twice, ends at once\n")
                    os._exit(128 + signal.SIGINT)
