"""Which rank is this, of how many, and who says so: read from the environment that the launcher made."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from spmd_rl.config.errors import UserError

_DEFAULT_PORT = 29500  # where torch's own launcher meets, too


@dataclass(frozen=True)
class Placement:
    """One process in a job. What the launcher does not say is None; `bootstrap` finds it out from the other ranks.

    source: explicit, torchrun, openmpi, mpich, slurm or single; node: index of this machine among `nodes`; master:
    host and port where the ranks meet.
    """

    source: str
    rank: int
    size: int
    local_rank: int | None = None
    local_size: int | None = None
    node: int | None = None
    nodes: int | None = None
    master: tuple[str, int] | None = None


def detect(environ: Mapping[str, str]) -> Placement:
    """The placement that `environ` describes. The innermost launcher wins, so mpirun inside Slurm is mpirun.

    Order: SPMD_RL_RANK (explicit), RANK (torchrun), OMPI_COMM_WORLD_RANK (Open MPI), PMI_RANK (MPICH), SLURM_PROCID
    of a real step (srun), else single. MASTER_ADDR and MASTER_PORT, where set, win over a derived meeting point.
    Raises UserError where values are missing, are no numbers or contradict each other.
    """
    placement = _read(environ)
    _check(placement)
    return placement


def _read(environ: Mapping[str, str]) -> Placement:
    number = _Numbers(environ)
    if "SPMD_RL_RANK" in environ:
        return Placement(
            source="explicit",
            rank=number("SPMD_RL_RANK"),
            size=number("SPMD_RL_SIZE"),
            local_rank=number.maybe("SPMD_RL_LOCAL_RANK"),
            local_size=number.maybe("SPMD_RL_LOCAL_SIZE"),
            node=number.maybe("SPMD_RL_NODE"),
            nodes=number.maybe("SPMD_RL_NODES"),
            master=_explicit_master(environ),
        )
    if "RANK" in environ:
        return Placement(
            source="torchrun",
            rank=number("RANK"),
            size=number("WORLD_SIZE"),
            local_rank=number.maybe("LOCAL_RANK"),
            local_size=number.maybe("LOCAL_WORLD_SIZE"),
            node=number.maybe("GROUP_RANK"),
            nodes=number.maybe("GROUP_WORLD_SIZE"),
            master=_named_master(environ, required_by="RANK"),
        )
    if "OMPI_COMM_WORLD_RANK" in environ:
        return Placement(
            source="openmpi",
            rank=number("OMPI_COMM_WORLD_RANK"),
            size=number("OMPI_COMM_WORLD_SIZE"),
            local_rank=number.maybe("OMPI_COMM_WORLD_LOCAL_RANK"),
            local_size=number.maybe("OMPI_COMM_WORLD_LOCAL_SIZE"),
            master=_named_master(environ),
        )
    if "PMI_RANK" in environ:
        return Placement(
            source="mpich",
            rank=number("PMI_RANK"),
            size=number("PMI_SIZE"),
            local_rank=number.maybe("MPI_LOCALRANKID"),
            local_size=number.maybe("MPI_LOCALNRANKS"),
            master=_named_master(environ),
        )
    # A batch script without srun has SLURM_PROCID, too, but no step with a number of tasks: it is one process.
    if "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" in environ:
        return _slurm(environ, number)
    return Placement("single", 0, 1, 0, 1, 0, 1)


def _slurm(environ: Mapping[str, str], number: _Numbers) -> Placement:
    size, node, nodes = number("SLURM_STEP_NUM_TASKS"), number("SLURM_NODEID"), number("SLURM_STEP_NUM_NODES")
    tasks = parse_tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if len(tasks) != nodes or sum(tasks) != size or not 0 <= node < nodes:
        raise UserError(
            f"SLURM_STEP_TASKS_PER_NODE={environ.get('SLURM_STEP_TASKS_PER_NODE')!r} does not describe {size} tasks on "
            f"{nodes} nodes (this is node {node}); start the ranks with srun, or name the rank by SPMD_RL_RANK"
        )
    hosts = parse_nodelist(environ.get("SLURM_STEP_NODELIST", ""))
    job, step = number("SLURM_JOB_ID"), number.maybe("SLURM_STEP_ID") or 0
    restart = number.maybe("SLURM_RESTART_COUNT") or 0
    port = number.maybe("MASTER_PORT") or slurm_port(job, step, restart)
    return Placement(
        source="slurm",
        rank=number("SLURM_PROCID"),
        size=size,
        local_rank=number("SLURM_LOCALID"),
        local_size=tasks[node],
        node=node,
        nodes=nodes,
        master=(environ.get("MASTER_ADDR") or hosts[0], port),
    )


def slurm_port(job: int, step: int, restart: int) -> int:
    """The port of a job step: the same on all ranks, below the ephemeral range, different for neighbouring steps."""
    return 10000 + (job * 31 + step * 7 + restart) % 20000


def parse_tasks_per_node(text: str) -> list[int]:
    """`2(x3),1` → [2, 2, 2, 1]. Raises UserError for anything else."""
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise UserError(f"SLURM_STEP_TASKS_PER_NODE={text!r} is not of the form 2(x3),1")
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def parse_nodelist(text: str) -> list[str]:
    """Slurm's host list `a,n[1-3,07]-x` → [a, n1-x, n2-x, n3-x, n07-x]. Raises UserError where it is malformed."""
    hosts: list[str] = []
    if not re.fullmatch(r"(?:[^\[\]]|\[[^\[\]]+\])+", text):
        raise UserError(f"SLURM_STEP_NODELIST={text!r} is not a list of hosts")
    for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        names = [""]
        for literal, group in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", part):
            endings = [literal] if literal else _expand_range(group, text)
            names = [name + ending for name in names for ending in endings]
        hosts += names
    if not hosts:
        raise UserError(f"SLURM_STEP_NODELIST={text!r} names no host")
    return hosts


