"""This process: last words, a quick end, and what its forked children must not keep."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import weakref
from collections.abc import Callable


def say(line: str) -> None:
    """To stderr past Python's buffers and locks, which a stuck thread may hold."""
    with contextlib.suppress(OSError):
        os.write(2, f"spmd_rl: {line}\n".encode())


def flush_and_exit(code: int) -> None:
    """End the process now: the main thread may sit in a collective for ever. Output gets half a second to leave."""

    def flush() -> None:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()

    thread = threading.Thread(target=flush, daemon=True)
    thread.start()
    thread.join(0.5)
    os._exit(code)


def in_forked_children(action: Callable[[], None]) -> None:
    """Call a bound method in every child that this process forks from now on, as long as its object lives."""
    reference = weakref.WeakMethod(action)

    def run() -> None:
        method = reference()
        if method is not None:
            method()

    os.register_at_fork(after_in_child=run)


def machine() -> str:
    """This machine and its process table: where a pid means the same process."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()}/{os.getpid()}"
