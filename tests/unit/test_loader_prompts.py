from __future__ import annotations

import json

import pytest

from spmd_rl.config.errors import UserError
from spmd_rl.config.schema import DataConfig, SourceConfig
from spmd_rl.data.prompts import PromptEncoder
from spmd_rl.data.sources import Source
from tests.tiny_model import make_tiny_tokenizer

TEXTS = ["2+2", "مرحبا 😀", "漢字", "a\u2028b", "{braces} \\boxed{}"]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


def source_of(tmp_path, row, **settings):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(row) + "\n")
    return Source.open(SourceConfig(name="s", path=str(path), **settings), "data.train[0]")


def encode(tokenizer, source, **settings):
    row = source.row(0)
    return PromptEncoder(tokenizer, DataConfig(**settings)).encode(source, row, source.where(0))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("system", ["", "Be brief."])
def test_plain_text_becomes_messages(tokenizer, tmp_path, text, system):
    template = "Q: {prompt} Answer in \\boxed{}."
    source = source_of(tmp_path, {"prompt": text}, system_prompt=system, prompt_template=template)
    messages = [{"role": "system", "content": system}] * bool(system)
    messages.append({"role": "user", "content": f"Q: {text} Answer in \\boxed{{}}."})
    right = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    ids = encode(tokenizer, source)
    assert ids == right and tokenizer.decode(ids).endswith(
        f"Q: {text} Answer in \\boxed{{}}.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_messages_are_used_as_they_are(tokenizer, tmp_path):
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    source = source_of(tmp_path, {"prompt": messages}, system_prompt="not used", prompt_template="not used {prompt}")
    right = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert encode(tokenizer, source) == right


def test_without_chat_template(tokenizer, tmp_path):
    source = source_of(tmp_path, {"prompt": "ab"}, prompt_template="<{prompt}>", system_prompt="not used")
    assert tokenizer.decode(encode(tokenizer, source, chat_template=False)) == "<ab>"


def test_beginning_of_sequence_token_is_kept_without_chat_template(tmp_path):
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tiny_tokenizer()
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    source = source_of(tmp_path, {"prompt": "ab"})
    assert encode(tokenizer, source, chat_template=False)[0] == 1
    assert encode(tokenizer, source).count(1) == 2  # the template's own two, no third in front


def test_template_arguments_and_refusals_name_the_row(tokenizer, tmp_path):
    own = make_tiny_tokenizer()
    own.chat_template = "{% if not thinking %}{{ raise_exception('think first') }}{% endif %}{{ messages[0].content }}"
    source = source_of(tmp_path, {"prompt": "ab"})
    assert own.decode(encode(own, source, chat_template_kwargs={"thinking": True})) == "ab"
    with pytest.raises(
        UserError, match=r"x.jsonl:1: the chat template refuses this row \(TemplateError: think first\)"
    ):
        encode(own, source)
    own.chat_template = None
    with pytest.raises(UserError, match="has no chat template: set data.chat_template=false"):
        encode(own, source)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "holds NoneType; text or a list of messages"),
        (7, "holds int; text or a list of messages"),
        ([], "holds no message"),
        ([{"role": "user"}], "each message needs a role and a content"),
        (["a"], "each message needs a role and a content"),
        ([{"role": "user", "content": "\ud800"}], "half of a surrogate pair"),
    ],
)
def test_prompts_of_the_wrong_kind(tokenizer, tmp_path, prompt, message):
    with pytest.raises(UserError, match=f"x.jsonl:1: .*{message}"):
        encode(tokenizer, source_of(tmp_path, {"prompt": prompt}))


def test_an_empty_prompt_is_refused(tokenizer, tmp_path):
    with pytest.raises(UserError, match="x.jsonl:1: the prompt is empty"):
        encode(tokenizer, source_of(tmp_path, {"prompt": ""}), chat_template=False)
    with pytest.raises(UserError, match="needs data.chat_template=true"):
        encode(tokenizer, source_of(tmp_path, {"prompt": [{"role": "user", "content": "a"}]}), chat_template=False)


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_overlong_is_exactly_more_tokens_than_the_limit(tokenizer, tmp_path, text, chat):
    source = source_of(tmp_path, {"prompt": text})
    row, where = source.row(0), source.where(0)
    count = len(encode(tokenizer, source, chat_template=chat))
    for limit, overlong in ((count - 1, True), (count, False), (count + 1, False), (10_000, False)):
        encoder = PromptEncoder(tokenizer, DataConfig(max_prompt_tokens=limit, chat_template=chat))
        assert encoder.is_overlong(source, row, where) is overlong


def test_the_caller_s_tokenizer_is_left_alone(tokenizer, tmp_path):
    """Its padding and truncation are state; what one thread sets must neither reach nor come from another."""
    encoder = PromptEncoder(tokenizer, DataConfig())
    source = source_of(tmp_path, {"prompt": "a"})
    before = encoder.encode(source, source.row(0), "")
    tokenizer(["a", "abc"], padding=True, truncation=True, max_length=2)
    state = tokenizer._tokenizer.padding, tokenizer._tokenizer.truncation
    assert encoder.encode(source, source.row(0), "") == before
    assert (tokenizer._tokenizer.padding, tokenizer._tokenizer.truncation) == state != (None, None)


def test_examples_are_earlier_turns(tokenizer, tmp_path):
    source = source_of(
        tmp_path,
        {"prompt": "3+3"},
        system_prompt="S",
        prompt_template="{prompt} =",
        examples=[["1+1", "2"], ["2+2", "4"]],
    )
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "1+1 ="},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2 ="},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "3+3 ="},
    ]
    right = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert encode(tokenizer, source) == right
    with pytest.raises(UserError, match=r"each of examples is a list of two texts"):
        source_of(tmp_path, {"prompt": "x"}, examples=[["alone"]])
