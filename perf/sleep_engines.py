"""Engines whose work is a measured sleep, in the graph of GRPO: what a job does around its engines, and nothing else.

A decoding step takes `STEP_S`, however many responses are running (decoding is bound by memory); training takes
`TOKEN_S` for each token. Response lengths have a long tail and follow from the sample's identity alone. Sleeping needs
no core, so that more ranks than cores can be looked at.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.config.schema import Config
from spmd_rl.data.batch import Batch, Finish
from spmd_rl.engines.protocol import Completion, Request, SampleId
from spmd_rl.engines.rollout.versions import Versions, first_version
from spmd_rl.graph.graph import Graph
from spmd_rl.graph.stage import BuildContext
from spmd_rl.observe.metrics import Metrics
from spmd_rl.recipes import grpo

STEP_S = float(os.environ.get("SLEEP_STEP_S", "0.005"))
TOKEN_S = float(os.environ.get("SLEEP_TOKEN_S", "0.00025"))
MEDIAN, SIGMA = 40.0, 0.9  # of the response lengths: log-normal, cut at rollout.max_tokens
WEIGHT_BYTES = 1 << 22


def graph(config: Config, world_size: int) -> Graph:
    """GRPO's graph; the two engines of its models are replaced."""
    declared = grpo.graph(config, world_size)
    builders = {"actor": SleepTrainer, "rollout": SleepRollout}
    engines = tuple(replace(e, build=builders.get(e.name, e.build)) for e in declared.engines)
    return Graph(declared.stages, engines)


class SleepRollout:
    def __init__(self, context: BuildContext) -> None:
        self.version = 0
        self._most = context.config.rollout.max_sequences
        self._waiting: list[Request] = []
        self._running: dict[SampleId, tuple[Request, Versions, int]] = {}  # tokens so far

    def submit(self, requests: Sequence[Request]) -> None:
        self._waiting += requests

    def unfinished(self) -> int:
        return len(self._waiting) + len(self._running)

    def step(self) -> list[Completion]:
        while self._waiting and len(self._running) < self._most:
            request = self._waiting.pop(0)
            begun = request.begun
            runs, count = (begun.versions, len(begun.tokens)) if begun else ((), 0)
            self._running[request.id] = (request, Versions(runs), count)
        time.sleep(STEP_S)
        done = []
        for request, versions, count in list(self._running.values()):
            self._running[request.id] = (request, versions, count + 1)
            if count + 1 == length(request):
                done.append(self._take_out(request.id, Finish.STOP))
        return done

    def _take_out(self, sample: SampleId, finish: Finish) -> Completion:
        _, versions, count = self._running.pop(sample)
        runs = versions.upto(count, self.version)
        return Completion(sample, [7] * count, [-1.0] * count, finish, first_version(runs, self.version), runs)

    def abort(self, ids: Sequence[SampleId] | None = None) -> list[Completion]:
        chosen = self._running.keys() | {request.id for request in self._waiting} if ids is None else set(ids)
        waiting, self._waiting = self._waiting, [request for request in self._waiting if request.id not in chosen]
        ended = [self._take_out(sample, Finish.ABORTED) for sample in list(self._running) if sample in chosen]
        none = [request.id for request in waiting if request.id in chosen]
        return ended + [Completion(sample, [], [], Finish.ABORTED, self.version, ()) for sample in none]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int, keep_cache: bool = False) -> None:
        for _ in weights:
            pass
        for _, versions, count in self._running.values():
            versions.upto(count, self.version)
        self.version = version

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


def length(request: Request) -> int:
    drawn = random.Random(request.seed).lognormvariate(math.log(MEDIAN), SIGMA)
    return max(1, min(request.sampling.max_tokens, round(drawn)))


class SleepTrainer:
    def __init__(self, context: BuildContext) -> None:
        self.version = self.skipped = 0
        self._world = context.world

    def update(self, batch: Batch, loss: Any, metrics: Metrics, last: bool = True) -> None:
        """The ranks go in lockstep: the one with most tokens sets the pace."""
        tokens = torch.tensor([int(batch["response"].lengths.sum()) if len(batch) else 0])
        dist.all_reduce(tokens, dist.ReduceOp.MAX, group=self._world.control)
        time.sleep(TOKEN_S * int(tokens))
        if last:
            self.version += 1

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield "weight", torch.zeros(WEIGHT_BYTES // 4)

    def state_dict(self) -> dict[str, Any]:
        return {"version": self.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.version = int(state["version"])
