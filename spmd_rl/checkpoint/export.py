"""Writes trained weights as an ordinary Hugging Face folder: safetensors beside the source model's other files."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from spmd_rl.checkpoint.files import sync_folder, write_durably
from spmd_rl.comm.world import World

SHARD_BYTES = 5_000_000_000
INDEX = "model.safetensors.index.json"
_COPIED = {".json", ".jinja", ".txt", ".model", ".tiktoken", ".py", ".md"}  # config, tokenizer, template, own code
_NOT_COPIED = {"prepared.json"}  # speaks of the source folder


class ExportError(RuntimeError):
    """The export could not be written; the message is one line. What was there before is untouched."""


def export_model(
    source: Path,
    folder: Path,
    weights: Iterable[tuple[str, Tensor]],
    world: World,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Make `folder` a model that transformers and vLLM load: `weights` in `dtype`, all else copied from `source`.

    weights: (Hugging Face name, full tensor), as of `TrainEngine.named_weights`: every rank goes through all of them,
    rank 0 writes. dtype: of floating-point weights; default: the one that the source's config.json names.
    At most one shard of weights is in memory. Written aside and renamed: `folder` is the old one or the whole new one.
    Collective. Raises ExportError on every rank.
    """
    problem: str | None = None
    writer: _Writer | None = None
    if world.rank == 0:
        try:
            writer = _Writer(source, folder, dtype, shard_bytes)
        except (OSError, ValueError) as error:
            problem = str(error)
    for name, tensor in weights:
        # Also after a failure: the gathering of each weight needs all ranks.
        if writer is not None and problem is None:
            try:
                writer.add(name, tensor)
            except Exception as error:  # safetensors has its own exceptions for a full disk
                problem = str(error)
    if writer is not None:
        try:
            if problem is None:
                writer.finish()
        except Exception as error:
            problem = str(error)
        finally:
            writer.clean_up()
    raise_together(problem, folder, world)


def raise_together(problem: str | None, folder: Path, world: World) -> None:
    """Raises ExportError on every rank where rank 0 has a `problem`. Collective."""
    answer = [problem]
    dist.broadcast_object_list(answer, group=world.control, group_src=0)
    if answer[0] is not None:
        raise ExportError(f"export to {folder} failed: {answer[0].splitlines()[0]}")


def replace_folder(folder: Path, temporary: Path) -> None:
    """Give the whole `temporary` the name `folder`; what had it is removed."""
    replaced = folder.with_name(f".{folder.name}.old-{secrets.token_hex(4)}")
    if folder.exists():
        folder.rename(replaced)
    temporary.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


class _Writer:
    """Collects weights into shards in a temporary folder beside the target."""

    def __init__(self, source: Path, folder: Path, dtype: torch.dtype | None, shard_bytes: int) -> None:
        if folder.resolve() == source.resolve():
            raise ValueError("the source model is not overwritten; give another folder")
        self.folder = folder
        self.temporary = folder.with_name(f".{folder.name}.tmp-{secrets.token_hex(4)}")
        self.config: dict[str, Any] = json.loads((source / "config.json").read_text(encoding="utf-8"))
        self.dtype = dtype or _named_dtype(self.config)
        self.tied = bool(self.config.get("tie_word_embeddings", False))
        self.shard_bytes = shard_bytes
        self.shard: dict[str, Tensor] = {}
        self.shard_size = 0
        self.shards: list[list[str]] = []
        self.total = 0
        self.temporary.mkdir(parents=True)
        for file in sorted(source.iterdir()):
            if file.is_file() and file.suffix in _COPIED and not _is_of_weights(file.name):
                shutil.copy(file, self.temporary / file.name)

    def add(self, name: str, tensor: Tensor) -> None:
        if self.tied and name == "lm_head.weight":  # the embedding, under its second name
            return
        kind = self.dtype if tensor.is_floating_point() else tensor.dtype
        # A copy: the source may be a view or a buffer that is used again for the next weight.
        value = tensor.detach().to(device="cpu", dtype=kind, copy=True).contiguous()
        size = value.numel() * value.element_size()
        if self.shard and self.shard_size + size > self.shard_bytes:
            self._flush()
        self.shard[name] = value
        self.shard_size += size
        self.total += size

    def finish(self) -> None:
        if self.shard:
            self._flush()
        names = self._final_names()
        for index, name in enumerate(names):
            self._part(index).rename(self.temporary / name)
        if len(names) > 1:
            weight_map = {weight: name for name, held in zip(names, self.shards, strict=True) for weight in held}
            content = {"metadata": {"total_size": self.total}, "weight_map": dict(sorted(weight_map.items()))}
            write_durably(self.temporary / INDEX, json.dumps(content, indent=2) + "\n")
        config = {key: value for key, value in self.config.items() if key != "torch_dtype"}
        config["dtype"] = str(self.dtype).removeprefix("torch.")
        write_durably(self.temporary / "config.json", json.dumps(config, indent=2) + "\n")
        replace_folder(self.folder, self.temporary)

    def clean_up(self) -> None:
        """Nothing is left aside after a failure; after a success there is nothing to remove."""
        shutil.rmtree(self.temporary, ignore_errors=True)

    def _flush(self) -> None:
        file = self._part(len(self.shards))
        save_file(self.shard, file, metadata={"format": "pt"})
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
        self.shards.append(list(self.shard))
        self.shard, self.shard_size = {}, 0

    def _part(self, index: int) -> Path:
        return self.temporary / f"part-{index:05d}.safetensors"

    def _final_names(self) -> list[str]:
        count = len(self.shards)
        if count == 1:
            return ["model.safetensors"]
        return [f"model-{index + 1:05d}-of-{count:05d}.safetensors" for index in range(count)]


def _is_of_weights(name: str) -> bool:
    return name in _NOT_COPIED or name.endswith(".index.json")


def _named_dtype(config: dict[str, Any]) -> torch.dtype:
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    found = getattr(torch, str(name), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"config.json names the dtype {name!r}, which torch does not have")
    return found
