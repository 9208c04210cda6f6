"""Whole runs with a reward model: alone or mixed with functions, with a critic or without, and what is refused."""

from __future__ import annotations

import json

import pytest

from spmd_rl.config.check import check
from spmd_rl.config.errors import UserError
from spmd_rl.config.load import load_config
from spmd_rl.graph.graph import load_graph
from tests.integration.program import metrics, samples, start, tiny_config
from tests.tiny_model import make_tiny_model, make_tiny_scorer


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return make_tiny_model(folder / "policy"), make_tiny_scorer(folder / "scorer")


def mixed_config(folder, models):
    folder.mkdir(exist_ok=True)
    policy, scorer = models
    config = tiny_config(folder, policy, reward_model={"path": str(scorer), "weight": 0.5}, eval={"at_end": True})
    settings = json.loads(config.read_text())
    settings["reward"]["functions"][0]["weight"] = 2.0
    config.write_text(json.dumps(settings))
    return config


def records(run):
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().split("\n")[:-1]]


def test_a_mixture_by_weights_on_any_number_of_ranks(tmp_path, models):
    for ranks in (1, 2):
        config = mixed_config(tmp_path / str(ranks), models)
        start(config, "train.steps=2", ranks=ranks, launcher="single" if ranks == 1 else "torchrun").check()
    runs = [tmp_path / str(ranks) / "run" for ranks in (1, 2)]
    assert [(r["id"], r["response"]) for r in records(runs[0])] == [(r["id"], r["response"]) for r in records(runs[1])]
    seen = {True: 0, False: 0}
    for record in records(runs[0]):
        parts = record["reward_parts"]
        assert record["reward"] == pytest.approx(2.0 * parts["letters"] + 0.5 * parts["reward_model"], rel=1e-5)
        assert parts["reward_model"] != 0
        seen[record["eval"]] += 1
    assert seen == {True: 6, False: 40}
    for ours, theirs in zip(metrics(runs[1]), metrics(runs[0]), strict=True):
        for name in ("reward/mean", "reward/part/letters", "reward/part/reward_model", "loss/policy", "grad_norm"):
            if name in theirs:
                assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name
    assert "reward/part/reward_model" in metrics(runs[0])[0]


def test_the_model_alone_with_a_critic_that_starts_from_it(tmp_path, models):
    policy, scorer = models
    config = tiny_config(
        tmp_path,
        policy,
        run={"name": "tiny", "folder": str(tmp_path / "run"), "graph": "spmd_rl.recipes.ppo:graph"},
        reward={"functions": []},
        reward_model={"path": str(scorer)},
        algorithm={"advantage": "gae"},
        critic={"path": str(scorer)},
    )
    start(config, "train.steps=2", ranks=2).check()
    first = metrics(tmp_path / "run")[0]
    assert first["reward/mean"] == pytest.approx(first["reward/part/reward_model"], rel=1e-5)
    assert first["value/mean"] != 0 and first["reward/std"] > 0  # the critic keeps the model's head
    assert len(samples(tmp_path / "run")) == 40


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["reward_model.path=''"], "reward_model.weight=0.5 has no effect here: it needs reward_model.path"),
        (["reward_model.path=''", "reward_model.weight=1.0", "reward.functions=[]"], "or a reward_model.path"),
        (
            ["algorithm.dynamic_sampling=true", "algorithm.loss=decoupled_ppo"],
            "reward_model.path is not there yet with algorithm.dynamic_sampling=true",
        ),
        (["reward.functions[0].function=mine:reward_model"], "is that of the reward model's own part"),
    ],
)
def test_refused_in_one_line(tmp_path, models, overrides, said):
    with pytest.raises(UserError) as error:
        config = load_config(mixed_config(tmp_path, models), overrides)
        check(config)
        load_graph(config.run.graph)(config, 2)
    assert said in str(error.value) and "\n" not in str(error.value)
