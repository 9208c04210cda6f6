"""What every engine around a sharded model does: packed passes, optimizer steps, state."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from spmd_rl.comm.world import World
from spmd_rl.config.errors import UserError
from spmd_rl.config.schema import Config, OptimizerConfig
from spmd_rl.data.batch import Batch, Column
from spmd_rl.engines.protocol import Terms
from spmd_rl.engines.train.attention import PackedTree
from spmd_rl.engines.train.fsdp import (
    accumulating,
    drop_gathered,
    recompute_layers,
    shard,
)
from spmd_rl.engines.train.host import reuse_freed_memory
from spmd_rl.engines.train.microbatch import microbatches
from spmd_rl.engines.train.model import PackedModel
from spmd_rl.engines.train.optimizer import build_optimizer
from spmd_rl.engines.train.packing import Packed, pack
from spmd_rl.observe.metrics import Metrics

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


TermsT = TypeVar("TermsT", bound=Terms)


class Labels(NamedTuple):
    """What an engine's numbers are called in metrics and messages."""

    loss: str = "loss/total"
    tokens: str = "tokens/trained"
    skipped: str = "train/skipped_updates"
    norm: str = "grad_norm"
    lr: str = "lr"
    step: str = "optimizer step"


@dataclass(frozen=True)
class _Part:
    """Of an optimizer step: its loss before the division, on this rank; what counts in it, on all ranks."""

    loss: float = 0.0
    tokens: float = 0.0
    sequences: float = 0.0

    def __add__(self, other: _Part) -> _Part:
        return _Part(self.loss + other.loss, self.tokens + other.tokens, self.sequences + other.sequences)


