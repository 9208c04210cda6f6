"""Which settings make two runs the same training: only such a run may go on in the other's folder."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, get_args, get_type_hints

from spmd_rl.config.load import settings_of
from spmd_rl.config.schema import Config

# Settings that change where, how fast or how closely a run is watched, but not what it learns.
_FREE = (
    "run.name",
    "run.folder",
    "run.resume",
    "run.threads",
    "model.activation_checkpointing",
    "model.prefix_sharing",
    "model.logprob_chunk",
    "data.eval",
    "algorithm.dynamic_sampling_tries",
    "rollout.tensor_parallel",
    "rollout.max_sequences",
    "rollout.kv_cache_gib",
    "rollout.gpu_memory_fraction",
    "rollout.enforce_eager",
    "rollout.prefix_caching",
    "rollout.max_model_tokens",
    "reward.workers",
    "reward.timeout_s",
    "reward.load_timeout_s",
    "train.tokens_per_microbatch",
    "train.shard",
    "eval",
    "checkpoint",
    "placement",
    "stream.limit_mib",
    "comm",
    "observe",
)


# What decides which states a checkpoint holds, and of which shapes.
_CONTENTS = ("mode", "run.graph", "model", "critic")


def run_identity(config: Config) -> dict[str, Any]:
    """Flat `section.key` → JSON value of every setting that defines the training.

    `train.steps` belongs to it only where a learning-rate schedule depends on it: else a run may be extended.
    """
    flat: dict[str, Any] = {}
    _flatten("", dataclasses.asdict(config), flat)
    extensible = config.train.optimizer.schedule == config.critic.optimizer.schedule == "constant"
    free = (*_FREE, "train.steps") if extensible else _FREE
    return {key: value for key, value in flat.items() if not _within(key, free)}


def differences(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """One phrase per setting that differs, by name. there: of a run that an older version may have begun.

    A setting that is new since then had its default; one that has become free counts no more.
    """
    there = {key: value for key, value in there.items() if key in here or not _within(key, _FREE)}
    there |= {key: _default(key) for key in here.keys() - there.keys()}
    keys = [key for key in sorted(there) if there[key] != here.get(key)]
    return [f"{key} is {there[key]!r} there and {here.get(key)!r} here" for key in keys]


def unlike(there: str, here: Config) -> list[str]:
    """Those differences that give a checkpoint other contents. there: the YAML text of the run that wrote it."""
    flat: dict[str, Any] = {}
    _flatten("", settings_of(there), flat)
    return [phrase for phrase in differences(flat, run_identity(here)) if _within(phrase.split()[0], _CONTENTS)]


def _default(key: str) -> Any:
    """What a setting is where nobody names it; None where there is no such setting, or it must be named."""
    section: Any = Config
    for name in re.sub(r"\[\d+\]", "", key).split("."):
        known = (
            {field.name: field for field in dataclasses.fields(section)} if dataclasses.is_dataclass(section) else {}
        )
        if name not in known:
            return None
        field, hint = known[name], get_type_hints(section)[name]
        section = next(iter(get_args(hint)), hint)  # of a list: of its items
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _flatten(prefix: str, value: Any, flat: dict[str, Any]) -> None:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            _flatten(f"{prefix}.{key}" if prefix else str(key), item, flat)
    elif isinstance(value, list | tuple) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            _flatten(f"{prefix}[{index}]", item, flat)
    else:
        flat[prefix] = list(value) if isinstance(value, tuple) else value


def _within(key: str, sections: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith((f"{name}.", f"{name}[")) for name in sections)
