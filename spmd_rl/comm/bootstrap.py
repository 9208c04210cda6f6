"""From a started process to a `World`: find the launcher, meet the other ranks, open the process groups."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from spmd_rl.comm.address import interfaces
from spmd_rl.comm.meeting import Meeting, meet
from spmd_rl.comm.placement import Placement, detect
from spmd_rl.comm.process import say
from spmd_rl.comm.roles import check_roles, gloo_group
from spmd_rl.comm.world import World
from spmd_rl.config.errors import UserError
from spmd_rl.config.schema import CommConfig


def bootstrap(comm: CommConfig, threads: int = 0) -> World:
    """Join the job that this process was started in. Collective over all ranks; close with `shutdown`.

    threads: CPU threads of torch in this process; 0: the cores that it may use, shared fairly with the other ranks
    that may use the same ones. RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set in
    the environment as torchrun would, because vLLM and others read them there.

    Raises UserError (one line) for an impossible backend, contradictory launcher variables, or ranks that have not
    come within `comm.init_timeout_s`, naming them.
    """
    job, _ = bootstrap_roles(comm, threads, {})
    return job


def bootstrap_roles(comm: CommConfig, threads: int, roles: Mapping[str, Sequence[int]]) -> tuple[World, World]:
    """The world of the job, and that of this rank's role; see `bootstrap` and `roles.py`. `shutdown` the job's.

    roles: name → its ranks of the job, in the order in which the role numbers them; every rank has one. No roles: both
    worlds are the same. Else the default process group is the role's, and the job's `control` (and `data`, which is
    the same group) takes only collectives without a root.
    """
    backend = _backend(comm.backend)
    placement = detect(os.environ)
    role, ranks = "", tuple(range(placement.size))
    if roles:
        check_roles(roles, placement.size)
        role, ranks = next((name, tuple(of)) for name, of in roles.items() if placement.rank in of)
    meeting = meet(placement, comm.init_timeout_s)
    _export(placement, meeting)
    timeout = timedelta(seconds=comm.timeout_s)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"default/{role}", meeting.store),
        rank=ranks.index(placement.rank),
        world_size=len(ranks),
        timeout=timeout,
    )
    data = dist.group.WORLD
    assert data is not None  # just made
    control = dist.new_group(backend="gloo", timeout=timeout)
    everyone = control
    if roles:
        everyone = gloo_group(dist.PrefixStore("job", meeting.store), placement.rank, placement.size, timeout)
    local = _locate(placement, everyone)
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = str(local.rank), str(local.size)
    device = _device(local, placement)
    torch.set_num_threads(threads if threads > 0 else local.fair_threads)
    job = World(
        rank=placement.rank,
        size=placement.size,
        local_rank=local.rank,
        local_size=local.size,
        node=local.node,
        nodes=local.nodes,
        device=device,
        source=placement.source,
        timeout_s=comm.timeout_s,
        data=everyone if roles else data,
        control=everyone,
        address=meeting.address,
    )
    if not roles:
        return job, job
    mine = replace(
        job,
        rank=ranks.index(placement.rank),
        size=len(ranks),
        data=data,
        control=control,
        role=role,
        job_ranks=ranks,
    )
    return job, mine


def shutdown(world: World) -> None:
    """Close the process groups once every rank has come here. For a normal end only.

    After a failure the peers may be gone and a collective would wait for its deadline: let the process end instead.
    Where a rank is lost just here, nothing is lost with it: one line, no exception.
    """
    try:
        world.control.barrier(timeout=timedelta(seconds=world.timeout_s)).wait()
    except RuntimeError:
        say(f"rank {world.rank}: another rank is gone before all said goodbye; the work was done")
        return
    dist.destroy_process_group()


def leave(status: int) -> NoReturn:
    """End this process with `status`, after the functions registered with `atexit`, but without Python's teardown.

    Threads of the process groups (and of other libraries) outlive `shutdown`. One that wants the interpreter during
    its teardown is ended by force inside C++ code, which aborts the process after a good run: seen once in some
    hundred processes on a crowded machine ("terminate called without an active exception", SIGABRT).
    """
    atexit._run_exitfuncs()  # worker processes, loggers
    mpi = sys.modules.get("mpi4py.MPI")  # ends itself from C code of the teardown, and mpirun wants it to end properly
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or its reader is gone
            stream.flush()
    os._exit(status)


def describe(world: World) -> str:
    """One line for the start of a log: how many ranks, where, and who started them."""
    ranks = f"{world.size} rank" + "s" * (world.size != 1)
    nodes = f"{world.nodes} node" + "s" * (world.nodes != 1)
    threads = f"{torch.get_num_threads()} thread" + "s" * (torch.get_num_threads() != 1)
    backend = dist.get_backend()
    return f"{ranks} on {nodes}, started by {world.source}; {world.device.type} ({backend}), {threads} per rank"


@dataclass(frozen=True)
class _Local:
    rank: int
    size: int
    node: int
    nodes: int
    fair_threads: int


def _backend(name: str) -> str:
    if name not in ("auto", "gloo", "nccl"):
        raise UserError(f"comm.backend={name!r} is unknown: auto, gloo or nccl")
    cuda = torch.cuda.is_available()
    if name == "nccl" and not cuda:
        raise UserError("comm.backend=nccl needs CUDA, and torch finds none here: use auto or gloo")
    if name == "gloo" or not cuda:
        return "gloo"
    return "cpu:gloo,cuda:nccl"  # the CPU half serves checkpoints and other host-side collectives of libraries


def _export(placement: Placement, meeting: Meeting) -> None:
    """Set what libraries read: torchrun's variables, and the network interface of gloo, unless the user chose one.

    Gloo otherwise takes the interface that the host name resolves to: on many machines none, or a loopback address
    that other nodes cannot reach. `meeting.address` is loopback on a single node, whatever the host is called.
    """
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(placement.rank), str(placement.size)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = meeting.host, str(meeting.port)
    interface = interfaces().get(meeting.address)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _locate(placement: Placement, control: dist.ProcessGroup) -> _Local:
    """Fill in what the launcher did not say, from what all ranks say about their machine and their cores."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [os.cpu_count() or 1]
    facts: list[Any] = [None] * placement.size
    dist.all_gather_object(facts, (_machine(), placement.node, hash(tuple(cores))), group=control)
    machines = [fact[0] if fact[1] is None else fact[1] for fact in facts]
    mine = machines[placement.rank]
    here = [rank for rank in range(placement.size) if machines[rank] == mine]
    local_rank = here.index(placement.rank) if placement.local_rank is None else placement.local_rank
    local_size = len(here) if placement.local_size is None else placement.local_size
    if local_size != len(here):
        raise UserError(
            f"{placement.source} says {local_size} ranks on this node, but {len(here)} are here: ranks {here[:16]}"
        )
    order = list(dict.fromkeys(machines))
    sharing = sum(fact[0] == facts[placement.rank][0] and fact[2] == facts[placement.rank][2] for fact in facts)
    return _Local(
        rank=local_rank,
        size=local_size,
        node=order.index(mine) if placement.node is None else placement.node,
        nodes=len(order) if placement.nodes is None else placement.nodes,
        fair_threads=max(1, len(cores) // sharing),
    )


def _machine() -> str:
    """A name for this machine that two containers on one host do not share by accident."""
    return f"{socket.gethostname()}/{_read('/proc/sys/kernel/random/boot_id')}"


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


def _device(local: _Local, placement: Placement) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    found = torch.cuda.device_count()
    # Slurm and MPI may hand each rank one GPU of its own, which every rank then sees as number 0.
    index = 0 if found == 1 and placement.source not in ("torchrun", "single") else local.rank
    if index >= found:
        raise UserError(f"rank {placement.rank} would use GPU {index} of its node, which has {found}: too many ranks")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device
