"""`generate` against an engine that is told what to do: order, deadline, lost and doubled samples."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import pytest
from torch import Tensor

from spmd_rl.data.batch import Finish
from spmd_rl.engines.protocol import Completion, Request, Sampling
from spmd_rl.engines.rollout.generate import RolloutTimeout, generate


class Scripted:
    """Finishes the last submitted request first, one per step; never the ones in `stuck`; forgets those in `lost`."""

    def __init__(self, stuck: Iterable[int] = (), lost: Iterable[int] = ()) -> None:
        self.stuck, self.lost = set(stuck), set(lost)
        self.open: list[Request] = []

    def submit(self, requests: Sequence[Request]) -> None:
        self.open.extend(requests)

    def unfinished(self) -> int:
        return len(self.open)

    def step(self) -> list[Completion]:
        time.sleep(0.01)
        ready = [request for request in self.open if request.id[2] not in self.stuck]
        if not ready:
            return []
        self.open.remove(ready[-1])
        if ready[-1].id[2] in self.lost:
            return []
        return [Completion(ready[-1].id, [ready[-1].id[2]], [float("nan")], Finish.STOP, 3, ((3, 1),))]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


def requests(count: int) -> list[Request]:
    return [Request((0, 7, sample), (1, 2), Sampling(), sample) for sample in range(count)]


def test_completions_come_in_the_order_of_the_requests():
    done = generate(Scripted(), requests(5), deadline_s=10)
    assert [completion.id[2] for completion in done] == [0, 1, 2, 3, 4]
    assert [completion.tokens for completion in done] == [[0], [1], [2], [3], [4]]


def test_no_requests_are_no_completions():
    assert generate(Scripted(), [], deadline_s=1) == []


def test_the_deadline_ends_the_wait_and_names_samples():
    start = time.monotonic()
    with pytest.raises(RolloutTimeout, match=r"2 of 4 responses.*after 0.3 s.*\(0, 7, 1\), \(0, 7, 2\)"):
        generate(Scripted(stuck=[1, 2]), requests(4), deadline_s=0.3)
    assert time.monotonic() - start < 2


def test_a_lost_sample_is_named():
    with pytest.raises(RuntimeError, match=r"lost sample \(0, 7, 2\)"):
        generate(Scripted(lost=[2]), requests(4), deadline_s=10)


def test_a_doubled_sample_is_refused():
    with pytest.raises(RuntimeError, match="one sample twice: 3 requests, 2 completions"):
        generate(Scripted(), [*requests(2), requests(2)[1]], deadline_s=10)


def test_an_engine_that_is_not_idle_is_refused():
    engine = Scripted()
    engine.submit(requests(2))
    with pytest.raises(RuntimeError, match="still has 2 requests"):
        generate(engine, requests(1), deadline_s=1)
