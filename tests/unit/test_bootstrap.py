"""Who am I, according to the launcher's environment: recorded from real launchers, and broken on purpose."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from spmd_rl.comm.bootstrap import bootstrap
from spmd_rl.comm.placement import Placement, detect, parse_nodelist, parse_tasks_per_node, slurm_port
from spmd_rl.config.errors import UserError
from spmd_rl.config.schema import CommConfig

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29511",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",  # the rank within the node again, in spite of its name
    "PMIX_RANK": "3",
}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "6", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "3", "PMI_FD": "7"}
SLURM = {  # srun -N3 -n7, rank 4 on the second node
    "SLURM_JOB_ID": "1217",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "16",  # of the allocation: the step is smaller
    "SLURM_NNODES": "4",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "3,2(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
}
EXPLICIT = {
    "SPMD_RL_RANK": "1",
    "SPMD_RL_SIZE": "2",
    "SPMD_RL_LOCAL_RANK": "0",
    "SPMD_RL_LOCAL_SIZE": "1",
    "SPMD_RL_NODE": "1",
    "SPMD_RL_NODES": "2",
    "SPMD_RL_MASTER": "10.0.0.1:4000",
}

PLACED = [
    pytest.param(TORCHRUN, Placement("torchrun", 5, 8, 1, 4, 1, 2, ("node-a", 29511)), id="torchrun"),
    pytest.param(OPEN_MPI, Placement("openmpi", 3, 4, 1, 2), id="Open MPI"),
    pytest.param(MPICH, Placement("mpich", 2, 6, 2, 3), id="MPICH"),
    pytest.param(SLURM, Placement("slurm", 4, 7, 1, 2, 1, 3, ("gpu07", slurm_port(1217, 2, 0))), id="srun, uneven"),
    pytest.param(EXPLICIT, Placement("explicit", 1, 2, 0, 1, 1, 2, ("10.0.0.1", 4000)), id="explicit"),
    pytest.param({}, Placement("single", 0, 1, 0, 1, 0, 1), id="single"),
    # One launcher inside another: the inner one started this process.
    pytest.param({**SLURM, **OPEN_MPI}, Placement("openmpi", 3, 4, 1, 2), id="mpirun inside Slurm"),
    pytest.param({**SLURM, **MPICH}, Placement("mpich", 2, 6, 2, 3), id="mpiexec inside Slurm"),
    pytest.param(
        {**SLURM, **TORCHRUN}, Placement("torchrun", 5, 8, 1, 4, 1, 2, ("node-a", 29511)), id="torchrun inside srun"
    ),
    pytest.param(
        {**TORCHRUN, **EXPLICIT}, Placement("explicit", 1, 2, 0, 1, 1, 2, ("10.0.0.1", 4000)), id="explicit wins"
    ),
    # A batch script that runs the program without srun is one process, whatever the allocation's size.
    pytest.param(
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "4"},
        Placement("single", 0, 1, 0, 1, 0, 1),
        id="batch script without srun",
    ),
    pytest.param(
        {**OPEN_MPI, "MASTER_ADDR": "node-a"},
        Placement("openmpi", 3, 4, 1, 2, master=("node-a", 29500)),
        id="a meeting point given by the user",
    ),
    pytest.param(
        {**SLURM, "MASTER_ADDR": "10.1.1.1", "MASTER_PORT": "41000"},
        Placement("slurm", 4, 7, 1, 2, 1, 3, ("10.1.1.1", 41000)),
        id="Slurm with a meeting point given by the user",
    ),
]


@pytest.mark.parametrize(("environ", "placement"), PLACED)
def test_placement(environ: Mapping[str, str], placement: Placement) -> None:
    assert detect(environ) == placement


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({**TORCHRUN, "RANK": "8"}, "rank 8 of 8"),
        ({**TORCHRUN, "RANK": "-1"}, "rank -1 of 8"),
        ({**TORCHRUN, "WORLD_SIZE": "eight"}, "WORLD_SIZE='eight' is not a whole number"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "local rank 4 of 4"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, "local rank 1 of 9 in a world of 8"),
        ({**TORCHRUN, "GROUP_RANK": "2"}, "node 2 of 2"),
        ({k: v for k, v in TORCHRUN.items() if k != "LOCAL_RANK"}, "local rank None of 4: set both or none"),
        ({k: v for k, v in TORCHRUN.items() if k != "MASTER_ADDR"}, "MASTER_ADDR is not"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not set"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "3,2"}, "does not describe 7 tasks on 3 nodes"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "3,2(x"}, "not of the form 2(x3),1"),
        ({**SLURM, "SLURM_NODEID": "3"}, "this is node 3"),
        ({**SLURM, "SLURM_STEP_NODELIST": "gpu[7-"}, "SLURM_STEP_NODELIST"),
        ({**EXPLICIT, "SPMD_RL_MASTER": "10.0.0.1"}, "is not host:port"),
    ],
)
def test_contradictions_are_refused(environ: Mapping[str, str], message: str) -> None:
    with pytest.raises(UserError) as error:
        detect(environ)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_every_rank_of_a_step_derives_the_same_port_and_the_next_step_another() -> None:
    assert slurm_port(1217, 2, 0) == slurm_port(1217, 2, 0) != slurm_port(1217, 3, 0)
    assert slurm_port(1217, 2, 0) != slurm_port(1217, 2, 1)  # a requeued job does not meet the one before
    assert all(1024 < slurm_port(job, step, 0) < 32768 for job in range(0, 10**7, 99991) for step in range(3))


def test_tasks_per_node() -> None:
    assert parse_tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert parse_tasks_per_node("4") == [4]
    with pytest.raises(UserError):
        parse_tasks_per_node("")


def test_nodelist() -> None:
    assert parse_nodelist("n[1-3,7]") == ["n1", "n2", "n3", "n7"]
    assert parse_nodelist("a,gpu[08-11]-ib,z9") == ["a", "gpu08-ib", "gpu09-ib", "gpu10-ib", "gpu11-ib", "z9"]
    assert parse_nodelist("r[1-2]n[1-2]") == ["r1n1", "r1n2", "r2n1", "r2n2"]
    for text in ("", "n[1-", "n[a-b]", "n[]"):
        with pytest.raises(UserError):
            parse_nodelist(text)


@pytest.mark.parametrize(
    ("backend", "message"), [("nccl", "needs CUDA"), ("mpi", "'mpi' is unknown: auto, gloo or nccl")]
)
def test_impossible_backends(backend: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match=message):
        bootstrap(CommConfig(backend=backend))
