"""Dynamic sampling: steps of groups that teach, on any number of ranks, over a stop and a new start (case D2)."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.integration.program import metrics, samples, start, start_each, tiny_config

# About half of the groups have equal rewards, by a rule of the prompt that no weights change.
REWARDS = """
def rare(prompt, response, row):
    if hash_of(row["question"]) % 5 < 3:
        return 0.25
    return sum(ord(c) % 7 for c in response) / (1 + len(response))

def constant(prompt, response, row):
    return 1.0

def hash_of(text):
    return sum(map(ord, text))
"""
DYNAMIC = {"dynamic_sampling": True, "loss": "decoupled_ppo", "dynamic_sampling_tries": 6}
SIZES = {"prompts_per_step": 4, "samples_per_prompt": 3, "steps": 4, "updates_per_step": 2}


def config_in(folder, model, reward="rare", algorithm=(), **train):
    path = tiny_config(
        folder,
        model,
        run={"threads": 1},
        algorithm={**DYNAMIC, **dict(algorithm)},
        train={**SIZES, "tokens_per_microbatch": 300, "optimizer": {"lr": 1e-3}, **train},
        reward={"functions": [{"function": f"{folder / 'dynamic_rewards.py'}:{reward}"}], "workers": 0},
        checkpoint={"every": 1, "keep": 0, "export": False},
    )
    (folder / "dynamic_rewards.py").write_text(REWARDS)
    return path


@pytest.fixture(scope="module")
def alone(tmp_path_factory, model):
    """Single-process runs: of four steps; one to the end of its ten prompts."""
    whole, short = tmp_path_factory.mktemp("alone"), tmp_path_factory.mktemp("short")
    few = config_in(short, model, steps=9)
    start_each([config_in(whole, model)], [few, "data.epochs=1", "data.train[0].size=10"])
    return whole / "run", short / "run"


def test_every_step_has_the_wanted_groups_and_each_of_them_teaches(alone):
    alone, _ = alone
    groups = Counter(id[:2] for id in samples(alone))
    assert set(groups.values()) == {3}  # whole groups, each once
    rewards: dict[tuple[int, tuple[int, ...]], set[float]] = {}
    for id, (step, _, reward) in samples(alone).items():
        rewards.setdefault((step, id[:2]), set()).add(reward)
    assert Counter(step for step, _ in rewards) == {1: 4, 2: 4, 3: 4, 4: 4}
    assert all(len(values) > 1 for values in rewards.values())
    lines = metrics(alone)
    assert max(line["dynamic/rounds"] for line in lines) > 1
    drawn = sum(line["samples"] for line in lines)
    kept = sum(line["dynamic/kept_fraction"] * line["samples"] for line in lines)
    # Nothing accepted is lost: it is trained on, or waits.
    assert kept == pytest.approx(4 * 4 * 3 + 3 * lines[-1]["dynamic/waiting"])
    assert 0.2 < kept / drawn < 0.8
    assert any(line["dynamic/waiting"] for line in lines[:-1])
    assert all(line["reward/zero_variance_fraction"] == 0 for line in lines)
    assert {"time/experience", "time/experience/rollout", "time/experience/reward"} <= set(lines[0])


def same(ours, theirs):
    assert samples(ours) == samples(theirs)
    for mine, other in zip(metrics(ours), metrics(theirs), strict=True):
        for name in (
            *("loss/policy", "grad_norm", "reward/mean", "ratio/max", "samples", "dynamic/rounds", "dynamic/waiting"),
            *("dynamic/kept_fraction", "correction/weight_mean", "mismatch/kl"),
        ):
            assert mine[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), (name, mine["step"])


def test_d2_a_reward_that_is_always_equal_stops_with_what_to_do(tmp_path, model):
    done = start(config_in(tmp_path, model, "constant", {"dynamic_sampling_tries": 2}), launcher="single")
    assert done.returncode != 0
    assert "after 2 rounds of 4 prompts, 0 of the 4 groups wanted have rewards that differ" in done.stderr
    assert "the rewards lie between 1 and 1" in done.stderr and "start again for further rounds" in done.stderr


@pytest.fixture(scope="module")
def resumed(tmp_path_factory, model, alone):
    """Two runs that began otherwise and went on in one process: on two ranks, up to a step that left groups waiting;
    and with one round per step, until a round did not suffice."""
    larger, stopped = tmp_path_factory.mktemp("larger"), tmp_path_factory.mktemp("stopped")
    waiting = next(line["step"] for line in metrics(alone[0])[:-1] if line["dynamic/waiting"])
    start(config_in(larger, model), f"train.steps={waiting}", ranks=2).check()
    done = start(config_in(stopped, model, algorithm={"dynamic_sampling_tries": 1}), launcher="single")
    assert done.returncode == 2 and "of the 4 groups wanted have rewards that differ" in done.stderr, done.stderr
    last = max(step for step, _, _ in samples(stopped / "run").values())
    kept = [id for id, (step, _, _) in samples(stopped / "run").items() if step == last]
    assert 0 < len(kept) < 4 * 3 and len(metrics(stopped / "run")) == last - 1  # on record; the step itself is not
    start_each([str(config_in(larger, model))], [str(config_in(stopped, model))])
    return larger / "run", stopped / "run"


def test_the_world_size_changes_nothing_also_over_a_resume(resumed, alone):
    same(resumed[0], alone[0])


def test_d2_groups_accepted_before_the_stop_are_kept(resumed, alone):
    """The run goes on with them: its steps are those of the run that had as many rounds as it needed."""
    assert samples(resumed[1]) == samples(alone[0])
    ours, theirs = (metrics(run)[-1]["loss/policy"] for run in (resumed[1], alone[0]))
    assert ours == pytest.approx(theirs, abs=1e-6)


def test_prompts_that_end_first_give_a_smaller_last_step(alone):
    _, short = alone
    lines = metrics(short)
    assert lines[-1]["dynamic/waiting"] == 0
    accepted = sum(line["dynamic/kept_fraction"] * line["samples"] for line in lines)
    assert len(samples(short)) == pytest.approx(accepted)
    assert sum(line["samples"] for line in lines) == 10 * 3
