"""Sharding of the model over the data-parallel ranks with FSDP2, set up so that gradients are sums over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from spmd_rl.engines.train.host import GlooReduceScatter
from spmd_rl.engines.train.model import PackedModel, decoder_layers


def shard(
    network: PackedModel, mesh: DeviceMesh, compute_dtype: torch.dtype, keep: bool, offload: bool = False
) -> None:
    """Shards each decoder layer and the rest (embedding, final norm, head) over `mesh`, in place.

    Each rank stores its slices in the dtype of the loaded weights, computes in `compute_dtype` and reduces gradients
    in float32. keep: gathered parameters stay from their first use until the step's last backward pass; else each
    layer's are dropped after its forward and after its backward pass. offload: the slices lie in the host's memory,
    from which each layer's come just before they are gathered.
    """
    place = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()

    def fully(module: nn.Module, policy: MixedPrecisionPolicy, reshard: bool) -> None:
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard, offload_policy=place)

    usual = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for layer in decoder_layers(network.model):
        fully(layer, usual, not keep)
    for module in network.full_precision():
        exact = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
        fully(module, exact, not keep)
    fully(network, usual, False)
    for module in network.modules():
        if isinstance(module, FSDPModule) and mesh.size() > 1:
            # The loss is normalised by counts over all ranks already, so gradients add up; a mean would divide twice.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # the plain SUM, which every backend has
            if mesh.device_type == "cpu":
                module.set_custom_reduce_scatter(GlooReduceScatter())


def recompute_layers(network: PackedModel) -> None:
    """Activation checkpointing: each decoder layer keeps its input and computes the rest again in the backward pass.

    Only `forward` is wrapped, so that parameter names and the hooks of FSDP, which run outside it, stay as they are.
    """
    for layer in decoder_layers(network.model):
        forward = layer.forward

        def recomputed(*args: Any, _forward: Any = forward, **kwargs: Any) -> Any:
            return checkpoint(_forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

        layer.forward = recomputed


@contextmanager
def accumulating(network: nn.Module, last: bool, keep: bool) -> Iterator[None]:
    """Around the forward and backward pass of one micro-batch of several; `last`: of the optimizer step.

    keep: gradients stay whole on each rank until the last micro-batch and are reduced once (least communication);
    else each micro-batch's are reduced to the rank's slices at once (least memory). The sums are the same.
    """
    root = cast(FSDPModule, network)
    root.set_is_last_backward(last)
    root.set_reshard_after_backward(last or not keep)
    root.set_requires_gradient_sync(last or not keep)
    yield


def gathered_parameters(network: PackedModel, keep: bool) -> Iterator[tuple[str, Tensor]]:
    """(name in the model, whole parameter in the compute dtype), layer by layer with one gather each; a tied one once.

    Each tensor is a view that lives until the next layer's is drawn (keep: until the parameters are dropped).
    """
    model = network.model
    names = [name for name, _ in model.named_parameters()]
    units = {f"{name}.": module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    inside = {name: prefix for name in names for prefix in units if name.startswith(prefix)}
    for prefix, module in {"": cast(FSDPModule, network), **units}.items():
        module.unshard()
        for name in names:
            if inside.get(name, "") == prefix:
                yield name, model.get_parameter(name).detach()
        if not keep:
            module.reshard()


def drop_gathered(network: nn.Module) -> None:
    """Frees gathered parameters, which a forward pass without a backward pass leaves behind."""
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
