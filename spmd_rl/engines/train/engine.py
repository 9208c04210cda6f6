"""`TrainEngine`: a causal language model that is trained, or only asked for log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from spmd_rl.comm.world import World
from spmd_rl.config.schema import Config
from spmd_rl.data.batch import Batch
from spmd_rl.engines.protocol import LossTerms, Terms
from spmd_rl.engines.train.fsdp import drop_gathered, gathered_parameters
from spmd_rl.engines.train.model import PolicyModel, load_model
from spmd_rl.engines.train.model_engine import ModelEngine, compute_dtype, dtype_of, full_tensor


class TrainEngine(ModelEngine[LossTerms]):
    """A causal language model. See `engines.protocol.TrainEngine`.

    trainable: false for a model that is only evaluated (a reference): its weights are stored in the compute dtype.
    offload: see `fsdp.shard`. Raises UserError for a model folder that cannot be used.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        mesh: DeviceMesh,
        total_steps: int,
        trainable: bool = True,
        offload: bool = False,
    ) -> None:
        self._rollout_dtype = dtype_of("rollout.dtype", config.rollout.dtype)
        model = self._load(config, trainable)
        # Greedy sampling has no temperature to divide by; its policy is read at 1.
        network = PolicyModel(model, config.rollout.temperature or 1.0, config.model.logprob_chunk)
        optimizer = config.train.optimizer if trainable else None
        super().__init__(config, world, mesh, network, model, optimizer, total_steps, offload)

    def _load(self, config: Config, trainable: bool) -> PreTrainedModel:
        return load_model(config.model.path, torch.float32 if trainable else compute_dtype(config), verify=trainable)

    def logprobs(self, batch: Batch) -> Tensor:
        """float32 [R] on the CPU, in batch order: log-probabilities of all response tokens, without gradient."""
        return self._evaluate(batch)

    def _terms(self, outputs: tuple[Tensor, ...], common: Terms) -> LossTerms:
        logprob_R, entropy_R = outputs
        return LossTerms(logprob_R=logprob_R, entropy_R=entropy_R, **vars(common))

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor of the rollout dtype), one after the other; a tied weight once.

        All ranks must draw all of them. With `train.shard=keep` the gathered parameters stay for the next pass.
        """
        gathered = self._rollout_dtype == self._compute_dtype or self._compute_dtype == torch.float32
        for name, tensor in self._whole_weights(gathered):
            yield name, tensor.to(self._rollout_dtype, copy=gathered)

    def _whole_weights(self, gathered: bool) -> Iterator[tuple[str, Tensor]]:
        """Whole parameters. gathered: as the forward pass has them, in views that do not live long; else from the
        masters, because the rollout wants more digits than the compute dtype has."""
        if gathered:
            yield from gathered_parameters(self._network, self._keep)
        else:
            drop_gathered(self._network)
            for name, parameter in self._model.named_parameters():
                yield name, full_tensor(parameter.detach().to(self._rollout_dtype))
