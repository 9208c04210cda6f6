"""Graph, plan and placement: pure functions, so tested without processes, for many world sizes at once."""

from __future__ import annotations

import random

import pytest

from spmd_rl.config.errors import UserError
from spmd_rl.config.schema import Config, RunConfig
from spmd_rl.data.balance import Balance
from spmd_rl.graph.describe import describe_plan
from spmd_rl.graph.graph import Graph, declare, load_graph, resolve
from spmd_rl.graph.plan import FinishExchange, Plan, Run, StartExchange, make_plan
from spmd_rl.graph.stage import REST, Placement, Stage


def stage(name, consumes="", produces="", **more):
    return Stage(name, lambda context, batch: None, tuple(consumes.split()), tuple(produces.split()), **more)


def plan_of(*stages, size=4) -> Plan:
    return make_plan(resolve(Graph(tuple(stages)), size))


def text(plan: Plan, rank: int = 0, step: int = 1) -> list[str]:
    return [op.describe() for op in plan.slice(rank, step)]


DIAMOND = (
    stage("train", "prompt response value ref", ""),  # declared first: the order follows from columns
    stage("prompts", "", "prompt"),
    stage("rollout", "prompt", "response"),
    stage("ref", "prompt response", "ref"),
    stage("critic", "prompt response", "value"),
)


def test_diamond_runs_in_the_order_of_its_columns_without_any_exchange():
    names = [op.stage.name for op in plan_of(*DIAMOND).operations if isinstance(op, Run)]
    assert names == ["prompts", "rollout", "ref", "critic", "train"]
    assert not list(plan_of(*DIAMOND).exchanges())


def test_balanced_consumer_gets_one_exchange_started_behind_the_last_producer():
    plan = plan_of(
        stage("prompts", "", "prompt"),
        stage("rollout", "prompt", "response"),
        stage("reward", "response", "reward"),
        stage("ref", "prompt response", "ref", balance=Balance()),
        stage("advantage", "response reward", "advantage"),
        stage("train", "prompt response ref advantage"),
    )
    assert text(plan) == [
        "run    prompts: -> prompt",
        "run    rollout: prompt -> response",
        "start  prompts->ref: balances prompt, response",
        "run    reward: response -> reward",
        "finish prompts->ref",
        "run    ref: prompt response -> ref".replace("prompt response", "prompt, response"),
        "run    advantage: response, reward -> advantage",
        # Prompt and response are there already; only the advantage joins them, following the assignment.
        "start  prompts->train: joins advantage",
        "finish prompts->train",
        "run    train: prompt, response, ref, advantage",
    ]


def test_exchange_overlaps_with_stages_between_producer_and_consumer():
    plan = plan_of(
        stage("prompts", "", "prompt"),
        stage("rollout", "prompt", "response", placement=Placement((0, 1))),
        stage("other", "prompt", "other"),
        stage("train", "response", "", placement=Placement((2, 3))),
    )
    kinds = [(type(op).__name__, getattr(op, "edge", "") or op.describe().split()[1]) for op in plan.operations]
    start = kinds.index(("StartExchange", "rollout->train"))
    assert kinds[start - 1] == ("Run", "rollout:")
    assert kinds[start + 1] == ("Run", "other:")
    assert kinds[start + 2] == ("FinishExchange", "rollout->train")


def test_only_ranks_that_take_part_see_an_operation():
    plan = plan_of(
        stage("a", "", "x", placement=Placement((0, 1))),
        stage("b", "x", "y", placement=Placement((2,))),
        stage("c", "y", "", placement=Placement((3,))),
    )
    assert [line.split()[1].rstrip(":") for line in text(plan, 0)] == ["a", "a->b", "a->b"]
    assert [line.split()[1].rstrip(":") for line in text(plan, 2)] == ["a->b", "a->b", "b", "b->c", "b->c"]
    assert [line.split()[1].rstrip(":") for line in text(plan, 3)] == ["b->c", "b->c", "c"]