class ModelEngine(Generic[TermsT]):
    """A model sharded over `mesh` (one axis, `dp`); what its outputs mean is the subclass's.

    network: packed tokens in, one or more float32 [R] out; model: its part that is trained and saved, by whose names.
    optimizer: None for a model that is only evaluated: no gradients, no state. total_steps: optimizer steps of the
    whole run, for the learning-rate schedule. offload: see `fsdp.shard`. Every method is collective over the mesh.
    """

    labels: ClassVar[Labels] = Labels()
    _base = ""  # `weights_identity` of the frozen part, where there is one

    def __init__(
        self,
        config: Config,
        world: World,
        mesh: DeviceMesh,
        network: PackedModel,
        model: nn.Module,
        optimizer: OptimizerConfig | None,
        total_steps: int,
        offload: bool = False,
    ) -> None:
        self.version = self.skipped = 0
        self._part: _Part | None = None  # of a step that comes in parts
        self._config, self._device, self._settings = config, world.device, optimizer
        if mesh.ndim != 1:
            raise UserError(f"the trainer shards over one mesh axis (dp), not over {mesh.mesh_dim_names}")
        self._group = mesh.get_group()
        self._keep = config.train.shard == "keep" and not offload
        self._compute_dtype = compute_dtype(config)
        if self._device.type == "cpu":
            reuse_freed_memory()
        if optimizer is None:
            network.requires_grad_(False)
        self._network, self._model = network, model
        if config.model.activation_checkpointing and optimizer is not None:
            recompute_layers(network)
        shard(network, mesh, self._compute_dtype, self._keep, offload)
        if optimizer is not None:
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            self._optimizer, self._schedule = build_optimizer(trained, optimizer, total_steps)

    def _terms(self, outputs: tuple[Tensor, ...], common: Terms) -> TermsT:
        """What the loss function sees of one micro-batch."""
        raise NotImplementedError

    @torch.no_grad()
    def _evaluate(self, batch: Batch) -> Tensor:
        """float32 [R] on the CPU, in batch order: the network's first output for all response tokens."""
        parts, count = self._microbatches(batch, _counts(0, 0))[:2]
        rows: list[Tensor] = [torch.empty(0)] * len(batch)
        for index_K in [*parts, *[torch.empty(0, dtype=torch.int64)] * (count - len(parts))]:
            part = batch.select(index_K)
            output_R = self._forward(pack(part, self._config.model.prefix_sharing))[0]
            if len(part):
                split = output_R.cpu().split(part["response"].lengths.tolist())
                for sample, row in zip(index_K.tolist(), split, strict=True):
                    rows[sample] = row
        if not self._keep:
            drop_gathered(self._network)
        return torch.cat(rows) if rows else torch.empty(0)

    def update(
        self, batch: Batch, loss: Callable[[TermsT, Metrics], Tensor], metrics: Metrics, last: bool = True
    ) -> None:
        """One optimizer step. `loss` sees every micro-batch of this rank; the sum over all ranks is minimised.

        last: false where more samples of the step come with another call. Gradients then add up until the call with
        `last`. What the step's loss is divided by is known only there, so `loss` is normalised by counts of 1 and the
        gradients are scaled in the end, by what its `rescale(tokens, sequences)` gives.
        Where no token counts on any rank the step is skipped: weights, moments and their decay stay as they are. It
        still counts in `version` and in the learning-rate schedule, which follow the updates that were due, so that
        neither depends on the rewards; `skipped` says how many there were.
        Adds `loss/total`, `grad_norm`, `lr`, `tokens/trained`, `train/skipped_updates`, or what `labels` calls them.
        Raises FloatingPointError where the gradient is not finite; the weights are then as before.
        """
        if self._settings is None:
            raise RuntimeError("this engine was made without an optimizer")
        mask_R = _mask(batch)
        parts, count, (tokens, sequences) = self._microbatches(batch, _counted(batch, mask_R))
        whole = last and self._part is None
        if whole and not tokens:
            self._skip(metrics)
            return
        batch = batch.with_columns({"loss_mask": Column(mask_R, batch["response"].lengths)}) if len(batch) else batch
        normalizers = {"tokens": tokens, "sequences": sequences} if whole else {"tokens": 1.0, "sequences": 1.0}
        total = 0.0
        for i in range(count):
            part = batch.select(parts[i]) if i < len(parts) else Batch.empty()
            with accumulating(self._network, last=last and i == count - 1, keep=self._keep):
                total += self._backward(part, loss, normalizers, metrics)
        if not whole:
            self._part = step = _Part(total, tokens, sequences) + (self._part or _Part())
            if not last:
                return
            self._part = None
            if not step.tokens:
                self._optimizer.zero_grad()
                self._skip(metrics)
                return
            total = step.loss * self._rescale(loss, step)
        metrics.sum(self.labels.skipped, 0.0)
        self._step(metrics)
        ranks = dist.get_world_size(self._group)
        metrics.mean(self.labels.loss, total, 1.0 / ranks)  # sums over ranks, averages over the updates of a round

    def _rescale(self, loss: Any, step: _Part) -> float:
        """Scale the gradients that were made without the step's counts; the factor. Raises TypeError for a loss that
        cannot say it."""
        if not hasattr(loss, "rescale"):
            raise TypeError(f"{loss!r} has no rescale(tokens, sequences), so its step cannot come in parts")
        factor = float(loss.rescale(step.tokens, step.sequences))
        torch._foreach_mul_([_local(p.grad) for p in self._model.parameters() if p.grad is not None], factor)
        return factor

    def state_dict(self) -> dict[str, Any]:
        """For torch.distributed.checkpoint: sharded tensors that load on any number of ranks. Shares their memory.

        Parameters that are not trained are left out: they are what lies in the model's folder.
        """
        if self._settings is None:
            return {}
        drop_gathered(self._network)
        frozen = self._frozen()
        state = {
            **({"base": self._base} if self._base else {}),
            "model": {name: t for name, t in get_model_state_dict(self._model).items() if name not in frozen},
            "optimizer": get_optimizer_state_dict(self._model, self._optimizer),
            "schedule": self._schedule.state_dict(),
            "version": self.version,
            "skipped": self.skipped,
        }
        self._forget_step_of_nothing()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what `state_dict` gave and a checkpoint filled. Raises UserError for adapters of another model."""
        if self._settings is None:
            return
        if state.get("base", "") != self._base:
            raise UserError("the checkpoint's LoRA adapters belong to a model other than the one that was loaded")
        drop_gathered(self._network)
        set_model_state_dict(self._model, state["model"], options=StateDictOptions(strict=not self._frozen()))
        set_optimizer_state_dict(self._model, self._optimizer, state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
        self.version, self.skipped = int(state["version"]), int(state["skipped"])
        self._forget_step_of_nothing()

    def _forget_step_of_nothing(self) -> None:
        """Before the first real step torch fills the optimizer's state by one with gradient 0, which would count."""
        if self.version == self.skipped:
            self._optimizer.state.clear()

    def _frozen(self) -> set[str]:
        return {name for name, p in self._model.named_parameters(remove_duplicate=False) if not p.requires_grad}

    def _microbatches(self, batch: Batch, counts: Tensor) -> tuple[list[Tensor], int, tuple[float, float]]:
        """This rank's micro-batches, how many every rank computes, the sums of `counts` (float64 [2]) over ranks."""
        budget = self._config.train.tokens_per_microbatch
        parts = microbatches(batch, self._config.model.prefix_sharing, budget)
        mine = torch.cat([torch.tensor([float(len(parts))], dtype=torch.float64), counts]).to(self._device)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(everyone, mine, group=self._group)
        table = torch.stack(everyone).cpu()
        tokens, sequences = table[:, 1:].sum(0).tolist()
        return parts, max(int(table[:, 0].max()), 1), (tokens, sequences)

    def _forward(self, packed: Packed) -> tuple[Tensor, ...]:
        return self._network(packed, PackedTree(packed.nodes, self._device))

    def _backward(
        self,
        part: Batch,
        loss: Callable[[TermsT, Metrics], Tensor],
        normalizers: dict[str, float],
        metrics: Metrics,
    ) -> float:
        """Adds the micro-batch's gradients; its loss. An empty one is computed too: its ranks' peers wait for it."""
        packed = pack(part, self._config.model.prefix_sharing)
        metrics.sum(self.labels.tokens, packed.tokens)
        outputs = self._forward(packed)
        value = nothing = torch.stack([output_R[:0].sum() for output_R in outputs]).sum()
        if len(part):
            moved = _to(part, self._device)
            common = Terms(
                batch=moved,
                cu_seqlens=part["response"].offsets.to(self._device),
                mask_R=moved["loss_mask"].values,
                normalizers=normalizers,
            )
            value = loss(self._terms(outputs, common), metrics) + nothing
        value.backward()
        return float(value.detach())

    def _step(self, metrics: Metrics) -> None:
        assert self._settings is not None
        drop_gathered(self._network)  # they are out of date after this
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        norm = self._global_norm(gradients)
        if not math.isfinite(norm):
            self._optimizer.zero_grad()
            raise FloatingPointError(
                f"{self.labels.step} {self.version + 1}: the gradient norm is {norm}; the weights were not changed"
            )
        limit = self._settings.grad_clip
        if 0 < limit < norm:
            torch._foreach_mul_([_local(g) for g in gradients], limit / norm)
        metrics.set(self.labels.norm, norm)
        metrics.set(self.labels.lr, self._schedule.get_last_lr()[0])
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad()
        self.version += 1

    def _skip(self, metrics: Metrics) -> None:
        """An update without a token: there is no loss, and a gradient of 0 would still move the weights (moments)."""
        metrics.sum(self.labels.skipped, float(dist.get_rank(self._group) == 0))  # all know it; it is counted once
        metrics.mean(self.labels.loss, 0.0, 1.0 / dist.get_world_size(self._group))
        metrics.set(self.labels.norm, 0.0)
        metrics.set(self.labels.lr, self._schedule.get_last_lr()[0])
        with warnings.catch_warnings():  # of a schedule that goes on without its optimizer: it is meant to
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            self._schedule.step()
        self.version += 1
        self.skipped += 1

    def _global_norm(self, gradients: Sequence[Tensor]) -> float:
        """The 2-norm of all gradients over all ranks; each rank has its own slices, without overlap."""
        norms = torch._foreach_norm([_local(g) for g in gradients])
        squares = torch.stack(norms).double().square().sum().reshape(1)
        dist.all_reduce(squares, group=self._group)
        return math.sqrt(value) if (value := float(squares)) >= 0 else value


