"""`Stage` and `Engine`: the nouns that a recipe declares. Nothing here runs anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from spmd_rl.config.errors import UserError
from spmd_rl.config.schema import Config
from spmd_rl.data.balance import Balance
from spmd_rl.data.batch import Batch, Column
from spmd_rl.data.layout import Layout

if TYPE_CHECKING:
    from spmd_rl.comm.world import World
    from spmd_rl.observe.metrics import Metrics

REST = -1  # the size of a mesh axis that takes what the other axes leave


@dataclass(frozen=True)
class Placement:
    """The ranks something runs on, and the mesh that they form.

    ranks: None for the whole world; axes: name → size, outermost first, one of them may be REST. The axis `dp` tells
    apart ranks that hold different samples; ranks that differ only in other axes (tensor or sequence parallel) form
    one *slot*, so `dp` comes first. shared: all ranks of a slot get its samples; else only its first one does, and the
    others run the stage without samples.
    """

    ranks: tuple[int, ...] | None = None
    axes: Mapping[str, int] = field(default_factory=lambda: {"dp": REST})
    shared: bool = True

    def resolve(self, owner: str, world_size: int) -> ResolvedPlacement:
        """Concrete ranks and axis sizes. Raises UserError, naming `owner`, where they do not fit the world."""
        ranks = tuple(range(world_size)) if self.ranks is None else self.ranks
        if not ranks:
            raise UserError(f"{owner}: placed on no rank")
        outside = [r for r in ranks if not 0 <= r < world_size]
        if outside:
            raise UserError(f"{owner}: placed on rank {outside[0]}, but the world has ranks 0 to {world_size - 1}")
        if len(set(ranks)) != len(ranks):
            raise UserError(f"{owner}: a rank is named twice in its placement {list(ranks)}")
        if next(iter(self.axes), None) != "dp":
            raise UserError(f"{owner}: the first mesh axis must be dp, not {next(iter(self.axes), 'none')}")
        fixed = prod(size for size in self.axes.values() if size != REST)
        if list(self.axes.values()).count(REST) > 1 or fixed <= 0:
            raise UserError(f"{owner}: mesh axes {dict(self.axes)}: positive sizes are wanted, at most one left open")
        axes = {name: len(ranks) // fixed if size == REST else size for name, size in self.axes.items()}
        if prod(axes.values()) != len(ranks):
            shape = " x ".join(f"{name}={'any' if size == REST else size}" for name, size in self.axes.items())
            raise UserError(f"{owner}: mesh {shape} does not multiply to its {len(ranks)} ranks")
        made = ResolvedPlacement(ranks, axes, self.shared)
        if not made.layout.shared and list(ranks) != sorted(ranks):  # torch sorts the ranks of a group
            raise UserError(f"{owner}: placed on ranks {list(ranks)}, of which not all share samples: let them ascend")
        return made


@dataclass(frozen=True)
class ResolvedPlacement:
    ranks: tuple[int, ...]
    axes: Mapping[str, int]
    shared: bool = True

    @property
    def layout(self) -> Layout:
        replicas = prod(self.axes.values()) // self.axes["dp"]
        return Layout(self.ranks, replicas, self.shared or replicas == 1)

    def describe(self) -> str:
        ranks = rank_spans(self.ranks)
        heads = "" if self.layout.shared else f", samples on {rank_spans(self.layout.heads)}"
        return f"ranks {ranks} as " + " x ".join(f"{name}={size}" for name, size in self.axes.items()) + heads


class Deferred(Protocol):
    """Columns that somebody else is still working on; a stage may return one, and the runner waits at first use.
    `done`: whether `result` would not wait; only where groups go their own ways (mode: async) it is asked for."""

    def done(self) -> bool: ...

    def result(self) -> Mapping[str, Column]: ...


@dataclass
class Context:
    """What a stage sees of the run, besides its samples."""

    config: Config
    world: World
    engines: Mapping[str, Any]  # those placed on this rank, by name
    step: int
    metrics: Metrics
    slot: int  # this rank's data-parallel slot in the stage's layout, of so many
    slots: int
    replica: int  # and its place among the ranks of the slot; replica 0 counts what is counted once per sample
    # Times and supervises a named part of the stage: `with context.watch("rollout"):`.
    watch: Callable[[str], AbstractContextManager[Any]] = nullcontext
    last: bool = True  # whether no more samples of this step come (mode: async brings them in portions)
    # Where only the first rank of a slot has its samples: a gloo group of the slot's ranks, that one first.
    peers: ProcessGroup | None = None

    @property
    def own_slot(self) -> int | None:
        """The slot whose samples this rank has; None where another rank has them."""
        return self.slot if self.peers is None or self.replica == 0 else None


StageOutput = Mapping[str, Column] | Batch | Deferred | None
StageFunction = Callable[[Context, Batch], StageOutput]


@dataclass(frozen=True)
class Stage:
    """A node of the graph.

    run: called on every rank of the placement with this rank's samples (the columns `consumes`); returns the columns
    `produces` for the same samples, a `Batch` of other samples (then `new_samples` must be set), a `Deferred`, or
    None where it produces nothing. Ranks of one slot must return the same, or (placement not shared) all but the first
    columns without samples.
    after: stages that must have run before, though no column says so.
    balance: spread the samples anew over the slots by the lengths of the columns `cost`.
    every: run in the steps that are multiples of this number.
    """

    name: str
    run: StageFunction
    consumes: tuple[str, ...] = ()
    produces: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    placement: Placement = field(default_factory=Placement)
    balance: Balance | None = None
    cost: tuple[str, ...] = ("prompt", "response")
    new_samples: bool = False
    every: int = 1


@dataclass(frozen=True)
class BuildContext:
    """What the builder of an engine gets. engines: those built before it, on this rank."""

    config: Config
    world: World
    mesh: DeviceMesh
    engines: Mapping[str, Any]


@dataclass(frozen=True)
class EngineSpec:
    """Something stateful that stages use: a trained model, a rollout engine, a loader, a pool of reward workers.

    build: called on every rank of the placement, in the order of declaration. Engines with `state_dict` and
    `load_state_dict` are part of every checkpoint; those with `close` are closed at the end.
    """

    name: str
    build: Callable[[BuildContext], Any]
    placement: Placement = field(default_factory=Placement)


def rank_spans(ranks: Sequence[int]) -> str:
    """`0-3,6` for [0, 1, 2, 3, 6]."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
