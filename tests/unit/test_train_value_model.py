"""Critics and reward models computed packed: the values of each sequence alone, what is kept, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedModel,
)

from spmd_rl.config.errors import UserError
from spmd_rl.engines.train.attention import PackedTree
from spmd_rl.engines.train.packing import pack
from spmd_rl.engines.train.value_model import load_value_model
from tests.tiny_model import make_tiny_model, make_tiny_scorer
from tests.unit.test_train_model import batch_of

CPU = torch.device("cpu")


def scores_of_prefixes(model: PreTrainedModel) -> list[float]:
    """Before each response token of the batch, by the whole model's own forward call on that prefix alone."""
    batch, found = batch_of(), []
    for prompt, response in zip(batch["prompt"].rows(), batch["response"].rows(), strict=True):
        for known in range(len(response)):
            ids = torch.cat([prompt, response[:known]]).long()
            found.append(float(model(ids[None]).logits[0, 0]))
    return found


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2"])
@torch.no_grad()
def test_a_reward_model_keeps_its_head_and_its_scores(tmp_path: Path, kind: str) -> None:
    make_tiny_scorer(tmp_path, kind)
    own = scores_of_prefixes(AutoModelForSequenceClassification.from_pretrained(tmp_path).eval())
    assert float(torch.tensor(own).std()) > 0.1
    network, batch = load_value_model(str(tmp_path), torch.float32, "critic.path"), batch_of()
    for shared in (False, True):
        packed = pack(batch, shared, min_shared=1)
        (value_R,) = network(packed, PackedTree(packed.nodes, CPU))
        assert value_R.tolist() == pytest.approx(own, abs=2e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_a_causal_model_gets_a_head_of_zeros_and_gives_its_own_away(tmp_path: Path, tied: bool) -> None:
    make_tiny_model(tmp_path, "llama", tied=tied)
    network = load_value_model(str(tmp_path), torch.bfloat16, "critic.path")
    packed = pack(batch_of(), True)
    (value_R,) = network(packed, PackedTree(packed.nodes, CPU))
    assert value_R.dtype == torch.float32 and not value_R.any()
    value_R.sum().backward()
    of_weight, of_bias = network.head.weight.grad, network.head.bias.grad
    assert of_weight is not None and bool(of_weight.any())
    assert of_bias is not None and float(of_bias) == len(value_R)
    names = {name for name, _ in network.named_parameters()}
    own = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert names == {f"model.{name}" for name, _ in own.base_model.named_parameters()} | {"head.weight", "head.bias"}


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="critic.path: there is no folder '.*nowhere'"):
        load_value_model(str(tmp_path / "nowhere"), torch.float32, "critic.path")
    small = {"vocab_size": 272, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    two = LlamaConfig(**small, num_attention_heads=2, num_labels=2)
    LlamaForSequenceClassification(two).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"reward_model.path: the model in .* has 2 labels; one \(a reward\) is wanted"):
        load_value_model(str(tmp_path), torch.float32, "reward_model.path")
