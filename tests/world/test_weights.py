"""Weights from trainers to replicas among real processes, while both go on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.world.harness import find_mpirun, run_world
from tests.world.weight_worlds import ROLES, dies, everything

NEEDS_MPI = [pytest.mark.mpi, pytest.mark.skipif(find_mpirun() is None, reason="no mpirun in this environment")]
LIMIT_S = 240.0


@pytest.fixture(scope="module", params=["torch", pytest.param("mpi", marks=NEEDS_MPI)])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each of the four ranks returned, having run all cases one after the other."""
    launcher = {"torch": "torchrun", "mpi": "mpirun"}[request.param]
    result = run_world(everything, 4, launcher, LIMIT_S, {"transport": request.param}, roles=ROLES)
    return result.check().ranks


def replicas(ranks: list[dict[str, Any]], case: str) -> list[dict[str, Any]]:
    if case not in ranks[0]:
        pytest.skip("with torch alone: nothing of it depends on the transport")
    return [ranks[rank][case] for rank in ROLES["rollout"]]


@pytest.mark.parametrize("case", ["in_order", "sent"])
def test_every_bit_arrives_and_all_threads_end(ranks: list[dict[str, Any]], case: str) -> None:
    """Read in the trainers' memory, or sent."""
    for replica in replicas(ranks, case):
        assert replica["versions"] == [0, 1, 5] and replica["right"]
    assert [ranks[rank][case]["seen"] for rank in ROLES["train"]] == [[case == "in_order"] * 2] * 2
    for rank in ranks:
        for found in rank.values():
            assert found.get("threads", []) == []


def test_what_cannot_be_is_said(ranks: list[dict[str, Any]]) -> None:
    for rank in ROLES["train"]:
        again, wrong = ranks[rank]["in_order"]["said"]
        assert again == "ValueError: version 5 is published after version 5"
        assert "weight 'head' (16, 37) torch.float64 comes where 'head' (16, 37) torch.float32 came at first" in wrong
    (late,) = ranks[1]["in_order"]["said"]
    assert late.startswith("TimeoutError: rank 1 waited 0.2 s for version 6 of the weights from ranks [0, 3]; it has")


def test_versions_are_passed_over_and_the_newest_arrives(ranks: list[dict[str, Any]]) -> None:
    """A4."""
    slow, fast = replicas(ranks, "slow_and_fast")
    for replica in (slow, fast):
        assert replica["right"]
        assert replica["versions"] == sorted(set(replica["versions"])) and replica["versions"][-1] == 30
    assert len(slow["versions"]) == 3  # 0, the one that came while it was busy, and the last
    assert slow["kept"] == [False, True, False]


def test_replicas_swap_one_after_the_other(ranks: list[dict[str, Any]]) -> None:
    first, second = replicas(ranks, "one_after_the_other")
    assert first["versions"] == second["versions"] == [0, 1] and first["right"] and second["right"]
    assert second["shown"] == [0]


def test_the_ranks_of_a_replica_share_what_it_receives(ranks: list[dict[str, Any]]) -> None:
    for rank in replicas(ranks, "shared"):
        for way in ("mapped", "copied"):
            assert rank[way]["versions"] == [3, 4] and rank[way]["right"] and rank[way]["threads"] == []
            assert rank[way]["copies"] == (way == "copied")


def test_a_replica_that_dies_is_named() -> None:
    result = run_world(dies, 4, timeout_s=LIMIT_S, roles=ROLES)
    assert not result.timed_out, result.stacks
    for rank in ROLES["train"]:
        (heard,) = [line for line in result.stdout.splitlines() if f"rank {rank} heard:" in line]
        assert "TransportError: weights were not sent" in heard and f"between rank {rank} and rank 1" in heard
