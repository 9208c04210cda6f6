"""What the ranks of test_train_engine.py run. The stand-in losses define the aggregations by their formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from spmd_rl.checkpoint.checkpointer import Checkpointer
from spmd_rl.checkpoint.files import latest_valid
from spmd_rl.checkpoint.load import load_checkpoint
from spmd_rl.comm.world import World
from spmd_rl.config.schema import Config, ModelConfig, OptimizerConfig, RolloutConfig, TrainConfig
from spmd_rl.data.batch import Batch, Column
from spmd_rl.engines.protocol import LossFunction, LossTerms
from spmd_rl.engines.train.engine import TrainEngine
from spmd_rl.engines.train.fsdp import drop_gathered
from spmd_rl.observe.metrics import Metrics

LENGTHS = {0: [5, 1, 7], 1: [3, 3], 2: [4], 3: [9, 2, 6, 2]}  # of the responses to each prompt


def config(folder: str, dtype: str = "float32", shared: bool = True, **train: Any) -> Config:
    optimizer = OptimizerConfig(**train.pop("optimizer", {}))
    model = ModelConfig(
        path=folder,
        compute_dtype=dtype,
        prefix_sharing=shared,
        activation_checkpointing=train.pop("recompute", False),
        logprob_chunk=train.pop("chunk", 1024),
    )
    rollout = RolloutConfig(temperature=train.pop("temperature", 0.8), dtype=train.pop("rollout_dtype", "float32"))
    return Config(model=model, rollout=rollout, train=TrainConfig(optimizer=optimizer, **train))


class Engine(TrainEngine):
    """Remembers the gradients of the last step before they are clipped, and counts forward passes."""

    def __init__(
        self, config: Config, world: World, trainable: bool = True, total_steps: int = 10, offload: bool = False
    ) -> None:
        mesh = world.mesh(range(world.size), {"dp": world.size})
        super().__init__(config, world, mesh, total_steps=total_steps, trainable=trainable, offload=offload)
        self.forwards = 0
        self.gradients: dict[str, Tensor] = {}

    def _forward(self, packed: Any) -> Any:
        self.forwards += 1
        return super()._forward(packed)

    def _step(self, metrics: Metrics) -> None:
        self.gradients = {name: full(p.grad).clone() for name, p in self._model.named_parameters()}
        super()._step(metrics)

    def weights(self) -> dict[str, Tensor]:
        drop_gathered(self._network)  # else these would be the gathered ones, in the compute dtype
        return {name: full(p.detach()).clone() for name, p in self._model.named_parameters()}


def full(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def samples(lengths: dict[int, list[int]] = LENGTHS, masked: bool = True) -> Batch:
    """The whole batch, the same on every rank: ragged groups, advantages, two masked samples (one wholly)."""
    generator = torch.Generator().manual_seed(7)
    rows: list[tuple[int, int, Tensor, int]] = []
    for prompt, group in lengths.items():
        tokens = torch.randint(3, 260, (4 + 3 * prompt,), generator=generator, dtype=torch.int32)
        rows += [(prompt, i, tokens, length) for i, length in enumerate(group)]
    responses = [torch.randint(3, 260, (n,), generator=generator, dtype=torch.int32) for *_, n in rows]
    advantages = [torch.randn(1, generator=generator).expand(n) for *_, n in rows]
    mask = [torch.ones(n, dtype=torch.uint8) for *_, n in rows]
    if masked:
        mask[1].zero_()
        mask[-1][-1] = 0
    return Batch(
        torch.tensor([[0, prompt, i] for prompt, i, _, _ in rows]),
        {
            "prompt": Column.from_rows([tokens for _, _, tokens, _ in rows]),
            "response": Column.from_rows(responses),
            "advantage": Column.from_rows(advantages),
            "loss_mask": Column.from_rows(mask),
        },
    )


def share(batch: Batch, world: World) -> Batch:
    """This rank's samples: consecutive, uneven, cutting groups; the last ranks may have none."""
    each = -(-len(batch) // world.size)
    mine = torch.arange(len(batch))[world.rank * each : (world.rank + 1) * each]
    return batch.select(mine) if len(mine) else Batch.empty()


def aggregated(kind: str) -> LossFunction:
    """-advantage * ratio, aggregated as `kind` says; the ratio to the policy itself is 1, its gradient is not."""

    def loss(terms: LossTerms, metrics: Metrics) -> Tensor:
        ratio_R = (terms.logprob_R - terms.logprob_R.detach()).exp()
        x_R = -terms.batch["advantage"].values * ratio_R * terms.mask_R
        lengths = terms.batch["response"].lengths.tolist()
        sums = torch.stack([row.sum() for row in x_R.split(lengths)])
        counts = torch.stack([row.sum() for row in terms.mask_R.split(lengths)]).clamp(min=1)
        if kind == "token_mean":
            return sums.sum() / terms.normalizers["tokens"]
        if kind == "seq_mean_token_sum":
            return sums.sum() / terms.normalizers["sequences"]
        if kind == "seq_mean_token_mean":
            return (sums / counts).sum() / terms.normalizers["sequences"]
        return sums.sum() / (terms.normalizers["sequences"] * 16)

    return loss


class Streamed:
    """`aggregated` for steps that come in parts: the divisions of the formulas above, by counts known in the end."""

    def __init__(self, kind: str) -> None:
        self.kind, self.loss = kind, aggregated(kind)

    def __call__(self, terms: LossTerms, metrics: Metrics) -> Tensor:
        return self.loss(terms, metrics)

    def rescale(self, tokens: float, sequences: float) -> float:
        return 1 / (tokens if self.kind == "token_mean" else sequences)


AGGREGATIONS = ("token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "constant")
WAYS: dict[str, dict[str, Any]] = {  # ways to compute the same thing
    "whole": {},
    "cut small": {"tokens_per_microbatch": 12, "chunk": 5},
    "cut small, kept": {"tokens_per_microbatch": 12, "shard": "keep"},
    "unshared": {"shared": False, "tokens_per_microbatch": 40},
    "recomputed": {"recompute": True},
    "in parts": {"tokens_per_microbatch": 40},
    "in parts, kept": {"tokens_per_microbatch": 40, "shard": "keep"},
}


def train(engine: Engine, batch: Batch, kind: str, metrics: Metrics, in_parts: bool) -> None:
    if not in_parts:
        engine.update(batch, aggregated(kind), metrics)
        return
    first = len(batch) // 3  # then nothing, then the rest: some ranks have none in one of them
    for part, last in ((batch.select(torch.arange(first)), False), (Batch.empty(), False)):
        engine.update(part if len(part) else Batch.empty(), Streamed(kind), metrics, last=last)
    rest = batch.select(torch.arange(first, len(batch))) if len(batch) else batch
    engine.update(rest, Streamed(kind), metrics)


def same_everywhere(world: World, folder: str, out: str) -> dict[str, Any]:
    """Losses, norms, gradients and log-probabilities of one batch in every way; gradients are saved by rank 0."""
    results: dict[str, Any] = {}
    gradients: dict[str, dict[str, Tensor]] = {}
    for way, settings in WAYS.items():
        engine = Engine(config(folder, **settings, optimizer={"lr": 0.0, "grad_clip": 0.0}), world)
        for kind in AGGREGATIONS if way in ("whole", "cut small", "in parts") else AGGREGATIONS[:1]:
            metrics = Metrics()
            train(engine, share(samples(), world), kind, metrics, way.startswith("in parts"))
            reduced = metrics.reduce(world.control)
            results[f"{way}: {kind}"] = [reduced["loss/total"], reduced["grad_norm"]]
            gradients[f"{way}: {kind}"] = engine.gradients
        logprobs: list[Any] = [None] * world.size
        dist.all_gather_object(logprobs, engine.logprobs(share(samples(), world)).tolist(), group=world.control)
        results[f"{way}: logprobs"] = [x for part in logprobs for x in part]
        results[f"{way}: n1"] = case_n1(engine, world)
    if world.rank == 0:
        torch.save(gradients, f"{out}/gradients-{world.size}.pt")
    return results


def case_n1(engine: Engine, world: World) -> dict[str, float]:
    """Two responses of 1 and 3 tokens, ratio 1, advantages +1 and -1: the loss in every aggregation."""
    batch = samples({0: [1, 3]}, masked=False)
    advantage = Column.from_rows([torch.tensor([1.0]), torch.tensor([-1.0] * 3)])
    losses = {}
    for kind in AGGREGATIONS:
        metrics = Metrics()
        engine.update(share(batch.with_columns({"advantage": advantage}), world), aggregated(kind), metrics)
        losses[kind] = metrics.reduce(world.control)["loss/total"]
    return losses


def case_d3(world: World, folder: str) -> dict[str, Any]:
    """Long samples on rank 0, short ones on rank 1, and then one rank without any."""
    long, short = samples({i: [90 - 3 * i] for i in range(5)}), samples({i: [15] for i in range(5)})
    engine = Engine(config(folder, tokens_per_microbatch=100), world)
    counts, metrics = [], Metrics()
    for mine in (long if world.rank == 0 else short, long if world.rank == 1 else Batch.empty(), Batch.empty()):
        engine.forwards = 0
        engine.update(mine, aggregated("token_mean"), metrics)
        engine.logprobs(mine)
        counts.append(engine.forwards)
    return {"forwards": counts, "tokens": metrics.reduce(world.control)["tokens/trained"]}


def skipped(world: World, folder: str) -> dict[str, Any]:
    """A step, then an update in which no token counts (masked on rank 0, no sample elsewhere), then a step."""
    settings: dict[str, Any] = {"optimizer": {"lr": 1e-2, "weight_decay": 0.1, "schedule": "linear", "warmup_steps": 1}}
    engine = Engine(config(folder, **settings), world, total_steps=4)
    none = samples().with_columns(
        {"loss_mask": Column(samples()["loss_mask"].values * 0, samples()["loss_mask"].lengths)}
    )
    first = steps(engine, world, 0, 1)
    before = engine.weights(), [v.clone() for s in engine._optimizer.state.values() for v in map(full, s.values())]
    metrics = Metrics()
    engine.forwards = 0
    engine.update(none if world.rank == 0 else Batch.empty(), aggregated("token_mean"), metrics)
    after = engine.weights(), [v for s in engine._optimizer.state.values() for v in map(full, s.values())]
    return {
        "weights": all(torch.equal(before[0][n], after[0][n]) for n in after[0]),
        "moments": all(map(torch.equal, before[1], after[1])) and len(after[1]) > 3,
        "metrics": [first[0], metrics.reduce(world.control), *steps(engine, world, 2, 3)],
        "counted": [engine.version, engine.skipped, engine.state_dict()["skipped"]],
    }


def steps(engine: Engine, world: World, first: int, last: int) -> list[dict[str, float]]:
    """Optimizer steps `first` to `last`, each on its own data, with Adam."""
    made = []
    for step in range(first, last):
        batch = samples({k: [n + step % 3 for n in group] for k, group in LENGTHS.items()})
        metrics = Metrics()
        engine.update(share(batch, world), aggregated("token_mean"), metrics)
        made.append(metrics.reduce(world.control))
    return made


def save_and_go_on(world: World, folder: str, out: str) -> list[dict[str, float]]:
    settings: dict[str, Any] = {"optimizer": {"lr": 1e-2, "schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.1}}
    engine = Engine(config(folder, **settings), world, total_steps=6)
    steps(engine, world, 0, 3)
    checkpointer = Checkpointer(Path(out), world)
    checkpointer.save(3, {"actor": engine.state_dict()}, {})
    outcome = checkpointer.wait()
    assert outcome is not None and outcome.error is None, outcome
    return finish(engine, world, out)


def load_and_go_on(world: World, folder: str, out: str) -> list[dict[str, float]]:
    settings: dict[str, Any] = {"optimizer": {"lr": 1e-2, "schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.1}}
    engine = Engine(config(folder, **settings), world, total_steps=6)
    state = {"actor": engine.state_dict()}
    checkpoint = latest_valid(Path(out))
    assert checkpoint is not None
    load_checkpoint(checkpoint, state, world)
    engine.load_state_dict(state["actor"])
    assert engine.version == 3
    return finish(engine, world, out)


def finish(engine: Engine, world: World, out: str) -> list[dict[str, float]]:
    made = steps(engine, world, 3, 6)
    weights = engine.weights()
    if world.rank == 0:
        torch.save(weights, f"{out}/weights-{world.size}.pt")
    return made


def numerics(world: World, folder: str) -> dict[str, Any]:
    """Everything of one engine that does not depend on other worlds."""
    found: dict[str, Any] = {}
    batch = share(samples(), world)

    frozen = Engine(config(folder, optimizer={"lr": 0.0, "weight_decay": 0.1}), world)
    before, logprob_R, ratios = frozen.weights(), frozen.logprobs(batch), []

    def watched(terms: LossTerms, metrics: Metrics) -> Tensor:
        ratios.append(float((terms.logprob_R - terms.batch["old_logprob"].values).abs().max()))
        return aggregated("token_mean")(terms, metrics)

    with_old = batch.with_columns({"old_logprob": Column(logprob_R, batch["response"].lengths)})
    for _ in range(20):
        frozen.update(with_old, watched, Metrics())
    after = frozen.weights()
    found["lr 0: weights equal to the bit"] = all(torch.equal(before[n], after[n]) for n in before)
    found["lr 0: largest |log ratio| in 20 steps"] = max(ratios)
    found["version"] = frozen.version

    broken = Engine(config(folder, optimizer={"lr": 0.1}), world)
    before = broken.weights()
    nan_on_last = float("nan") if world.rank == world.size - 1 else 1.0
    try:
        broken.update(batch, lambda t, m: t.logprob_R.sum() * nan_on_last, Metrics())
    except FloatingPointError as error:
        found["nan"] = str(error)
    after = broken.weights()
    found["nan: weights equal to the bit"] = all(torch.equal(before[n], after[n]) for n in before)
    broken.update(batch, aggregated("token_mean"), Metrics())  # and it can go on
    found["nan: version after a good step"] = broken.version

    clipped = {}
    for limit in (0.0, 0.01):
        engine = Engine(config(folder, optimizer={"lr": 0.0, "grad_clip": limit}), world)
        clipped[limit] = captured_norms(engine, batch)
    found["norms"] = clipped

    bf16 = Engine(config(folder, dtype="bfloat16", rollout_dtype="bfloat16", optimizer={"lr": 1e-3}), world)
    seen: set[str] = set()
    for module in bf16._model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda m, args, out: seen.update({str(args[0].dtype), str(m.weight.dtype)}))
    bf16.update(batch, aggregated("token_mean"), Metrics())
    found["bf16: dtypes in linear layers"] = sorted(seen)
    found["bf16: dtypes of masters and moments"] = sorted(
        {str(p.dtype) for p in bf16._model.parameters()}
        | {str(v.dtype) for s in bf16._optimizer.state.values() for k, v in s.items() if k != "step"}
    )
    weights = bf16.weights()
    sent = list(bf16.named_weights())
    found["sent"] = [name for name, _ in sent]
    found["sent: dtypes"] = sorted({str(tensor.dtype) for _, tensor in sent})
    found["sent: equal"] = all(torch.equal(tensor, weights[name].bfloat16()) for name, tensor in sent)

    found["sent between steps"] = sent_between_steps(world, folder)
    precise = Engine(config(folder, dtype="bfloat16", rollout_dtype="float32"), world)
    weights = precise.weights()
    sent = list(precise.named_weights())
    found["sent in float32: equal"] = all(torch.equal(tensor, weights[name]) for name, tensor in sent)

    reference = Engine(replace(config(folder, dtype="bfloat16"), train=TrainConfig()), world, trainable=False)
    found["reference: dtypes"] = sorted({str(p.dtype) for p in reference._model.parameters()})
    fresh = Engine(config(folder, dtype="bfloat16"), world)
    found["reference = fresh policy"] = bool(torch.equal(reference.logprobs(batch), fresh.logprobs(batch)))
    keeping = config(folder, dtype="bfloat16", shard="keep")
    offloaded = Engine(keeping, world, trainable=False, offload=True)
    found["offloaded reference = fresh policy"] = bool(torch.equal(offloaded.logprobs(batch), fresh.logprobs(batch)))
    units = [module for module in offloaded._network.modules() if isinstance(module, FSDPModule)]
    found["offloaded: policies"] = sorted({type(_fsdp_group(unit).offload_policy).__name__ for unit in units})
    found["offloaded: gathered"] = any(_fsdp_group(unit).is_unsharded for unit in units)
    found["reference: state"] = reference.state_dict()
    found["reference: no gradients"] = not any(p.requires_grad for p in reference._model.parameters())
    return found


def _fsdp_group(unit: FSDPModule) -> Any:
    return unit._get_fsdp_state()._fsdp_param_group


def sent_between_steps(world: World, folder: str) -> list[bool]:
    """Drawing the weights after each step, which may leave them gathered, gives the new ones and changes nothing."""
    right = []
    for mode in ("full", "keep"):
        settings: dict[str, Any] = {"dtype": "bfloat16", "rollout_dtype": "bfloat16", "shard": mode}
        settings["optimizer"] = {"lr": 1e-2}
        drawn, undisturbed = Engine(config(folder, **settings), world), Engine(config(folder, **settings), world)
        batch = share(samples(), world)
        for step in range(3):
            steps(undisturbed, world, step, step + 1)
            steps(drawn, world, step, step + 1)
            sent = dict(drawn.named_weights())
            want = undisturbed.weights()
            right.append(all(torch.equal(tensor, want[name].bfloat16()) for name, tensor in sent.items()))
            right.append(torch.equal(drawn.logprobs(batch), undisturbed.logprobs(batch)))
        state, want = drawn.state_dict()["model"], undisturbed.weights()
        right.append(all(torch.equal(full(state[name]), tensor) for name, tensor in want.items()))
    return right


def captured_norms(engine: Engine, batch: Batch) -> list[float]:
    """[reported norm, true norm before clipping, norm that the optimizer saw]."""
    metrics, seen = Metrics(), []
    step: Callable[..., Any] = engine._optimizer.step

    def watched() -> None:
        gradients = [full(p.grad) for p in engine._model.parameters()]
        seen.append(float(torch.stack([g.norm() for g in gradients]).norm()))
        step()

    setattr(engine._optimizer, "step", watched)  # noqa: B010 - a method is not assignable for the type checker
    engine.update(batch, aggregated("token_mean"), metrics)
    true = float(torch.stack([g.norm() for g in engine.gradients.values()]).norm())
    return [metrics.reduce()["grad_norm"], true, *seen]