def compute_dtype(config: Config) -> torch.dtype:
    """Of the matrix products. Raises UserError for an unknown name."""
    return dtype_of("model.compute_dtype", config.model.compute_dtype)


def dtype_of(key: str, name: str) -> torch.dtype:
    if name not in DTYPES:
        raise UserError(f"{key} must be one of {', '.join(DTYPES)}, not {name!r}")
    return DTYPES[name]


def _mask(batch: Batch) -> Tensor:
    """float32 [R]: 1 where the token counts in the loss; all of them where the batch has no `loss_mask`."""
    if "loss_mask" in batch:
        return batch["loss_mask"].values.float()
    return torch.ones(batch["response"].values.shape[0]) if len(batch) else torch.empty(0)


def _counted(batch: Batch, mask_R: Tensor) -> Tensor:
    """float64 [2]: counted tokens, and samples that have one."""
    if not len(batch):
        return _counts(0, 0)
    per_sample = [float(row.sum()) for row in Column(mask_R, batch["response"].lengths).rows()]
    return _counts(sum(per_sample), sum(count > 0 for count in per_sample))


def _counts(tokens: float, sequences: float) -> Tensor:
    return torch.tensor([tokens, sequences], dtype=torch.float64)


def _to(batch: Batch, device: torch.device) -> Batch:
    """Values on `device`; lengths and ids stay on the CPU."""
    return Batch(batch.ids, {name: Column(c.values.to(device), c.lengths) for name, c in batch.columns.items()})


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """All slices of a sharded tensor, on every rank (collective); another tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
