"""Whole single-process runs one after the other in one process, so that the libraries are imported once.

usage: several.py '[["config.yaml", "section.key=value"], ...]'
"""

from __future__ import annotations

import json
import os
import sys

from spmd_rl.comm.bootstrap import leave
from spmd_rl.main import main

if __name__ == "__main__":
    before = dict(os.environ)
    for arguments in json.loads(sys.argv[1]):
        os.environ.clear()
        os.environ.update(before)  # without the meeting point of the run before
        print("run", *arguments, flush=True)
        status = main(arguments)
        if status:
            leave(status)
    leave(0)
