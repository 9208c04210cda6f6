"""What is said when a job must stop: which rank, where, doing what, and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

EXIT_STOPPED = 70  # of a rank that stops because of an alarm (EX_SOFTWARE of sysexits.h)


@dataclass(frozen=True)
class Alarm:
    """kind: died, stuck, failed or overdue; rank, host, pid, stage, step: of the culprit; by: the rank that noticed."""

    kind: str
    rank: int
    host: str
    pid: int
    stage: str
    step: int
    by: int
    cause: str = ""

    def line(self) -> str:
        who = f"rank {self.rank} (host {self.host}, pid {self.pid})"
        where = f"in stage '{self.stage}' of step {self.step}"
        what = {
            "died": f"{who} died {where}",
            "stuck": f"{who} is stuck {where}: {self.cause}",
            "failed": f"{who} failed {where}: {self.cause}",
            "overdue": f"{who} is overdue {where}: {self.cause}",
        }[self.kind]
        return f"{what}; " + ("it stops the job" if self.by == self.rank else f"rank {self.by} stops the job")

    def message(self) -> dict[str, Any]:
        """For the wire; `Alarm(**message)` is the way back."""
        return asdict(self)


def one_line(error: BaseException, limit: int = 300) -> str:
    """`ValueError: the first line of its message`, or just the type where it has none."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}"[:limit] if text else type(error).__name__
