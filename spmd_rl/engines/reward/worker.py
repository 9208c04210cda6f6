"""The worker process: loads the reward functions once, then makes calls until its rank hangs up.

It is started by `process.py` as a plain interpreter (no fork of the rank, no import of the rank's main module), so it
never loads torch unless a reward function does.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple

from spmd_rl.config.errors import UserError
from spmd_rl.engines.reward.calls import Call, Outcome, Sample, run_calls
from spmd_rl.engines.reward.functions import FunctionSpec, RewardFunction

PR_SET_PDEATHSIG = 1
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Setup(NamedTuple):
    """First message to the worker."""

    functions: Sequence[FunctionSpec]
    timeout_s: float


class Work(NamedTuple):
    """Calls to make, with the samples they are about."""

    calls: Sequence[Call]
    samples: dict[int, Sample]


class Ready(NamedTuple):
    """The functions are loaded; their `timeout_value`s and which of them are async."""

    timeout_values: Sequence[float | None]
    are_async: Sequence[bool]


class Refused(NamedTuple):
    """The functions can't be loaded: one line."""

    message: str


class Result(NamedTuple):
    call: Call
    outcomes: list[Outcome]


class Done(NamedTuple):
    """All calls of the last `Work` are made."""


def main(descriptor: int, parent: int) -> None:
    """`descriptor`: this process's end of the connection; `parent`: process id of the rank."""
    _follow(parent)
    connection = Connection(descriptor)
    try:
        setup: Setup = connection.recv()
        try:
            functions = [RewardFunction.load(spec) for spec in setup.functions]
        except UserError as error:
            connection.send(Refused(str(error)))
            return
        connection.send(Ready([f.timeout_value for f in functions], [f.is_async for f in functions]))
        with asyncio.Runner() as runner:
            while True:
                work: Work = connection.recv()
                run_calls(
                    functions,
                    work.calls,
                    work.samples,
                    runner,
                    setup.timeout_s,
                    lambda call, outcomes: connection.send(Result(call, outcomes)),
                )
                connection.send(Done())
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the rank has hung up


def _follow(parent: int) -> None:
    """Live as long as the rank, and no longer: Ctrl-C and a scheduler's warnings are the rank's business."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
