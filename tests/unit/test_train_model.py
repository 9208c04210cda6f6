"""Models computed packed: case N11, gradients with a shared prompt, what is refused and how."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GraniteConfig, GraniteForCausalLM, MistralConfig, MistralForCausalLM

from spmd_rl.config.errors import UserError
from spmd_rl.data.batch import Batch, Column
from spmd_rl.engines.train.attention import PackedTree
from spmd_rl.engines.train.fsdp import recompute_layers
from spmd_rl.engines.train.model import PolicyModel, load_model, load_tokenizer
from spmd_rl.engines.train.packing import pack
from tests.tiny_model import make_tiny_model

KINDS = ["qwen3", "llama", "gpt2"]
CPU = torch.device("cpu")


def batch_of(seed: int = 0) -> Batch:
    """Two groups of ragged responses and one sample alone; two prompts begin alike, two responses are equal."""
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(3, 260, (n,), generator=generator, dtype=torch.int32) for n in (11, 4, 6)]
    prompts[2] = torch.cat([prompts[0][:5], prompts[2][-1:]])
    samples = [(0, 5), (0, 1), (0, 7), (1, 3), (1, 3), (2, 4)]
    responses = [torch.randint(3, 260, (n,), generator=generator, dtype=torch.int32) for _, n in samples]
    responses[4] = responses[3].clone()
    responses[2][:3] = responses[0][:3]
    return Batch(
        torch.tensor([[0, prompt, i] for i, (prompt, _) in enumerate(samples)]),
        {"prompt": Column.from_rows([prompts[p] for p, _ in samples]), "response": Column.from_rows(responses)},
    )


def packed_logprobs(model: nn.Module, batch: Batch, shared: bool, temperature: float = 1.0) -> Tensor:
    packed = pack(batch, shared, min_shared=1)
    return PolicyModel(model, temperature, 1024)(packed, PackedTree(packed.nodes, CPU))[0]


def alone(model: nn.Module, batch: Batch) -> Tensor:
    """Each sample by itself through the model's own forward call, eager attention and head."""
    rows = []
    for prompt, response in zip(batch["prompt"].rows(), batch["response"].rows(), strict=True):
        logits = model(torch.cat([prompt, response]).long()[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
        rows.append(F.log_softmax(logits, -1).gather(1, response.long()[:, None])[:, 0])
    return torch.cat(rows)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: make_tiny_model(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_case_n11_packed_equals_alone(folders: dict[str, Path], kind: str) -> None:
    model, batch = load_model(str(folders[kind]), torch.float32), batch_of()
    with torch.no_grad():
        unshared, shared = (packed_logprobs(model, batch, s) for s in (False, True))
        model.set_attn_implementation("eager")
        want = alone(model, batch)
    assert float(want.std()) > 0.5  # far from uniform, so that a wrong mask or position shows
    torch.testing.assert_close(unshared, want, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(shared, want, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_shared_prompt_has_the_gradients_of_each_sample_alone(folders: dict[str, Path], kind: str) -> None:
    batch = batch_of()
    weight_R = torch.linspace(-1, 1, len(batch["response"].values))
    gradients = []
    for compute in ("alone", "unshared", "shared"):
        model = load_model(str(folders[kind]), torch.float32, verify=False)
        if compute == "alone":
            model.set_attn_implementation("eager")
            logprob_R = alone(model, batch)
        else:
            logprob_R = packed_logprobs(model, batch, compute == "shared")
        (logprob_R * weight_R).sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, want in gradients[0].items():
        scale = float(want.abs().max()) + 1e-6
        for got in gradients[1:]:
            torch.testing.assert_close(got[name] / scale, want / scale, atol=1e-5, rtol=0, msg=name)


def test_recomputed_layers_give_the_same_gradients(folders: dict[str, Path]) -> None:
    batch, results = batch_of(), []
    for recompute in (False, True):
        model = load_model(str(folders["qwen3"]), torch.float32, verify=False)
        policy = PolicyModel(model, 1.0, 1024)
        if recompute:
            recompute_layers(policy)
        names = [name for name, _ in model.named_parameters()]
        packed = pack(batch, True, min_shared=1)
        policy(packed, PackedTree(packed.nodes, CPU))[0].sum().backward()
        results.append((names, [p.grad for p in model.parameters()]))
    assert results[0][0] == results[1][0]  # no wrapper in the names
    for a, b in zip(results[0][1], results[1][1], strict=True):
        assert torch.equal(a, b)


def test_temperature_reaches_the_logits(folders: dict[str, Path]) -> None:
    model, batch = load_model(str(folders["llama"]), torch.float32, verify=False), batch_of()
    with torch.no_grad():
        got = packed_logprobs(model, batch, True, temperature=0.5)
        model.lm_head.weight = nn.Parameter(model.lm_head.weight * 2)  # unties it: the embedding stays
        torch.testing.assert_close(got, packed_logprobs(model, batch, True), atol=1e-4, rtol=1e-5)


def test_no_dropout(tmp_path: Path) -> None:
    """GPT-2 declares dropout 0.1 everywhere: two passes must agree to the bit all the same."""
    model, batch = load_model(str(make_tiny_model(tmp_path, "gpt2")), torch.float32), batch_of()
    assert model.config.resid_pdrop == 0.1
    assert torch.equal(packed_logprobs(model, batch, True), packed_logprobs(model, batch, True))


SMALL = {
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 2,
}


def test_logits_scaled_behind_the_head_are_noticed(tmp_path: Path) -> None:
    GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=4.0)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="granite models cannot be computed packed: log-probabilities .* differ by"):
        load_model(str(tmp_path), torch.float32)


def test_sliding_window(tmp_path: Path) -> None:
    """A window as long as every sequence does nothing; a shorter one is refused, not ignored."""
    MistralForCausalLM(MistralConfig(**SMALL, sliding_window=14)).save_pretrained(tmp_path)
    model, batch = load_model(str(tmp_path), torch.float32), batch_of()
    with pytest.raises(UserError, match="a sequence of 17 tokens is longer than the model's sliding window of 14"):
        packed_logprobs(model, batch, True)
    packed_logprobs(model, batch.select(torch.tensor([3, 4, 5])), True)


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="model.path: there is no folder '.*nowhere'; give one in Hugging Face format"):
        load_model(str(tmp_path / "nowhere"), torch.float32)
    with pytest.raises(UserError, match="has no config.json"):
        load_model(str(tmp_path), torch.float32)
    (tmp_path / "config.json").write_text("{ not json")
    with pytest.raises(UserError, match="has an unusable config.json"):
        load_model(str(tmp_path), torch.float32)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": "64"}')
    with pytest.raises(UserError, match="has an unusable config.json"):
        load_model(str(tmp_path), torch.float32)
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(UserError, match=r"is an encoder-decoder model \(t5\); a causal one is wanted"):
        load_model(str(tmp_path), torch.float32)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match="cannot load a causal language model from"):
        load_model(str(tmp_path), torch.float32)
    with pytest.raises(UserError, match="has no usable tokenizer"):
        load_tokenizer(str(tmp_path))


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "qwen3")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(UserError, match="cannot load a causal language model from"):
        load_model(str(tmp_path), torch.float32)


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    """A weight that the file lacks must not be made up at random."""
    from safetensors.torch import load_file, save_file

    make_tiny_model(tmp_path, "qwen3")
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    removed = weights.pop("model.layers.1.mlp.up_proj.weight")
    assert removed.numel()
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match="lacks the weight model.layers.1.mlp.up_proj.weight"):
        load_model(str(tmp_path), torch.float32)
