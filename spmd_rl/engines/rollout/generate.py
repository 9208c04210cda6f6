"""Requests in, completions out: the whole of a synchronous rollout stage."""

from __future__ import annotations

import time
from collections.abc import Sequence

from spmd_rl.engines.protocol import Completion, Request, RolloutEngine, SampleId


class RolloutTimeout(TimeoutError):
    """The engine did not finish all requests in time."""


def generate(engine: RolloutEngine, requests: Sequence[Request], deadline_s: float) -> list[Completion]:
    """One completion per request, in the order of the requests.

    The engine must be idle, and no two requests may have one identity. Ranks of a tensor-parallel group call it with
    the same requests. Log-probabilities are passed on as they are, also NaN: what becomes of such a sample is the
    rule `algorithm.nonfinite_logprob`, applied where advantages are made.

    Raises RolloutTimeout after `deadline_s` seconds, naming samples that are not finished; RuntimeError where the
    engine was not idle or ended a request that it had not finished.
    """
    if engine.unfinished():
        raise RuntimeError(f"the rollout engine still has {engine.unfinished()} requests of an earlier call")
    start = time.monotonic()
    done: dict[SampleId, Completion] = {}
    engine.submit(requests)
    while engine.unfinished():
        done.update((completion.id, completion) for completion in engine.step())
        if time.monotonic() - start > deadline_s and engine.unfinished():
            open_ids = [request.id for request in requests if request.id not in done]
            raise RolloutTimeout(
                f"rollout: {len(open_ids)} of {len(requests)} responses were not finished after {deadline_s:g} s; the "
                f"first are samples {', '.join(map(str, open_ids[:3]))}"
            )
    lost = [request.id for request in requests if request.id not in done]
    if lost or len(done) != len(requests):
        what = f"lost sample {lost[0]}" if lost else "was given one sample twice"
        raise RuntimeError(f"the rollout engine {what}: {len(requests)} requests, {len(done)} completions")
    return [done[request.id] for request in requests]
