"""The transformers engine: one answer per request whatever runs beside it, and the right distribution."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from spmd_rl.config.errors import UserError
from spmd_rl.data.batch import Finish
from spmd_rl.engines.protocol import Completion, Request, Sampling
from spmd_rl.engines.rollout.draw import draw_tokens
from spmd_rl.engines.rollout.generate import generate
from spmd_rl.engines.rollout.seeds import uniform
from spmd_rl.engines.rollout.transformers_engine import TransformersEngine
from tests.rollout_cases import END, make_model, make_requests, reference_distributions, reference_logprobs, state
from tests.tiny_model import make_tiny_model

KINDS: dict[str, dict[str, Any]] = {"qwen3": {}, "llama": {"tied": False, "kv_heads": 2}, "gpt2": {}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights."""
    return make_tiny_model(tmp_path_factory.mktemp("other"), seed=1)


def engine(
    folder: Path, max_sequences: int = 64, max_model_tokens: int = 64, end: Sequence[int] = END
) -> TransformersEngine:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return TransformersEngine(str(folder), tokenizer, frozenset(end), max_sequences, max_model_tokens)


def tokens(done: list[Completion]) -> list[list[int]]:
    return [completion.tokens for completion in done]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=20),
        Sampling(temperature=0.6, max_tokens=20),
        Sampling(temperature=1.3, top_k=9, top_p=0.8, max_tokens=20),
        Sampling(temperature=0.0, max_tokens=20),
    ],
    ids=["plain", "cold", "cut", "greedy"],
)
def test_logprobs_are_those_of_a_whole_forward_pass(kind: str, sampling: Sampling, tmp_path: Path):
    """Also N6 (the temperature divides the logits) and N7 (nothing of generation_config.json is applied)."""
    folder = make_model(tmp_path, kind=kind, **KINDS[kind])
    requests = make_requests(sampling=sampling)
    done = generate(engine(folder), requests, deadline_s=60)
    for completion, expected_R in zip(done, reference_logprobs(folder, requests, done), strict=True):
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected_R, rtol=1e-4, atol=1e-4)


def test_each_token_is_drawn_by_the_number_of_its_seed_and_position(folder: Path):
    requests = make_requests(prompts=6, samples=4)
    done = generate(engine(folder), requests, deadline_s=60)
    for request, completion, logprobs_RV in zip(
        requests, done, reference_distributions(folder, requests, done), strict=True
    ):
        length = len(completion.tokens)
        numbers = [uniform(request.seed, position) for position in range(length)]
        assert draw_tokens(logprobs_RV, [request.sampling] * length, numbers).tolist() == completion.tokens


def test_responses_end_where_they_should(folder: Path):
    done = generate(engine(folder), make_requests(prompts=8, samples=8), deadline_s=60)
    for completion in done:
        assert len(completion.tokens) == len(completion.logprobs)
        assert not set(completion.tokens[:-1]) & set(END)  # nothing comes after an end token
        ended = completion.tokens[-1] in END  # which is part of the response
        assert completion.finish == (Finish.STOP if ended else Finish.LENGTH)
        assert ended or len(completion.tokens) == 20
    assert {completion.finish for completion in done} == {Finish.STOP, Finish.LENGTH}


def test_a_request_has_one_answer_in_any_company(folder: Path):
    requests = make_requests(prompts=6, samples=4)
    alone = [generate(engine(folder), [request], deadline_s=60)[0] for request in requests[:3]]
    together = generate(engine(folder), requests, deadline_s=60)
    few_slots = generate(engine(folder, max_sequences=3), requests, deadline_s=60)
    backwards = generate(engine(folder, max_sequences=5), requests[::-1], deadline_s=60)[::-1]
    assert tokens(together)[:3] == tokens(alone)
    assert tokens(few_slots) == tokens(together) == tokens(backwards)
    for a, b in itertools.chain(zip(few_slots, together, strict=True), zip(backwards, together, strict=True)):
        torch.testing.assert_close(torch.tensor(a.logprobs), torch.tensor(b.logprobs), rtol=0, atol=1e-5)
    assert len({tuple(t) for t in tokens(together)}) > 18  # of 24: seeds differ, so responses do, but some end at once


def test_requests_may_join_while_others_run(folder: Path):
    requests = make_requests(prompts=5, samples=2)
    expected = {c.id: c.tokens for c in generate(engine(folder), requests, deadline_s=60)}
    running, done = engine(folder, max_sequences=4), []
    for request in requests:  # one more after every two steps
        running.submit([request])
        done += running.step() + running.step()
    while running.unfinished():
        done += running.step()
    assert {c.id: c.tokens for c in done} == expected


def test_the_prompt_of_a_group_is_computed_once(folder: Path):
    counted, calls = engine(folder), []
    forward = counted.model.forward

    def counting(**arguments: Any) -> Any:
        calls.append(arguments["input_ids"].numel())
        return forward(**arguments)

    counted.model.forward = counting
    counted.submit(make_requests(prompts=2, samples=5, length=9))
    counted.step()
    assert calls == [9, 11]  # tokens: each prompt once, though five samples each


def test_stop_strings(folder: Path):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    free = generate(engine(folder), make_requests(sampling=Sampling(max_tokens=30)), deadline_s=60)
    text = next(tokenizer.decode(t[k]) for t in tokens(free) for k in range(3, len(t) - 1) if 35 < t[k] < 90)
    stopped = generate(engine(folder), make_requests(sampling=Sampling(max_tokens=30, stop=(text,))), deadline_s=60)
    cut = 0
    for a, b in zip(free, stopped, strict=True):
        first = next((k + 1 for k in range(len(a.tokens)) if tokenizer.decode(a.tokens[k]) == text), None)
        assert b.tokens == a.tokens[:first]
        if first is not None:
            cut += 1
            assert b.finish == Finish.STOP
    assert cut > 0


