"""Rollout with a transformers model in this process: few dependencies, and the same tokens on any number of ranks.

The random number behind a token is a pure function of the request's seed and the token's position, and each sequence
is computed independently of its neighbours (slot_cache.py): in float32 a request has one answer, wherever it runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import DynamicCache
from transformers.utils import logging

from spmd_rl.config.errors import UserError
from spmd_rl.data.batch import Finish
from spmd_rl.engines.protocol import Completion, Request, SampleId
from spmd_rl.engines.rollout.draw import draw_tokens, processed_logprobs
from spmd_rl.engines.rollout.sampling import check_request
from spmd_rl.engines.rollout.seeds import uniform
from spmd_rl.engines.rollout.slot_cache import SlotCache
from spmd_rl.engines.rollout.stopping import finish_of
from spmd_rl.engines.rollout.versions import Versions, first_version


@dataclass
class _Sequence:
    """A request with what was drawn so far."""

    request: Request
    number: int  # in the order of submission
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: Versions = field(default_factory=Versions)

    @classmethod
    def of(cls, request: Request, number: int) -> _Sequence:
        begun = request.begun
        if begun is None:
            return cls(request, number)
        return cls(request, number, list(begun.tokens), list(begun.logprobs), Versions(begun.versions))

    def context(self) -> tuple[int, ...]:
        return (*self.request.prompt, *self.tokens)

    def most_tokens(self) -> int:
        return len(self.request.prompt) + self.request.sampling.max_tokens

    def completion(self, finish: Finish, version: int) -> Completion:
        """version: of the weights now."""
        runs = self.versions.upto(len(self.tokens), version)
        first = first_version(runs, version)
        return Completion(self.request.id, self.tokens, self.logprobs, finish, first, runs)


class TransformersEngine:
    """Continuous batching over at most `max_sequences` sequences; an `InterruptibleEngine` of one rank.

    path: folder in Hugging Face format; dtype: of the weights and the cache; end: ids that end a response.
    Raises UserError for a model whose cache is not made of keys and values of all earlier tokens.
    """

    def __init__(
        self,
        path: str,
        tokenizer: Any,
        end: frozenset[int],
        max_sequences: int,
        max_model_tokens: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        _check_attention(AutoConfig.from_pretrained(path), max_model_tokens)
        with _no_progress_bar():
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")
        self.model = model.to(device).eval().requires_grad_(False)
        self.device = torch.device(device)
        self.tokenizer = tokenizer
        self.end = end
        self.max_sequences = max_sequences
        self.max_model_tokens = max_model_tokens
        self.version = 0
        self._submitted = 0
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []  # by slot
        self._cache = SlotCache()

    def submit(self, requests: Sequence[Request]) -> None:
        """Raises ValueError for a request that does not fit into `max_model_tokens`."""
        for request in requests:
            check_request(request, self.max_model_tokens)
        for request in requests:
            self._waiting.append(_Sequence.of(request, self._submitted))
            self._submitted += 1

    def unfinished(self) -> int:
        return len(self._waiting) + len(self._running)

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """One more token for every running sequence, and the first ones of those that are let in."""
        logits = [self._decode()] if self._running else []
        logits += self._admit()
        if not logits:
            return []
        samplings = [sequence.request.sampling for sequence in self._running]
        uniforms = [uniform(s.request.seed, len(s.tokens)) for s in self._running]
        logprobs_BV = processed_logprobs(torch.cat(logits), samplings)
        token_B = draw_tokens(logprobs_BV, samplings, uniforms)
        logprob_B = logprobs_BV.gather(-1, token_B[:, None])[:, 0]
        for sequence, token, logprob in zip(self._running, token_B.tolist(), logprob_B.tolist(), strict=True):
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
        return self._collect()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int, keep_cache: bool = False) -> None:
        """Copy into the model in place. Names are those of the model's parameters; all must come.

        Sequences that are running go on with the new weights: their keys and values are computed anew, or with
        `keep_cache` left as they are.
        """
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        missing = {id(parameter): name for name, parameter in self.model.named_parameters()}
        with torch.no_grad():
            for name, tensor in weights:
                if name not in parameters:
                    raise ValueError(f"weights of version {version}: the rollout model has no parameter {name!r}")
                if parameters[name].shape != tensor.shape:
                    shapes = f"{tuple(tensor.shape)}, the rollout model has {tuple(parameters[name].shape)}"
                    raise ValueError(f"weights of version {version}: {name!r} is {shapes}")
                parameters[name].copy_(tensor)
                missing.pop(id(parameters[name]), None)
        if missing:
            some = ", ".join(sorted(missing.values())[:3])
            raise ValueError(f"weights of version {version}: {len(missing)} parameters were not sent, e.g. {some}")
        for sequence in (*self._running, *self._waiting):
            sequence.versions.upto(len(sequence.tokens), self.version)
        self.version = version
        if not keep_cache:
            self._waiting.extendleft(reversed(self._running))
            self._running.clear()
            self._cache.clear()

    @torch.inference_mode()
    def abort(self, ids: Sequence[SampleId] | None = None) -> list[Completion]:
        """See `InterruptibleEngine`. In float32, going on gives what would have come without the interruption."""
        chosen = None if ids is None else set(ids)
        ended = [s for s in (*self._running, *self._waiting) if chosen is None or s.request.id in chosen]
        gone = {id(sequence) for sequence in ended}
        self._waiting = deque(sequence for sequence in self._waiting if id(sequence) not in gone)
        for slot in reversed(range(len(self._running))):
            if id(self._running[slot]) in gone:
                self._take_out(slot)
        ended.sort(key=lambda sequence: sequence.number)
        return [sequence.completion(Finish.ABORTED, self.version) for sequence in ended]

    def sleep(self) -> None:
        """Give the cache's memory back; only between calls of `generate`."""
        if self.unfinished():
            raise RuntimeError(f"{self.unfinished()} requests are not finished: the engine cannot sleep")
        self._cache.clear()

    def wake(self) -> None:
        """Nothing to do: the cache grows again as it is needed."""

    def close(self) -> None:
        self._waiting.clear()
        self._running.clear()
        self._cache.clear()
        del self.model

    def _decode(self) -> Tensor:
        """[B, V]: logits after the last token of every running sequence, which is not in the cache yet."""
        column_B = torch.tensor([len(s.request.prompt) + len(s.tokens) - 1 for s in self._running], device=self.device)
        token_B = torch.tensor([s.tokens[-1] for s in self._running], device=self.device)
        self._cache.advance(column_B)
        mask_BT = torch.arange(int(column_B.max()) + 1, device=self.device) <= column_B[:, None]
        return self.model(
            input_ids=token_B[:, None],
            position_ids=column_B[:, None],
            attention_mask=mask_BT.long(),
            past_key_values=self._cache,
            use_cache=True,
        ).logits[:, -1]

    def _admit(self) -> list[Tensor]:
        """Let waiting sequences in, in their order; [1, V] for each: logits after its context.

        Sequences of one group wait beside each other and have one prompt: it is computed once for all of them.
        """
        logits: list[Tensor] = []
        context: tuple[int, ...] = ()
        while self._waiting and len(self._running) < self.max_sequences:
            sequence = self._waiting.popleft()
            if sequence.context() != context:
                context = sequence.context()
                prefix = DynamicCache()
                output = self.model(
                    input_ids=torch.tensor([context], device=self.device),
                    past_key_values=prefix,
                    use_cache=True,
                    logits_to_keep=1,
                )
            self._cache.add(prefix, sequence.most_tokens())
            self._running.append(sequence)
            logits.append(output.logits[:, -1])
        return logits

    def _collect(self) -> list[Completion]:
        """Take the finished sequences out of their slots."""
        done = []
        for slot in reversed(range(len(self._running))):
            sequence = self._running[slot]
            finish = finish_of(sequence.tokens, sequence.request.sampling, self.end, self.tokenizer)
            if finish is None:
                continue
            done.append(sequence.completion(finish, self.version))
            self._take_out(slot)
        return done

    def _take_out(self, slot: int) -> None:
        """The last sequence moves into the slot."""
        self._cache.remove(slot)
        self._running[slot] = self._running[-1]
        self._running.pop()


def _check_attention(config: Any, max_model_tokens: int) -> None:
    """Only attention over all earlier tokens is decoded here: refuses recurrent layers, and windows that would bite."""
    config = config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention"])  # not said: a window holds everywhere
    window = getattr(config, "sliding_window", None)
    if "sliding_attention" in kinds and window is not None and window < max_model_tokens:
        what = f"a sliding window of {window} tokens"
    elif kinds - {"full_attention", "sliding_attention"}:
        what = f"layers of the kind {sorted(kinds - {'full_attention', 'sliding_attention'})[0]}"
    else:
        return
    raise UserError(
        f"rollout.engine=transformers does not decode {what} ({config.model_type}): use rollout.engine=vllm"
    )


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Else every rank draws one while it loads."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
