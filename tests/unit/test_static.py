"""Lint and types, as tests (what ruff or mypy says is the failure's message); the documentation names what there is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHECKED = ("spmd_rl", "tests", "examples", "launch", "perf", "csrc", "setup.py")


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=280)
    return "" if done.returncode == 0 else f"{done.stdout}{done.stderr}"


def test_ruff() -> None:
    assert not run("ruff", "check", "--no-fix", *CHECKED)
    assert not run("ruff", "format", "--check", *CHECKED)


def test_mypy() -> None:
    assert not run("mypy")


def test_tests_that_the_documentation_names_exist() -> None:
    named = {
        (path, test)
        for document in (ROOT / "docs").glob("*.md")
        for path, test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", document.read_text())
    }
    assert len(named) > 15
    missing = [f"{path}::{test}" for path, test in sorted(named) if f"def {test}(" not in (ROOT / path).read_text()]
    assert missing == []
