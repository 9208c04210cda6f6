"""`World`: who this process is among the others. Made once in `main`, passed on as a value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from spmd_rl.config.errors import UserError


@dataclass(frozen=True)
class World:
    """The place of one process among the ranks of a job, or of its role where the job has several (`roles.py`).

    rank, size: among these ranks; local_rank, local_size: on this node; node, nodes: which node of how many;
    source: what started the job (torchrun, openmpi, mpich, slurm, explicit, single); data: the group for payloads
    (NCCL on CUDA, else gloo); control: a gloo group over all ranks for metadata; timeout_s: deadline of one
    collective; address: where the other ranks reach this one; role: the name of the role whose ranks these are, empty
    for those of the job; job_ranks: the number of each of these ranks in the job, empty where it is the same.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    nodes: int
    device: torch.device
    source: str
    timeout_s: float
    data: ProcessGroup
    control: ProcessGroup
    address: str = "127.0.0.1"
    role: str = ""
    job_ranks: tuple[int, ...] = ()

    def job_rank(self, rank: int | None = None) -> int:
        """The number in the job, by which messages name it, of a rank of this world (default: this one)."""
        rank = self.rank if rank is None else rank
        return self.job_ranks[rank] if self.job_ranks else rank

    def mesh(self, ranks: Sequence[int], axes: Mapping[str, int]) -> DeviceMesh:
        """A mesh over `ranks` with named axes, the last axis innermost. Collective over *all* ranks of the world.

        Raises UserError where the axes do not multiply to the number of ranks.
        """
        if prod(axes.values()) != len(ranks):
            shape = " x ".join(f"{name}={size}" for name, size in axes.items())
            raise UserError(f"mesh {shape} needs {prod(axes.values())} ranks, but {len(ranks)} are placed there")
        layout = torch.tensor(list(ranks)).reshape(list(axes.values()))
        return DeviceMesh(self.device.type, layout, mesh_dim_names=tuple(axes))
