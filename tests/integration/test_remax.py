"""Whole runs of ReMax: the baseline is the greedy response, on any number of ranks and also asynchronously."""

from __future__ import annotations

import importlib.util
import json
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.integration.program import metrics, samples, start, start_each, tiny_config

# On policy the ratio is 1, so with these the loss is the mean of -advantage over the samples.
RECIPE = ("algorithm.advantage=remax", "algorithm.aggregation=seq_mean_token_mean", "train.steps=2")
ALONE = {"alone": [], "vllm": ["rollout.engine=vllm", "rollout.kv_cache_gib=0.125", "train.steps=1"]}
ASYNC = ["mode=async", "placement.train=1", "stream.staleness=0", "stream.train_on=step", "stream.swap=in_flight"]
TOGETHER = {"two ranks": [], "async": ASYNC}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, model) -> dict[str, Path]:
    found, configs = {}, {}
    for name in (*ALONE, *TOGETHER):
        folder = tmp_path_factory.mktemp("remax")
        configs[name] = tiny_config(folder, model, checkpoint={"every": 0, "export": False})
        found[name] = folder / "run"
    start_each(*[[str(configs[name]), *RECIPE, *own] for name, own in ALONE.items()])
    for name, own in TOGETHER.items():
        start(configs[name], *RECIPE, *own, ranks=2).check()
    return found


def greedy_reward(runs: dict[str, Path], model: Path) -> float:
    """Mean over the prompts of the first step, by transformers' own generation and the reward function itself."""
    spec = importlib.util.spec_from_file_location("rewards", runs["alone"].parent / "rewards.py")
    assert spec is not None and spec.loader is not None
    rewards = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rewards)
    reference, tokenizer = AutoModelForCausalLM.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)
    prompts: dict[int, dict] = {}
    for line in (runs["alone"] / "samples.jsonl").read_text().split("\n")[:-1]:
        record = json.loads(line)
        if record["step"] == 1:
            prompts[record["id"][1]] = record
    found = []
    for record in prompts.values():
        ids = torch.tensor([tokenizer.encode(record["prompt"])])
        out = reference.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
        text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        found.append(rewards.letters(record["prompt"], text, {"answer": ""}))
    assert len(found) == 5
    return sum(found) / len(found)


def test_the_baseline_is_the_greedy_response(runs, model):
    """Without the reward's part that is the answer's own (0.01 for each of its letters, alike for all of a group)."""
    for name in ("alone", "vllm"):
        line = metrics(runs[name])[0]
        answers = greedy_reward(runs, model)
        assert 0.005 < line["reward/greedy_mean"] - answers < 0.05, name
        assert line["reward/greedy_mean"] != pytest.approx(line["reward/mean"], rel=1e-3)
        assert line["samples"] == 20 and line["tokens/generated"] <= 20 * 12 and 0 < line["tokens/greedy"] <= 5 * 12
    assert metrics(runs["vllm"])[0]["reward/greedy_mean"] == pytest.approx(
        metrics(runs["alone"])[0]["reward/greedy_mean"], rel=1e-6
    )


def test_the_advantage_is_the_lead_over_it(runs):
    for name, run in runs.items():
        for line in metrics(run):
            wanted = line["reward/greedy_mean"] - line["reward/mean"]
            assert line["loss/policy"] == pytest.approx(wanted, rel=1e-4, abs=1e-5), name


def test_ranks_and_modes_change_nothing(runs):
    for name in TOGETHER:
        assert samples(runs[name]) == samples(runs["alone"]), name
        for ours, theirs in zip(metrics(runs[name]), metrics(runs["alone"]), strict=True):
            for key in ("reward/greedy_mean", "tokens/greedy", "loss/policy", "grad_norm", "samples"):
                assert ours[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-6), (name, key)
    groups = defaultdict(set)
    for _, prompt, sample in samples(runs["alone"]):
        groups[prompt].add(sample)
    assert all(numbers == {0, 1, 2, 3} for numbers in groups.values())  # the greedy one is not among them
