"""Roles of asynchronous training: which ranks draw, which train, and a graph cut in two between them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spmd_rl.config.errors import UserError
from spmd_rl.config.schema import Config
from spmd_rl.data.batch import Batch
from spmd_rl.graph.graph import Graph, resolve
from spmd_rl.graph.stage import Context, EngineSpec, Placement, Stage, StageOutput

TRAIN, ROLLOUT = "train", "rollout"
AGES = ("version", "versions")  # of the oldest token of a sample; of all its tokens, where a stage tells them
ACCEPTED = "accepted"  # where a stage that draws makes it: whether a sample is of use; those that are not stay there
SOURCE = "stream"  # the trainers' first stage: the samples that have come


@dataclass(frozen=True)
class Roles:
    """Ranks of the job, ascending. Every rank has one role."""

    train: tuple[int, ...]
    rollout: tuple[int, ...]

    def as_mapping(self) -> dict[str, tuple[int, ...]]:
        return {TRAIN: self.train, ROLLOUT: self.rollout}


def roles_of(config: Config, size: int) -> Roles | None:
    """The roles that `placement` gives in a job of `size` ranks; None where all ranks do both (mode: sync).

    Raises UserError where a role would have no rank, or the two do not make up the job.
    """
    placement = config.placement
    if config.mode == "sync":
        for key in ("rollout", "train"):
            if getattr(placement, key) is not None:
                raise UserError(f"placement.{key}={getattr(placement, key)} needs mode=async: in mode=sync all do both")
        return None
    given = {key: getattr(placement, key) for key in (TRAIN, ROLLOUT)}
    parsed = {key: _parse(f"placement.{key}", value, size) for key, value in given.items() if value is not None}
    if not parsed:
        raise UserError("mode=async wants placement.rollout or placement.train: how many ranks draw, how many train")
    named = {key: ranks for key, ranks in parsed.items() if isinstance(ranks, tuple)}
    counts = {key: count for key, count in parsed.items() if isinstance(count, int)}
    taken = {rank for ranks in named.values() for rank in ranks}
    free = [rank for rank in range(size) if rank not in taken]
    roles: dict[str, tuple[int, ...]] = dict(named)
    for key in (TRAIN, ROLLOUT):  # trainers first: rank 0 writes the files
        if key not in named:
            count = counts.get(key, len(free) - sum(n for other, n in counts.items() if other not in roles))
            roles[key], free = tuple(free[: max(count, 0)]), free[max(count, 0) :]
    return _checked(Roles(roles[TRAIN], roles[ROLLOUT]), given, free, size)


def _checked(roles: Roles, given: Mapping[str, Any], free: Sequence[int], size: int) -> Roles:
    said = ", ".join(f"placement.{key}={value}" for key, value in given.items() if value is not None)
    for name, ranks in roles.as_mapping().items():
        if not ranks:
            what = "trainer" if name == TRAIN else "rollout replica"
            raise UserError(f"{said} on {size} ranks leaves no {what}: mode=async needs at least one rank for each")
    both = sorted(set(roles.train) & set(roles.rollout))
    if both:
        raise UserError(f"{said}: rank {both[0]} is in both; in mode=async a rank draws or trains")
    if free or len(roles.train) + len(roles.rollout) != size:
        raise UserError(f"{said} do not make up the {size} ranks of the job: leave one of them out to take the rest")
    return roles


def _parse(key: str, value: Any, size: int) -> int | tuple[int, ...]:
    """A number of ranks, or the ranks."""
    if isinstance(value, list) and value and all(type(rank) is int for rank in value):
        outside = [rank for rank in value if not 0 <= rank < size]
        if outside:
            raise UserError(f"{key}={value}: there is no rank {outside[0]}, the job has ranks 0 to {size - 1}")
        if len(set(value)) != len(value):
            raise UserError(f"{key}={value} names a rank twice")
        return tuple(sorted(value))
    if type(value) is float and 0 < value < 1 and size > 1:
        return min(max(round(value * size), 1), size - 1)
    if type(value) is not int:
        raise UserError(f"{key}={value}: a number of ranks (2), a fraction (0.5) or a list of ranks is wanted")
    if not 0 < value < size:
        other = "trainer" if key.endswith(ROLLOUT) else "rollout replica"
        raise UserError(f"{key}={value} on {size} ranks: at least one is wanted, and one left for a {other}")
    return value


@dataclass(frozen=True)
class Halves:
    """A graph cut in two. train, rollout: each role's graph, with placements in the role's own numbers; columns: what
    goes from one to the other."""

    train: Graph
    rollout: Graph
    columns: tuple[str, ...]


def cut(graph: Graph, roles: Roles, recorded: Sequence[str]) -> Halves:
    """Cut `graph` at the border between the roles. recorded: columns that are wanted at the trainers in any case.

    Raises UserError for a stage or engine on ranks of both roles, and a column that would have to go back.
    """
    size = len(roles.train) + len(roles.rollout)
    resolved = resolve(graph, size)
    role_of = {rank: name for name, ranks in roles.as_mapping().items() for rank in ranks}

    def side(what: str, ranks: Sequence[int]) -> str:
        sides = {role_of[rank] for rank in ranks}
        if len(sides) > 1:
            raise UserError(
                f"{what} runs on ranks that draw and on ranks that train: this graph has no form for mode=async"
            )
        return sides.pop()

    stages: dict[str, list[Stage]] = {TRAIN: [], ROLLOUT: []}
    made: dict[str, str] = {}  # column → side
    for stage in resolved.order:
        where = side(f"stage {stage.name!r}", resolved.placements[stage.name].ranks)
        for column in stage.consumes:
            if where == ROLLOUT and made[column] == TRAIN:
                raise UserError(
                    f"stage {stage.name!r} draws, but consumes {column!r}, which is made at the trainers: "
                    "not possible with mode=async"
                )
        made.update(dict.fromkeys(stage.produces, where))
        after = tuple(other for other in stage.after if other in {s.name for s in stages[where]})
        moved = _moved(resolved.placements[stage.name].ranks, roles.as_mapping()[where], stage.placement)
        stages[where].append(replace(stage, placement=moved, after=after))
    wanted = {column for stage in stages[TRAIN] for column in stage.consumes} | {*recorded, *AGES}
    columns = tuple(sorted(column for column in wanted if made.get(column) == ROLLOUT))
    if "version" not in columns:
        raise UserError("the graph makes no column 'version', by which mode=async knows the age of samples")
    engines: dict[str, list[EngineSpec]] = {TRAIN: [], ROLLOUT: []}
    for engine in graph.engines:
        placed = resolved.engine_placements[engine.name]
        if engine.placement.ranks is None:  # on all ranks: each role has its own
            for where in (TRAIN, ROLLOUT):
                engines[where].append(engine)
        else:
            where = side(f"engine {engine.name!r}", placed.ranks)
            moved = _moved(placed.ranks, roles.as_mapping()[where], engine.placement)
            engines[where].append(replace(engine, placement=moved))
    first = Stage(SOURCE, take_samples, produces=columns, placement=Placement())
    return Halves(
        train=Graph((first, *stages[TRAIN]), tuple(engines[TRAIN])),
        rollout=Graph(tuple(stages[ROLLOUT]), tuple(engines[ROLLOUT])),
        columns=columns,
    )


def _moved(ranks: Sequence[int], role: Sequence[int], placement: Placement) -> Placement:
    place = {rank: index for index, rank in enumerate(role)}
    return replace(placement, ranks=tuple(place[rank] for rank in ranks))


def take_samples(context: Context, _: Batch) -> StageOutput:
    """The trainers' source: samples of the groups that this rank has and that are to be trained on now."""
    return context.engines[SOURCE].claimed
