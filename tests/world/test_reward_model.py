"""The reward model's scores are those of a plain transformers call on each sequence alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from spmd_rl.comm.world import World
from spmd_rl.config.errors import UserError
from spmd_rl.config.schema import DataConfig, RewardModelConfig, SourceConfig
from spmd_rl.data.batch import Batch, Column
from spmd_rl.engines.reward.model import Reader, RewardModel
from tests.tiny_model import make_tiny_model, make_tiny_scorer, make_tiny_tokenizer
from tests.world.harness import run_world
from tests.world.train_cases import config, samples, share

SOURCES = [SourceConfig(name="sums", generator="chain_sum", system_prompt="Be brief.", prompt_template="Q: {prompt}")]
OTHER_TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"


def judged_samples() -> Batch:
    """One response is empty, one ends with padding, one is text; rows as the loader writes them."""
    batch, pad = samples(), make_tiny_tokenizer().pad_token_id
    responses = [row.clone() for row in batch["response"].rows()]
    responses[0] = torch.empty(0, dtype=torch.int32)
    responses[2][-2:] = pad
    responses[3] = torch.tensor(make_tiny_tokenizer()("fünf")["input_ids"], dtype=torch.int32)
    rows = [json.dumps({"question": f"{i} + 1?", "source": "sums"}).encode() for i in range(len(batch))]
    return Batch(
        batch.ids,
        {"prompt": batch["prompt"], "response": Column.from_rows(responses), "row": Column.from_bytes(rows)},
    )


def scores(world: World, policy: str, scorer: str) -> list[float]:
    settings = replace(
        config(policy, tokens_per_microbatch=24), reward_model=RewardModelConfig(path=scorer), data=DataConfig(SOURCES)
    )
    mesh = world.mesh(range(world.size), {"dp": world.size})
    engine = RewardModel(settings, world, mesh, AutoTokenizer.from_pretrained(policy))
    assert engine.state_dict() == {}
    return engine.score(share(judged_samples(), world)).tolist()


@torch.no_grad()
def alone(scorer: Path, sequences: list[list[int]]) -> list[float]:
    model = AutoModelForSequenceClassification.from_pretrained(scorer).eval()
    return [float(model(torch.tensor([ids])).logits[0, 0]) for ids in sequences]


def test_the_tokens_as_they_stand_on_any_number_of_ranks(tmp_path: Path) -> None:
    policy = make_tiny_model(tmp_path / "policy", layers=1)
    scorer = make_tiny_scorer(tmp_path / "scorer")
    batch = judged_samples()
    whole = [torch.cat(pair).tolist() for pair in zip(batch["prompt"].rows(), batch["response"].rows(), strict=True)]
    want = alone(scorer, whole)
    assert float(torch.tensor(want).std()) > 0.1
    for ranks in (1, 3):
        args = {"policy": str(policy), "scorer": str(scorer)}
        found = run_world(scores, ranks, "single" if ranks == 1 else "torchrun", 120, args).check().ranks
        assert [score for rank in found for score in rank] == pytest.approx(want, abs=2e-5)


def test_another_template_reads_messages(tmp_path: Path) -> None:
    policy, other = make_tiny_tokenizer(), make_tiny_tokenizer()
    other.chat_template = OTHER_TEMPLATE
    settings = replace(config("none"), reward_model=RewardModelConfig(path="x"), data=DataConfig(SOURCES, SOURCES))
    sequences = Reader(settings, policy, other, other.pad_token_id).sequences(judged_samples())
    read = [other.decode(prompt.tolist()) for prompt in sequences["prompt"].rows()]
    assert read[3] == "[system] Be brief.\n[user] Q: 3 + 1?\n[assistant] fünf\n"
    assert sequences["response"].lengths.tolist() == [1] * len(read)  # the token that is only there to be predicted
    plain = replace(settings, data=DataConfig(SOURCES, chat_template=False))
    written = Reader(plain, policy, other, None).sequences(judged_samples())["prompt"].rows()
    assert other.decode(written[3].tolist()).endswith("fünf")


def test_folders_and_sources_that_cannot_be_used(tmp_path: Path) -> None:
    policy = str(make_tiny_model(tmp_path))
    settings = replace(config(policy), reward_model=RewardModelConfig(path=policy))
    with pytest.raises(UserError, match="reward_model.path: .* holds Qwen3ForCausalLM; a model for sequence class"):
        RewardModel(settings, None, None, None)  # type: ignore[arg-type]
    other = make_tiny_tokenizer()
    other.chat_template = OTHER_TEMPLATE
    twice = DataConfig([*SOURCES, replace(SOURCES[0], system_prompt="Think.")])
    with pytest.raises(UserError, match="two sources are named 'sums' and differ in system_prompt"):
        Reader(replace(settings, data=twice), make_tiny_tokenizer(), other, None)
    other.chat_template = None
    with pytest.raises(UserError, match="reward_model.path: its tokenizer has no chat template"):
        Reader(replace(settings, data=DataConfig(SOURCES)), make_tiny_tokenizer(), other, None)
