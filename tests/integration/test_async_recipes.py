"""Asynchronous runs of recipes whose stages lie on both sides: on-policy they are the synchronous runs."""

from __future__ import annotations

from collections import Counter

import pytest

from spmd_rl.config.errors import UserError
from spmd_rl.config.load import load_config
from spmd_rl.graph.graph import load_graph
from tests.integration import test_dynamic_sampling as dynamic
from tests.integration.program import metrics, samples, start, tiny_config
from tests.tiny_model import make_tiny_scorer

ASYNC = ("mode=async", "stream.staleness=0")


def same(ours, theirs, names):
    assert samples(ours) == samples(theirs) and samples(theirs)  # ids, steps, sampled tokens, rewards
    for mine, other in zip(metrics(ours), metrics(theirs), strict=True):
        for name in names:
            if name in other:
                assert mine[name] == pytest.approx(other[name], rel=1e-4, abs=1e-5), (name, mine["step"])


def test_a_reward_model_and_a_kl_coefficient_that_moves(tmp_path, model):
    """The model scores at the trainers what replicas draw, in steps and in evaluations; the coefficient is agreed."""
    scorer = make_tiny_scorer(tmp_path / "scorer")
    for mode in ("sync", "async"):
        folder = tmp_path / mode
        folder.mkdir()
        config = tiny_config(
            folder,
            model,
            reward_model={"path": str(scorer), "weight": 0.5},
            algorithm={"kl_coef": 0.1, "kl_target": 0.02, "kl_horizon": 40.0},
            eval={"at_end": True},
        )
        overrides = (*ASYNC, "placement.train=2") if mode == "async" else ()
        start(config, "train.steps=4", *overrides, ranks=3 if mode == "async" else 1).check()
    names = ("loss/policy", "grad_norm", "kl/ref", "kl/coef", "reward/mean", "reward/part/reward_model", "samples",
             "reward/zero_variance_fraction", "eval/held_out/reward_mean", "eval/held_out/n")  # fmt: skip
    same(tmp_path / "async" / "run", tmp_path / "sync" / "run", names)
    coefs = [line["kl/coef"] for line in metrics(tmp_path / "async" / "run") if "kl/coef" in line]
    assert len(set(coefs)) == 4 and "eval/held_out/reward_mean" in metrics(tmp_path / "async" / "run")[-1]


def test_dynamic_sampling(tmp_path, model):
    """On-policy: the rounds, the steps and the surplus of the synchronous run, with two updates per step."""
    for mode in ("sync", "async"):
        folder = tmp_path / mode
        folder.mkdir()
        config = dynamic.config_in(folder, model)
        overrides = (*ASYNC, "placement.train=1", "stream.train_on=step") if mode == "async" else ()
        start(config, *overrides, ranks=3 if mode == "async" else 1).check()
    names = ("loss/policy", "grad_norm", "ratio/max", "dynamic/rounds", "dynamic/waiting", "mismatch/kl",
             "correction/weight_mean", "reward/zero_variance_fraction")  # fmt: skip
    same(tmp_path / "async" / "run", tmp_path / "sync" / "run", names)
    lines = metrics(tmp_path / "async" / "run")
    drawn = sum(line["samples"] for line in lines)  # counted with the group: those that wait will be later
    kept = sum(line["dynamic/kept_fraction"] * line["samples"] for line in lines)
    assert kept == pytest.approx(4 * 4 * 3) and drawn > kept
    assert max(line["dynamic/rounds"] for line in lines) > 1 and any(line["dynamic/waiting"] for line in lines[:-1])


def test_dynamic_sampling_ahead_of_the_trainers_to_the_end_of_the_data_and_over_a_stop(tmp_path, model):
    """Whole groups that teach, each once; the prompts end within a step, which is smaller; a new start goes on."""
    config = dynamic.config_in(tmp_path, model, steps=9, updates_per_step=1)
    overrides = ["mode=async", "placement.train=2", "stream.staleness=1", "data.epochs=1", "data.train[0].size=14"]
    start(config, *overrides, "train.steps=1", ranks=3).check()
    start(config, *overrides, ranks=3).check()
    run = tmp_path / "run"
    teaching = {id for id, (_, _, reward) in samples(run).items() if reward != 0.25}
    groups = Counter(id[:2] for id in samples(run))
    assert set(groups.values()) == {3} and {id[:2] for id in teaching} == set(groups)
    steps = Counter(step for step, _, _ in samples(run).values())
    assert [steps[step] for step in sorted(steps)][:-1] == [12] * (len(steps) - 1) and len(groups) > 4
    assert max(line["staleness/max"] for line in metrics(run)) <= 2


def test_d2_in_asynchronous_mode(tmp_path, model):
    config = dynamic.config_in(tmp_path, model, "constant", {"dynamic_sampling_tries": 2})
    done = start(config, "mode=async", "placement.train=1", "stream.train_on=step", ranks=2)
    assert done.returncode != 0
    assert "after 2 rounds of 4 prompts, 0 of the 4 groups wanted have rewards that differ" in done.stderr


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["stream.on_stale=drop"], "with mode=async it needs stream.on_stale=wait, not drop"),
        (["stream.surplus=1", "stream.staleness=1"], "stream.surplus=1 lets other groups go first"),
    ],
)
def test_dynamic_sampling_keeps_the_order_or_is_refused(tmp_path, model, overrides, said):
    config = dynamic.config_in(tmp_path, model, updates_per_step=1)
    loaded = load_config(config, ["mode=async", "placement.train=1", *overrides])
    with pytest.raises(UserError, match=said):
        load_graph(loaded.run.graph)(loaded, 2)
