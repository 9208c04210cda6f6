"""A train engine whose model stays: only its LoRA adapters are trained and saved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from spmd_rl.config.model_folder import weights_identity
from spmd_rl.config.schema import Config
from spmd_rl.data.batch import Batch
from spmd_rl.engines.train import lora
from spmd_rl.engines.train.engine import TrainEngine
from spmd_rl.engines.train.fsdp import drop_gathered
from spmd_rl.engines.train.model_engine import compute_dtype, full_tensor


class LoraEngine(TrainEngine):
    """As `TrainEngine`, with the base stored in the compute dtype and float32 adapters as `model.lora_*` say.

    `named_weights` gives merged weights under the plain names, so that nobody else need know of adapters.
    """

    def _load(self, config: Config, trainable: bool) -> PreTrainedModel:
        self._lora = lora.lora_config(config.model)
        model = super()._load(config, trainable)
        lora.add_adapters(model, self._lora, compute_dtype(config), config.run.seed)
        self._base = weights_identity(config.model.path)
        return model

    def _whole_weights(self, gathered: bool) -> Iterator[tuple[str, Tensor]]:
        return lora.merged(super()._whole_weights(gathered), self._model)

    def base_logprobs(self, batch: Batch) -> Tensor:
        """As `logprobs`, with the adapters off."""
        with lora.adapters_off(self._model):
            return self.logprobs(batch)

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name in a PEFT adapter file, full float32 tensor), one after the other. All ranks must draw all of them."""
        drop_gathered(self._network)
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                yield lora.adapter_name(name), full_tensor(parameter.detach())

    def adapter_settings(self) -> dict[str, Any]:
        """What PEFT's adapter_config.json is to hold."""
        return lora.adapter_settings(self._lora)


class BasePolicy:
    """The base of a LoRA engine as the reference policy: no second model is loaded."""

    def __init__(self, engine: LoraEngine) -> None:
        self._engine = engine

    def logprobs(self, batch: Batch) -> Tensor:
        """As `TrainEngine.logprobs`, with the adapters off. Collective over the engine's ranks."""
        return self._engine.base_logprobs(batch)
