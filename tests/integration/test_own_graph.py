"""A user's own graph, as the README shows it."""

from __future__ import annotations

import os

import pytest

from tests.integration.program import metrics, samples, start, tiny_config

GRAPHS = """
from dataclasses import replace

from spmd_rl.data.batch import Column
from spmd_rl.graph.graph import Graph
from spmd_rl.graph.stage import Placement, Stage
from spmd_rl.recipes import grpo


def lengths(context, batch):
    return {"length": Column.scalars(batch["response"].lengths)}


def log_lengths(context, batch):
    if context.replica == 0:
        context.metrics.sum("my/tokens", batch["length"].as_scalars().sum())


def graph(config, world_size):
    standard = grpo.graph(config, world_size)
    mine = (
        Stage("lengths", lengths, consumes=("response",), produces=("length",)),
        Stage("log_lengths", log_lengths, consumes=("length",), placement=Placement((world_size - 1,)), every=2),
    )
    return Graph((*standard.stages, *mine), standard.engines)


def no_sync(config, world_size):
    standard = grpo.graph(config, world_size)
    return replace(standard, stages=tuple(s for s in standard.stages if s.name != "sync"))


def no_reward_engine(config, world_size):
    standard = grpo.graph(config, world_size)
    return replace(standard, engines=tuple(e for e in standard.engines if e.name != "reward"))
"""


@pytest.fixture(autouse=True)
def graphs(tmp_path, monkeypatch):
    (tmp_path / "my_graphs.py").write_text(GRAPHS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))


def test_further_stages_run_with_the_recipe(tmp_path, model):
    """One of them on another rank than most samples, in every second step."""
    start(tiny_config(tmp_path, model), "run.graph=my_graphs:graph", "train.steps=2", ranks=2).check()
    first, second = metrics(tmp_path / "run")
    assert "my/tokens" not in first and second["my/tokens"] == second["tokens/generated"] > 0
    assert len(samples(tmp_path / "run")) == 2 * 5 * 4


@pytest.mark.parametrize(
    ("graph", "said"),
    [
        ("no_sync", "the graph has no stage named 'sync', which the job needs"),
        ("no_reward_engine", "the graph has no engine named 'reward', which the job needs"),
    ],
)
def test_a_graph_without_what_the_job_needs_is_refused(tmp_path, model, graph, said):
    done = start(tiny_config(tmp_path, model), f"run.graph=my_graphs:{graph}", launcher="single")
    assert done.returncode == 2 and f"error: {said}" in done.stderr