def test_a_large_world_is_described_by_its_distinct_ranks(monkeypatch):
    first, rest = Placement((0,)), Placement(tuple(range(1, 5000)))
    plan = plan_of(stage("a", "", "x", placement=first), stage("b", "x", "", placement=rest), size=5000)
    looked: list[Run] = []

    def ranks(run: Run) -> frozenset[int]:
        looked.append(run)
        return frozenset(run.layout.ranks)

    monkeypatch.setattr(Run, "ranks", property(ranks))
    described = describe_plan(plan)
    assert described.count("schedule of rank") == 2
    assert "schedule of ranks 1-4999, each step" in described
    assert len(looked) == 2  # not once per rank: that would be quadratic


def test_two_producers_on_other_ranks_join_one_assignment():
    left, right, all_four = Placement((0, 1)), Placement((2, 3)), Placement()
    plan = plan_of(
        stage("prompts", "", "prompt", placement=left),
        stage("ref", "prompt", "ref", placement=right),
        stage("train", "prompt ref", "", placement=all_four, balance=Balance(), cost=("prompt",)),
    )
    moves = [op for op in plan.exchanges() if op.consumer == "train"]
    # The balanced exchange takes what sits together (prompt and ref both sit on `right` by then).
    assert [(m.columns, m.follow, m.balance is not None) for m in moves] == [(("prompt", "ref"), False, True)]


def test_every_other_step():
    plan = plan_of(stage("a", "", "x"), stage("b", "x", "", every=2), stage("c", "x", ""))
    assert [line.split()[1] for line in text(plan, step=1)] == ["a:", "c:"]
    assert [line.split()[1] for line in text(plan, step=2)] == ["a:", "b:", "c:"]


def test_occasional_consumer_does_not_become_the_source_of_a_regular_one():
    elsewhere = Placement((1,))
    plan = plan_of(
        stage("a", "", "x", placement=Placement((0,))),
        stage("b", "x", "", every=3, placement=elsewhere),
        stage("c", "x", "", placement=elsewhere),
        size=2,
    )
    assert {(op.origin, op.consumer, op.every) for op in plan.exchanges()} == {("a:out", "b", 3), ("a:out", "c", 1)}


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([stage("a", "x", "y"), stage("b", "y", "x")], "cycle: a -> b -> a|cycle: b -> a -> b"),
        ([stage("a", "", "x", after=("a2",))], "after 'a2', which is not a stage"),
        (
            [stage("a", "rewrad", ""), stage("b", "", "reward")],
            "'rewrad', which no stage produces; did you mean 'reward'",
        ),
        ([stage("a", "", "x"), stage("b", "", "x")], "'x' is produced twice: by stages 'a' and 'b'"),
        ([stage("a", "", "x"), stage("a", "x", "")], "two stages are named 'a'"),
        (
            [stage("a", "", "x", placement=Placement((0, 7)))],
            "stage 'a': placed on rank 7, but the world has ranks 0 to 3",
        ),
        ([stage("a", "", "x", placement=Placement((1, 1)))], "twice"),
        ([stage("a", "", "x", placement=Placement(()))], "no rank"),
        ([stage("a", "", "x", placement=Placement(axes={"dp": REST, "tp": 3}))], "does not multiply to its 4 ranks"),
        ([stage("a", "", "x", placement=Placement(axes={"tp": 2, "dp": 2}))], "first mesh axis must be dp"),
        (
            [stage("a", "", "x", placement=Placement((1, 0), {"dp": 1, "tp": 2}, shared=False))],
            "not all share samples: let them ascend",
        ),
        ([stage("a", "", "x", every=2), stage("b", "x", "")], "only every 2"),
        ([stage("a", "", "x"), stage("b", "x", "", balance=Balance())], "balanced by 'prompt'"),
    ],
)
def test_what_cannot_be_is_one_clear_line(stages, message):
    with pytest.raises(UserError, match=message) as caught:
        plan_of(*stages)
    assert "\n" not in str(caught.value)


