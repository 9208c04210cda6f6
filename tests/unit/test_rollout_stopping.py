"""Where a response ends, and that its end token or stop string belongs to it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from spmd_rl.data.batch import Finish
from spmd_rl.engines.protocol import Sampling
from spmd_rl.engines.rollout.stopping import finish_of
from tests.tiny_model import make_tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


def finishes(text: str, tokenizer, end: Iterable[int] = (), **sampling: Any) -> list[Finish | None]:
    """The verdict after each token of `text`."""
    tokens = tokenizer.encode(text)
    settings = Sampling(**sampling)
    return [finish_of(tokens[: n + 1], settings, frozenset(end), tokenizer) for n in range(len(tokens))]


def test_end_token_ends_also_where_it_is_the_pad_token(tokenizer):
    pad = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    tokenizer_text = "ab<|endoftext|>"
    assert finishes(tokenizer_text, tokenizer, {pad}) == [None, None, Finish.STOP]
    assert finishes(tokenizer_text, tokenizer, set()) == [None, None, None]


def test_length_is_only_the_reason_where_nothing_else_is(tokenizer):
    end = tokenizer.eos_token_id
    assert finishes("abc", tokenizer, {end}, max_tokens=2)[:2] == [None, Finish.LENGTH]
    assert finishes("a<|im_end|>", tokenizer, {end}, max_tokens=2) == [None, Finish.STOP]
    assert finishes("a\n", tokenizer, {end}, max_tokens=2, stop=("\n",)) == [None, Finish.STOP]


def test_stop_strings_over_several_tokens_and_scripts(tokenizer):
    assert finishes("x: \n\nQ", tokenizer, stop=("\n\n",))[:5] == [None, None, None, None, Finish.STOP]
    verdicts = finishes("答案。", tokenizer, stop=("案",))  # three bytes, one token each, per character
    assert verdicts.index(Finish.STOP) == 5
    assert finishes("ab", tokenizer, stop=("zz", "b")) == [None, Finish.STOP]


def test_special_tokens_are_not_text(tokenizer):
    assert finishes("<|im_start|>user", tokenizer, stop=("<|im_start|>",)) == [None] * 5
    assert finishes("en<|im_start|>d", tokenizer, stop=("end",))[-1] == Finish.STOP


def test_a_long_response_is_not_read_from_its_start_again(tokenizer):
    class Counting:
        def decode(self, tokens, skip_special_tokens):
            assert skip_special_tokens
            assert len(tokens) <= 2 + 16
            return tokenizer.decode(tokens, skip_special_tokens=True)

    tokens = tokenizer.encode("a" * 5000 + "END"[:2])
    assert finish_of(tokens, Sampling(max_tokens=10**6, stop=("EN",)), frozenset(), Counting()) == Finish.STOP
