"""Exchanges among real processes, over every transport."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import numpy as np
import pytest

from spmd_rl.comm.transport import TransportError
from spmd_rl.comm.transport_mpi import MpiChannel
from tests.world.harness import find_mpirun, run_world

NEEDS_MPI = [pytest.mark.mpi, pytest.mark.skipif(find_mpirun() is None, reason="no mpirun in this environment")]
LIMIT_S = 240.0  # of a world, its start on a busy machine included
TRANSPORTS = [("torch", "torchrun"), pytest.param("mpi", "mpirun", marks=NEEDS_MPI)]


RANDOM = {"plain": 200, "shared": 60}


@pytest.fixture(scope="module", params=["torch", pytest.param("mpi", marks=NEEDS_MPI)])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each of four ranks returned, having run all cases one after the other: a world takes long to start."""
    transport, launcher = request.param, {"torch": "torchrun", "mpi": "mpirun"}[request.param]
    arguments = {"transport": transport, "counts": RANDOM}
    return run_world("tests.world.exchange_cases:everything", 4, launcher, LIMIT_S, arguments).check().ranks


def test_random_exchanges_deliver_every_byte(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for kind, count in RANDOM.items():
            found = rank["random"][kind]
            assert found["exchanges"] == count and found["sent"] > 0 and found["hits"] > 0
            assert (found["channel"] == "SharedMemoryChannel") == (kind == "shared")
            assert (found["direct"] > 10) == (kind == "shared")  # the bytes went straight to their place


def test_a_diamond_joins_each_sample_with_its_own_columns(ranks: list[dict[str, Any]]) -> None:
    assert sum(rank["diamond"]["samples"] for rank in ranks) == 36


def test_a_thousand_steps_reuse_their_buffers() -> None:
    result = run_world(
        "tests.world.exchange_cases:thousand_steps",
        ranks=2,
        timeout_s=LIMIT_S,
        args={"transport": "torch", "steps": 1000},
    ).check()
    for rank in result.ranks:
        assert rank["late"] == rank["early"] < 20
        assert rank["metrics"]["exchange/a/bytes_sent"] > 0
        assert rank["metrics"]["time/exchange_exposed"] > 0 and rank["metrics"]["time/exchange_total"] > 0
        assert rank["metrics"]["exchange/b/local_hit_fraction"] > 0
        assert 1 <= rank["metrics"]["exchange/a/imbalance_after"] <= rank["metrics"]["exchange/a/imbalance_before"]


def test_payload_per_rank_does_not_grow_with_the_world() -> None:
    result = run_world(
        "tests.world.exchange_cases:bytes_per_rank", ranks=8, timeout_s=LIMIT_S, args={"transport": "torch"}
    ).check()
    for size in ("2", "4", "8"):
        moved = [rank[size] for rank in result.ranks if size in rank]
        sent, received = (max(pair[side] for pair in moved) for side in (0, 1))
        held = 4 * sum(1 + 16 * s for s in range(64))
        assert held <= sent <= 1.05 * held and received <= 1.05 * held


def test_faults_are_named_on_every_rank_and_leave_the_channel_usable(ranks: list[dict[str, Any]]) -> None:
    heard = ranks[0]["faults"]
    assert all(rank["faults"] == heard for rank in ranks)
    assert "rank 3: column 'prompt' holds 6 values, but its lengths add up to 10" in heard["lengths"]
    assert "(0, 0, 0) occurs more than once" in heard["duplicates"]
    assert "rank 3: column 'prompt' holds" in heard["dtype"] and "cannot be sent" in heard["dtype"]
    assert "columns differ: rank 0 has" in heard["schema"] and "rank 3 has" in heard["schema"]
    assert "rank 3 has no columns" in heard["bare"]
    assert "ranks [3] mean 'step 5" in heard["plan"] and "linear=2.0" in heard["plan"]
    assert "cost column 'respons' does not exist; there are prompt, version" in heard["cost"]
    assert "not in the source" in heard["outside"]
    assert "(0, 3, 0) is missing" in heard["follow"]
    assert all("exchange 'e' of step" in text for text in heard.values())


def test_memory_that_one_rank_cannot_write_to_ends_the_exchange_on_all(ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ranks):
        who = "rank 3 cannot write into the others' memory: not permitted" if rank == 3 else "ranks [3] cannot write"
        assert f"exchange 'first' of step 0 among ranks [0, 1, 2, 3]: {who}" in found["unwritable"]["first"]
        assert "unusable since exchange 'first' of step 0 failed" in found["unwritable"]["again"]


@pytest.mark.parametrize(("transport", "launcher"), TRANSPORTS)
def test_a_peer_that_never_comes_is_named_in_time(transport: str, launcher: str) -> None:
    result = run_world(
        "tests.world.exchange_faults:absent_peer",
        ranks=3,
        launcher=launcher,
        timeout_s=LIMIT_S,
        args={"transport": transport, "patience_s": 4.0},
    )
    assert not result.timed_out, result.stacks
    for rank in (0, 1):
        heard = [line for line in result.stdout.splitlines() if f"rank {rank} heard:" in line]
        assert len(heard) == 1 and "exchange 'rollout' of step 1" in heard[0], result.stdout + result.stderr
        assert "rank 2 did not come" in heard[0]
        assert f"rank {rank} again: the channel is unusable since exchange 'rollout' of step 1 failed" in result.stdout


def test_mpi_counts_payload_in_units_and_refuses_what_it_cannot_count() -> None:
    """MPI's counts and displacements are 32-bit: 4 GiB to one rank and 16 GiB in all fit, 32 GiB do not."""
    sizes = np.array([2**32, 0, 2**33, 2**32])
    counts, displacements = MpiChannel.counts(sizes)
    assert (counts * 16 == sizes).all() and (displacements * 16 == np.cumsum(sizes) - sizes).all()
    assert max(counts.max(), displacements.max()) < 2**31
    for bad in ([2**34, 2**34], [8]):
        with pytest.raises(TransportError, match="multiples of 16 up to 32 GiB"):
            MpiChannel.counts(np.array(bad))


@pytest.mark.skipif("SPMD_RL_LARGE" not in os.environ, reason="moves 2.3 GiB; SPMD_RL_LARGE=1 runs it")
@pytest.mark.parametrize(("transport", "launcher"), TRANSPORTS)
def test_a_message_of_more_than_2_gib_arrives(transport: str, launcher: str) -> None:
    result = run_world(
        "tests.world.exchange_cases:large_message", 2, launcher, timeout_s=200, args={"transport": transport}
    ).check()
    assert result.ranks == [True, True]


@pytest.mark.mpi
@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="no mpi4py in this environment")
def test_mpi_without_its_launcher_is_refused_in_one_line() -> None:
    result = run_world(
        "tests.world.exchange_faults:wrong_transport", ranks=1, launcher="single", timeout_s=LIMIT_S
    ).check()
    assert "mpi sees rank 0 of 1, but this is rank 0 of 2; start the ranks with mpirun" in result.ranks[0]
