"""`Plan`: one global, deterministic order of operations. Every rank filters the same order to its own part.

No two ranks can meet the collectives of two operations in different order, because each rank's sequence is a
sub-sequence of one total order: deadlock freedom by construction.

Samples *sit* somewhere: the **distribution** of a column says which slot of which layout holds which sample. It is
named after the stage that created it. A stage whose inputs already sit on its own layout takes them by reference;
anything else is an exchange, started as soon as its columns exist and finished when they are wanted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from spmd_rl.config.errors import UserError
from spmd_rl.data.balance import Balance
from spmd_rl.data.layout import Layout
from spmd_rl.graph.graph import ResolvedGraph
from spmd_rl.graph.stage import Stage


@dataclass(frozen=True)
class StartExchange:
    """Send `columns` from where they sit to where `consumer` wants them; does not wait.

    origin → target: names of distributions. follow: the target's assignment exists (or is made by an exchange that is
    finished first), and these samples join it; else this exchange makes the assignment.
    """

    edge: str
    consumer: str
    origin: str
    target: str
    columns: tuple[str, ...]
    source: Layout
    destination: Layout
    balance: Balance | None
    cost: tuple[str, ...]
    follow: bool
    every: int

    @property
    def ranks(self) -> frozenset[int]:
        return frozenset(self.source.ranks) | frozenset(self.destination.ranks)

    def describe(self) -> str:
        how = "joins" if self.follow else "balances" if self.balance else "moves"
        return f"start  {self.edge}: {how} {', '.join(self.columns)}"


@dataclass(frozen=True)
class FinishExchange:
    start: StartExchange

    @property
    def ranks(self) -> frozenset[int]:
        return self.start.ranks

    @property
    def every(self) -> int:
        return self.start.every

    def describe(self) -> str:
        return f"finish {self.start.edge}"


@dataclass(frozen=True)
class Run:
    """Run a stage on the columns `inputs`, all of which sit in distribution `origin` (None: it has no inputs)."""

    stage: Stage
    layout: Layout
    origin: str | None
    output: str | None

    @property
    def ranks(self) -> frozenset[int]:
        return frozenset(self.layout.ranks)

    @property
    def every(self) -> int:
        return self.stage.every

    def describe(self) -> str:
        arrow = f" {', '.join(self.stage.consumes)}" if self.stage.consumes else ""
        made = f" -> {', '.join(self.stage.produces)}" if self.stage.produces else ""
        return f"run    {self.stage.name}:{arrow}{made}"


Operation = StartExchange | FinishExchange | Run


@dataclass(frozen=True)
class Plan:
    """The operations of one step. `digest` is equal on all ranks, or the ranks run different programs."""

    world_size: int
    operations: tuple[Operation, ...]
    sits: tuple[tuple[str, Layout, frozenset[str]], ...] = ()  # distributions and what is in them after every step

    def where(self, columns: Iterable[str]) -> tuple[str, Layout] | None:
        """A distribution in which all `columns` sit together after every step, or None."""
        wanted = set(columns)
        return next(((name, layout) for name, layout, there in self.sits if wanted <= there), None)

    def slice(self, rank: int, step: int) -> Iterator[Operation]:
        """What `rank` does in `step` (counted from 1), in order."""
        return (op for op in self.operations if rank in op.ranks and step % op.every == 0)

    @property
    def digest(self) -> bytes:
        lines = [f"{self.world_size}"]
        for op in self.operations:
            lines.append(f"{op.describe()} on {sorted(op.ranks)} every {op.every}")
            if isinstance(op, StartExchange):
                lines.append(f"  {op.source} {op.destination} {op.balance} {op.cost} {op.follow}")
        return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).digest()

    def exchanges(self) -> Iterator[StartExchange]:
        return (op for op in self.operations if isinstance(op, StartExchange))


def make_plan(graph: ResolvedGraph) -> Plan:
    """Pure function of the graph, so equal on all ranks. Raises UserError where the cost columns sit apart."""
    planner = _Planner(graph)
    for stage in graph.order:
        planner.add(stage)
    return Plan(graph.world_size, planner.operations(), planner.sits())


@dataclass
class _Distribution:
    """Where samples sit. index: of the stage that made it; columns: name → (index of the stage with which the column
    arrived here, the steps in which it does); assigned: the steps in which every rank knows who holds what."""

    name: str
    index: int
    layout: Layout
    every: int
    columns: dict[str, tuple[int, int]] = field(default_factory=dict)
    assigned: set[int] = field(default_factory=set)

    def has(self, stage: Stage) -> set[str]:
        """The columns that are here whenever `stage` runs."""
        return {name for name, (_, every) in self.columns.items() if stage.every % every == 0}

    def is_assigned(self, stage: Stage) -> bool:
        return any(stage.every % every == 0 for every in self.assigned)


class _Planner:
    """Walks the stages once and remembers which columns sit where."""

    def __init__(self, graph: ResolvedGraph) -> None:
        self._graph = graph
        self._index = {stage.name: i for i, stage in enumerate(graph.order)}
        self._distributions: dict[str, _Distribution] = {}
        self._before: list[list[Operation]] = []
        self._runs: list[Run] = []
        self._after: list[list[Operation]] = [[] for _ in graph.order]  # exchanges to start behind a stage

    def operations(self) -> tuple[Operation, ...]:
        parts = zip(self._before, self._runs, self._after, strict=True)
        return tuple(op for before, run, after in parts for op in (*before, run, *after))

    def sits(self) -> tuple[tuple[str, Layout, frozenset[str]], ...]:
        return tuple(
            (d.name, d.layout, frozenset(name for name, (_, every) in d.columns.items() if every == 1))
            for d in self._distributions.values()
            if d.every == 1
        )

    def add(self, stage: Stage) -> None:
        layout = self._graph.placements[stage.name].layout
        before: list[Operation] = []
        home = self._gather(stage, layout, before) if stage.consumes else None
        output = home
        if stage.produces:
            if home is None or stage.new_samples:
                output = self._distribution(f"{stage.name}:out", stage, layout)
            assert output is not None
            output.columns.update(dict.fromkeys(stage.produces, (self._index[stage.name], stage.every)))
        self._before.append(before)
        made = output.name if output is not None and stage.produces else None
        self._runs.append(Run(stage, layout, home.name if home is not None else None, made))

    def _gather(self, stage: Stage, layout: Layout, before: list[Operation]) -> _Distribution:
        """Plan the exchanges that bring the inputs of `stage` together; the distribution in which they then sit."""
        usable = [d for d in self._distributions.values() if stage.every % d.every == 0]
        home = None
        if stage.balance is None:
            # Join the inputs that arrived at these ranks last: they have been balanced already.
            cover = _cover(stage, layout, stage.consumes, usable)
            home = max((d for d in cover if d.layout == layout), key=lambda d: d.index, default=None)
        if home is None:
            home = self._distribution(f"{stage.name}:in", stage, layout)
        missing = [c for c in stage.consumes if c not in home.has(stage)]
        if missing and home.columns and not home.is_assigned(stage):
            self._exchange(stage, home, home, (), before)  # moves nothing: only tells every rank who holds what
        origins = _cover(stage, layout, missing, [d for d in usable if d is not home])
        if stage.balance is not None and origins:
            anchor = next((d for d in origins if set(stage.cost) <= d.has(stage)), None)
            if anchor is None:
                raise UserError(
                    f"stage {stage.name!r} is balanced by {', '.join(stage.cost)}, which come from stages on different "
                    "ranks: let cost name columns that sit together"
                )
            origins.sort(key=lambda d: d is not anchor)
        for origin in origins:
            columns = tuple(c for c in missing if c in origin.has(stage) and c not in home.has(stage))
            self._exchange(stage, origin, home, columns, before)
            home.columns.update(dict.fromkeys(columns, (self._index[stage.name], stage.every)))
        return home

    def _exchange(
        self,
        stage: Stage,
        origin: _Distribution,
        home: _Distribution,
        columns: tuple[str, ...],
        before: list[Operation],
    ) -> None:
        follow = home.is_assigned(stage)
        balance = stage.balance if origin is not home and not follow else None
        start = StartExchange(
            edge=f"{origin.name.split(':')[0]}->{stage.name}",
            consumer=stage.name,
            origin=origin.name,
            target=home.name,
            columns=columns,
            source=origin.layout,
            destination=home.layout,
            balance=balance,
            cost=stage.cost if balance else (),
            follow=follow,
            every=stage.every,
        )
        ready = max([origin.index, *(origin.columns[c][0] for c in columns)])
        if follow or self._graph.order[ready].every != stage.every:
            before.append(start)  # the assignment comes from an exchange that is finished just before
        else:
            self._after[ready].append(start)
        before.append(FinishExchange(start))
        home.assigned.add(stage.every)

    def _distribution(self, name: str, stage: Stage, layout: Layout) -> _Distribution:
        self._distributions[name] = made = _Distribution(name, self._index[stage.name], layout, stage.every)
        return made


def _cover(
    stage: Stage, layout: Layout, columns: Iterable[str], distributions: list[_Distribution]
) -> list[_Distribution]:
    """Few distributions that together hold all `columns`: the one with most of them first; among equals one that
    already lies as `stage` does, then the latest."""
    left = set(columns)
    chosen = []
    while left:
        best = max(distributions, key=lambda d: (len(left & d.has(stage)), d.layout == layout, d.index))
        chosen.append(best)
        left -= best.has(stage)
    return chosen
