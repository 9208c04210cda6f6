"""`report.html`: what a run did, in one file that needs nothing else. `python -m spmd_rl.observe.report RUN_FOLDER`."""

from __future__ import annotations

from pathlib import Path

from spmd_rl.observe.report.data import read_run
from spmd_rl.observe.report.page import page


def write_report(run_folder: Path | str) -> Path:
    """Write `report.html` into the run folder, from the files that are there, and return its path.

    Works on a finished, a running and an interrupted run. Raises UserError where it is no run folder.
    """
    folder = Path(run_folder)
    target = folder / "report.html"
    aside = target.with_suffix(".html.part")
    aside.write_text(page(read_run(folder)), encoding="utf-8")
    aside.replace(target)
    return target