def _expand_range(group: str, text: str) -> list[str]:
    values: list[str] = []
    for item in group.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
        if match is None:
            raise UserError(f"SLURM_STEP_NODELIST={text!r} has a malformed range {item!r}")
        first, last = match[1], match[2] or match[1]
        values += [f"{value:0{len(first)}d}" for value in range(int(first), int(last) + 1)]
    return values


def _explicit_master(environ: Mapping[str, str]) -> tuple[str, int] | None:
    text = environ.get("SPMD_RL_MASTER")
    if text is None:
        return _named_master(environ)
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"SPMD_RL_MASTER={text!r} is not host:port")
    return host.strip("[]"), int(port)


def _named_master(environ: Mapping[str, str], required_by: str = "") -> tuple[str, int] | None:
    host = environ.get("MASTER_ADDR")
    if host:
        return host, _Numbers(environ).maybe("MASTER_PORT") or _DEFAULT_PORT
    if required_by:
        raise UserError(f"{required_by} is set, but MASTER_ADDR is not: start with torchrun, or set both")
    return None


def _check(placement: Placement) -> None:
    of = f"{placement.source} says"
    if not 0 <= placement.rank < placement.size:
        raise UserError(f"{of} rank {placement.rank} of {placement.size}: ranks count from 0 to size - 1")
    for name, index, count, whole in (
        ("local rank", placement.local_rank, placement.local_size, placement.size),
        ("node", placement.node, placement.nodes, placement.size),
    ):
        if (index is None) != (count is None):
            raise UserError(f"{of} {name} {index} of {count}: set both or none")
        if index is not None and count is not None and not 0 <= index < count <= whole:
            raise UserError(f"{of} {name} {index} of {count} in a world of {whole} ranks: that cannot be")


class _Numbers:
    """Reads whole numbers from the environment, and says which variable is wrong."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def __call__(self, name: str) -> int:
        value = self.maybe(name)
        if value is None:
            raise UserError(f"{name} is not set, but the other variables of this launcher are")
        return value

    def maybe(self, name: str) -> int | None:
        text = self._environ.get(name)
        if text is None or text == "":
            return None
        if not text.strip().lstrip("-").isdigit():
            raise UserError(f"{name}={text!r} is not a whole number")
        return int(text)
