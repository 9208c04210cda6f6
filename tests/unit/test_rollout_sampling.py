"""What the configuration says about sampling; end tokens; limits that are refused before an engine starts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from spmd_rl.config.errors import UserError
from spmd_rl.config.schema import Config, DataConfig, EvalConfig, RolloutConfig
from spmd_rl.engines.protocol import Request, Sampling
from spmd_rl.engines.rollout.sampling import check_model, check_request, end_tokens, model_tokens, sampling_from


def test_training_and_evaluation_sample_as_their_sections_say():
    rollout = RolloutConfig(temperature=0.6, top_p=0.9, top_k=20, max_tokens=32, stop=["\n"])
    config = Config(rollout=rollout, eval=EvalConfig(temperature=0.0))
    assert sampling_from(config, "train") == Sampling(0.6, 0.9, 20, 32, ("\n",))
    assert sampling_from(config, "eval") == Sampling(0.0, 1.0, 0, 32, ("\n",))
    assert sampling_from(config, "baseline") == Sampling(0.0, 1.0, 0, 32, ("\n",))
    warm = Config(rollout=rollout, eval=EvalConfig(temperature=1.0))
    assert sampling_from(warm, "eval") == Sampling(1.0, 0.9, 20, 32, ("\n",))
    with pytest.raises(ValueError, match="one of train, baseline, eval"):
        sampling_from(config, "test")


def test_tokens_of_prompt_and_response_together():
    config = Config(data=DataConfig(max_prompt_tokens=100), rollout=RolloutConfig(max_tokens=28))
    assert model_tokens(config) == 128
    given = Config(data=DataConfig(max_prompt_tokens=100), rollout=RolloutConfig(max_tokens=28, max_model_tokens=512))
    assert model_tokens(given) == 512


@pytest.mark.parametrize(
    ("generation", "model", "tokenizer", "expected"),
    [
        ({"eos_token_id": [7, 8], "top_p": 0.8}, {"eos_token_id": 1}, 9, {7, 8, 9}),  # generation_config wins
        ({"eos_token_id": 7}, {}, 7, {7}),
        ({"top_p": 0.8}, {"eos_token_id": [4, 5]}, None, {4, 5}),  # it says nothing: config.json does
        (None, {"eos_token_id": 4}, 6, {4, 6}),
        (None, {}, None, set()),  # a model without an end: responses end by length
    ],
)
def test_end_tokens(tmp_path: Path, generation: dict | None, model: dict, tokenizer: int | None, expected: set[int]):
    (tmp_path / "config.json").write_text(json.dumps(model))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert end_tokens(tmp_path, SimpleNamespace(eos_token_id=tokenizer)) == expected


def test_end_tokens_that_are_no_integers_are_refused(tmp_path: Path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(UserError, match="eos_token_id is '</s>'; an integer or a list is wanted"):
        end_tokens(tmp_path, SimpleNamespace(eos_token_id=2))


def described(tmp_path: Path, **fields: object) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    return path


def test_a_model_that_cannot_be_split_is_refused(tmp_path: Path):
    smol = described(tmp_path, num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192)
    check_model(smol, 3, 8192)
    with pytest.raises(UserError, match=r"tensor_parallel=2 does not divide the 9 attention heads.*possible: 1, 3, 9"):
        check_model(smol, 2)
    with pytest.raises(UserError, match="does not divide the 6 key/value heads"):
        check_model(described(tmp_path, num_attention_heads=12, num_key_value_heads=6), 4)
    check_model(described(tmp_path, num_attention_heads=8, num_key_value_heads=2), 4)  # each head on two ranks
    with pytest.raises(UserError, match="4 attention heads"):
        check_model(described(tmp_path, text_config={"num_attention_heads": 4}), 3)


def test_more_tokens_than_positions_are_refused(tmp_path: Path):
    path = described(tmp_path, num_attention_heads=4, max_position_embeddings=128)
    check_model(path, 1, 128)
    with pytest.raises(UserError, match="129 tokens together.*max_position_embeddings=128"):
        check_model(path, 1, 129)


def test_requests_that_do_not_fit_name_their_sample():
    def request(prompt: int, tokens: int) -> Request:
        return Request((0, 5, 1), tuple(range(prompt)), Sampling(max_tokens=tokens), 0)

    check_request(request(6, 10), 16)
    with pytest.raises(ValueError, match=r"\(0, 5, 1\): 7 prompt tokens and 10 of response are 17.*holds 16"):
        check_request(request(7, 10), 16)
    with pytest.raises(ValueError, match=r"\(0, 5, 1\): the prompt is empty"):
        check_request(request(0, 10), 16)
    with pytest.raises(ValueError, match="max_tokens=0"):
        check_request(request(1, 0), 16)
