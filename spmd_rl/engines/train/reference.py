"""The reference policy: a model as it is on disk, known by its content."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from spmd_rl.comm.world import World
from spmd_rl.config.errors import UserError
from spmd_rl.config.model_folder import weights_identity
from spmd_rl.config.schema import Config
from spmd_rl.engines.train.engine import TrainEngine


class Reference(TrainEngine):
    """The model of `model.path`, never trained. A checkpoint remembers which one it was: a run that goes on keeps its
    distance from the policy that it began with, and from no other that has taken its place in the folder."""

    def __init__(self, config: Config, world: World, mesh: DeviceMesh) -> None:
        offload = config.algorithm.offload_reference
        if offload and world.device.type == "cpu":
            raise UserError("algorithm.offload_reference=true is for GPUs: here all weights lie in the host's memory")
        super().__init__(config, world, mesh, total_steps=0, trainable=False, offload=offload)
        self._path, self._identity = config.model.path, weights_identity(config.model.path)

    def state_dict(self) -> dict[str, Any]:
        return {"identity": self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises UserError where the checkpoint was made beside another reference model."""
        if state["identity"] != self._identity:
            raise UserError(
                f"the reference model in model.path={self._path} is not the one that this run began with: its files "
                "have changed since; put them back, or start anew in another run.folder"
            )
