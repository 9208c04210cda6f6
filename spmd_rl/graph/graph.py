"""`Graph`: stages whose edges follow from columns, checked and put into one deterministic order."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from spmd_rl.config.errors import UserError
from spmd_rl.config.schema import Config
from spmd_rl.graph.stage import EngineSpec, ResolvedPlacement, Stage


@dataclass(frozen=True)
class Graph:
    """What a recipe declares: any directed acyclic graph of stages, and the engines that they use."""

    stages: tuple[Stage, ...]
    engines: tuple[EngineSpec, ...] = ()


@dataclass(frozen=True)
class ResolvedGraph:
    """A checked graph in a concrete world.

    order: stages in the one topological order that all ranks share (ties: order of declaration);
    producer: column → stage that makes it; depends: stage → stages that come before it.
    """

    world_size: int
    order: tuple[Stage, ...]
    engines: tuple[EngineSpec, ...]
    placements: Mapping[str, ResolvedPlacement]
    engine_placements: Mapping[str, ResolvedPlacement]
    producer: Mapping[str, str]
    depends: Mapping[str, frozenset[str]] = field(default_factory=dict)


GraphFunction = Callable[[Config, int], Graph]


def load_graph(path: str) -> GraphFunction:
    """The function behind `package.module:function`. Raises UserError where there is none."""
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise UserError(f"run.graph={path!r} is not of the form package.module:function")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UserError(f"run.graph={path!r}: no module named {error.name!r} (is its folder in PYTHONPATH?)") from None
    except TypeError:
        if not path.startswith("."):
            raise
        raise UserError(f"run.graph={path!r}: a whole name is wanted, not one that starts with a dot") from None
    function = getattr(module, name, None)
    if not callable(function):
        near = difflib.get_close_matches(name, dir(module), 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"run.graph={path!r}: {module_name} has no function {name!r}{hint}")
    return function


def declare(config: Config, world_size: int) -> Graph:
    """The graph of `run.graph`. Raises UserError where that is no function `graph(config, world_size) -> Graph`."""
    path, function = config.run.graph, load_graph(config.run.graph)
    wanted = "a function graph(config, world_size) that returns a Graph is wanted"
    try:
        inspect.signature(function).bind(config, world_size)
    except (TypeError, ValueError) as error:
        raise UserError(f"run.graph={path!r}: {wanted} ({error})") from None
    declared = function(config, world_size)
    if not isinstance(declared, Graph):
        raise UserError(f"run.graph={path!r}: {wanted}, not {type(declared).__name__}")
    return declared


def resolve(graph: Graph, world_size: int) -> ResolvedGraph:
    """Check `graph` and order it for `world_size` ranks. Pure. Raises UserError for each thing that cannot be."""
    by_name = _unique({}, "stage", graph.stages)
    _unique({}, "engine", graph.engines)
    producer: dict[str, str] = {}
    for stage in graph.stages:
        for column in stage.produces:
            if column in producer:
                raise UserError(
                    f"column {column!r} is produced twice: by stages {producer[column]!r} and {stage.name!r}"
                )
            producer[column] = stage.name
    depends: dict[str, set[str]] = {}
    for stage in graph.stages:
        depends[stage.name] = set()
        for column in stage.consumes:
            if column not in producer:
                near = difflib.get_close_matches(column, list(producer), 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise UserError(f"stage {stage.name!r} consumes column {column!r}, which no stage produces{hint}")
            depends[stage.name].add(producer[column])
        for other in stage.after:
            if other not in by_name:
                raise UserError(f"stage {stage.name!r} is to run after {other!r}, which is not a stage")
            depends[stage.name].add(other)
        if stage.balance is not None and not set(stage.cost) <= set(stage.consumes):
            missing = sorted(set(stage.cost) - set(stage.consumes))
            raise UserError(f"stage {stage.name!r} is balanced by {missing[0]!r}, a column that it does not consume")
        if stage.every < 1:
            raise UserError(f"stage {stage.name!r}: every={stage.every}, at least 1 is wanted")
        for other in depends[stage.name]:
            if stage.every % by_name[other].every and other in {producer[c] for c in stage.consumes}:
                raise UserError(
                    f"stage {stage.name!r} runs every {stage.every} steps, but {other!r}, whose columns it consumes, "
                    f"only every {by_name[other].every}"
                )
    order = _topological(graph.stages, depends)
    return ResolvedGraph(
        world_size=world_size,
        order=order,
        engines=graph.engines,
        placements={s.name: s.placement.resolve(f"stage {s.name!r}", world_size) for s in order},
        engine_placements={e.name: e.placement.resolve(f"engine {e.name!r}", world_size) for e in graph.engines},
        producer=producer,
        depends={name: frozenset(others) for name, others in depends.items()},
    )


def _unique(seen: dict, kind: str, things: tuple) -> dict:
    for thing in things:
        if thing.name in seen:
            raise UserError(f"two {kind}s are named {thing.name!r}")
        seen[thing.name] = thing
    return seen


def _topological(stages: tuple[Stage, ...], depends: Mapping[str, set[str]]) -> tuple[Stage, ...]:
    """Kahn's algorithm; among the stages that could come next, the first declared one."""
    position = {stage.name: index for index, stage in enumerate(stages)}
    waiting = {name: len(others) for name, others in depends.items()}
    dependants: dict[str, list[str]] = {name: [] for name in waiting}
    for name, others in depends.items():
        for other in others:
            dependants[other].append(name)
    ready = [position[name] for name, count in waiting.items() if count == 0]
    heapify(ready)
    order: list[Stage] = []
    while ready:
        stage = stages[heappop(ready)]
        order.append(stage)
        for name in dependants[stage.name]:
            waiting[name] -= 1
            if waiting[name] == 0:
                heappush(ready, position[name])
    if len(order) < len(stages):
        raise UserError(f"the graph has a cycle: {' -> '.join(_cycle(depends, waiting))}")
    return tuple(order)


def _cycle(depends: Mapping[str, set[str]], waiting: Mapping[str, int]) -> list[str]:
    """One cycle among the stages that never became ready, in the direction of the data."""
    path = [min(name for name, count in waiting.items() if count > 0)]
    while path.count(path[-1]) == 1:
        path.append(min(other for other in depends[path[-1]] if waiting[other] > 0))
    return path[path.index(path[-1]) :][::-1]
