"""What the tests ask of other processes."""

from __future__ import annotations

import time
from pathlib import Path


def running(pid: int) -> bool:
    """False once the process has ended, also while nobody has asked for its exit status yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:  # there is no such process, or it ended between open and read
        return False


def ended(pid: int, within_s: float = 10.0) -> bool:
    """Waits until the process has ended; whether it did."""
    deadline = time.monotonic() + within_s
    while running(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
