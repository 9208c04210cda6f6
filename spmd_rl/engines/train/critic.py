"""The critic: a trained model of what a response will be worth, asked before each of its tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spmd_rl.comm.world import World
from spmd_rl.config.errors import UserError
from spmd_rl.config.model_folder import weights_identity
from spmd_rl.config.schema import Config, ModelConfig
from spmd_rl.data.batch import Batch
from spmd_rl.engines.protocol import Terms, ValueTerms
from spmd_rl.engines.train import lora
from spmd_rl.engines.train.model import load_config
from spmd_rl.engines.train.model_engine import Labels, ModelEngine, compute_dtype
from spmd_rl.engines.train.value_model import load_value_model


class CriticEngine(ModelEngine[ValueTerms]):
    """Starts from `critic.path` (the policy's own model where it is empty). See `engines.protocol.Critic`.

    Raises UserError for a folder that cannot be used, or whose vocabulary is smaller than the policy's.
    """

    labels = Labels(
        loss="loss/value",
        tokens="critic/tokens",
        skipped="critic/skipped_updates",
        norm="critic/grad_norm",
        lr="critic/lr",
        step="critic, optimizer step",
    )

    def __init__(self, config: Config, world: World, mesh: DeviceMesh, total_steps: int) -> None:
        path = config.critic.path or config.model.path
        sizes = [
            load_config(folder, key).get_text_config().vocab_size
            for folder, key in ((path, "critic.path"), (config.model.path, "model.path"))
        ]
        if sizes[0] < sizes[1]:
            raise UserError(
                f"critic.path: {path!r} knows {sizes[0]} tokens and the policy {sizes[1]}; a model of the same tokens "
                "is wanted"
            )
        # The policy's own model has been verified by the actor.
        network = load_value_model(path, torch.float32, "critic.path", verify=path != config.model.path)
        if config.critic.lora_rank:
            adapters = lora.lora_config(ModelConfig(path=path, lora_rank=config.critic.lora_rank), bare=True)
            lora.add_adapters(network.model, adapters, compute_dtype(config), config.run.seed)
            self._base = weights_identity(path)
        super().__init__(config, world, mesh, network, network, config.critic.optimizer, total_steps)

    def values(self, batch: Batch) -> Tensor:
        """float32 [R] on the CPU, in batch order: the value before each response token, without gradient."""
        return self._evaluate(batch)

    def _terms(self, outputs: tuple[Tensor, ...], common: Terms) -> ValueTerms:
        return ValueTerms(value_R=outputs[0], **vars(common))
