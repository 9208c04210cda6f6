"""How much memory a rank has needed at most."""

from __future__ import annotations

import resource
import sys

import torch

from spmd_rl.observe.metrics import Metrics

GIB = 1024**3


def host_peak_gib() -> float:
    """Peak resident set of this process since it started, in GiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB on Linux
    return peak * unit / GIB


def peak_gib(device: torch.device) -> float:
    """Peak of the memory that limits a run, in GiB: tensors on a CUDA device, the resident set on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    return host_peak_gib()


def add_memory(metrics: Metrics, device: torch.device) -> None:
    """`memory/peak_gib` and `memory/host_peak_gib` of the rank that needs most."""
    metrics.max("memory/peak_gib", peak_gib(device))
    metrics.max("memory/host_peak_gib", host_peak_gib())
