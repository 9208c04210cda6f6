"""torch's launcher without the tracebacks about itself, which would bury what the ranks have said last.

Used by torchrun.sh; takes the arguments of `torch.distributed.run`. Its exit status is the least of the ranks that
failed, or 128 + the number of the signal that ended one or asked the launcher to stop.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

_HAVE_SPOKEN = (1, 2, 70)  # exit statuses of ranks that have said why: a traceback, an error line, another's failure


def launch(arguments: Sequence[str]) -> int:
    """Start the ranks and wait for them; the exit status."""
    logging.disable(logging.ERROR)  # whom it signals and who failed; what stops the launcher itself is an exception
    try:
        main(list(arguments))
    except SignalException as stopped:
        _say(f"stopped by {signal.Signals(stopped.sigval).name}")
        return 128 + int(stopped.sigval)
    except ChildFailedError as failed:
        # Those that were asked to stop because others had failed are no cause.
        causes = {rank: each for rank, each in failed.failures.items() if each.exitcode != -signal.SIGTERM}
        for rank, failure in sorted((causes or failed.failures).items()):
            if failure.exitcode < 0:
                memory = " (is the memory full?)" if failure.exitcode == -signal.SIGKILL else ""
                _say(f"rank {rank} (pid {failure.pid}) was ended by {failure.signal_name()}{memory}")
            elif failure.exitcode not in _HAVE_SPOKEN:
                _say(f"rank {rank} (pid {failure.pid}) ended with status {failure.exitcode}")
        status = min(failure.exitcode for failure in (causes or failed.failures).values())
        return status if status > 0 else 128 - status
    return 0


def _say(line: str) -> None:
    print(f"launcher: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
