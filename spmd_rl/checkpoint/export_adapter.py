"""Writes LoRA adapters as a folder in the format of PEFT."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from spmd_rl.checkpoint.export import raise_together, replace_folder
from spmd_rl.checkpoint.files import write_durably
from spmd_rl.comm.world import World


def export_adapter(
    folder: Path, settings: Mapping[str, Any], weights: Iterable[tuple[str, Tensor]], world: World
) -> None:
    """Make `folder` an adapter that `peft.PeftModel.from_pretrained(base, folder)` loads.

    settings: for adapter_config.json; weights: (name in the file, full tensor): every rank goes through all of them,
    rank 0 writes. Written aside and renamed. Collective. Raises ExportError on every rank.
    """
    tensors = {name: tensor.cpu().contiguous() for name, tensor in weights}
    problem: str | None = None
    if world.rank == 0:
        try:
            _write(folder, settings, tensors)
        except Exception as error:  # safetensors has its own exceptions for a full disk
            problem = str(error)
    raise_together(problem, folder, world)


def _write(folder: Path, settings: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    temporary = folder.with_name(f".{folder.name}.tmp-{secrets.token_hex(4)}")
    temporary.mkdir(parents=True)
    try:
        save_file(tensors, temporary / "adapter_model.safetensors", metadata={"format": "pt"})
        write_durably(temporary / "adapter_config.json", json.dumps(settings, indent=2, sort_keys=True) + "\n")
        replace_folder(folder, temporary)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
