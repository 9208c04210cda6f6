"""Exported folders load in transformers with the same outputs, whole or in shards, and never half."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from spmd_rl.checkpoint.export import ExportError, export_model
from spmd_rl.comm.world import World
from tests.tiny_model import make_tiny_model
from tests.world.harness import run_world


def weights(source: str, scale: float) -> Iterator[tuple[str, Tensor]]:
    """float32 weights, each a view into one reused buffer, as an engine that gathers shards may give them."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    state = dict(model.named_parameters()) | {"lm_head.weight": model.lm_head.weight}
    buffer = torch.empty(max(value.numel() for value in state.values()))
    for name, value in state.items():
        view = buffer[: value.numel()].view(value.shape)
        view.copy_(value.detach() * scale)
        yield name, view


def export(world: World, source: str, target: str, occupied: str) -> dict[str, Any]:
    where = Path(target)
    export_model(Path(source), where / "whole", weights(source, 0.5), world)
    export_model(Path(source), where / "whole", weights(source, 1.0), world, dtype=torch.bfloat16)  # replaces it
    export_model(Path(source), where / "shards", weights(source, 1.0), world, shard_bytes=40_000)
    errors, drained = [], 0

    def counted() -> Iterator[tuple[str, Tensor]]:
        nonlocal drained
        for item in weights(source, 1.0):
            drained += 1
            yield item

    for folder in (Path(occupied) / "model", Path(source)):
        try:
            export_model(Path(source), folder, counted(), world)
        except ExportError as error:
            errors.append(str(error))
    return {"errors": errors, "drained": drained}


def test_export_loads_and_fails_as_one(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "source")
    (source / "prepared.json").write_text("{}")
    (tmp_path / "file").touch()
    args = {"source": str(source), "target": str(tmp_path / "out"), "occupied": str(tmp_path / "file")}
    ranks = run_world(export, timeout_s=120, ranks=2, args=args).check().ranks
    assert ranks[0] == ranks[1] and ranks[0]["drained"] > 20  # rank 1's gathering goes on after rank 0's failure
    occupied, onto_source = ranks[0]["errors"]
    assert "Not a directory" in occupied and "the source model is not overwritten" in onto_source

    shards = sorted((tmp_path / "out" / "shards").glob("*.safetensors"))
    assert len(shards) > 2 and all(shard.stat().st_size < 80_000 for shard in shards)
    index = json.loads((tmp_path / "out" / "shards" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {shard.name for shard in shards}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["shards", "whole"]

    tokens = AutoTokenizer.from_pretrained(tmp_path / "out" / "whole").apply_chat_template(
        [{"role": "user", "content": "2 + 2 = 四"}], return_tensors="pt", add_generation_prompt=True, return_dict=True
    )
    with torch.no_grad():
        wanted = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)(**tokens).logits
        shards_give = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "shards", dtype="auto")(**tokens).logits
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "whole", dtype="auto")
        whole_gives = whole(**tokens).logits.float()
    assert torch.equal(wanted, shards_give)
    assert whole.dtype == torch.bfloat16
    assert torch.allclose(wanted, whole_gives, atol=0.15, rtol=0.1) and not torch.equal(wanted, whole_gives)
    assert not (tmp_path / "out" / "whole" / "prepared.json").exists()
