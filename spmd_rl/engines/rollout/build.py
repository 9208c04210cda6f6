"""The rollout engine that the configuration names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from spmd_rl.comm.world import World
from spmd_rl.config.errors import UserError
from spmd_rl.config.schema import Config
from spmd_rl.engines.protocol import InterruptibleEngine
from spmd_rl.engines.rollout.sampling import check_model, end_tokens, model_tokens

ENGINES = ("vllm", "transformers")


def build_rollout(config: Config, world: World, mesh: DeviceMesh, tokenizer: Any) -> InterruptibleEngine:
    """This rank's rollout engine. Collective over the ranks of `mesh`, whose innermost axis is tensor parallelism.

    Raises UserError, before anything is loaded, for an unknown engine, a model that cannot be split or is too short,
    and a placement that the engine cannot serve.
    """
    rollout, path = config.rollout, config.model.path
    tensor_parallel = rollout.tensor_parallel
    if rollout.engine not in ENGINES:
        raise UserError(f"rollout.engine={rollout.engine!r} is unknown: {' or '.join(ENGINES)}")
    check_model(Path(path) / "config.json", tensor_parallel, model_tokens(config))
    end = end_tokens(path, tokenizer)
    if rollout.engine == "transformers":
        if tensor_parallel > 1:
            raise UserError(f"rollout.tensor_parallel={tensor_parallel} needs rollout.engine=vllm")
        from spmd_rl.engines.rollout.transformers_engine import TransformersEngine

        return TransformersEngine(
            path,
            tokenizer,
            end,
            rollout.max_sequences,
            model_tokens(config),
            dtype={"bfloat16": torch.bfloat16, "float32": torch.float32}[rollout.dtype],
            device=world.device,
        )
    if mesh.mesh.flatten().tolist() != list(range(world.size)) or world.size % tensor_parallel:
        raise UserError(
            f"rollout.engine=vllm runs on all {world.size} ranks, in consecutive groups of "
            f"rollout.tensor_parallel={tensor_parallel}; it was placed on {mesh.mesh.flatten().tolist()}"
        )
    from spmd_rl.engines.rollout.vllm_engine import VllmEngine

    return VllmEngine(path, rollout, world, end, model_tokens(config))
