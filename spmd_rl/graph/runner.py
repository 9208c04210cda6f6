"""`Runner`: a loop over this rank's operations. Nothing else synchronises the ranks: there is no barrier."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed import ProcessGroup

from spmd_rl.comm.roles import group_of
from spmd_rl.comm.world import World
from spmd_rl.config.schema import Config
from spmd_rl.data.assignment import Assignment
from spmd_rl.data.batch import Batch, Column
from spmd_rl.data.exchange import Coordinator, Pending
from spmd_rl.data.layout import Layout
from spmd_rl.graph.plan import FinishExchange, Plan, Run, StartExchange
from spmd_rl.graph.stage import Context, Deferred
from spmd_rl.observe.metrics import Metrics

Watch = Callable[[str, int], AbstractContextManager[Any]]


class Runner:
    """Executes one rank's slice of the plan, step by step.

    watch: called with (operation, step), gives the context manager that times and supervises it; peers: see
    `peer_groups`.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        plan: Plan,
        engines: Mapping[str, Any],
        coordinator: Coordinator,
        watch: Watch,
        peers: Mapping[Layout, ProcessGroup | None] | None = None,
    ) -> None:
        self._config = config
        self._world = world
        self._plan = plan
        self._engines = engines
        self._coordinator = coordinator
        self._watch = watch
        self._peers = peers or {}

    def step(
        self, step: int, keep: tuple[str, ...] = (), last: bool = True, metrics: Metrics | None = None
    ) -> tuple[Batch, Metrics]:
        """Run one step: the columns `keep` of the samples that this rank counts as its own, and its metrics.

        last: false for a portion of a step of which more comes; metrics: those of the step so far, to be added to.

        There are no samples where those columns never sit together, and on a rank that repeats another's samples.
        """
        metrics = Metrics() if metrics is None else metrics
        store = _Store()
        pending: dict[StartExchange, Pending] = {}
        for op in self._plan.slice(self._world.rank, step):
            match op:
                case StartExchange():
                    with self._watch("exchange", step):
                        pending[op] = self._start(op, step, store)
                case FinishExchange():
                    with self._watch("exchange", step):
                        batch, store.assignments[op.start.target] = pending.pop(op.start).wait()
                        if self._world.rank in op.start.destination.ranks:
                            store.put(op.start.target, batch)
                case Run():
                    with self._watch(op.stage.name, step):
                        self._run(op, step, store, metrics, last)
        if last:
            self._coordinator.metrics(metrics)
        place = self._plan.where(keep)
        if place is None or self._world.rank not in place[1].heads:
            return Batch.empty(), metrics
        return store.get(place[0], keep), metrics

    def _start(self, op: StartExchange, step: int, store: _Store) -> Pending:
        batch = store.get(op.origin, op.columns) if self._world.rank in op.source.ranks else Batch.empty()
        return self._coordinator.start(
            step=step,
            edge=op.edge,
            batch=batch,
            source=op.source,
            target=op.destination,
            balance=op.balance,
            cost=op.cost,
            follow=store.assignments[op.target] if op.follow else None,
        )

    def _run(self, op: Run, step: int, store: _Store, metrics: Metrics, last: bool) -> None:
        stage = op.stage
        batch = store.get(op.origin, stage.consumes) if op.origin else Batch.empty()
        slot, replica = divmod(op.layout.ranks.index(self._world.rank), op.layout.replicas)
        context = Context(
            config=self._config,
            world=self._world,
            engines=self._engines,
            step=step,
            metrics=metrics,
            slot=slot,
            slots=op.layout.slots,
            replica=replica,
            watch=lambda name: self._watch(name, step),
            last=last,
            peers=self._peers.get(op.layout),
        )
        output = stage.run(context, batch)
        if op.output is None:
            if output is not None:
                raise TypeError(f"stage {stage.name!r} returned {type(output).__name__}, but declares no columns")
            return
        if isinstance(output, Batch):
            if op.output == op.origin and not torch.equal(output.ids, batch.ids):
                raise ValueError(f"stage {stage.name!r} returned other samples than it got; declare new_samples=True")
            _check_columns(stage.name, stage.produces, output.columns)
            store.put(op.output, output)
        elif isinstance(output, Mapping):
            _check_columns(stage.name, stage.produces, output)
            store.put(op.output, Batch(batch.ids, output))
        elif output is not None and hasattr(output, "result") and op.output == op.origin:
            store.defer(op.output, stage.name, stage.produces, output)
        else:
            raise TypeError(f"stage {stage.name!r} must return columns {', '.join(stage.produces)}, not {output!r}")


def peer_groups(world: World, layouts: Iterable[Layout], limit_s: float) -> dict[Layout, ProcessGroup | None]:
    """For each layout of which only the heads have samples: a gloo group over this rank's slot; None for a rank
    without one. Collective over the world; limit_s: deadline of one collective."""
    wanted = dict.fromkeys(layout for layout in layouts if not layout.shared)
    return {
        layout: group_of(
            world, [[world.job_rank(rank) for rank in layout.group(slot)] for slot in range(layout.slots)], limit_s
        )
        for layout in wanted
    }


class _Store:
    """What sits on this rank in the current step: one batch per distribution."""

    def __init__(self) -> None:
        self.assignments: dict[str, Assignment] = {}
        self._batches: dict[str, Batch] = {}
        self._deferred: dict[tuple[str, str], tuple[str, tuple[str, ...], Deferred]] = {}

    def put(self, name: str, batch: Batch) -> None:
        held = self._batches.get(name)
        if held is not None and not torch.equal(held.ids, batch.ids):
            raise ValueError(f"columns {sorted(batch.columns)} belong to other samples than those that sit in {name}")
        self._batches[name] = batch if held is None else held.with_columns(batch.columns)

    def defer(self, name: str, stage: str, columns: tuple[str, ...], output: Deferred) -> None:
        for column in columns:
            self._deferred[name, column] = (stage, columns, output)

    def get(self, name: str, columns: tuple[str, ...]) -> Batch:
        for column in columns:
            if (name, column) in self._deferred:
                self._resolve(name, column)
        return self._batches[name].only(columns)

    def _resolve(self, name: str, column: str) -> None:
        stage, columns, output = self._deferred[name, column]
        for other in columns:
            del self._deferred[name, other]
        made = output.result()
        _check_columns(stage, columns, made)
        self.put(name, Batch(self._batches[name].ids, made))


def _check_columns(stage: str, declared: tuple[str, ...], made: Mapping[str, Column]) -> None:
    if set(made) != set(declared):
        raise ValueError(f"stage {stage!r} declares columns {sorted(declared)}, but returned {sorted(made)}")
