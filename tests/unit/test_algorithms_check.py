"""Settings without meaning are refused with what to choose instead; every key is used somewhere."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from spmd_rl.algorithms.advantages import ADVANTAGES
from spmd_rl.algorithms.check import check
from spmd_rl.algorithms.policy_loss import LOSSES
from spmd_rl.config.errors import UserError
from spmd_rl.config.schema import AlgorithmConfig, RolloutConfig, TrainConfig

ROOT = Path(__file__).resolve().parents[2]

REFUSED: list[tuple[dict[str, object], dict[str, int], str]] = [
    ({"loss": "decoupled_ppo", "correction": "tis"}, {}, "weigh each token again: choose algorithm.correction=none"),
    ({"overlong_buffer": 300}, {}, r"overlong_buffer=300: at most rollout\.max_tokens=256"),
    ({"overlong_buffer": 8.5}, {}, "a whole number of tokens is wanted"),
    ({"advantage": "gpro"}, {}, r"algorithm\.advantage='gpro'.*did you mean grpo\?"),
    ({"advantage": "gae"}, {}, "gae' needs a critic.*choose grpo or rloo.*run.graph=spmd_rl.recipes.ppo:graph"),
    ({"gae_lambda": 0.5}, {}, r"algorithm\.gae_lambda=0\.5 has no effect here: it needs algorithm\.advantage=gae"),
    ({"gae_gamma": 1.5}, {}, r"algorithm\.gae_gamma=1\.5: a number from 0 to 1 is wanted"),
    (
        {"advantage": "remax", "dynamic_sampling": True, "correction": "tis"},
        {},
        "compares each with the greedy response's: set dynamic_sampling=false, or choose rloo",
    ),
    ({"loss": "ppo-clip"}, {}, r"algorithm\.loss='ppo-clip'.*did you mean ppo_clip\?"),
    ({"aggregation": "token-mean"}, {}, r"did you mean token_mean\?"),
    ({"correction": "tsi"}, {}, r"did you mean tis\?"),
    ({"correction": "tis", "correction_level": "sequences"}, {}, r"did you mean sequence\?"),
    ({"kl_estimator": "k1", "kl_coef": 0.1}, {}, "averages to 0; choose k2, or algorithm.kl_in=reward"),
    ({"kl_estimator": "k5", "kl_coef": 0.1}, {}, "one of k2, k3, k3_ratio"),
    ({"kl_estimator": "k3"}, {}, "kl_estimator=k3 has no effect here: it needs algorithm.kl_coef above 0"),
    ({"kl_estimator": "k3", "kl_coef": 0.1, "kl_in": "reward"}, {}, "has no effect here.*kl_in=loss"),
    ({"kl_target": 0.1}, {}, "kl_target=0.1 has no effect here: it needs algorithm.kl_coef above 0"),
    (
        {"kl_horizon": 5.0, "kl_coef": 0.1},
        {},
        "kl_horizon=5.0 has no effect here: it needs algorithm.kl_target above 0",
    ),
    ({"kl_coef": 0.1, "kl_target": 0.1, "kl_horizon": 63.0}, {}, "at least the 64 samples of a step"),
    ({"kl_in": "reward"}, {}, "needs algorithm.kl_coef above 0"),
    ({"offload_reference": True}, {}, "offload_reference=True has no effect here: it needs algorithm.kl_coef above 0"),
    ({"kl_in": "rewards", "kl_coef": 0.1}, {}, r"did you mean reward\?"),
    ({}, {"samples_per_prompt": 1}, "samples_per_prompt=1: set it to 2 or more, or choose .*reinforce_pp or remax"),
    ({"advantage": "rloo"}, {"samples_per_prompt": 1}, "rloo compares the samples"),
    ({"advantage": "passk", "pass_k": 9}, {}, "from 2 to train.samples_per_prompt=8"),
    ({"advantage": "passk"}, {}, "pass_k=0.*from 2"),
    ({"pass_k": 4}, {}, "needs algorithm.advantage=passk"),
    ({"advantage": "dr_grpo"}, {}, "dr_grpo goes with algorithm.aggregation=constant, not token_mean; .*grpo_no_std"),
    ({"loss": "gspo", "correction": "tis"}, {}, "one ratio per response.*geometric or sequence"),
    ({"loss": "gmpo", "correction": "mis"}, {}, "one ratio per response.*geometric or sequence"),
    ({"loss": "gmpo", "aggregation": "seq_mean_token_sum"}, {}, "choose seq_mean_token_mean"),
    ({"loss": "reinforce"}, {"updates_per_step": 2}, "choose ppo_clip, or train.updates_per_step=1"),
    ({"loss": "reinforce", "clip_high": 0.3}, {}, "clip_high=0.3 has no effect here"),
    ({"loss": "gspo", "dual_clip": 3.0}, {}, "needs algorithm.loss=ppo_clip"),
    ({"dual_clip": 0.5}, {}, "above 1 is wanted"),
    ({"drift_coef": 0.1}, {}, "needs algorithm.loss=cpgd"),
    ({"sapo_tau_negative": 2.0}, {}, "needs algorithm.loss=sapo"),
    ({"loss": "sapo", "sapo_tau_positive": 0.0}, {}, "a number above 0"),
    ({"clip_low": 1.5}, {}, "at most 1"),
    ({"clip_low": -0.1}, {}, "at least 0"),
    ({"clip_high": float("nan")}, {}, "at least 0"),
    ({"loss": "cpgd", "clip_low": 1.0}, {}, "below 1"),
    ({"loss_constant": 100.0}, {}, "needs algorithm.aggregation=constant"),
    ({"correction_cap": 3.0}, {}, "needs algorithm.correction=tis"),
    ({"correction": "mis", "correction_floor": 0.5}, {}, "needs algorithm.correction=icepop"),
    ({"correction": "icepop", "correction_floor": 3.0}, {}, "must be below"),
    ({"overlong_penalty": 2.0}, {}, "needs algorithm.overlong_buffer above 0"),
    ({"nonfinite_logprob": "ignore"}, {}, "one of stop, exclude"),
]


@pytest.mark.parametrize(("algorithm", "train", "message"), REFUSED)
def test_refused(algorithm: dict[str, object], train: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        check(AlgorithmConfig(**algorithm), TrainConfig(**train), RolloutConfig())  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("rollout", [RolloutConfig(top_p=0.9), RolloutConfig(top_k=50)])
def test_a_correction_is_refused_where_the_distribution_is_cut(rollout: RolloutConfig) -> None:
    check(AlgorithmConfig(), TrainConfig(), rollout)
    for algorithm in (AlgorithmConfig(correction="tis"), AlgorithmConfig(loss="decoupled_ppo")):
        with pytest.raises(UserError, match=r"needs the probabilities of the whole.*set top_p=1 and top_k=0"):
            check(algorithm, TrainConfig(), rollout)


def test_a_critic_goes_with_gae_alone() -> None:
    check(AlgorithmConfig(advantage="gae", gae_whiten=False), TrainConfig(samples_per_prompt=1), RolloutConfig(), True)
    with pytest.raises(UserError, match="grpo makes no use of this graph's critic: choose algorithm.advantage=gae"):
        check(AlgorithmConfig(), TrainConfig(), RolloutConfig(), critic=True)


@pytest.mark.parametrize("advantage", ADVANTAGES)
@pytest.mark.parametrize("loss", LOSSES)
def test_accepted(advantage: str, loss: str) -> None:
    aggregation = "constant" if advantage == "dr_grpo" else "seq_mean_token_mean"
    if loss == "gmpo" and advantage == "dr_grpo":
        return
    weighted = loss == "decoupled_ppo"
    check(
        AlgorithmConfig(
            advantage=advantage, loss=loss, aggregation=aggregation, pass_k=4 if advantage == "passk" else 0,
            kl_coef=0.01, overlong_buffer=8, correction_level="token" if weighted else "geometric",
            correction="none" if weighted else "icepop", correction_floor=0.0 if weighted else 0.5,
        ),
        TrainConfig(),
        RolloutConfig(),
    )  # fmt: skip


def test_every_key_is_read_by_the_code() -> None:
    sources = [p.read_text() for p in (ROOT / "spmd_rl").rglob("*.py") if p.name not in ("schema.py", "check.py")]
    unread = [f.name for f in fields(AlgorithmConfig) if not any(f".{f.name}" in s for s in sources)]
    assert unread == []
