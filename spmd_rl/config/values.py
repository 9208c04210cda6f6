"""The values that a single setting may have, whatever the others are. Pure functions; each raises UserError."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from spmd_rl.config.errors import UserError
from spmd_rl.config.schema import Config


class Range(NamedTuple):
    """least <= value <= most; with `above` least itself is too little, with `below` most itself too much."""

    least: float = -math.inf
    most: float = math.inf
    above: bool = False
    below: bool = False

    def holds(self, value: float) -> bool:
        return (value > self.least if self.above else value >= self.least) and (
            value < self.most if self.below else value <= self.most
        )

    def __str__(self) -> str:
        lower = f"a number above {self.least:g}" if self.above else f"at least {self.least:g}"
        upper = f"below {self.most:g}" if self.below else f"at most {self.most:g}"
        return " and ".join([lower] * (self.least > -math.inf) + [upper] * (self.most < math.inf)) + " is wanted"


_COUNT, _SOME, _POSITIVE, _ANY = Range(0), Range(1), Range(0, above=True), Range()
_SECONDS = Range(0.1, 1e6)  # the system's own clocks and polls overflow not far beyond
_WEIGHT = Range(-1e6, 1e6)  # of a reward, see LARGEST in engines/reward/calls.py
_SEED = Range(-(2**63), 2**63 - 1)
_OPTIMIZER = {
    "lr": _COUNT,
    "betas": Range(0, 1, below=True),
    "eps": _POSITIVE,
    "weight_decay": _COUNT,
    "grad_clip": _COUNT,
    "warmup_steps": _COUNT,
    "min_lr_ratio": Range(0, 1),
}
_SOURCE = {"size": _COUNT, "seed": _SEED, "weight": Range(0, 1e6, above=True)}

# `algorithm` looks at its own numbers, in algorithms/check.py.
RANGES: dict[str, Range] = {
    "run.seed": _SEED,
    "run.threads": Range(0, 4096),
    "model.logprob_chunk": _SOME,
    "model.lora_rank": _COUNT,
    "model.lora_alpha": _COUNT,
    **{f"data.{part}.{key}": allowed for part in ("train", "eval") for key, allowed in _SOURCE.items()},
    "data.epochs": _COUNT,
    "data.max_prompt_tokens": _SOME,
    "rollout.tensor_parallel": _SOME,
    "rollout.temperature": Range(0.01, 100),  # vLLM takes a lower one as 0.01; beyond, the samples are noise
    "rollout.top_p": Range(0, 1, above=True),
    "rollout.top_k": _COUNT,
    "rollout.max_tokens": _SOME,
    "rollout.max_sequences": _SOME,
    "rollout.kv_cache_gib": _POSITIVE,
    "rollout.gpu_memory_fraction": Range(0, 1, above=True),
    "rollout.max_model_tokens": _COUNT,
    "reward.functions.weight": _WEIGHT,
    "reward.workers": Range(0, 4096),
    "reward.timeout_s": Range(0, 1e6, above=True),
    "reward.load_timeout_s": _SECONDS,
    "reward_model.weight": _WEIGHT,
    "train.steps": _SOME,
    "train.prompts_per_step": _SOME,
    "train.samples_per_prompt": _SOME,
    "train.updates_per_step": _SOME,
    "train.tokens_per_microbatch": _SOME,
    "critic.warmup_steps": _COUNT,
    "critic.epochs": _SOME,
    "critic.lora_rank": _COUNT,
    "critic.value_clip": _COUNT,
    **{f"{part}.optimizer.{key}": allowed for part in ("train", "critic") for key, allowed in _OPTIMIZER.items()},
    "eval.every": _COUNT,
    "eval.samples_per_prompt": _SOME,
    "eval.temperature": Range(0, 100),
    "eval.pass_at": _SOME,
    "eval.pass_threshold": _ANY,
    "checkpoint.every": _COUNT,
    "checkpoint.keep": _COUNT,
    "comm.timeout_s": _SECONDS,
    "comm.init_timeout_s": _SECONDS,
    "comm.heartbeat_s": _SECONDS,
    "comm.stage_timeout_s": _SECONDS,
    "observe.console_samples": _COUNT,
    "observe.console_every": _SOME,
    "observe.samples_per_step": _COUNT,
    "stream.staleness": _COUNT,
    "stream.surplus": _COUNT,
    "stream.tail_tokens": _COUNT,
    "stream.limit_mib": _POSITIVE,
}
_NOT_EMPTY = {
    "run.name", "run.folder", "run.resume", "run.graph", "model.path", "model.lora_targets", "data.train.name",
    "data.eval.name", "data.train.prompt_column", "data.eval.prompt_column", "rollout.stop",
    "reward.functions.function",
}  # fmt: skip
_LARGEST = 2**63 - 1  # of an integer: tensors and files hold no larger one


def check_values(config: Config) -> None:
    """Refuse a number outside of its range or none at all (NaN, infinite), and a text that no file could hold."""
    for key, value in leaves(config):
        name = re.sub(r"\[\d+\]", "", key)
        if isinstance(value, str):
            _check_text(key, value, empty=name not in _NOT_EMPTY)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            if not math.isfinite(value):
                raise UserError(f"{key}={value}: a finite number is wanted")
            allowed = RANGES.get(name, _ANY)
            if not allowed.holds(value):
                raise UserError(f"{key}={value}: {allowed}")
            if isinstance(value, int) and abs(value) > _LARGEST:
                raise UserError(f"{key}={value}: no such number fits in 64 bits")


def leaves(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every single value of a configuration with its key, e.g. `data.train[0].params.max_terms`."""
    if dataclasses.is_dataclass(node):
        node = {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
    if isinstance(node, dict):
        for name, child in node.items():
            yield from leaves(child, f"{key}.{name}".lstrip("."))
    elif isinstance(node, list):
        for index, child in enumerate(node):
            yield from leaves(child, f"{key}[{index}]")
    else:
        yield key, node


def _check_text(key: str, text: str, empty: bool) -> None:
    if not text and not empty:
        raise UserError(f"{key} is empty: a text is wanted")
    if "\0" in text:
        raise UserError(f"{key}: a NUL character ({text[:40]!r}) fits in no path and no prompt")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"{key}: {text[:40]!r} is not UTF-8") from None
