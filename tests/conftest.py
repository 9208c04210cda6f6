"""What holds for every test: no network, few threads, deterministic strings, and the small real model."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# Before torch or transformers is imported, and inherited by every process that a test starts.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Set in many containers; every process would compile torch and all of ours anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct; launch/test.sh makes it before it starts pytest."""
    folder = ROOT / "models" / "SmolLM2-135M-Instruct"
    if not (folder / "config.json").exists():
        pytest.fail(f"{folder} is not there: run launch/prepare_model.py first")
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that this machine cannot run is skipped with its reason, which the summary shows."""
    for item in items:
        if item.get_closest_marker("root") and os.geteuid() != 0:
            item.add_marker(pytest.mark.skip(reason="needs root to mount a small disk"))
        if item.get_closest_marker("gpu"):
            import torch

            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
