"""LoRA on real ranks: only adapters learn, are saved and are sent merged; the same training on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from tests.tiny_model import make_tiny_model
from tests.world import lora_cases as cases
from tests.world.harness import run_world

TIMEOUT_S = 240


def tiny(folder: Path, seed: int = 0) -> str:
    return str(make_tiny_model(folder, heads=4, kv_heads=2, hidden=32, head_dim=16, seed=seed))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, model: str) -> tuple[Path, list[Any]]:
    out = tmp_path_factory.mktemp("two")
    args = {"folder": model, "out": str(out), "shard": "full"}
    return out, run_world(cases.train, 2, "torchrun", TIMEOUT_S, args).check().ranks


def compared(steps: list[dict[str, float]]) -> list[dict[str, float]]:
    """A group that is cut between ranks has its prompt computed on both."""
    return [{name: value for name, value in step.items() if name != "tokens/trained"} for step in steps]


def test_only_adapters_learn_and_the_base_is_the_reference(two: tuple[Path, list[Any]]) -> None:
    adapters = 0
    for found in two[1]:
        assert found["base"] and found["trained"] and found["reference"] <= 1e-6
        assert len(found["with gradient"]) == 2 * 7 * 2  # A and B of 7 layers in each of 2
        assert all(".lora_" in name for name in found["with gradient"])
        assert found["saved"] == sorted(found["with gradient"])
        adapters = found["held"]
    # r (in + out): q 32+64, k and v 32+32, o 64+32, gate and up 32+64, down 64+32
    assert adapters == 2 * 4 * (96 + 64 + 64 + 96 + 96 + 96 + 96)


@pytest.mark.parametrize("shard", ["full", "keep"])
def test_one_rank_and_kept_parameters_give_the_same_training(
    two: tuple[Path, list[Any]], model: str, tmp_path: Path, shard: str
) -> None:
    args = {"folder": model, "out": str(tmp_path), "shard": shard}
    ranks, launcher = (1, "single") if shard == "full" else (2, "torchrun")
    found = run_world(cases.train, ranks, launcher, TIMEOUT_S, args).check().ranks[0]
    for mine, theirs in zip(compared(found["steps"]), compared(two[1][0]["steps"]), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    assert found["logprobs"] == pytest.approx(two[1][0]["logprobs"], abs=1e-4)


def test_a_checkpoint_goes_on_on_one_rank_and_refuses_another_base(
    two: tuple[Path, list[Any]], model: str, tmp_path: Path
) -> None:
    out, ranks = two
    args = {"folder": model, "out": str(out), "other": tiny(tmp_path / "other", seed=5)}
    found = run_world(cases.go_on, 1, "single", TIMEOUT_S, args).check().ranks[0]
    assert found["version"] == 3
    assert found["logprobs"] == pytest.approx(ranks[0]["logprobs"], abs=1e-5)
    for mine, theirs in zip(compared(found["steps"]), compared(ranks[0]["steps"][3:]), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    assert "LoRA adapters belong to a model other than" in found["other"]


def test_transformers_loads_the_merged_model_and_peft_the_adapter(two: tuple[Path, list[Any]], model: str) -> None:
    out, _ = two
    ids = torch.tensor([[5, 77, 140, 9, 33, 250]])
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        plain = base(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32)(ids).logits
        beside = PeftModel.from_pretrained(base, out / "adapter")(ids).logits
    assert float((merged - plain).abs().max()) > 1e-2
    torch.testing.assert_close(beside, merged, atol=1e-5, rtol=1e-5)


def test_bfloat16_keeps_adapters_and_moments_in_float32(model: str) -> None:
    with safe_open(Path(model) / "model.safetensors", "pt") as file:
        names = sorted(file.keys())
    for found in run_world(cases.bf16, 2, "torchrun", TIMEOUT_S, {"folder": model}).check().ranks:
        assert found["stored"] == ["torch.bfloat16", "torch.float32"] and found["moments"] == ["torch.float32"]
        for rollout, tolerance in (("bfloat16", 1e-2), ("float32", 1e-6)):
            assert found[f"{rollout}: names"] == names
            assert found[f"{rollout}: dtypes"] == [f"torch.{rollout}"]
            assert found[f"{rollout}: change"] > 1e-3 and found[f"{rollout}: error"] < tolerance


def test_a_critic_learns_by_adapters_and_its_head(model: str) -> None:
    (alone,) = run_world(cases.critic, 1, "single", TIMEOUT_S, {"folder": model, "steps": 25}).check().ranks
    assert alone["losses"][-1][0] < 0.3 * alone["losses"][0][0]
    assert alone["saved"][:2] == ["head.bias", "head.weight"] and len(alone["saved"]) == 2 + 2 * 7 * 2
    assert all(".lora_" in name for name in alone["saved"][2:]) and alone["base"]
    for rank in run_world(cases.critic, 2, "torchrun", TIMEOUT_S, {"folder": model, "steps": 3}).check().ranks:
        for ours, theirs in zip(rank["losses"], alone["losses"], strict=False):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
