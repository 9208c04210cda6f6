"""Bad input to the whole program: one clear line, a non-zero exit, before any model is loaded."""

from __future__ import annotations

import pytest

from tests.integration.program import start, tiny_config


def refusal(config, *overrides, ranks=1) -> str:
    done = start(config, *overrides, ranks=ranks, launcher="single" if ranks == 1 else "torchrun", timeout_s=90)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode != 0, done.stdout
    if ranks == 1:
        assert done.returncode == 2, done.stderr[-2000:]
        assert "Traceback" not in done.stderr
    assert len(lines) == 1, done.stderr[-2000:]
    assert "step 1" not in done.stdout
    return lines[0]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["trainer.nnodez=4"], "unknown key trainer.nnodez"),
        (["model.path=nowhere/at-all"], "there is no folder nowhere/at-all"),
        (["train.samples_per_prompt=0"], "train.samples_per_prompt=0: at least 1 is wanted"),
        (["data.train[0].generator=chian_sum"], "chain_sum"),
        (["data.train[0].generator=''", "data.train[0].path=gone.jsonl"], "gone.jsonl"),
        (["data.max_prompt_tokens=3"], "max_prompt_tokens"),
        (["reward.functions[0].function=rewards_that_are_not:there"], "rewards_that_are_not"),
        (["algorithm.advantage=gropo"], "did you mean grpo"),
        (["rollout.tensor_parallel=3"], "does not divide the 8 attention heads"),
        (["run.graph=spmd_rl.recipes.grpo:graf"], "did you mean graph"),
        (["algorithm.kl_coef=0.1", "algorithm.offload_reference=true"], "offload_reference=true is for GPUs"),
    ],
)
def test_one_line(tmp_path, model, overrides, said):
    assert said in refusal(tiny_config(tmp_path, model), *overrides)


def test_one_line_for_all_ranks(tmp_path, model):
    config = tiny_config(tmp_path, model)
    assert "unknown key train.stepz" in refusal(config, "train.stepz=4", ranks=2)
    assert "data.max_prompt_tokens" in refusal(config, "data.max_prompt_tokens=3", ranks=2)
    two = refusal(config, "rollout.tensor_parallel=2", "rollout.engine=vllm", ranks=3)
    assert "3 ranks are not divisible by rollout.tensor_parallel=2" in two


def test_data_files(tmp_path, model):
    config = tiny_config(tmp_path, model)
    file = tmp_path / "rows.jsonl"
    source = [
        "data.train[0].generator=''",
        "data.train[0].params={}",
        "data.train[0].size=0",
        f"data.train[0].path={file}",
    ]
    file.write_text('{"question": "1+1"}\n')
    said = refusal(config, *source)
    assert "prompt" in said and "question" in said  # the column that is missing, and those that are there
    file.write_text('{"prompt": "1+1", "answer": "2"}\n{"prompt": \n')
    assert f"{file}:2" in refusal(config, *source)
    file.write_text("")
    assert str(file) in refusal(config, *source)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise KeyError('no such thing')", "no such thing"),
        ("return None", "None"),
        ("return float('nan')", "NaN"),
        ("import time; time.sleep(60)", "reward.timeout_s=1"),
    ],
)
def test_a_reward_that_fails_stops_the_run_by_name_of_the_sample(tmp_path, model, body, said):
    config = tiny_config(tmp_path, model, reward={"timeout_s": 1.0})
    (tmp_path / "rewards.py").write_text(f"def letters(prompt, response, row):\n    {body}\n")
    done = start(config, ranks=1, launcher="single", timeout_s=90)
    assert done.returncode not in (0, None)
    line = next(line for line in done.stderr.splitlines() if "letters" in line and "sample" in line)
    assert said.lower() in line.lower(), line
    assert "sample (epoch 0, prompt " in line


def test_a_reward_that_fails_can_be_excluded_instead(tmp_path, model):
    config = tiny_config(tmp_path, model, reward={"on_error": "exclude"})
    (tmp_path / "rewards.py").write_text(
        "def letters(prompt, response, row):\n    number = sum(map(ord, response))\n"
        "    return None if number % 3 == 0 else number % 7\n"
    )
    start(config, "train.steps=2", ranks=2).check()
    from tests.integration.program import metrics

    first = metrics(tmp_path / "run")[0]
    assert 0 < first["reward/excluded"] < first["samples"]
    assert first["grad_norm"] > 0


def test_a_run_that_trained_nothing_does_not_end_well(tmp_path, model):
    config = tiny_config(tmp_path, model, reward={"on_error": "exclude"})
    (tmp_path / "rewards.py").write_text("def letters(prompt, response, row):\n    return None\n")
    done = start(config, "train.steps=2", ranks=2, timeout_s=90)
    assert done.returncode != 0
    assert "error: nothing was trained in 2 steps" in done.stderr and "reward.on_error" in done.stderr
    from tests.integration.program import metrics

    assert [m["train/skipped_updates"] for m in metrics(tmp_path / "run")] == [1.0, 1.0]
    assert [m["grad_norm"] for m in metrics(tmp_path / "run")] == [0.0, 0.0]
