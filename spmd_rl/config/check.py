"""Contradictions in a configuration, found before anything is loaded. Pure functions; each raises UserError."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from spmd_rl.config.errors import UserError
from spmd_rl.config.schema import Config, OptimizerConfig
from spmd_rl.config.values import check_values


def check(config: Config) -> None:
    """Refuse what contradicts itself, whatever the world is."""
    check_values(config)
    one_of("rollout.engine", config.rollout.engine, ("vllm", "transformers"))
    one_of("rollout.dtype", config.rollout.dtype, ("bfloat16", "float32"))
    one_of("model.compute_dtype", config.model.compute_dtype, ("bfloat16", "float32"))
    one_of("train.shard", config.train.shard, ("full", "keep"))
    _optimizer("train.optimizer", config.train.optimizer)
    _optimizer("critic.optimizer", config.critic.optimizer)
    one_of("reward.on_error", config.reward.on_error, ("stop", "exclude"))
    one_of("comm.backend", config.comm.backend, ("auto", "gloo", "nccl"))
    one_of("mode", config.mode, ("sync", "async"))
    one_of("stream.on_stale", config.stream.on_stale, ("wait", "drop"))
    one_of("stream.train_on", config.stream.train_on, ("microbatch", "step"))
    one_of("stream.send", config.stream.send, ("background", "blocking"))
    one_of("stream.swap", config.stream.swap, ("between_groups", "in_flight", "rolling"))
    one_of("comm.transport", config.comm.transport, ("torch", "mpi"))
    if config.stream.keep_cache and config.stream.swap != "in_flight":
        raise UserError(f"stream.keep_cache=true needs stream.swap=in_flight, not {config.stream.swap}")
    _surplus(config)
    _tails(config)
    _tolerance(config)
    if config.train.updates_per_step > config.train.prompts_per_step:
        raise UserError(
            f"train.updates_per_step={config.train.updates_per_step} is more than "
            f"train.prompts_per_step={config.train.prompts_per_step}: an update needs at least one whole group"
        )
    longest = config.data.max_prompt_tokens + config.rollout.max_tokens
    if 0 < config.rollout.max_model_tokens < longest:
        raise UserError(
            f"rollout.max_model_tokens={config.rollout.max_model_tokens} is less than data.max_prompt_tokens + "
            f"rollout.max_tokens = {longest}, which a prompt and its response may have"
        )
    if config.model.lora_rank == 0 and (config.model.lora_alpha or config.model.lora_targets):
        raise UserError(
            "model.lora_alpha and model.lora_targets mean nothing with model.lora_rank=0: set a rank, e.g. 16"
        )
    if config.algorithm.offload_reference and config.model.lora_rank:
        raise UserError(
            "algorithm.offload_reference=true: with model.lora_rank the reference policy is the actor without its "
            "adapters, so there is nothing to move"
        )
    if 0 < config.eval.temperature < 0.01:  # vLLM would take it as 0.01
        raise UserError(f"eval.temperature={config.eval.temperature}: 0 (greedy) or at least 0.01 is wanted")
    if config.eval.temperature == 0 and config.eval.samples_per_prompt > 1:
        raise UserError(
            f"eval.samples_per_prompt={config.eval.samples_per_prompt} with eval.temperature=0 draws the same response "
            "each time: set eval.temperature above 0, or one sample per prompt"
        )
    for k in config.eval.pass_at:
        if not 1 <= k <= config.eval.samples_per_prompt:
            raise UserError(
                f"eval.pass_at={k} needs 1 <= k <= eval.samples_per_prompt={config.eval.samples_per_prompt}"
            )
    if not config.data.train:
        raise UserError("data.train is empty: name at least one source (path: or generator:)")
    _rewards(config)
    labels = [s.name for s in config.data.eval]
    for label in labels:
        if labels.count(label) > 1:
            raise UserError(f"data.eval: two sources are named {label!r}; their metrics would be one")


def _surplus(config: Config) -> None:
    stream = config.stream
    if not stream.surplus:
        return
    if config.mode != "async":
        raise UserError(f"stream.surplus={stream.surplus} needs mode=async: in mode=sync a step draws its own groups")
    room = stream.staleness * config.train.prompts_per_step
    if stream.surplus >= room:
        raise UserError(
            f"stream.surplus={stream.surplus}: less than stream.staleness * train.prompts_per_step = {room} is wanted, "
            "so that the bound on staleness leaves stragglers some time"
            + (" (staleness=0 trains each step on its own groups)" if not stream.staleness else "")
        )


def _tails(config: Config) -> None:
    stream, rollout = config.stream, config.rollout
    if not stream.tail_tokens:
        return
    said = f"stream.tail_tokens={stream.tail_tokens}"
    if not stream.surplus or stream.on_stale != "wait":
        raise UserError(
            f"{said} needs stream.surplus (with mode=async), and stream.on_stale=wait: other groups take the places of "
            "those that are put aside, and these must not become too old"
        )
    if stream.swap == "in_flight":
        raise UserError(f"{said}: with stream.swap=in_flight long responses hold up nothing; set between_groups")
    if stream.tail_tokens >= rollout.max_tokens:
        raise UserError(f"{said}: less than rollout.max_tokens={rollout.max_tokens} is wanted, or no response is long")
    if rollout.stop:
        raise UserError(f"{said}: responses with rollout.stop cannot be interrupted")


def _tolerance(config: Config) -> None:
    stream, key = config.stream, "stream.tolerate_replica_loss=true"
    if not stream.tolerate_replica_loss:
        return
    if config.mode != "async":
        raise UserError(f"{key} needs mode=async: in mode=sync there is no step without each of the ranks")
    if config.rollout.tensor_parallel > 1:
        raise UserError(
            f"{key}: of a replica of rollout.tensor_parallel={config.rollout.tensor_parallel} ranks the others would "
            "wait for the one that failed; it is for replicas of one rank"
        )
    if stream.swap == "rolling":
        raise UserError(f"{key}: with stream.swap=rolling each replica waits for the one before; set between_groups")
    if stream.on_stale == "drop":
        raise UserError(f"{key}: a group that is given back belongs to the replica that drew it; set on_stale=wait")


def check_model_folder(config: Config) -> None:
    """Refuse a folder that holds no model."""
    folder = Path(config.model.path)
    if not folder.is_dir():
        raise UserError(f"model.path: there is no folder {config.model.path}")
    for file in (folder / "config.json", folder / "generation_config.json"):
        if file.name == "config.json" or file.exists():
            _check_json(file)
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"model.path: no *.safetensors in {folder}; save the model with save_pretrained")


def _check_json(file: Path) -> None:
    try:
        described = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"model.path: {file}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"model.path: {file} is not valid JSON ({error})") from None
    if not isinstance(described, dict):
        raise UserError(f"model.path: {file} holds no JSON object, but {type(described).__name__}")


def check_world(config: Config, size: int) -> None:
    """Refuse a number of ranks that draw which the mesh does not divide."""
    tensor_parallel = config.rollout.tensor_parallel
    if size % tensor_parallel:
        more = "start" if config.mode == "sync" else "place"
        raise UserError(
            f"{size} ranks are not divisible by rollout.tensor_parallel={tensor_parallel}: {more} a multiple of "
            f"{tensor_parallel} ranks, or set one of {_divisors(size)}"
        )
    if tensor_parallel > 1 and config.rollout.engine != "vllm":
        raise UserError(f"rollout.tensor_parallel={tensor_parallel} needs rollout.engine=vllm")


def refuse_unused(section: str, value: Any, needs: str) -> None:
    """Raises UserError, naming the first key, where a section (a dataclass) is set that nothing will read."""
    for field in fields(value):
        got = getattr(value, field.name)
        if got != getattr(type(value)(), field.name):
            raise UserError(f"{section}.{field.name}={got} has no effect here: it needs {needs}, or leave it out")


def one_of(key: str, value: str, valid: Sequence[str]) -> None:
    """Raises UserError where `value` is none of `valid`, with the nearest one."""
    if value not in valid:
        near = difflib.get_close_matches(value, valid, 1, 0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"{key}={value!r} is not known: one of {', '.join(valid)} is wanted{hint}")


def derived_sizes(config: Config, size: int) -> dict[str, int | float]:
    """What the settings amount to, for people to read at the start. size: ranks that draw."""
    train = config.train
    samples = train.prompts_per_step * train.samples_per_prompt
    slots = size // config.rollout.tensor_parallel
    return {
        "samples per step": samples,
        "samples per optimizer step": samples // train.updates_per_step,
        "rollout replicas": slots,
        "samples per rollout replica and step": samples / slots,
        "tokens per step at most": samples * (config.data.max_prompt_tokens + config.rollout.max_tokens),
        "token budget per rank and micro-batch": train.tokens_per_microbatch,
        "samples in the whole run": samples * train.steps,
    }


def _rewards(config: Config) -> None:
    if not config.reward_model.path:
        refuse_unused("reward_model", config.reward_model, "reward_model.path")
        if not config.reward.functions:
            raise UserError(
                "reward.functions is empty: name at least one (math_verify, reasoning_gym, module:function), or a "
                "reward_model.path"
            )
    elif any(f.function.rpartition(":")[2] == "reward_model" for f in config.reward.functions):
        raise UserError("reward.functions: the name reward_model is that of the reward model's own part; rename yours")


def _optimizer(section: str, optimizer: OptimizerConfig) -> None:
    one_of(f"{section}.schedule", optimizer.schedule, ("constant", "linear", "cosine"))
    if len(optimizer.betas) != 2:
        raise UserError(f"{section}.betas: two numbers are wanted, not {optimizer.betas}")


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)