def test_new_weights_are_used_for_everything_that_follows(folder: Path, other: Path):
    """D11: also for requests that are running, whose keys and values are of the old weights."""
    greedy = Sampling(temperature=0.0, max_tokens=24)
    requests = make_requests(sampling=greedy, samples=1)
    updated = engine(folder, end=())
    updated.submit(requests)
    done = [completion for _ in range(6) for completion in updated.step()]
    assert not done  # all are in the middle
    before = {s.request.id: list(s.tokens) for s in updated._running}
    updated.load_weights(state(other).items(), version=5)
    while updated.unfinished():
        done += updated.step()
    fresh = engine(other, end=())
    for completion in done:
        assert completion.version == 0  # the oldest weights that it is made of
        request = next(r for r in requests if r.id == completion.id)
        start = before[completion.id]
        assert completion.tokens[:6] == start
        rest = Request(request.id, (*request.prompt, *start), Sampling(temperature=0.0, max_tokens=18), 0)
        assert completion.tokens[6:] == generate(fresh, [rest], deadline_s=60)[0].tokens
    again = generate(updated, make_requests(), deadline_s=60)
    assert tokens(again) == tokens(generate(engine(other, end=()), make_requests(), deadline_s=60))
    assert {completion.version for completion in again} == {5}
    assert tokens(again) != tokens(generate(engine(folder, end=()), make_requests(), deadline_s=60))


def test_weights_are_taken_in_order_to_the_last_and_checked(folder: Path, other: Path):
    weights = state(other)
    source = iter(weights.items())
    loaded = engine(folder)
    loaded.load_weights(source, version=1)
    assert next(source, None) is None
    with pytest.raises(ValueError, match="version 2: 1 parameters were not sent, e.g. model.norm.weight"):
        loaded.load_weights(((n, t) for n, t in weights.items() if n != "model.norm.weight"), version=2)
    with pytest.raises(ValueError, match="no parameter 'model.nrom.weight'"):
        loaded.load_weights([("model.nrom.weight", torch.zeros(64))], version=2)
    with pytest.raises(ValueError, match=r"'model.norm.weight' is \(3,\), the rollout model has \(64,\)"):
        loaded.load_weights([("model.norm.weight", torch.zeros(3))], version=2)


def test_nan_is_reported_and_does_not_outlive_the_weights(folder: Path):
    """N12: a NaN log-probability reaches the caller; nothing of it stays in the cache."""
    good = state(folder)
    bad = {
        name: tensor * float("nan") if name.endswith("layers.1.mlp.up_proj.weight") else tensor
        for name, tensor in good.items()
    }
    broken = engine(folder, max_sequences=4)
    expected = generate(broken, make_requests(), deadline_s=60)
    broken.load_weights(bad.items(), version=1)
    done = generate(broken, make_requests(), deadline_s=60)
    assert all(torch.tensor(completion.logprobs).isnan().all() for completion in done)
    assert all(0 <= token < 272 for completion in done for token in completion.tokens)
    broken.load_weights(good.items(), version=2)
    assert tokens(generate(broken, make_requests(), deadline_s=60)) == tokens(expected)


def test_nan_of_one_request_does_not_reach_the_next_in_its_slot(tmp_path: Path):
    poisonous = 3
    model = make_model(tmp_path, kind="llama", tied=False)
    reused = engine(model, max_sequences=2)
    weights = state(model)
    weights["model.embed_tokens.weight"][poisonous] = float("nan")
    reused.load_weights(weights.items(), version=1)
    long = Request((0, 0, 0), (poisonous,) * 30, Sampling(max_tokens=20), 0)
    after = make_requests(prompts=2, samples=1)  # the shorter one comes into the used slot, with masked columns
    assert not any(poisonous in request.prompt for request in after)
    assert torch.tensor(generate(reused, [long], deadline_s=60)[0].logprobs).isnan().all()
    for completion in generate(reused, after, deadline_s=60):
        assert poisonous in completion.tokens or torch.tensor(completion.logprobs).isfinite().all()


def test_sleep_gives_the_cache_back(folder: Path):
    resting = engine(folder)
    expected = generate(resting, make_requests(), deadline_s=60)
    resting.submit(make_requests())
    with pytest.raises(RuntimeError, match="12 requests are not finished"):
        resting.sleep()
    while resting.unfinished():
        resting.step()
    resting.sleep()
    assert not resting._cache.layers
    resting.wake()
    assert tokens(generate(resting, make_requests(), deadline_s=60)) == tokens(expected)


def test_what_does_not_fit_is_refused_before_anything_runs(folder: Path):
    small = engine(folder, max_model_tokens=30)
    with pytest.raises(ValueError, match=r"sample \(0, 1, 0\): 11 prompt tokens and 20 of response are 31"):
        small.submit(make_requests())
    assert small.unfinished() == 0


def test_architectures_with_other_memory_are_refused(tmp_path: Path):
    from transformers import MistralConfig

    MistralConfig(sliding_window=32).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="does not decode a sliding window of 32 tokens .mistral."):
        TransformersEngine(str(tmp_path), None, frozenset(), max_sequences=4, max_model_tokens=33)
