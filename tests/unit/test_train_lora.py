"""Adapters beside a frozen base: the same numbers as the merged weights, and as the base where they are off."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from spmd_rl.config.errors import UserError
from spmd_rl.config.model_folder import model_identity, weights_identity
from spmd_rl.config.schema import ModelConfig
from spmd_rl.engines.train import lora
from tests.tiny_model import make_tiny_model

IDS = torch.tensor([[5, 77, 140, 9, 33, 250]])
LAYERS = 2
QWEN = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


@pytest.fixture(scope="module", params=["qwen3", "gpt2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("qwen"))


def base(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def adapted(folder: Path, dtype: torch.dtype = torch.float32, seed: int = 3, **settings: Any) -> Any:
    model = base(folder)
    config = lora.lora_config(ModelConfig(path=str(folder), **{"lora_rank": 4, **settings}))
    lora.add_adapters(model, config, dtype, seed)
    return model


def train(model: Any) -> None:
    """Stands for training: adapters far from their first values."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(IDS).logits


def test_training_starts_at_the_base_and_returns_to_it_with_adapters_off(folder: Path) -> None:
    model, plain = adapted(folder), logits(base(folder))
    assert torch.equal(logits(model), plain)
    train(model)
    trained = logits(model)
    assert float((trained - plain).abs().max()) > 0.1
    learn = [parameter.requires_grad for parameter in model.parameters()]
    with lora.adapters_off(model):
        assert torch.equal(logits(model), plain)
        assert [parameter.requires_grad for parameter in model.parameters()] == learn
    assert torch.equal(logits(model), trained)


def test_merged_weights_compute_what_the_adapters_do(folder: Path) -> None:
    model, merged = adapted(folder, lora_alpha=3.0), base(folder)
    train(model)
    weights = dict(lora.merged(((n, p.detach()) for n, p in model.named_parameters()), model))
    assert sorted(weights) == sorted(name for name, _ in merged.named_parameters())
    merged.load_state_dict(weights, strict=False)
    torch.testing.assert_close(logits(merged), logits(model), atol=2e-5, rtol=1e-5)


def test_the_product_by_hand(qwen: Path) -> None:
    model = adapted(qwen, lora_rank=1, lora_alpha=8.0, lora_targets=["q_proj"])
    name = "model.layers.1.self_attn.q_proj"
    layer = model.get_submodule(name)
    layer.lora_A.default.weight.data = torch.zeros(1, 64).index_fill_(1, torch.tensor([5]), 2.0)
    layer.lora_B.default.weight.data = torch.zeros(256, 1).index_fill_(0, torch.tensor([7]), 0.5)
    weights = dict(lora.merged(((n, p.detach()) for n, p in model.named_parameters()), model))
    change = weights[f"{name}.weight"].detach() - base(qwen).get_parameter(f"{name}.weight").detach()
    assert change.nonzero().tolist() == [[7, 5]] and float(change[7, 5]) == pytest.approx(8.0 / 1 * 0.5 * 2.0)


def test_only_float32_adapters_learn_and_the_base_takes_half(qwen: Path) -> None:
    model = adapted(qwen, dtype=torch.bfloat16)
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(learning) == 2 * len(QWEN) * LAYERS
    assert all(".lora_A." in name or ".lora_B." in name for name in learning)
    assert {p.dtype for p in learning.values()} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert {b.dtype for b in model.buffers()} == {torch.float32}


def test_first_values_follow_from_the_seed_alone(qwen: Path) -> None:
    def first(seed: int) -> Tensor:
        before = torch.random.get_rng_state()
        model = adapted(qwen, seed=seed)
        assert torch.equal(torch.random.get_rng_state(), before)
        return torch.cat([p.detach().flatten() for n, p in model.named_parameters() if ".lora_A." in n])

    one = first(3)
    torch.rand(1)
    assert torch.equal(first(3), one) and not torch.equal(first(4), one) and bool((one != 0).all())


def test_targets(qwen: Path) -> None:
    def targets(*names: str) -> list[str]:
        settings = ModelConfig(path=str(qwen), lora_rank=2, lora_targets=list(names))
        return sorted(lora.lora_config(settings).target_modules)

    assert targets() == QWEN
    assert targets("q_proj", "v_proj") == ["q_proj", "v_proj"]
    assert targets("1.mlp.up_proj") == ["model.layers.1.mlp.up_proj"]
    for wrong in ("proj", "lm_head", "embed_tokens", "q_projj"):
        with pytest.raises(
            UserError, match=f"no linear layer of .* is named '{wrong}'; there are down_proj, gate_proj"
        ):
            targets(wrong)


def test_alpha_is_twice_the_rank_where_it_is_not_given(qwen: Path) -> None:
    assert lora.lora_config(ModelConfig(path=str(qwen), lora_rank=4)).lora_alpha == 8
    assert lora.lora_config(ModelConfig(path=str(qwen), lora_rank=4, lora_alpha=1.0)).lora_alpha == 1


def test_the_identity_of_a_model_is_its_content(qwen: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(qwen, tmp_path / "copy")
    assert weights_identity(str(copy)) == weights_identity(str(qwen))
    assert model_identity(str(copy)) == model_identity(str(qwen))
    other = make_tiny_model(tmp_path / "other", seed=1)
    assert weights_identity(str(other)) != weights_identity(str(qwen))
    assert model_identity(str(other)) != model_identity(str(qwen))
    (copy / "README.md").write_text("as good as before")
    assert model_identity(str(copy)) == model_identity(str(qwen))
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    assert weights_identity(str(copy)) == weights_identity(str(qwen))
    assert model_identity(str(copy)) != model_identity(str(qwen))
    with pytest.raises(UserError, match=r"model.path=.*gone can't be read: No such file or directory: .*config.json"):
        model_identity(str(tmp_path / "gone"))
