"""State of the process-wide random generators. Data order and sampling use none; dropout or a user's code may."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def capture_rng(device: torch.device) -> dict[str, Any]:
    """States of Python's, NumPy's and torch's default generators, and of the CUDA one of `device`."""
    state: dict[str, Any] = {}
    state.update(python=random.getstate(), numpy=np.random.get_state(), torch=torch.get_rng_state())
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_rng(state: dict[str, Any], device: torch.device) -> None:
    """Continue the generators where `capture_rng` found them."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
