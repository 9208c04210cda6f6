"""From a row to the prompt's tokens: template, chat template, tokenizer."""

from __future__ import annotations

import copy
from typing import Any

from spmd_rl.config.errors import UserError
from spmd_rl.config.schema import DataConfig, SourceConfig
from spmd_rl.data.sources import Source
from spmd_rl.data.tables import first_line


class PromptEncoder:
    """Renders and tokenises prompts as `config` says.

    With `chat_template`, plain text becomes [system prompt, where there is one; the examples as earlier turns; user:
    prompt_template with the text in the place {prompt}], a list of messages is taken as it is, and the tokenizer's
    chat template renders them up to the place where the response begins. Without, the templated text is tokenised as
    the tokenizer does by itself (with its beginning-of-sequence token, where it has one). Raises UserError where the
    tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any, config: DataConfig) -> None:
        if config.chat_template and not tokenizer.chat_template:
            raise UserError("the model's tokenizer has no chat template: set data.chat_template=false")
        # A fast tokenizer is not safe for two threads, and prompts are made in the loader's own.
        self._tokenizer = copy.deepcopy(tokenizer)
        self._config = config
        self._specials = 0 if config.chat_template else tokenizer.num_special_tokens_to_add()

    def text(self, source: Source, row: dict[str, Any], where: str) -> str:
        """The whole prompt as text. `where` names the row in errors (UserError)."""
        text = self._render(source, row[source.prompt_column], where)
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(f"{where}: half of a surrogate pair stands alone; UTF-8 can't hold it") from None
        return text

    def encode(self, source: Source, row: dict[str, Any], where: str) -> list[int]:
        """Token ids of the prompt."""
        return self._tokens(self.text(source, row, where), where)

    def is_overlong(self, source: Source, row: dict[str, Any], where: str) -> bool:
        """Whether the prompt has more than data.max_prompt_tokens tokens."""
        text = self.text(source, row, where)
        # A token stands for at least one byte, so short texts need not be tokenised.
        if 0 < len(text.encode("utf-8")) + self._specials <= self._config.max_prompt_tokens:
            return False
        return len(self._tokens(text, where)) > self._config.max_prompt_tokens

    def _render(self, source: Source, prompt: Any, where: str) -> str:
        if isinstance(prompt, str):
            if not self._config.chat_template:
                return _templated(source.config, prompt)
            messages = messages_of(source.config, prompt)
        else:
            messages = _checked_messages(prompt, source.prompt_column, where)
            if not self._config.chat_template:
                raise UserError(f"{where}: a list of messages needs data.chat_template=true")
        try:
            return self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **self._config.chat_template_kwargs
            )
        except Exception as error:
            raise UserError(f"{where}: the chat template refuses this row ({first_line(error)})") from None

    def _tokens(self, text: str, where: str) -> list[int]:
        ids = self._tokenizer(text, add_special_tokens=not self._config.chat_template, verbose=False)["input_ids"]
        if not ids:
            raise UserError(f"{where}: the prompt is empty")
        return ids


def messages_of(source: SourceConfig, prompt: Any) -> list[dict[str, Any]]:
    """The conversation before the response: system prompt, examples and the text; or the row's own messages."""
    if not isinstance(prompt, str):
        return list(prompt)
    messages = [{"role": "system", "content": source.system_prompt}] if source.system_prompt else []
    for question, response in source.examples:
        messages.append({"role": "user", "content": _templated(source, question)})
        messages.append({"role": "assistant", "content": response})
    return [*messages, {"role": "user", "content": _templated(source, prompt)}]


def _templated(source: SourceConfig, text: str) -> str:
    # Not str.format: templates hold braces of their own, as in \boxed{}.
    return source.prompt_template.replace("{prompt}", text)


def _checked_messages(prompt: Any, column: str, where: str) -> list[dict[str, Any]]:
    if not isinstance(prompt, list):
        raise UserError(
            f"{where}: column {column!r} holds {type(prompt).__name__}; text or a list of messages is wanted"
        )
    for message in prompt:
        # A chat template renders what is missing as nothing, without a word.
        told = isinstance(message, dict) and (message.get("content") is not None or message.get("tool_calls"))
        if not told or not isinstance(message.get("role"), str):
            raise UserError(f"{where}: column {column!r}: each message needs a role and a content")
    if not prompt:
        raise UserError(f"{where}: column {column!r} holds no message")
    return prompt
