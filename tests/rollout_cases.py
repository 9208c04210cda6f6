"""What the tests of both rollout engines share: requests, reference log-probabilities, other weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache
from transformers.utils import logging

from spmd_rl.engines.protocol import Completion, Request, Sampling
from spmd_rl.engines.rollout.draw import draw_tokens, processed_logprobs
from spmd_rl.engines.rollout.seeds import sample_seed, uniform
from tests.tiny_model import make_tiny_model

logging.disable_progress_bar()  # of the reference models: what else appears on stderr is looked at

END = (2, *range(200, 212))  # the tokenizer's, and twelve of the 272 ids, so that a random model ends some responses


def make_model(folder: Path, **options: Any) -> Path:
    """A tiny model whose generation_config.json lists many end ids, and sampling parameters that nobody asked for."""
    make_tiny_model(folder, **options)
    hostile = {"eos_token_id": list(END[1:]), "repetition_penalty": 1.1, "top_p": 0.8, "temperature": 0.3, "top_k": 5}
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, **hostile}))
    return folder


def make_requests(
    prompts: int = 4, samples: int = 3, sampling: Sampling | None = None, length: int = 9, seed: int = 0
) -> list[Request]:
    """Groups of prompts of different lengths (`length` and more), no two alike."""
    sampling = sampling or Sampling(max_tokens=20)
    generator = torch.Generator().manual_seed(seed)
    requests = []
    for prompt in range(prompts):
        tokens = torch.randint(3, 259, (length + 2 * prompt,), generator=generator).tolist()
        requests += [
            Request((0, prompt, sample), tuple(tokens), sampling, sample_seed(seed, "train", 0, prompt, sample))
            for sample in range(samples)
        ]
    return requests


def reference_distributions(folder: Path, requests: Sequence[Request], done: Sequence[Completion]) -> list[Tensor]:
    """float32 [R, V] per completion: what each of its tokens was drawn from, by one whole forward pass."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    with torch.no_grad():
        for request, completion in zip(requests, done, strict=True):
            logits_TV = model(torch.tensor([[*request.prompt, *completion.tokens]])).logits[0]
            logits_RV = logits_TV[len(request.prompt) - 1 : -1]
            found.append(processed_logprobs(logits_RV, [request.sampling] * len(completion.tokens)))
    return found


def reference_logprobs(folder: Path, requests: Sequence[Request], done: Sequence[Completion]) -> list[Tensor]:
    """float32 [R] per completion: of its tokens, by one whole forward pass."""
    distributions = reference_distributions(folder, requests, done)
    return [
        logprobs_RV.gather(-1, torch.tensor(completion.tokens)[:, None])[:, 0]
        for logprobs_RV, completion in zip(distributions, done, strict=True)
    ]


def drawn_by_hand(request: Request, folders: Sequence[Path], versions: Sequence[int], keep_cache: bool) -> list[int]:
    """The tokens of a response whose token i is drawn by `versions[i]`, one forward pass per token.

    Keys and values are those of all weights that the sequence has met (keep_cache), or of the last ones alone.
    """
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in folders]
    context, cache = list(request.prompt), DynamicCache()
    for position, version in enumerate(versions):
        if not keep_cache:
            cache = DynamicCache()
        new = context[cache.get_seq_length() :]
        with torch.no_grad():
            logits = models[version](torch.tensor([new]), past_key_values=cache, use_cache=True).logits[:, -1]
        logprobs = processed_logprobs(logits, [request.sampling])
        context.append(int(draw_tokens(logprobs, [request.sampling], [uniform(request.seed, position)])))
    return context[len(request.prompt) :]


def state(folder: Path) -> dict[str, Tensor]:
    """Parameters of the model in `folder` by name, each once, as a trainer sends them."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).requires_grad_(False)
    return dict(model.named_parameters())
