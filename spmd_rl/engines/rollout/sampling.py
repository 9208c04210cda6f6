"""What the configuration says about sampling, in the engines' terms; pure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spmd_rl.config.errors import UserError
from spmd_rl.config.schema import Config
from spmd_rl.data.batch import Finish
from spmd_rl.engines.protocol import Request, Sampling


def sampling_from(config: Config, purpose: str) -> Sampling:
    """How the responses of `purpose` are drawn: `train` as section `rollout` says, `baseline` as that, but greedily,
    `eval` at `eval.temperature`.

    Greedy decoding (temperature 0) ignores top_p and top_k, in both engines.
    """
    rollout = config.rollout
    temperatures = {"train": rollout.temperature, "baseline": 0.0, "eval": config.eval.temperature}
    if purpose not in temperatures:
        raise ValueError(f"purpose must be one of {', '.join(temperatures)}, not {purpose!r}")
    temperature = temperatures[purpose]
    greedy = temperature == 0
    return Sampling(
        temperature=temperature,
        top_p=1.0 if greedy else rollout.top_p,
        top_k=0 if greedy else rollout.top_k,
        max_tokens=rollout.max_tokens,
        stop=tuple(rollout.stop),
    )


def model_tokens(config: Config) -> int:
    """Tokens that prompt and response may have together."""
    return config.rollout.max_model_tokens or config.data.max_prompt_tokens + config.rollout.max_tokens


def end_tokens(folder: str | Path, tokenizer: Any) -> frozenset[int]:
    """The token ids that end a response.

    Those of generation_config.json (else of config.json), where chat models list several, and the tokenizer's own.
    Nothing else of generation_config.json is ever read: its penalties and top_p must not slip into the sampling.
    Raises UserError, naming the file, where an id is no integer.
    """
    found: set[int] = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    for name in ("generation_config.json", "config.json"):
        path = Path(folder) / name
        declared = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        if declared is not None:
            ids = declared if isinstance(declared, list) else [declared]
            if not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
                raise UserError(f"model.path: {path}: eos_token_id is {declared!r}; an integer or a list is wanted")
            found.update(ids)
            break
    return frozenset(found)


def check_model(config_json: str | Path, tensor_parallel: int, max_model_tokens: int = 0) -> None:
    """Raises UserError where the model of this config.json cannot be split over `tensor_parallel` ranks, or has no
    positions for `max_model_tokens`. Reads one file and nothing else: call it before an engine starts."""
    described: dict[str, Any] = json.loads(Path(config_json).read_text())
    described = described.get("text_config") or described
    heads = described.get("num_attention_heads") or described.get("n_head")
    kv_heads = described.get("num_key_value_heads") or heads
    for what, count in (("attention heads", heads), ("key/value heads", kv_heads)):
        if count is None or count % tensor_parallel == 0:
            continue
        if what == "key/value heads" and tensor_parallel % count == 0:
            continue  # fewer heads than ranks: each is kept by several
        possible = [n for n in range(1, count + 1) if count % n == 0]
        raise UserError(
            f"rollout.tensor_parallel={tensor_parallel} does not divide the {count} {what} of {config_json}; "
            f"possible: {', '.join(map(str, possible))}"
        )
    positions = described.get("max_position_embeddings") or described.get("n_positions")
    if positions is not None and max_model_tokens > positions:
        raise UserError(
            f"prompt and response may have {max_model_tokens} tokens together, but {config_json} says "
            f"max_position_embeddings={positions}: lower data.max_prompt_tokens or rollout.max_tokens"
        )


def check_request(request: Request, max_model_tokens: int) -> None:
    """Raises ValueError, naming the sample, where a request cannot be answered as it asks."""
    if not request.prompt:
        raise ValueError(f"sample {request.id}: the prompt is empty")
    if request.sampling.max_tokens < 1:
        raise ValueError(f"sample {request.id}: max_tokens={request.sampling.max_tokens}, at least 1 is wanted")
    wanted = len(request.prompt) + request.sampling.max_tokens
    if wanted > max_model_tokens:
        raise ValueError(
            f"sample {request.id}: {len(request.prompt)} prompt tokens and {request.sampling.max_tokens} of response "
            f"are {wanted}, but the engine holds {max_model_tokens}"
        )
    begun = request.begun
    if begun is None:
        return
    if begun.id != request.id or begun.finish != Finish.ABORTED:
        raise ValueError(f"sample {request.id} cannot go on from sample {begun.id}, which ended by {begun.finish.name}")
    if len(begun.tokens) >= request.sampling.max_tokens:
        raise ValueError(
            f"sample {request.id} has {len(begun.tokens)} tokens already, of max_tokens={request.sampling.max_tokens}"
        )
