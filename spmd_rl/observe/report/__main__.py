"""`python -m spmd_rl.observe.report RUN_FOLDER` writes the report anew and prints where it lies."""

from __future__ import annotations

import sys

from spmd_rl.config.errors import UserError
from spmd_rl.observe.report import write_report


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m spmd_rl.observe.report RUN_FOLDER", file=sys.stderr)
        return 2
    try:
        print(write_report(arguments[0]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
