"""The critic engine on real ranks: the same training on 1 and 2, a head in float32, and a critic that learns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spmd_rl.algorithms.critic_loss import CriticLoss
from spmd_rl.comm.world import World
from spmd_rl.config.schema import CriticConfig, OptimizerConfig
from spmd_rl.data.batch import Batch, Column
from spmd_rl.engines.train.critic import CriticEngine
from spmd_rl.observe.metrics import Metrics
from tests.tiny_model import make_tiny_model
from tests.world.harness import run_world
from tests.world.train_cases import config, full, samples, share


def with_returns(batch: Batch) -> Batch:
    """A return that the tokens tell: the response's next token divided by the vocabulary."""
    return_R = batch["response"].values.float() / 260
    columns = {"return": return_R, "value": torch.zeros_like(return_R)}
    return batch.with_columns({name: Column(x_R, batch["response"].lengths) for name, x_R in columns.items()})


def learn(world: World, folder: str, dtype: str, shard: str, steps: int) -> dict[str, Any]:
    settings = config(folder, dtype, tokens_per_microbatch=24, shard=shard)
    critic = CriticConfig(optimizer=OptimizerConfig(lr=5e-3, grad_clip=0.0))
    mesh = world.mesh(range(world.size), {"dp": world.size})
    engine = CriticEngine(replace(settings, critic=critic), world, mesh, total_steps=steps)
    seen: set[str] = set()
    for module in engine._network.modules():
        if isinstance(module, torch.nn.Linear):
            kind = "head" if module is engine._network.head else "layers"
            module.register_forward_hook(lambda m, args, out, kind=kind: seen.add(f"{kind} {out.dtype}"))
    batch = share(with_returns(samples()), world)
    losses, first = [], engine.values(batch)
    for _ in range(steps):
        metrics = Metrics()
        engine.update(batch, CriticLoss(clip=0.0), metrics)
        found = metrics.reduce(world.control)
        losses.append([found["loss/value"], found["critic/grad_norm"]])
    masters = {str(full(p.detach()).dtype) for p in engine._model.parameters()}
    return {
        "first": first.tolist(),
        "losses": losses,
        "dtypes": sorted(seen),
        "masters": sorted(masters),
        "last": found,
        "version": engine.version,
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", heads=4, kv_heads=2, hidden=32, head_dim=16))


def test_one_and_two_ranks_learn_the_same(model: str) -> None:
    args = {"folder": model, "dtype": "float32", "shard": "full", "steps": 25}
    (alone,) = run_world(learn, 1, "single", 120, args).check().ranks
    assert set(alone["first"]) == {0.0} and alone["version"] == 25  # the new head starts at 0
    assert alone["losses"][-1][0] < 0.2 * alone["losses"][0][0]  # and it learns
    assert set(alone["last"]) == {
        "loss/value", "critic/grad_norm", "critic/lr", "critic/tokens", "critic/skipped_updates",
    }  # fmt: skip
    for rank in run_world(learn, 2, "torchrun", 120, args).check().ranks:
        for ours, theirs in zip(rank["losses"], alone["losses"], strict=True):
            assert ours == pytest.approx(theirs, rel=2e-3, abs=1e-6)  # Adam widens rounding over the steps
        assert rank["losses"][0] == pytest.approx(alone["losses"][0], rel=1e-5)


def test_the_head_computes_in_float32_whatever_the_layers_do(model: str) -> None:
    args = {"folder": model, "dtype": "bfloat16", "shard": "keep", "steps": 2}
    for rank in run_world(learn, 2, "torchrun", 120, args).check().ranks:
        assert rank["dtypes"] == ["head torch.float32", "layers torch.bfloat16"]
        assert rank["masters"] == ["torch.float32"]


def test_another_folder(tmp_path: Path, model: str) -> None:
    """A critic of fewer tokens than the policy cannot read its responses."""
    settings = replace(config(model), critic=CriticConfig(path=str(tmp_path)))
    from transformers import LlamaConfig, LlamaForCausalLM

    from spmd_rl.config.errors import UserError

    small = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(**small, num_attention_heads=2)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="critic.path: .* knows 100 tokens and the policy 272"):
        CriticEngine(settings, None, None, 1)  # type: ignore[arg-type]
