"""LoRA (Hu et al. 2021, arXiv:2106.09685): a frozen base, and a trained product of two thin matrices at linear layers.

y = W x + (alpha / r) B A x with A [r, in] random and B [out, r] 0 at first: training starts at the base exactly.
The layers are PEFT's. The rollout engine, the export and everyone else see W + (alpha / r) B A under W's plain name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from spmd_rl.config.errors import UserError
from spmd_rl.config.schema import ModelConfig
from spmd_rl.engines.train.model import decoder_layers, load_config

_ADAPTER = "default"  # PEFT's own name for the only one
_BASE, _A, _B = ".base_layer.", ".lora_A.", ".lora_B."


def lora_config(settings: ModelConfig, bare: bool = False) -> Any:
    """The `peft.LoraConfig` of these settings. Raises UserError for a target that names no linear layer.

    bare: for the transformer without its head, whose layers have other full names.
    Loads no weight: the layers are looked up in a model without storage, so that a mistake is known at once.
    """
    from peft import LoraConfig

    try:
        with torch.device("meta"):
            whole = AutoModelForCausalLM.from_config(load_config(settings.path))
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"model.path: {settings.path!r} is no causal language model: {reason}") from None
    model = whole.base_model if bare else whole
    linear = _linear_layers(model)
    chosen = list(linear)
    if settings.lora_targets:
        for target in settings.lora_targets:
            if not any(_ends(name, target) for name in linear):
                kinds = ", ".join(sorted({_last(name) for name in linear}))
                raise UserError(
                    f"model.lora_targets: no linear layer of {settings.path} is named {target!r}; there are {kinds}"
                )
        chosen = [name for name in linear if any(_ends(name, target) for target in settings.lora_targets)]
    short = sorted({_last(name) for name in chosen})
    also = [name for name, _ in model.named_modules() if _last(name) in short]
    return LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha or 2 * settings.lora_rank,
        target_modules=short if sorted(also) == sorted(chosen) else chosen,
        # With dropout the policy would differ from the one that drew the samples before any update.
        lora_dropout=0.0,
        fan_in_fan_out=any(isinstance(linear[name], Conv1D) for name in chosen),
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=settings.path,
    )


def add_adapters(model: PreTrainedModel, config: Any, base_dtype: torch.dtype, seed: int) -> None:
    """Freezes `model`, stores it in `base_dtype`, and puts trainable float32 adapters into it, in place.

    config: of `lora_config`. The adapters' first values follow from `seed` alone, equal on every rank.
    """
    from peft import inject_adapter_in_model

    model.requires_grad_(False)
    for parameter in model.parameters():  # not the buffers: rotary frequencies need their digits
        parameter.data = parameter.data.to(base_dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def merged(weights: Iterable[tuple[str, Tensor]], model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The pairs of a model with adapters as those of one without: plain names, base + product in float32.

    weights: (name in `model`, whole tensor), a layer's base before its A and its A before its B. Other tensors pass as
    they are.
    """
    layers = _adapter_layers(model)
    base, a_RI = torch.empty(0), torch.empty(0)
    for name, tensor in weights:
        if name.endswith(f"{_BASE}weight"):
            base = tensor
        elif _A in name:
            a_RI = tensor
        elif _B in name:
            owner = name.partition(_B)[0]
            thin = (
                (a_RI.T, tensor.T) if layers[owner].fan_in_fan_out else (tensor, a_RI)
            )  # a base [in, out] or [out, in]
            product = [factor.float() for factor in thin]
            yield f"{owner}.weight", torch.addmm(base.float(), *product, alpha=layers[owner].scaling[_ADAPTER])
        else:
            yield name.replace(_BASE, "."), tensor


def adapter_name(name: str) -> str:
    """The name of a trained parameter in an adapter file of PEFT."""
    return f"base_model.model.{name.replace(f'.{_ADAPTER}.', '.')}"


def adapter_settings(config: Any) -> dict[str, Any]:
    """What adapter_config.json holds, as values that JSON can carry."""
    plain = {key: sorted(v) if isinstance(v, set) else v for key, v in config.to_dict().items()}
    return {**plain, "peft_type": config.peft_type.value, "inference_mode": True}


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Within it, `model` computes what its base alone computes."""
    layers = _adapter_layers(model).values()
    try:
        for layer in layers:
            # Not `enable_adapters`, which switches `requires_grad` too: sharded parameters have to keep theirs.
            layer._disable_adapters = True
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def _linear_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Those of attention and MLP by name: what lies in the decoder layers."""
    inside = {id(module) for module in decoder_layers(model).modules()}
    kinds = (nn.Linear, Conv1D)
    return {name: m for name, m in model.named_modules() if id(m) in inside and isinstance(m, kinds)}


def _adapter_layers(model: nn.Module) -> dict[str, Any]:
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")
