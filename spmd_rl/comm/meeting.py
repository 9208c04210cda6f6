"""The rendezvous: all ranks meet at one TCPStore, within a deadline that names who has not come."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from spmd_rl.comm.address import LOOPBACK, address_towards, interfaces, is_loopback, resolves
from spmd_rl.comm.placement import Placement
from spmd_rl.config.errors import UserError

_LISTED = 16  # ranks named in one message
_GRACE_S = 5.0  # rank 0 decides who is missing; the others wait so much longer for its verdict


@dataclass(frozen=True)
class Meeting:
    """store: shared by all ranks; host, port: where it is; address: where the other ranks reach this one."""

    store: dist.Store
    host: str
    port: int
    address: str


def meet(placement: Placement, timeout_s: float) -> Meeting:
    """Wait for all ranks of the job. Raises UserError at the deadline, naming the ranks that are missing."""
    deadline = time.monotonic() + timeout_s
    host, port, store = _open(placement, timeout_s)
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    shared = dist.PrefixStore(f"spmd_rl/{restart}", store)
    one_node = placement.nodes == 1 or placement.local_size == placement.size
    address = LOOPBACK if one_node else address_towards(host)
    try:
        if not is_loopback(address):
            shared.set("elsewhere", address)
        _arrive(shared, placement, deadline)
        if is_loopback(address) and shared.check(["elsewhere"]):
            # This is the machine where the ranks meet: another machine's address tells which of ours leads out.
            address = address_towards(shared.get("elsewhere").decode())
    except dist.DistNetworkError as error:
        gone = f"the meeting point {host}:{port} went away before all had come"
        raise UserError(f"rank {placement.rank}: {gone}") from error
    return Meeting(shared, host, port, address)


def _open(placement: Placement, timeout_s: float) -> tuple[str, int, dist.Store]:
    timeout = timedelta(seconds=timeout_s)
    if placement.source == "single":
        store = dist.TCPStore(LOOPBACK, 0, 1, True, timeout)
        return LOOPBACK, store.port, store
    if placement.master is None:
        return _open_over_mpi(placement, timeout)
    host, port = placement.master
    if placement.nodes == 1 and not resolves(host):
        host = LOOPBACK  # a laptop or container that cannot look up its own name
    return host, port, _connect(host, port, placement, _serves(placement), timeout)


def _serves(placement: Placement) -> bool:
    """Whether this rank holds the store: rank 0, unless torchrun's agent already does."""
    return placement.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _connect(host: str, port: int, placement: Placement, serve: bool, timeout: timedelta) -> dist.Store:
    try:
        return dist.TCPStore(host, port, placement.size, serve, timeout, wait_for_workers=False)
    except (dist.DistError, OSError) as error:
        reason = str(error).splitlines()[0]
        if serve:
            raise UserError(f"cannot open the meeting point {host}:{port} ({reason}): set MASTER_PORT") from error
        raise UserError(
            f"rank {placement.rank} on {socket.gethostname()} did not reach the meeting point {host}:{port} within "
            f"{timeout.total_seconds():g} s: is rank 0 running there, and MASTER_ADDR right?"
        ) from error


def _open_over_mpi(placement: Placement, timeout: timedelta) -> tuple[str, int, dist.Store]:
    """Rank 0 opens a store on a free port, and MPI tells the others where: no port is guessed."""
    comm = _mpi_world(placement)
    if placement.rank == 0:
        store = dist.TCPStore("0.0.0.0", 0, placement.size, True, timeout, wait_for_workers=False)
        offered = [address for address in interfaces() if not is_loopback(address)]
        comm.bcast((socket.gethostname(), offered, store.port), root=0)
        return _own_name(placement), store.port, store
    name, offered, port = comm.bcast(None, root=0)
    candidates = [LOOPBACK] if name == socket.gethostname() else [name, *offered]
    for host in candidates:
        if _answers(host, port):
            return host, port, _connect(host, port, placement, False, timeout)
    raise UserError(
        f"rank {placement.rank} on {socket.gethostname()} reaches none of {', '.join(candidates)}, port {port}: "
        "set MASTER_ADDR and MASTER_PORT"
    )


def _own_name(placement: Placement) -> str:
    name = socket.gethostname()
    return name if placement.local_size != placement.size and resolves(name) else LOOPBACK


def _mpi_world(placement: Placement) -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"{placement.source} started this rank, but mpi4py does not load ({error}): pip install 'spmd_rl[mpi]', "
            "or set MASTER_ADDR and MASTER_PORT"
        ) from error
    comm = MPI.COMM_WORLD
    if (comm.Get_rank(), comm.Get_size()) != (placement.rank, placement.size):
        library = MPI.Get_library_version().split(",")[0].strip()
        raise UserError(
            f"{placement.source} started rank {placement.rank} of {placement.size}, but mpi4py ({library}) sees rank "
            f"{comm.Get_rank()} of {comm.Get_size()}: launcher and mpi4py must be of the same MPI"
        )
    return comm


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5.0).close()
        return True
    except OSError:
        return False


def _arrive(store: dist.Store, placement: Placement, deadline: float) -> None:
    """Sign in, then wait for the verdict: `all`, set by the last rank to come, or the list of those missing."""
    store.set(f"here/{placement.rank}", socket.gethostname())
    if store.add("arrived", 1) == placement.size:
        store.set("verdict", "all")
    remaining_s = max(1.0, deadline - time.monotonic()) + (_GRACE_S if placement.rank else 0.0)
    try:
        store.wait(["verdict"], timedelta(seconds=remaining_s))
        verdict = store.get("verdict").decode()
    except dist.DistStoreError:
        missing = [rank for rank in range(placement.size) if not store.check([f"here/{rank}"])]
        verdict = _missing_line(missing, placement.size)
        store.set("verdict", verdict)
        time.sleep(1.0)  # the store may be ours: let the others read before it goes
    if verdict != "all":
        raise UserError(f"{verdict}; rank {placement.rank} gives up (comm.init_timeout_s)")


def _missing_line(missing: list[int], size: int) -> str:
    names = ", ".join(map(str, missing[:_LISTED])) + (", …" if len(missing) > _LISTED else "")
    return f"only {size - len(missing)} of {size} ranks have come; missing: {names}"
