"""One run at a time in a folder: two that write the same files would ruin each other's records."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import time
from pathlib import Path
from typing import IO

from spmd_rl.config.errors import UserError

LOCK_FILE = "run.lock"
_TURN_S = 0.2
log = logging.getLogger(__name__)


def lock_folder(folder: Path, wait_s: float) -> IO[str]:
    """Hold `folder` as long as the returned file is open, at the latest until this process ends, however it ends.

    wait_s: the last ranks of a run that was killed a moment ago need some seconds to go. Raises UserError, naming the
    process that holds it, after that. On a file system without locks there is a warning and no protection.
    """
    file = (folder / LOCK_FILE).open("a+", encoding="utf-8")
    until = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                log.warning("%s can't be locked (%s): start no second run there", folder, error.strerror)
                return file
        if time.monotonic() > until:
            file.seek(0)
            holder = file.read().strip() or "an unknown process"
            file.close()
            raise UserError(f"another run is at work in {folder} ({holder}): wait for it, or give another run.folder")
        time.sleep(_TURN_S)
    file.truncate(0)
    file.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file
