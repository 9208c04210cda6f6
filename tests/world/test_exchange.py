"""Exchanges among real processes, over every transport."""

from __future__ import annotations

import pytest

from tests.world.harness import run_world

TRANSPORTS = [("torch", "torchrun"), ("mpi", "mpirun")]


@pytest.mark.parametrize(("transport", "launcher"), TRANSPORTS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_random_exchanges_deliver_every_byte(transport: str, launcher: str, ranks: int) -> None:
    result = run_world(
        "tests.world.exchange_cases:random_exchanges",
        ranks=ranks,
        launcher=launcher,
        timeout_s=120,
        args={"transport": transport, "count": 120, "seed": ranks},
    ).check()
    assert all(rank["exchanges"] == 120 for rank in result.ranks)
    assert all(rank["sent"] > 0 and rank["hits"] > 0 for rank in result.ranks)
