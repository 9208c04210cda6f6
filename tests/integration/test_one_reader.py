"""Ranks that share an engine: one of them reads, tokenises and rewards for all; the training is that of one rank."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.integration import pairs
from tests.integration.program import metrics, samples, start, start_each, tiny_config
from tests.tiny_model import make_tiny_scorer

REWARD = """
import os

def noted(prompt, response, row):
    file = os.open({path!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, (repr((prompt, response)) + "\\n").encode())
    os.close(file)
    if {rare} and sum(map(ord, prompt)) % 5 < 3:
        return 0.25
    return sum(ord(c) % 7 for c in response) / (1 + len(response)) + 0.01 * len(row["answer"])

def batched(prompts, responses, rows):
    assert prompts
    return [0.1 * (len(prompt) % 3) for prompt in prompts]
"""
SAME = ("loss/policy", "grad_norm", "reward/mean", "reward/std", "entropy", "samples", "response/length_mean",
        "tokens/generated", "ratio/max", "kl/ref", "reward/part/batched", "reward/part/reward_model",
        "dynamic/kept_fraction", "dynamic/waiting", "eval/held_out/reward_mean", "eval/held_out/n")  # fmt: skip


def configured(folder: Path, model: Path, graph: str, rare: bool = False, **sections: Any) -> Path:
    """One epoch of 9 prompts in two steps, and 6 held-out ones: everything is read, and nothing beyond."""
    folder.mkdir()
    functions = [
        {"function": f"{folder}/noted.py:noted"},
        {"function": f"{folder}/noted.py:batched", "batched": True, "weight": 0.5},
    ]
    (folder / "noted.py").write_text(REWARD.format(path=str(folder / "rewarded"), rare=rare))
    source = {"name": "sums", "generator": "chain_sum", "size": 9, "seed": 3, "params": {"max_terms": 3}}
    return tiny_config(
        folder,
        model,
        run={"graph": f"tests.integration.pairs:{graph}"},
        data={"train": [source], "epochs": 1, "max_prompt_tokens": 200},
        reward={"functions": functions, "workers": 0},
        eval={"at_end": True},
        **{"train": {"steps": 2, "prompts_per_step": 5, "samples_per_prompt": 4}, **sections},
    )


def run(config: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str, ranks: int) -> Path:
    monkeypatch.setenv(pairs.TOLD, str(config.parent / "tokenised"))
    start(config, *overrides, ranks=ranks, launcher="single" if ranks == 1 else "torchrun").check()
    return config.parent


def told(folder: Path) -> list[tuple[int, str]]:
    return pairs.tokenised(folder / "tokenised")


def rewarded(folder: Path) -> Counter[str]:
    return Counter((folder / "rewarded").read_text().splitlines())


def same_training(ours: Path, theirs: Path) -> None:
    mine, others = samples(ours / "run"), samples(theirs / "run")
    assert mine.keys() == others.keys()
    for identity, (step, response, reward) in mine.items():
        assert (step, response) == others[identity][:2]
        assert reward == pytest.approx(others[identity][2], rel=1e-4)
    for line, other in zip(metrics(ours / "run"), metrics(theirs / "run"), strict=True):
        for name in {*SAME} & {*other}:
            assert line[name] == pytest.approx(other[name], rel=1e-4, abs=1e-5), (name, line["step"])


def check_once(folder: Path, readers: set[int]) -> None:
    """Each prompt tokenised once and each sample scored once, by the readers alone."""
    assert len(told(folder)) == 9 + 6 and set(Counter(text for _, text in told(folder)).values()) == {1}
    assert {rank for rank, _ in told(folder)} == readers
    assert len(samples(folder / "run")) == 9 * 4 and sum(rewarded(folder).values()) == 9 * 4 + 6


def test_pairs_train_as_one_rank_and_read_and_reward_once(tmp_path, model, monkeypatch):
    """With a reward model and a penalty in the reward, which the trainers send back to where rewards are judged."""
    scorer = make_tiny_scorer(tmp_path / "scorer")
    sections: dict[str, Any] = {
        "algorithm": {"kl_coef": 0.1, "kl_in": "reward", "advantage": "reinforce_pp"},
        "reward_model": {"path": str(scorer), "weight": 0.5},
    }
    alone, paired = (
        run(configured(tmp_path / graph, model, graph, **sections), monkeypatch, "train.updates_per_step=2", ranks=n)
        for graph, n in (("noted", 1), ("pairs", 4))
    )
    same_training(paired, alone)
    assert rewarded(paired) == rewarded(alone)
    check_once(alone, {0})
    check_once(paired, {0, 2})


def test_dynamic_sampling_by_pairs_goes_on_alone(tmp_path, model, monkeypatch):
    """Groups that wait for the next step are kept and saved once, whatever shares an engine."""
    sections: dict[str, Any] = {
        "algorithm": {"dynamic_sampling": True, "loss": "decoupled_ppo"},
        "train": {"steps": 2, "prompts_per_step": 4, "samples_per_prompt": 3, "optimizer": {"lr": 1e-3}},
        "checkpoint": {"every": 1, "keep": 0, "export": False},
    }
    alone, paired = (configured(tmp_path / name, model, "pairs", rare=True, **sections) for name in ("alone", "paired"))
    overrides = ["data.train[0].size=24", "eval.at_end=false"]
    folder = run(paired, monkeypatch, *overrides, "train.steps=1", ranks=4)
    assert metrics(folder / "run")[0]["dynamic/waiting"] > 0
    assert {rank for rank, _ in told(folder)} == {0, 2}
    half = rewarded(folder)
    start_each(*([str(path), *overrides] for path in (alone, paired)))
    assert half == rewarded(alone.parent) & half
    same_training(folder, alone.parent)


def test_vllm_over_two_ranks_trains_as_over_one(tmp_path, model, monkeypatch):
    overrides = ["rollout.engine=vllm", "rollout.kv_cache_gib=0.125"]
    one, two = (
        run(
            configured(tmp_path / str(ranks), model, "noted"),
            monkeypatch, *overrides, f"rollout.tensor_parallel={ranks}", ranks=ranks,
        )
        for ranks in (1, 2)
    )  # fmt: skip
    same_training(two, one)
    check_once(two, {0})