def test_graph_function_that_is_not_there_is_named():
    with pytest.raises(UserError, match="did you mean graph"):
        load_graph("spmd_rl.recipes.grpo:graf")
    with pytest.raises(UserError, match="no module named 'nowhere'"):
        load_graph("nowhere:graph")
    with pytest.raises(UserError, match="package.module:function"):
        load_graph("spmd_rl.recipes.grpo")
    with pytest.raises(UserError, match="not one that starts with a dot"):
        load_graph(".recipes.grpo:graph")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("os:getcwd", r"graph\(config, world_size\) that returns a Graph is wanted \("),
        ("operator:eq", "that returns a Graph is wanted, not bool"),
    ],
)
def test_a_function_that_makes_no_graph_is_refused(path, message):
    with pytest.raises(UserError, match=message):
        declare(Config(run=RunConfig(graph=path)), 2)


def random_graph(rng: random.Random, size: int) -> list[Stage]:
    stages: list[Stage] = [stage("s0", "", "c0", placement=_somewhere(rng, size))]
    for i in range(1, rng.randint(2, 9)):
        wanted = rng.sample(range(i), rng.randint(0, min(i, 3)))
        columns = [f"c{w}" for w in wanted]
        balance = Balance() if columns and rng.random() < 0.4 else None
        stages.append(
            stage(
                f"s{i}",
                " ".join(columns),
                f"c{i}",
                placement=_somewhere(rng, size),
                balance=balance,
                cost=tuple(columns[:1]),
                new_samples=not columns or rng.random() < 0.1,
            )
        )
    rng.shuffle(stages)
    return stages


def _somewhere(rng: random.Random, size: int) -> Placement:
    inner = rng.choice([1, 1, 2])
    count = rng.choice([c for c in range(1, size + 1) if c % inner == 0] or [1])
    first = rng.randint(0, size - count)
    return Placement(tuple(range(first, first + count)), {"dp": REST, "tp": inner if count % inner == 0 else 1})


def test_random_graphs_never_deadlock_and_every_input_is_there():
    """Simulates every rank's own sequence with blocking collectives: all must end, with all inputs in place."""
    rng = random.Random(0)
    for _ in range(400):
        size = rng.randint(1, 6)
        plan = make_plan(resolve(Graph(tuple(random_graph(rng, size))), size))
        assert plan.digest == plan.digest
        queues = {rank: list(plan.slice(rank, 1)) for rank in range(size)}
        held: dict[int, set[tuple[str, str | None]]] = {rank: set() for rank in range(size)}
        in_flight: dict[StartExchange, set] = {}
        while any(queues.values()):
            progressed = False
            for rank, queue in queues.items():
                if not queue:
                    continue
                op = queue[0]
                if not isinstance(op, Run) and any(not queues[r] or queues[r][0] != op for r in op.ranks):
                    continue  # a collective: waits until all of its ranks have come to it
                progressed = True
                if isinstance(op, Run):
                    assert {(c, op.origin) for c in op.stage.consumes} <= held[rank], (op, held[rank])
                    held[rank] |= {(c, op.output) for c in op.stage.produces}
                    queue.pop(0)
                    continue
                for r in op.ranks:
                    queues[r].pop(0)
                if isinstance(op, StartExchange):
                    for r in op.source.ranks:
                        assert {(c, op.origin) for c in op.columns} <= held[r]
                    in_flight[op] = {(c, op.target) for c in op.columns}
                elif isinstance(op, FinishExchange):
                    for r in op.start.destination.ranks:
                        held[r] |= in_flight[op.start]
            assert progressed, f"deadlock: {[q[0].describe() for q in queues.values() if q]}"


def test_changing_anything_changes_the_digest():
    base = (stage("a", "", "x"), stage("b", "x", "y"))
    digests = {
        plan_of(*base).digest,
        plan_of(*base, size=2).digest,
        plan_of(base[0], stage("b", "x", "y", every=2)).digest,
        plan_of(base[0], stage("b", "x", "y", balance=Balance(), cost=("x",))).digest,
        plan_of(base[0], stage("b", "x", "y", placement=Placement((0, 1)))).digest,
    }
    assert len(digests) == 5
