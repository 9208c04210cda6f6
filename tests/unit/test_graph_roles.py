"""Roles, a graph cut in two, groups on their own way, and many requests at one desk."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from spmd_rl.config.errors import UserError
from spmd_rl.config.schema import Config, PlacementConfig
from spmd_rl.data.batch import Batch, Column, Finish
from spmd_rl.engines.protocol import Completion, Request, Sampling
from spmd_rl.engines.rollout.desk import Desk
from spmd_rl.graph.graph import Graph, resolve
from spmd_rl.graph.groups import GroupRun
from spmd_rl.graph.plan import make_plan
from spmd_rl.graph.roles import Roles, cut, roles_of
from spmd_rl.graph.stage import Context, EngineSpec, Placement, Stage


def placed(size: int, rollout: Any = None, train: Any = None) -> Roles | None:
    return roles_of(Config(mode="async", placement=PlacementConfig(rollout=rollout, train=train)), size)


@pytest.mark.parametrize(
    ("size", "rollout", "train", "expected"),
    [
        (2, 1, None, Roles((0,), (1,))),
        (4, None, 1, Roles((0,), (1, 2, 3))),
        (8, 0.75, None, Roles((0, 1), (2, 3, 4, 5, 6, 7))),
        (4, [0, 2], None, Roles((1, 3), (0, 2))),
        (4, [3], 3, Roles((0, 1, 2), (3,))),
        (4, 3, [2], Roles((2,), (0, 1, 3))),
        (2, 0.01, None, Roles((0,), (1,))),
    ],
)
def test_placements(size, rollout, train, expected):
    assert placed(size, rollout, train) == expected


@pytest.mark.parametrize(
    ("size", "rollout", "train", "message"),
    [
        (2, None, None, "wants placement.rollout or placement.train"),
        (1, 1, None, "on 1 ranks: at least one is wanted, and one left for a trainer"),
        (1, 0.5, None, "a number of ranks"),
        (4, 2, 1, "do not make up the 4 ranks"),
        (4, [4], None, "there is no rank 4, the job has ranks 0 to 3"),
        (4, [1, 1], None, "names a rank twice"),
        (4, [0, 1], [1, 2, 3], "rank 1 is in both"),
        (4, True, None, "a number of ranks"),
        (4, 1.5, None, "a number of ranks"),
    ],
)
def test_placements_that_leave_somebody_out_are_refused(size, rollout, train, message):
    with pytest.raises(UserError, match=message):
        placed(size, rollout, train)


def nothing(context: Context, batch: Batch) -> None:
    return None


ROLES = Roles((1, 3), (0, 2))
DRAW, TRAIN = Placement((0, 2)), Placement((1, 3))
GRAPH = Graph(
    (
        Stage("prompts", nothing, produces=("prompt",), placement=DRAW),
        Stage("rollout", nothing, ("prompt",), ("response", "version", "row"), placement=DRAW),
        Stage("old", nothing, ("prompt", "response"), ("old",), placement=TRAIN),
        Stage("update", nothing, ("response", "old"), placement=TRAIN),
        Stage("after", nothing, after=("update", "rollout"), placement=TRAIN),
    ),
    (EngineSpec("tokenizer", lambda c: None), EngineSpec("actor", lambda c: None, TRAIN)),
)


def test_a_graph_is_cut_where_the_roles_meet():
    halves = cut(GRAPH, ROLES, recorded=("row", "reward"))
    assert halves.columns == ("prompt", "response", "row", "version")
    train, rollout = resolve(halves.train, 2), resolve(halves.rollout, 2)
    assert [stage.name for stage in train.order] == ["stream", "old", "update", "after"]
    assert [stage.name for stage in rollout.order] == ["prompts", "rollout"]
    assert all(placed.ranks == (0, 1) for placed in [*train.placements.values(), *rollout.placements.values()])
    assert [engine.name for engine in halves.train.engines] == ["tokenizer", "actor"]
    assert [engine.name for engine in halves.rollout.engines] == ["tokenizer"]
    assert not list(make_plan(train).exchanges())  # nothing asks for balance here


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Stage("both", nothing, ("response",), placement=Placement()), "'both' runs on ranks that draw and on ranks"),
        (Stage("back", nothing, ("old",), placement=DRAW), "consumes 'old', which is made at the trainers"),
    ],
)
def test_a_graph_that_cannot_be_cut_is_refused(change, message):
    with pytest.raises(UserError, match=message):
        cut(Graph((*GRAPH.stages, change), GRAPH.engines), ROLES, ())


def test_a_graph_without_versions_is_refused():
    stages = (GRAPH.stages[0], replace(GRAPH.stages[1], produces=("response",)), *GRAPH.stages[2:4])
    with pytest.raises(UserError, match="no column 'version'"):
        cut(Graph(stages, GRAPH.engines), ROLES, ())


class Later:
    """A deferred column that is there once it is told so."""

    def __init__(self, name: str) -> None:
        self.name, self.ready = name, False

    def done(self) -> bool:
        return self.ready

    def result(self) -> dict[str, Column]:
        assert self.ready
        return {self.name: Column.scalars(torch.tensor([1.0, 2.0]))}


def test_a_group_waits_only_for_what_its_next_stage_needs():
    ids = torch.tensor([[0, 5, 0], [0, 5, 1]])
    drawn, judged = Later("response"), Later("reward")
    ran: list[str] = []

    def stage(name: str, output: Any) -> Any:
        def run(context: Context, batch: Batch) -> Any:
            ran.append(f"{name}({', '.join(batch.columns)})")
            return output

        return run

    one = {"length": Column.scalars(torch.tensor([3, 4]))}
    prompts = Batch(ids, {"prompt": Column.scalars(torch.tensor([7, 7]))})
    stages = [
        Stage("prompts", stage("prompts", prompts), produces=("prompt",)),
        Stage("draw", stage("draw", drawn), ("prompt",), ("response",)),
        Stage("judge", stage("judge", judged), ("response",), ("reward",)),
        Stage("measure", stage("measure", one), ("response",), ("length",)),  # goes on while the judge works
        Stage("end", stage("end", None), ("reward", "length")),
    ]
    run = GroupRun(stages, cast(Context, None))
    assert ran == ["prompts()"] and set(run.batch.columns) == {"prompt"}
    assert not run.advance() and not run.advance()
    assert ran[1:] == ["draw(prompt)"]
    drawn.ready = True
    assert not run.advance()
    assert ran[2:] == ["judge(response)", "measure(response)"]
    judged.ready = True
    assert run.advance()
    assert ran[4:] == ["end(reward, length)"] and set(run.batch.columns) == {"prompt", "response", "reward", "length"}


def test_a_group_says_which_stage_returned_what_it_should_not():
    ids = torch.tensor([[0, 5, 0]])
    prompts = Batch(ids, {"prompt": Column.scalars(torch.tensor([7]))})
    first = Stage("prompts", lambda c, b: prompts, produces=("prompt",))
    wrong = Stage("odd", lambda c, b: {"other": prompts["prompt"]}, ("prompt",), ("wanted",))
    with pytest.raises(ValueError, match="stage 'odd' declares"):
        GroupRun([first, wrong], cast(Context, None)).advance()
    with pytest.raises(TypeError, match="stage 'odd' must return columns wanted"):
        GroupRun([first, replace(wrong, run=nothing)], cast(Context, None)).advance()


class Engine:
    """Finishes a request after as many steps as its seed says."""

    def __init__(self) -> None:
        self.left: dict[tuple[int, int, int], int] = {}
        self.lose = False

    def submit(self, requests: list[Request]) -> None:
        self.left.update({request.id: request.seed for request in requests})

    def unfinished(self) -> int:
        return len(self.left)

    def step(self) -> list[Completion]:
        self.left = {id: steps - 1 for id, steps in self.left.items()}
        ended = [id for id, steps in self.left.items() if steps <= 0]
        self.left = {id: steps for id, steps in self.left.items() if steps > 0}
        return [] if self.lose else [Completion(id, [1], [-0.5], Finish.STOP, 0, ((0, 1),)) for id in ended]


def test_batches_at_one_desk_are_done_each_in_its_time():
    desk = Desk(cast(Any, Engine()))

    def request(prompt: int, sample: int, steps: int) -> Request:
        return Request((0, prompt, sample), (1,), Sampling(), steps)

    slow = desk.submit([request(0, 0, 3), request(0, 1, 1)])
    fast = desk.submit([request(1, 1, 2), request(1, 0, 1)])
    none = desk.submit([])
    assert none.done() and none.result() == []
    desk.step()
    assert not slow.done() and not fast.done() and desk.unfinished() == 2
    desk.step()
    assert fast.done() and [c.id for c in fast.result()] == [(0, 1, 1), (0, 1, 0)]  # in the order of the requests
    with pytest.raises(ValueError, match="is being drawn already"):
        desk.submit([request(0, 0, 1)])
    desk.step()
    assert slow.done() and desk.unfinished() == 0
    engine = Engine()
    engine.lose = True
    desk = Desk(cast(Any, engine))
    desk.submit([request(2, 0, 1)])
    with pytest.raises(RuntimeError, match=r"lost sample \(0, 2, 0\)"):
        desk.step()
