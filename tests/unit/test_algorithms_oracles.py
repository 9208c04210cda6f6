"""Estimators and the whole loss against plain loops over responses, written from the papers in float64; and what
must not matter: the order of the samples, and tokens that do not count."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, product
from math import log, nan, sqrt
from statistics import mean, stdev

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spmd_rl.algorithms.advantages import ADVANTAGES, compute_advantages
from spmd_rl.algorithms.aggregate import AGGREGATIONS
from spmd_rl.algorithms.correction import LEVELS
from spmd_rl.algorithms.policy_loss import LOSSES, policy_loss
from spmd_rl.algorithms.whiten import local_sums, whiten
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.data.batch import Batch
from spmd_rl.observe.metrics import Metrics
from tests.algorithm_cases import as_good_as_the_best, make_batch, make_terms

# --- advantages: one response after the other --------------------------------------------------------------------

Response = tuple[int, float, int]  # group, reward, tokens
RESPONSES = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([nan, 0.0, 0.25, 1.0, -2.0]), st.integers(1, 7)),
    min_size=1,
    max_size=12,
)


def by_loop(name: str, responses: list[Response], k: int = 2) -> list[float]:
    valid = [r for r in responses if r[1] == r[1]]
    return [one(name, response, valid, k) if response in valid else 0.0 for response in responses]


def one(name: str, response: Response, valid: list[Response], k: int) -> float:
    """The advantage of a response among all valid ones."""
    if name == "reinforce_pp":
        return whitened(response[1], [(r, n) for _, r, n in valid])
    groups = {g: [r for other, r, _ in valid if other == g] for g, _, _ in valid}
    differ = [g for g, rewards in groups.items() if len(set(rewards)) > 1]
    group, reward, _ = response
    if group not in differ:
        return 0.0
    rewards, centred = groups[group], reward - mean(groups[group])
    others = list(rewards)
    others.remove(reward)
    if name in ("grpo_no_std", "dr_grpo"):
        return centred
    if name == "grpo":
        return centred / (stdev(rewards) + 1e-6)
    if name == "grpo_leave_one_out":
        return (reward - mean(others)) / (stdev(rewards) + 1e-6)
    if name == "rloo":
        return reward - mean(others)
    if name == "opo":
        weighted = [(r, n) for g, r, n in valid if g == group]
        return reward - sum(r * n for r, n in weighted) / sum(n for _, n in weighted)
    if name == "passk":
        return k * mean(max(*c, reward) - max(c) for c in combinations(others, k - 1))
    if name == "remax":
        return reward - max(rewards)  # as_good_as_the_best
    if name == "cpgd":
        return centred * min(3.0, len(groups) / len(differ))
    squares = sum(n * (r - mean(groups[g])) ** 2 for g, r, n in valid)  # reinforce_pp_baseline
    return centred / sqrt(squares / sum(n for _, _, n in valid))


def whitened(value: float, weighted: list[tuple[float, int]]) -> float:
    tokens = [v for v, n in weighted for _ in range(n)]
    centre = mean(tokens)
    variance = mean((v - centre) ** 2 for v in tokens)
    return (value - centre) / sqrt(variance) if variance > 1e-12 else 0.0


@given(RESPONSES)
@settings(deadline=None, max_examples=60)
@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_equal_a_loop_over_the_responses(name: str, responses: list[Response]) -> None:
    algorithm = AlgorithmConfig(advantage=name, pass_k=2, aggregation="constant")
    groups, rewards, lengths = zip(*responses, strict=True)
    reward_S, group_S = torch.tensor(rewards), torch.tensor(groups)
    greedy_S = as_good_as_the_best(reward_S, group_S)
    found = compute_advantages(algorithm, reward_S, group_S, torch.tensor(lengths), max_tokens=8, greedy_S=greedy_S)
    assert found.tolist() == pytest.approx(by_loop(name, responses), rel=1e-5, abs=1e-6)


@given(RESPONSES)
@settings(deadline=None, max_examples=60)
def test_whitening_equals_a_loop_over_the_tokens(responses: list[Response]) -> None:
    values_S, lengths_S = torch.tensor([r for _, r, _ in responses]), torch.tensor([n for _, _, n in responses])
    valid = [(r, n) for _, r, n in responses if r == r]
    wanted = [whitened(r, valid) if r == r else 0.0 for _, r, _ in responses]
    assert whiten(values_S, local_sums(values_S, lengths_S)).tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-7)


# --- the loss: one response after the other, float64 ---------------------------------------------------------------

Tokens = dict[str, Tensor]  # of one response, only those that count


def ratios(t: Tokens) -> Tensor:
    return (t["logprob"] - t["old_logprob"]).exp()


def ppo(t: Tokens, low: float, high: float) -> Tensor:
    return -torch.min(ratios(t) * t["advantage"], ratios(t).clamp(1 - low, 1 + high) * t["advantage"])


def gspo(t: Tokens, low: float, high: float) -> Tensor:
    s = (t["logprob"] - t["old_logprob"]).mean().detach().exp() * (t["logprob"] - t["logprob"].detach()).exp()
    return -torch.min(s * t["advantage"], s.clamp(1 - low, 1 + high) * t["advantage"])


def cispo(t: Tokens, low: float, high: float) -> Tensor:
    return -ratios(t).clamp(1 - low, 1 + high).detach() * t["advantage"] * t["logprob"]


def gmpo(t: Tokens, low: float, high: float) -> Tensor:
    logs, sign = t["logprob"] - t["old_logprob"], t["advantage"].sign()
    bounded = torch.min(sign * logs, sign * logs.clamp(-low, high)) * sign  # sign of 0 leaves nothing: advantage is 0
    bounded = torch.where(sign == 0, logs.clamp(max=high), bounded)
    return (-t["advantage"].mean() * bounded.mean().exp()).expand(len(logs))


def cpgd(t: Tokens, low: float, high: float) -> Tensor:
    logs = t["logprob"] - t["old_logprob"]
    return -torch.min(logs * t["advantage"], logs.clamp(log(1 - low), log(1 + high)) * t["advantage"])


def sapo(t: Tokens, low: float, high: float) -> Tensor:
    tau = torch.where(t["advantage"] > 0, 1.0, 1.05).double()
    return -t["advantage"] * 4 / tau / (1 + (-tau * (ratios(t) - 1)).exp())


def decoupled(t: Tokens, low: float, high: float) -> Tensor:
    return (t["old_logprob"] - t["rollout_logprob"]).exp().clamp(max=1.5) * ppo(t, low, high)


ORACLES: dict[str, Callable[[Tokens, float, float], Tensor]] = {
    "ppo_clip": ppo, "decoupled_ppo": decoupled, "gspo": gspo, "cispo": cispo, "gmpo": gmpo, "cpgd": cpgd, "sapo": sapo,
    "reinforce": lambda t, low, high: -t["advantage"] * t["logprob"],
}  # fmt: skip
KL: dict[str, Callable[[Tokens], Tensor]] = {
    "k2": lambda t: ratios(t).detach() * (t["logprob"] - t["ref_logprob"]) ** 2 / 2,
    "k3": lambda t: (t["ref_logprob"] - t["logprob"]).exp() - 1 - (t["ref_logprob"] - t["logprob"]),
    "k3_ratio": lambda t: ratios(t) * KL["k3"](t),
}
COLUMNS = ("logprob", "old_logprob", "advantage", "ref_logprob", "rollout_logprob")


def weights(algorithm: AlgorithmConfig, t: Tokens) -> Tensor:
    """The importance weight of each token, bounded."""
    logs = t["old_logprob"] - t["rollout_logprob"]
    of_response = {"sequence": logs.sum(), "geometric": logs.mean()}
    weight = of_response.get(algorithm.correction_level, logs).exp().expand(len(logs))
    if algorithm.correction == "tis":
        return weight.clamp(max=algorithm.correction_cap)
    floor = algorithm.correction_floor if algorithm.correction == "icepop" else 0.0
    kept = [w if floor <= w <= algorithm.correction_cap else 0.0 for w in weight.tolist()]
    return torch.tensor(kept, dtype=torch.float64)


def loss_by_loop(algorithm: AlgorithmConfig, responses: list[Tokens]) -> Tensor:
    counted = [t for t in responses if len(t["logprob"])]
    per_response = []
    for t in counted:
        value = ORACLES[algorithm.loss](t, algorithm.clip_low, algorithm.clip_high)
        if algorithm.dual_clip:
            most = -algorithm.dual_clip * t["advantage"]
            value = torch.where(t["advantage"] < 0, torch.min(value, most), value)
        if algorithm.correction != "none":
            value = value * weights(algorithm, t)
        value = value - algorithm.entropy_coef * entropy(t["logprob"])
        per_response.append(value + algorithm.kl_coef * KL[algorithm.kl_estimator](t))
    if not counted:
        return torch.zeros((), dtype=torch.float64)
    if algorithm.aggregation == "token_mean":
        return torch.cat(per_response).mean()
    if algorithm.aggregation == "constant":
        return torch.cat(per_response).sum() / (len(counted) * 4)
    reduced = [v.mean() if algorithm.aggregation == "seq_mean_token_mean" else v.sum() for v in per_response]
    return torch.stack(reduced).mean()


def entropy(logprob_R: Tensor) -> Tensor:
    """Some function of the log-probability in the place of the entropy, so that a bonus has a gradient."""
    return -logprob_R.exp() * logprob_R


def ours(algorithm: AlgorithmConfig, batch: Batch, logprob_R: Tensor, mask_R: Tensor) -> tuple[float, Tensor]:
    """(loss, gradient)"""
    leaf_R = logprob_R.clone().requires_grad_()
    terms = make_terms(batch, leaf_R, mask_R, entropy_R=entropy(leaf_R.nan_to_num()))
    loss = policy_loss(algorithm, updates_per_step=2, max_tokens=4)(terms, Metrics())
    (gradient,) = torch.autograd.grad(loss, leaf_R)
    return float(loss.detach()), gradient


def draw(lengths: list[int], seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Columns and a mask, float64."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    logprob_R = -3 * torch.rand(total, generator=generator, dtype=torch.float64)
    near = {
        name: logprob_R + 0.4 * torch.randn(total, generator=generator, dtype=torch.float64)
        for name in COLUMNS
        if name not in ("logprob", "advantage")
    }
    advantage_R = torch.randn(len(lengths), generator=generator, dtype=torch.float64).repeat_interleave(
        torch.tensor(lengths)
    )
    mask_R = (torch.rand(total, generator=generator) < 0.8).double()
    return {"logprob": logprob_R, "advantage": advantage_R, **near}, mask_R


def settings_of(loss: str, mode: str, estimator: str, correction: tuple[str, str]) -> AlgorithmConfig:
    """Half of the settings with a bonus for entropy and, where there is one, the second bound."""
    method, level = correction
    more = estimator == "k2"
    return AlgorithmConfig(
        loss=loss,
        aggregation=mode,
        kl_coef=0.3,
        kl_estimator=estimator,
        correction=method,
        correction_level=level,
        correction_cap=1.5,
        correction_floor=0.7,
        clip_high=0.28,
        dual_clip=1.5 if more and loss == "ppo_clip" else 0.0,
        entropy_coef=0.2 if more else 0.0,
    )


def taken(columns: dict[str, Tensor], lengths: list[int]) -> Batch:
    return make_batch(lengths, {name: values for name, values in columns.items() if name != "logprob"})


LENGTHS = st.lists(st.integers(0, 5), min_size=1, max_size=6)
CORRECTIONS = [("none", "token"), *product(("tis", "mis", "icepop"), LEVELS)]
CHOICES = (st.sampled_from(AGGREGATIONS), st.sampled_from([*KL]), st.sampled_from(CORRECTIONS))


@given(LENGTHS, *CHOICES, st.integers(0, 2**31))
@settings(deadline=None, max_examples=25)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_and_its_gradient_equal_a_loop_over_the_responses(
    loss: str, lengths: list[int], mode: str, estimator: str, correction: tuple[str, str], seed: int
) -> None:
    algorithm = settings_of(loss, mode, estimator, correction)
    columns, mask_R = draw(lengths, seed)
    leaf_R = columns["logprob"].clone().requires_grad_()
    responses, first = [], 0
    for length in lengths:
        inside = (mask_R[first : first + length] != 0).nonzero().flatten() + first
        responses.append({n: (leaf_R if n == "logprob" else values)[inside] for n, values in columns.items()})
        first += length
    wanted = loss_by_loop(algorithm, responses)
    gradient_R = torch.zeros_like(leaf_R)
    if wanted.requires_grad:
        (gradient_R,) = torch.autograd.grad(wanted, leaf_R)
    value, found_R = ours(algorithm, taken(columns, lengths), columns["logprob"], mask_R)
    assert value == pytest.approx(float(wanted.detach()), rel=1e-9, abs=1e-12)
    torch.testing.assert_close(found_R, gradient_R, rtol=1e-9, atol=1e-12)


@given(LENGTHS, *CHOICES, st.integers(0, 2**31), st.data())
@settings(deadline=None, max_examples=15)
@pytest.mark.parametrize("loss", LOSSES)
def test_order_and_padding_do_not_matter(
    loss: str,
    lengths: list[int],
    mode: str,
    estimator: str,
    correction: tuple[str, str],
    seed: int,
    data: st.DataObject,
) -> None:
    """The samples in another order, each with masked tokens behind it, which may hold anything."""
    algorithm = settings_of(loss, mode, estimator, correction)
    columns, mask_R = draw(lengths, seed)
    order = data.draw(st.permutations(range(len(lengths))))
    padding = data.draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))

    def moved(values_R: Tensor, fill: float) -> Tensor:
        rows = values_R.split(lengths)
        return torch.cat([torch.cat([rows[i], torch.full((padding[i],), fill, dtype=torch.float64)]) for i in order])

    plain, gradient_R = ours(algorithm, taken(columns, lengths), columns["logprob"], mask_R)
    longer = [lengths[i] + padding[i] for i in order]
    changed = {name: moved(values, nan) for name, values in columns.items()}
    value, found_R = ours(algorithm, taken(changed, longer), changed["logprob"], moved(mask_R, 0.0))
    assert value == pytest.approx(plain, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(found_R, moved(gradient_R, 0.0), rtol=1e-9, atol=1e-12)
