"""Roles: disjoint sets of ranks that do different work, such as training and rollout.

Libraries take the default process group of torch for their whole world: vLLM lays its tensor-parallel groups over all
its ranks, DeviceMesh and `new_group` want every rank to come. So the default group of a process is that of its role,
and what concerns the whole job (failure detection, agreement on the configuration) goes over a group of its own, which
torch's registry of groups does not know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from spmd_rl.comm.world import World
from spmd_rl.config.errors import UserError


def check_roles(roles: Mapping[str, Sequence[int]], size: int) -> None:
    """Raises UserError unless each of the job's `size` ranks has exactly one role, and each role a rank."""
    taken: dict[int, str] = {}
    for role, ranks in roles.items():
        if not ranks:
            raise UserError(f"role {role!r} has no rank; the job has {size}")
        for rank in ranks:
            if not 0 <= rank < size:
                raise UserError(f"role {role!r}: there is no rank {rank}, the job has ranks 0 to {size - 1}")
            if rank in taken:
                raise UserError(f"rank {rank} is in role {taken[rank]!r} and in role {role!r}; it can have one")
            taken[rank] = role
    idle = [rank for rank in range(size) if rank not in taken]
    if idle:
        raise UserError(f"ranks {', '.join(map(str, idle[:16]))} have no role; there are {', '.join(roles)}")


def gloo_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
    """A gloo group that does not depend on the default group. Collective over its ranks.

    Collectives of torch.distributed take it as `group`; calls with a root and questions for ranks do not, because
    torch translates ranks by its registry. Ask the `World`.
    """
    backend = dist.ProcessGroupGloo(store, rank, size, timeout)
    group = ProcessGroup(store, rank, size)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
    return group


def group_of(world: World, groups: Sequence[Sequence[int]], limit_s: float) -> ProcessGroup | None:
    """A gloo group over those of `groups` (ranks of the job, of this role) that this rank is in; None for a group of
    one. Collective over the role; limit_s: deadline of one collective."""
    places = {world.job_rank(rank): rank for rank in range(world.size)}
    own = None
    for ranks in groups:
        if len(ranks) > 1:
            made = dist.new_group([places[rank] for rank in ranks], timeout=timedelta(seconds=limit_s), backend="gloo")
            own = made if world.job_rank() in ranks else own
    return own
