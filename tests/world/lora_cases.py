"""What the ranks of test_train_lora.py run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.algorithms.critic_loss import CriticLoss
from spmd_rl.checkpoint.checkpointer import Checkpointer
from spmd_rl.checkpoint.export import export_model
from spmd_rl.checkpoint.export_adapter import export_adapter
from spmd_rl.checkpoint.files import latest_valid
from spmd_rl.checkpoint.load import load_checkpoint
from spmd_rl.comm.world import World
from spmd_rl.config.errors import UserError
from spmd_rl.config.schema import Config, CriticConfig, OptimizerConfig
from spmd_rl.engines.train.critic import CriticEngine
from spmd_rl.engines.train.fsdp import drop_gathered
from spmd_rl.engines.train.lora_engine import BasePolicy, LoraEngine
from spmd_rl.observe.metrics import Metrics
from tests.world import train_cases as cases
from tests.world.test_critic import with_returns

CRITIC = OptimizerConfig(lr=1e-2, grad_clip=0.0)
OPTIMIZER = {"lr": 1e-2, "schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.1}


def config(folder: str, **settings: Any) -> Config:
    whole = cases.config(folder, tokens_per_microbatch=40, **{"optimizer": OPTIMIZER, **settings})
    return replace(whole, model=replace(whole.model, lora_rank=4, lora_alpha=6.0))


class Engine(cases.Engine, LoraEngine):
    """Remembers which parameters had a gradient in the last step."""

    def _step(self, metrics: Metrics) -> None:
        self.with_gradient = [name for name, p in self._model.named_parameters() if p.grad is not None]
        super(cases.Engine, self)._step(metrics)


def everywhere(engine: Engine, world: World) -> list[float]:
    """Log-probabilities of all samples, in order."""
    parts: list[Any] = [None] * world.size
    mine = engine.logprobs(cases.share(cases.samples(), world)).tolist()
    dist.all_gather_object(parts, mine, group=world.control)
    return [x for part in parts for x in part]


def train(world: World, folder: str, out: str, shard: str) -> dict[str, Any]:
    """Three steps, a checkpoint and an export, then three more; everything that should not depend on the world."""
    engine = Engine(config(folder, shard=shard), world, total_steps=6)
    reference = cases.Engine(cases.config(folder), world, trainable=False)
    batch = cases.share(cases.samples(), world)
    found: dict[str, Any] = {"base": bool(torch.equal(engine.logprobs(batch), reference.logprobs(batch)))}
    made = cases.steps(engine, world, 0, 3)
    found["with gradient"] = engine.with_gradient
    off = BasePolicy(engine).logprobs(batch)
    found["reference"] = float((off - reference.logprobs(batch)).abs().max()) if len(off) else 0.0
    found["trained"] = bool((off - engine.logprobs(batch)).abs().max() > 1e-3) if len(off) else True
    found["logprobs"] = everywhere(engine, world)
    found["held"] = sum(p.numel() for group in engine._optimizer.param_groups for p in group["params"])
    checkpointer = Checkpointer(Path(out) / "checkpoints", world)
    checkpointer.save(3, {"actor": engine.state_dict()}, {})
    outcome = checkpointer.wait()
    assert outcome is not None and outcome.error is None, outcome
    found["saved"] = sorted(engine.state_dict()["model"])
    export_model(Path(folder), Path(out) / "model", engine.named_weights(), world)
    export_adapter(Path(out) / "adapter", engine.adapter_settings(), engine.adapter_weights(), world)
    found["steps"] = made + cases.steps(engine, world, 3, 6)
    return found


def go_on(world: World, folder: str, out: str, other: str) -> dict[str, Any]:
    """From the checkpoint: the last three steps; and what a run on another base says."""

    def loaded(path: str) -> Engine:
        engine = Engine(config(path), world, total_steps=6)
        state = {"actor": engine.state_dict()}
        checkpoint = latest_valid(Path(out) / "checkpoints")
        assert checkpoint is not None
        load_checkpoint(checkpoint, state, world)
        engine.load_state_dict(state["actor"])
        return engine

    engine = loaded(folder)
    found = {"version": engine.version, "logprobs": everywhere(engine, world)}
    found["steps"] = cases.steps(engine, world, 3, 6)
    try:
        loaded(other)
    except UserError as error:
        found["other"] = str(error)
    return found


def bf16(world: World, folder: str) -> dict[str, Any]:
    """Dtypes with bfloat16 computation, and weights for a rollout in either dtype against masters merged by hand."""
    found: dict[str, Any] = {}
    for rollout in ("bfloat16", "float32"):
        engine = Engine(config(folder, dtype="bfloat16", rollout_dtype=rollout), world)
        cases.steps(engine, world, 0, 2)
        whole = whole_parameters(engine)
        sent = dict(engine.named_weights())
        found[f"{rollout}: names"] = sorted(sent)
        found[f"{rollout}: dtypes"] = sorted({str(tensor.dtype) for tensor in sent.values()})
        name = "model.layers.1.mlp.down_proj"
        a, b = whole[f"{name}.lora_A.default.weight"], whole[f"{name}.lora_B.default.weight"]
        want = whole[f"{name}.base_layer.weight"].float() + 6.0 / 4 * b @ a
        found[f"{rollout}: error"] = float((sent[f"{name}.weight"].float() - want).abs().max() / want.abs().max())
        found[f"{rollout}: change"] = float((b @ a).abs().max())
        found["stored"] = sorted({str(p.dtype) for p in whole.values()})
        moments = [v for s in engine._optimizer.state.values() for k, v in s.items() if k != "step"]
        found["moments"] = sorted({str(v.dtype) for v in moments})
    return found


def whole_parameters(engine: Engine) -> dict[str, Tensor]:
    drop_gathered(engine._network)
    return {name: cases.full(p.detach()) for name, p in engine._model.named_parameters()}


def critic(world: World, folder: str, steps: int) -> dict[str, Any]:
    """A critic with adapters, on returns that the tokens tell."""
    critic = CriticConfig(lora_rank=4, optimizer=CRITIC)
    settings = replace(cases.config(folder, tokens_per_microbatch=24), critic=critic)
    mesh = world.mesh(range(world.size), {"dp": world.size})
    engine = CriticEngine(settings, world, mesh, total_steps=steps)
    batch, losses = cases.share(with_returns(cases.samples()), world), []
    for _ in range(steps):
        metrics = Metrics()
        engine.update(batch, CriticLoss(clip=0.0), metrics)
        found = metrics.reduce(world.control)
        losses.append([found["loss/value"], found["critic/grad_norm"]])
    state = engine.state_dict()
    return {"losses": losses, "saved": sorted(state["model"]), "base": state["base"]}
