"""A reward model: a transformer that scores a prompt with its response by one number, never trained."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spmd_rl.comm.world import World
from spmd_rl.config.errors import UserError
from spmd_rl.config.schema import Config, SourceConfig
from spmd_rl.data.batch import Batch, Column
from spmd_rl.data.loader import EVAL_EPOCH
from spmd_rl.data.prompts import messages_of
from spmd_rl.data.sources import prompt_column_of
from spmd_rl.engines.protocol import Terms
from spmd_rl.engines.train.model import load_config, load_tokenizer
from spmd_rl.engines.train.model_engine import ModelEngine, compute_dtype
from spmd_rl.engines.train.value_model import is_scorer, load_value_model

KEY = "reward_model.path"


class RewardModel(ModelEngine[Terms]):
    """The model in `reward_model.path`, sharded like the trained ones, its weights in the compute dtype.

    tokenizer: the policy's. Raises UserError for a folder that holds no reward model. Every method is collective.
    """

    def __init__(self, config: Config, world: World, mesh: DeviceMesh, tokenizer: Any) -> None:
        path = config.reward_model.path
        settings = load_config(path, KEY)
        if not is_scorer(settings):
            kind = ", ".join(settings.architectures or ("a model of no named class",))
            raise UserError(f"{KEY}: {path!r} holds {kind}; a model for sequence classification of one label is wanted")
        self._reader = Reader(config, tokenizer, load_tokenizer(path, KEY), settings.pad_token_id)
        network = load_value_model(path, compute_dtype(config), KEY)
        super().__init__(config, world, mesh, network, network, optimizer=None, total_steps=0)

    def score(self, batch: Batch) -> Tensor:
        """float32 [S] on the CPU, of samples with the columns `prompt`, `response` and `row`."""
        if not len(batch):
            return self._evaluate(batch)
        sequences = self._reader.sequences(batch)
        return self._evaluate(sequences)[sequences["response"].offsets[1:] - 1]


class Reader:
    """What the reward model reads of a sample.

    Where its tokenizer has the policy's tokens and chat template, that is the sample as it stands, token by token.
    Else the prompt's messages and the response as the assistant's turn go through the model's own template (without
    `data.chat_template`: their text through its tokenizer). The score stands at the last token that is no padding, as
    in transformers. Raises UserError where two sources that are written differently have one name.
    """

    def __init__(self, config: Config, tokenizer: Any, own: Any, pad: int | None) -> None:
        self._policy, self._own, self._pad, self._data = tokenizer, own, pad, config.data
        self._same = own.get_vocab() == tokenizer.get_vocab() and own.chat_template == tokenizer.chat_template
        if not self._same and config.data.chat_template and not own.chat_template:
            raise UserError(f"{KEY}: its tokenizer has no chat template, and its tokens are not those of the policy")
        self._sources = {purpose: _by_name(list(getattr(config.data, purpose))) for purpose in ("train", "eval")}

    def sequences(self, batch: Batch) -> Batch:
        """Columns `prompt` and `response`; the last token is only there to be predicted, by the one with the score."""
        rows = zip(batch.ids[:, 0].tolist(), batch["prompt"].rows(), batch["response"].rows(), strict=True)
        if self._same:
            pairs = [(prompt.tolist(), response.tolist()) for _, prompt, response in rows]
        else:
            told = [json.loads(row) for row in batch["row"].row_bytes()]
            pairs = [
                (self._written(row, epoch == EVAL_EPOCH, prompt.tolist(), response.tolist()), [])
                for row, (epoch, prompt, response) in zip(told, rows, strict=True)
            ]
        ends = [self._unpadded(prompt, response) for prompt, response in pairs]
        columns = {
            "prompt": [torch.tensor(prompt, dtype=torch.int32) for prompt, _ in ends],
            "response": [torch.tensor([*response, 0], dtype=torch.int32) for _, response in ends],
        }
        return Batch(batch.ids, {name: Column.from_rows(values) for name, values in columns.items()})

    def _written(self, row: dict[str, Any], held_out: bool, prompt: list[int], response: list[int]) -> list[int]:
        answer = self._policy.decode(response, skip_special_tokens=True)
        if not self._data.chat_template:
            return self._own(self._policy.decode(prompt, skip_special_tokens=True) + answer, verbose=False)["input_ids"]
        source = self._sources["eval" if held_out else "train"][row["source"]]
        messages = [*messages_of(source, row[prompt_column_of(source)]), {"role": "assistant", "content": answer}]
        text = self._own.apply_chat_template(messages, tokenize=False)
        return self._own(text, add_special_tokens=False, verbose=False)["input_ids"]

    def _unpadded(self, prompt: list[int], response: list[int]) -> tuple[list[int], list[int]]:
        whole = prompt + response
        last = next((i for i in range(len(whole) - 1, 0, -1) if whole[i] != self._pad), 0)
        return whole[: min(len(prompt), last + 1)], whole[len(prompt) : last + 1]


def _by_name(sources: list[SourceConfig]) -> dict[str, SourceConfig]:
    found: dict[str, SourceConfig] = {}
    for source in sources:
        first = found.setdefault(source.name, source)
        for key in ("prompt_column", "prompt_template", "system_prompt", "examples"):
            if getattr(first, key) != getattr(source, key):
                raise UserError(
                    f"two sources are named {source.name!r} and differ in {key}: give them names of their own"
                )
    return found
