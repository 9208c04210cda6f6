"""The rank's handle on one worker process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Pipe
from typing import Any

from spmd_rl.engines.reward.calls import Call
from spmd_rl.engines.reward.functions import FunctionSpec
from spmd_rl.engines.reward.worker import Setup, Work

START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); "
    "from spmd_rl.engines.reward.worker import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)


class WorkerProcess:
    """A worker, what it is working on, and when it was last heard of.

    Make it in a thread that outlives it: Linux ends the worker when the thread that started it ends.
    """

    def __init__(self, functions: Sequence[FunctionSpec], timeout_s: float) -> None:
        self.connection, theirs = Pipe()
        # A child of a rank must not spread out over the cores that the rank computes on.
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        command = [sys.executable, "-c", START, str(theirs.fileno()), str(os.getpid()), json.dumps(sys.path)]
        # A process group of its own, so that what a reward function started ends with it.
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, env=environment, pass_fds=[theirs.fileno()], process_group=0
        )
        theirs.close()
        self.ready = False
        self.owner: Any = None  # whose calls it makes, None when idle
        self.open: list[Call] = []  # calls that it has not reported yet, in its order
        self.heard = time.monotonic()
        self.send(Setup(functions, timeout_s))

    def give(self, owner: Any, work: Work) -> None:
        self.owner, self.open = owner, list(work.calls)
        self.send(work)

    def send(self, message: Any) -> None:
        """A worker that is gone is noticed when it is read from."""
        self.heard = time.monotonic()
        try:
            self.connection.send(message)
        except (BrokenPipeError, ConnectionResetError):
            return

    def exit_code(self, timeout_s: float) -> int | None:
        """Negative: the signal that ended it; None: it still runs."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        self.connection.close()
        # The leader has not been waited for unless it ended by itself, so its number is still its own.
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
