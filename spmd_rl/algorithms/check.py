"""Settings of the algorithm that contradict themselves or have no effect: refused at the start, with what to choose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING

from spmd_rl.algorithms.advantages import ADVANTAGES
from spmd_rl.algorithms.aggregate import AGGREGATIONS
from spmd_rl.algorithms.correction import LEVELS, METHODS
from spmd_rl.algorithms.kl import LOSS_ESTIMATORS
from spmd_rl.algorithms.policy_loss import LOSSES
from spmd_rl.algorithms.shaping import overlong_tokens
from spmd_rl.config.check import one_of
from spmd_rl.config.errors import UserError

if TYPE_CHECKING:
    from spmd_rl.config.schema import AlgorithmConfig, RolloutConfig, TrainConfig

# Per key: when it has an effect, and how to say so. A key outside of its place must keep its default.
_PLACES: dict[str, tuple[Callable[[AlgorithmConfig], bool], str]] = {
    "gae_gamma": (lambda a: a.advantage == "gae", "algorithm.advantage=gae"),
    "gae_lambda": (lambda a: a.advantage == "gae", "algorithm.advantage=gae"),
    "gae_whiten": (lambda a: a.advantage == "gae", "algorithm.advantage=gae"),
    "pass_k": (lambda a: a.advantage == "passk", "algorithm.advantage=passk"),
    "overlong_penalty": (lambda a: a.overlong_buffer > 0, "algorithm.overlong_buffer above 0"),
    "loss_constant": (lambda a: a.aggregation == "constant", "algorithm.aggregation=constant"),
    "clip_low": (lambda a: a.loss not in ("sapo", "reinforce"), "a loss with a bounded ratio, as ppo_clip"),
    "clip_high": (lambda a: a.loss not in ("sapo", "reinforce"), "a loss with a bounded ratio, as ppo_clip"),
    "dual_clip": (lambda a: a.loss == "ppo_clip", "algorithm.loss=ppo_clip"),
    "drift_coef": (lambda a: a.loss == "cpgd", "algorithm.loss=cpgd"),
    "sapo_tau_positive": (lambda a: a.loss == "sapo", "algorithm.loss=sapo"),
    "sapo_tau_negative": (lambda a: a.loss == "sapo", "algorithm.loss=sapo"),
    "dynamic_sampling_tries": (lambda a: a.dynamic_sampling, "algorithm.dynamic_sampling=true"),
    "kl_target": (lambda a: a.kl_coef > 0, "algorithm.kl_coef above 0, which it starts from"),
    "kl_horizon": (lambda a: a.kl_target > 0, "algorithm.kl_target above 0"),
    "offload_reference": (lambda a: a.kl_coef > 0, "algorithm.kl_coef above 0"),
    "kl_in": (lambda a: a.kl_coef > 0, "algorithm.kl_coef above 0"),
    "kl_estimator": (lambda a: a.kl_coef > 0 and a.kl_in == "loss", "algorithm.kl_coef above 0 and kl_in=loss"),
    "correction_level": (lambda a: a.correction != "none", "algorithm.correction=tis, mis or icepop"),
    "correction_cap": (
        lambda a: a.correction != "none" or a.loss == "decoupled_ppo",
        "algorithm.correction=tis, mis or icepop, or algorithm.loss=decoupled_ppo",
    ),
    "correction_floor": (lambda a: a.correction == "icepop", "algorithm.correction=icepop"),
}


def check(algorithm: AlgorithmConfig, train: TrainConfig, rollout: RolloutConfig, critic: bool = False) -> None:
    """Raises UserError for an unknown name, a value out of range, a combination without meaning, or a key that the
    other keys leave without effect. critic: whether the graph has one."""
    _names(algorithm, critic)
    _ranges(algorithm)
    _advantage(algorithm, train)
    _loss(algorithm, train)
    samples = train.prompts_per_step * train.samples_per_prompt
    if algorithm.kl_target and not algorithm.kl_horizon >= samples:
        raise UserError(
            f"algorithm.kl_horizon={algorithm.kl_horizon:g}: at least the {samples} samples of a step are wanted"
        )
    if algorithm.dynamic_sampling:
        _dynamic_sampling(algorithm, train)
    _rollout(algorithm, rollout)
    for field in fields(algorithm):
        value = getattr(algorithm, field.name)
        if field.name in _PLACES and value != field.default:
            applies, place = _PLACES[field.name]
            if not applies(algorithm):
                raise UserError(f"algorithm.{field.name}={value} has no effect here: it needs {place}, or leave it out")


def _names(algorithm: AlgorithmConfig, critic: bool) -> None:
    if algorithm.advantage == "gae" and not critic:
        raise UserError(
            "algorithm.advantage='gae' needs a critic, which this graph has not: choose grpo or rloo, or the graph "
            "that has one, run.graph=spmd_rl.recipes.ppo:graph"
        )
    if algorithm.kl_estimator == "k1":
        raise UserError(
            "algorithm.kl_estimator='k1': as a loss its gradient averages to 0; choose k2, or algorithm.kl_in=reward, "
            "which uses k1"
        )
    one_of("algorithm.advantage", algorithm.advantage, (*ADVANTAGES, "gae"))
    if critic and algorithm.advantage != "gae":
        raise UserError(
            f"algorithm.advantage={algorithm.advantage} makes no use of this graph's critic: choose "
            "algorithm.advantage=gae, or the graph without one, run.graph=spmd_rl.recipes.grpo:graph"
        )
    one_of("algorithm.loss", algorithm.loss, LOSSES)
    one_of("algorithm.aggregation", algorithm.aggregation, AGGREGATIONS)
    one_of("algorithm.kl_in", algorithm.kl_in, ("loss", "reward"))
    one_of("algorithm.kl_estimator", algorithm.kl_estimator, LOSS_ESTIMATORS)
    one_of("algorithm.correction", algorithm.correction, METHODS)
    one_of("algorithm.correction_level", algorithm.correction_level, LEVELS)
    one_of("algorithm.nonfinite_logprob", algorithm.nonfinite_logprob, ("stop", "exclude"))


def _ranges(algorithm: AlgorithmConfig) -> None:
    for key in (
        "overlong_buffer", "overlong_penalty", "loss_constant", "clip_low", "clip_high", "drift_coef", "kl_coef",
        "kl_target", "entropy_coef", "correction_floor",
    ):  # fmt: skip
        if not getattr(algorithm, key) >= 0:
            raise UserError(f"algorithm.{key}={getattr(algorithm, key)}: at least 0 is wanted")
    for key in ("gae_gamma", "gae_lambda"):
        if not 0 <= getattr(algorithm, key) <= 1:
            raise UserError(f"algorithm.{key}={getattr(algorithm, key)}: a number from 0 to 1 is wanted")
    for key in ("sapo_tau_positive", "sapo_tau_negative", "correction_cap"):
        if not getattr(algorithm, key) > 0:
            raise UserError(f"algorithm.{key}={getattr(algorithm, key)}: a number above 0 is wanted")
    if algorithm.loss in ("ppo_clip", "decoupled_ppo", "gspo", "cispo") and algorithm.clip_low > 1:
        raise UserError(f"algorithm.clip_low={algorithm.clip_low}: at most 1 is wanted (1: no lower bound)")
    if algorithm.loss == "cpgd" and algorithm.clip_low >= 1:
        raise UserError(f"algorithm.clip_low={algorithm.clip_low}: below 1 is wanted, loss=cpgd takes ln(1 - clip_low)")
    if algorithm.dual_clip and not algorithm.dual_clip > 1:
        raise UserError(f"algorithm.dual_clip={algorithm.dual_clip}: above 1 is wanted (3 is usual), or 0 for off")
    if algorithm.correction == "icepop" and algorithm.correction_floor >= algorithm.correction_cap:
        raise UserError(
            f"algorithm.correction_floor={algorithm.correction_floor} must be below "
            f"algorithm.correction_cap={algorithm.correction_cap}"
        )


def _advantage(algorithm: AlgorithmConfig, train: TrainConfig) -> None:
    if train.samples_per_prompt == 1 and algorithm.advantage not in ("reinforce_pp", "gae", "remax"):
        raise UserError(
            f"algorithm.advantage={algorithm.advantage} compares the samples of a prompt, but "
            "train.samples_per_prompt=1: set it to 2 or more, or choose algorithm.advantage=reinforce_pp or remax"
        )
    if algorithm.advantage == "passk" and not 2 <= algorithm.pass_k <= train.samples_per_prompt:
        raise UserError(
            f"algorithm.pass_k={algorithm.pass_k}: a number from 2 to train.samples_per_prompt="
            f"{train.samples_per_prompt} is wanted (for the mean reward choose algorithm.advantage=rloo)"
        )
    if algorithm.advantage == "dr_grpo" and algorithm.aggregation != "constant":
        raise UserError(
            f"algorithm.advantage=dr_grpo goes with algorithm.aggregation=constant, not {algorithm.aggregation}; with "
            "that, the same advantages are called grpo_no_std"
        )


def _loss(algorithm: AlgorithmConfig, train: TrainConfig) -> None:
    if algorithm.loss == "reinforce" and train.updates_per_step > 1:
        raise UserError(
            f"algorithm.loss=reinforce has no ratio and is right for the first update only, but train.updates_per_step="
            f"{train.updates_per_step}: choose ppo_clip, or train.updates_per_step=1"
        )
    if algorithm.loss == "gmpo" and algorithm.aggregation in ("seq_mean_token_sum", "constant"):
        raise UserError(
            f"algorithm.loss=gmpo is one number per response, and algorithm.aggregation={algorithm.aggregation} would "
            "count it once per token: choose seq_mean_token_mean"
        )
    if algorithm.loss in ("gspo", "gmpo") and algorithm.correction != "none" and algorithm.correction_level == "token":
        raise UserError(
            f"algorithm.loss={algorithm.loss} has one ratio per response, but algorithm.correction_level=token weighs "
            "each token: choose algorithm.correction_level=geometric or sequence"
        )
    if algorithm.loss == "decoupled_ppo" and algorithm.correction != "none":
        raise UserError(
            f"algorithm.loss=decoupled_ppo has the importance weight in it, and algorithm.correction="
            f"{algorithm.correction} would weigh each token again: choose algorithm.correction=none, or loss=ppo_clip"
        )


def _dynamic_sampling(algorithm: AlgorithmConfig, train: TrainConfig) -> None:
    if algorithm.advantage == "remax":
        raise UserError(
            "algorithm.dynamic_sampling keeps groups whose rewards differ from each other, but algorithm.advantage="
            "remax compares each with the greedy response's: set dynamic_sampling=false, or choose rloo"
        )
    if train.samples_per_prompt == 1:
        raise UserError(
            "algorithm.dynamic_sampling keeps groups whose rewards differ, but train.samples_per_prompt=1: set it to 2 "
            "or more, or dynamic_sampling=false"
        )
    if algorithm.dynamic_sampling_tries < 1:
        raise UserError(f"algorithm.dynamic_sampling_tries={algorithm.dynamic_sampling_tries}: at least 1 is wanted")
    if algorithm.correction == "none" and algorithm.loss != "decoupled_ppo":
        raise UserError(
            "algorithm.dynamic_sampling=true keeps groups that are left over for the next step, and by then the policy "
            "has moved on: set algorithm.correction=tis (with correction_level=geometric for gspo and gmpo), or choose "
            "algorithm.loss=decoupled_ppo"
        )


def _rollout(algorithm: AlgorithmConfig, rollout: RolloutConfig) -> None:
    if (
        algorithm.overlong_buffer
        and not 1 <= overlong_tokens(algorithm.overlong_buffer, rollout.max_tokens) <= rollout.max_tokens
    ):
        raise UserError(
            f"algorithm.overlong_buffer={algorithm.overlong_buffer:g}: at most rollout.max_tokens={rollout.max_tokens} "
            "tokens are wanted, or a fraction of it below 1"
        )
    if algorithm.overlong_buffer >= 1 and algorithm.overlong_buffer % 1:
        raise UserError(
            f"algorithm.overlong_buffer={algorithm.overlong_buffer:g}: a whole number of tokens is wanted, or a "
            "fraction of rollout.max_tokens below 1"
        )
    weighted = "loss=decoupled_ppo" if algorithm.loss == "decoupled_ppo" else f"correction={algorithm.correction}"
    if is_cut(rollout) and weighted != "correction=none":
        raise UserError(
            f"algorithm.{weighted} needs the probabilities of the whole vocabulary, but rollout.top_p="
            f"{rollout.top_p:g} and rollout.top_k={rollout.top_k} draw from a part of it: set top_p=1 and top_k=0, or "
            "choose algorithm.correction=none with loss=ppo_clip"
        )


def is_cut(rollout: RolloutConfig) -> bool:
    """Whether tokens are drawn from a part of the distribution only."""
    return rollout.top_p < 1 or rollout.top_k > 0
