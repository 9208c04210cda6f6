"""Advantages: values worked by hand, exact enumeration of their policy gradients, and invariances (N4, N5, N9)."""

from __future__ import annotations

from math import sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spmd_rl.algorithms import group_advantages as by_group
from spmd_rl.algorithms.advantages import ADVANTAGES, OVER_THE_BATCH, compute_advantages
from spmd_rl.algorithms.shaping import kl_penalized, overlong_tokens, soft_overlong
from spmd_rl.algorithms.whiten import local_sums, whiten
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.observe.metrics import Metrics
from tests.algorithm_cases import as_good_as_the_best, expectation, gradient

NAN = float("nan")


def config(name: str, **keys: object) -> AlgorithmConfig:
    aggregation = "constant" if name == "dr_grpo" else "token_mean"
    return AlgorithmConfig(advantage=name, pass_k=2 if name == "passk" else 0, aggregation=aggregation, **keys)  # type: ignore[arg-type]


def advantages(name: str, rewards: list[float], groups: list[int], lengths: list[int] | None = None) -> list[float]:
    lengths_S = torch.tensor(lengths if lengths is not None else [1] * len(rewards))
    reward_S, group_S = torch.tensor(rewards), torch.tensor(groups, dtype=torch.int64)
    greedy_S = as_good_as_the_best(reward_S, group_S)
    return compute_advantages(config(name), reward_S, group_S, lengths_S, max_tokens=16, greedy_S=greedy_S).tolist()


# Rewards 1, 2, 6 of lengths 1, 1, 2: mean 3, sum of squared deviations 4 + 1 + 9 = 14, std sqrt(7).
BY_HAND: dict[str, list[float]] = {
    "grpo": [-2 / sqrt(7), -1 / sqrt(7), 3 / sqrt(7)],
    "grpo_no_std": [-2.0, -1.0, 3.0],
    "grpo_leave_one_out": [-3 / sqrt(7), -1.5 / sqrt(7), 4.5 / sqrt(7)],
    "dr_grpo": [-2.0, -1.0, 3.0],
    "rloo": [1 - 4, 2 - 3.5, 6 - 1.5],
    # Per token 1, 2, 6, 6: mean 3.75, variance (7.5625 + 3.0625 + 2 * 5.0625) / 4 = 5.1875.
    "reinforce_pp": [-2.75 / sqrt(5.1875), -1.75 / sqrt(5.1875), 2.25 / sqrt(5.1875)],
    # Centred per token -2, -1, 3, 3: mean square (4 + 1 + 9 + 9) / 4 = 5.75.
    "reinforce_pp_baseline": [-2 / sqrt(5.75), -1 / sqrt(5.75), 3 / sqrt(5.75)],
    "opo": [1 - 3.75, 2 - 3.75, 6 - 3.75],  # (1 + 2 + 2 * 6) / 4 = 3.75
    # k = 2: twice the mean over the two others of max(pair) - other. For 2: (2 - 1 + 6 - 6) / 2; for 6: (5 + 4) / 2.
    "passk": [0.0, 1.0, 9.0],
    "cpgd": [-2.0, -1.0, 3.0],  # all groups have variance: weight 1
    "remax": [-5.0, -4.0, 0.0],  # the greedy response has the best one's reward
}


@pytest.mark.parametrize("name", ADVANTAGES)
def test_by_hand(name: str) -> None:
    assert advantages(name, [1, 2, 6], [0, 0, 0], [1, 1, 2]) == pytest.approx(BY_HAND[name], rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_n4_uneven_groups_never_mix(name: str) -> None:
    rewards = [1.0, 0.0, 0.0, 1.0, 5.0, 5.0, 5.0, 0.2, 0.9, 0.4, 0.1]
    groups = [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2]
    found = advantages(name, rewards, groups)
    if name != "reinforce_pp":  # it has no groups
        assert found[4:7] == [0.0, 0.0, 0.0]
    if name not in OVER_THE_BATCH:
        alone = advantages(name, rewards[:4], groups[:4]) + [0.0] * 3 + advantages(name, rewards[7:], [0] * 4)
        assert found == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7.7, 1e6, 0.0])
def test_n5_nothing_to_compare_is_exactly_zero(name: str, reward: float) -> None:
    assert advantages(name, [reward], [0]) == [0.0]
    # Rounding of the mean of equal numbers must not be blown up by a division by a tiny standard deviation.
    assert advantages(name, [reward] * 7, [0] * 7, [1, 2, 3, 4, 5, 6, 7]) == [0.0] * 7
    assert advantages(name, [], []) == []


def test_n5_fraction_of_groups_without_variance() -> None:
    metrics = Metrics()
    # Groups: {1, 0} teaches; {5, 5, 5}, {3} and {2, NaN} do not; {NaN} is no group at all.
    rewards = torch.tensor([1, 0, 5, 5, 5, 3, 2, NAN, NAN])
    groups = torch.tensor([0, 0, 1, 1, 1, 2, 3, 3, 4])
    compute_advantages(
        config("grpo", overlong_buffer=8), rewards, groups, torch.arange(9), max_tokens=8, metrics=metrics
    )
    # Of the task's reward, although the length penalty tells the three equal samples apart.
    assert metrics.reduce() == {"reward/zero_variance_fraction": 0.75}


@pytest.mark.parametrize("name", ADVANTAGES)
def test_excluded_samples_are_in_nobodys_statistics(name: str) -> None:
    found = advantages(name, [1, NAN, 2, 6, NAN], [0, 0, 0, 0, 1], [1, 9, 1, 2, 4])
    right = advantages(name, [1, 2, 6], [0, 0, 0], [1, 1, 2])
    assert found == pytest.approx([right[0], 0, right[1], right[2], 0], rel=1e-6, abs=1e-12)


def test_infinite_rewards_and_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="infinite reward of sample 1"):
        advantages("grpo", [0.0, float("inf")], [0, 0])
    with pytest.raises(ValueError, match="2 rewards, but 1 group"):
        by_group.grpo(torch.tensor([0.0, 1.0]), torch.tensor([0]))
    with pytest.raises(ValueError, match="there are grpo, "):
        advantages("grpoo", [0.0, 1.0], [0, 0])


SAMPLES = st.lists(st.tuples(st.integers(0, 3), st.integers(-3, 3), st.integers(1, 9)), min_size=1, max_size=14)


@given(SAMPLES, st.data())
@settings(deadline=None, max_examples=30)
@pytest.mark.parametrize("name", ADVANTAGES)
def test_order_of_samples_and_names_of_groups_do_not_matter(
    name: str, samples: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(samples))))
    rename = data.draw(st.permutations(range(4)))
    groups, rewards, lengths = ([s[i] for s in samples] for i in range(3))
    plain = advantages(name, [r / 3 for r in rewards], groups, lengths)
    moved = advantages(
        name, [rewards[i] / 3 for i in order], [rename[groups[i]] for i in order], [lengths[i] for i in order]
    )
    assert moved == pytest.approx([plain[i] for i in order], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", OVER_THE_BATCH)
def test_batch_statistics_are_those_of_all_ranks(name: str) -> None:
    rewards, groups = [1.0, 0.0, 3.0, 3.0, 0.5, 2.0, 0.0], [0, 0, 1, 1, 2, 2, 2]
    lengths = [3, 1, 4, 1, 5, 9, 2]
    whole = advantages(name, rewards, groups, lengths)
    parts = [slice(0, 2), slice(2, 2), slice(2, 4), slice(4, 7)]  # four ranks, one without samples
    local_groups = [[g - groups[p.start] for g in groups[p]] for p in parts]
    tensors = [
        (torch.tensor(rewards[p]), torch.tensor(g, dtype=torch.int64)) for p, g in zip(parts, local_groups, strict=True)
    ]
    lengths_of = [torch.tensor(lengths[p], dtype=torch.int64) for p in parts]

    def run(total: object) -> list[Tensor]:
        return [
            compute_advantages(config(name), r, g, n, max_tokens=16, total=total)  # type: ignore[arg-type]
            for (r, g), n in zip(tensors, lengths_of, strict=True)
        ]

    contributions: list[Tensor] = []

    def record(sums: Tensor) -> Tensor:
        contributions.append(sums)
        return sums

    run(record)
    assert len(contributions) == 4  # also the rank without samples takes part
    summed = torch.stack(contributions).sum(0)
    assert torch.cat(run(lambda _: summed)).tolist() == pytest.approx(whole, rel=1e-6)
    assert torch.cat(run(lambda sums: sums)).tolist() != pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize("value", [0.1, 1e8])
def test_n9_whitening_one_token(value: float) -> None:
    values_S, lengths_S = torch.tensor([value, NAN, 5.0]), torch.tensor([1, 3, 0])
    sums = local_sums(values_S, lengths_S)
    assert float(sums[0]) == 1.0
    assert whiten(values_S, sums)[:2].tolist() == [0.0, 0.0]
    assert whiten(torch.empty(0), local_sums(torch.empty(0), torch.empty(0))).shape == (0,)


def test_whitening_does_not_blow_up_rounding() -> None:
    values_S, lengths_S = torch.full((7,), 1 / 7, dtype=torch.float64), torch.tensor([1, 2, 3, 4, 5, 6, 7])
    sums = local_sums(values_S, lengths_S)
    assert float(sums[1] / sums[0]) != 1 / 7  # the mean is not exact
    assert whiten(values_S, sums).tolist() == [0.0] * 7


def test_whitening_gives_mean_0_and_variance_1_over_tokens() -> None:
    torch.manual_seed(1)
    values_S, lengths_S = torch.randn(50) * 1e-2 + 1e3, torch.randint(0, 9, (50,))
    white_R = whiten(values_S, local_sums(values_S, lengths_S)).repeat_interleave(lengths_S)
    assert float(white_R.mean()) == pytest.approx(0, abs=1e-7)
    assert float(white_R.var(correction=0)) == pytest.approx(1, abs=1e-3)


def test_cpgd_weight_makes_up_for_groups_that_teach_nothing() -> None:
    # One of two groups has variance: weight 2. One of four: weight 4, capped at 3.
    assert advantages("cpgd", [1, 0, 5, 5], [0, 0, 1, 1]) == [1.0, -1.0, 0.0, 0.0]
    assert advantages("cpgd", [1, 0, 5, 5, 4, 4, 3, 3], [0, 0, 1, 1, 2, 2, 3, 3])[:2] == [1.5, -1.5]


# --- the policy gradient that the advantages lead to, by exact enumeration of a 3-action policy -------------------

LOGITS = torch.tensor([0.3, -0.5, 0.9], dtype=torch.float64, requires_grad=True)
REWARDS = torch.tensor([0.2, 1.0, -0.4], dtype=torch.float64)


def policy_gradient(n: int, advantage: object) -> Tensor:
    """The expectation over groups of n of mean_i A_i grad log pi(y_i)."""
    logprobs_A = LOGITS.log_softmax(0)

    def surrogate(actions: tuple[int, ...]) -> Tensor:
        reward_S = REWARDS[list(actions)]
        advantage_S = advantage(reward_S, torch.zeros(n, dtype=torch.int64))  # type: ignore[operator]
        return (advantage_S * logprobs_A[list(actions)]).mean()

    return gradient(expectation(logprobs_A.exp(), n, surrogate), LOGITS)


def gradient_of_best(k: int) -> Tensor:
    """The gradient of E[max of k rewards], differentiated through the probabilities."""
    probs_A = LOGITS.softmax(0)
    order = REWARDS.argsort()
    below_A = probs_A[order].cumsum(0) ** k
    return gradient((REWARDS[order] * below_A.diff(prepend=below_A.new_zeros(1))).sum(), LOGITS)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_rloo_is_unbiased(n: int) -> None:
    torch.testing.assert_close(policy_gradient(n, by_group.rloo), gradient_of_best(1))


@pytest.mark.parametrize("n", [2, 4])
def test_centring_shrinks_the_gradient_by_n_minus_1_over_n(n: int) -> None:
    centred = policy_gradient(n, lambda r, g: by_group.grpo(r, g, std=False))
    torch.testing.assert_close(centred, gradient_of_best(1) * (n - 1) / n)


@pytest.mark.parametrize(("n", "k"), [(2, 2), (3, 2), (3, 3), (4, 2), (4, 3)])
def test_passk_is_unbiased_for_the_best_of_k(n: int, k: int) -> None:
    torch.testing.assert_close(policy_gradient(n, lambda r, g: by_group.passk(r, g, k)), gradient_of_best(k))


def test_remax_is_unbiased() -> None:
    greedy = REWARDS[int(LOGITS.argmax())]
    found = policy_gradient(2, lambda r, g: by_group.remax(r, greedy.expand(len(r))))
    torch.testing.assert_close(found, gradient_of_best(1))
    assert by_group.remax(torch.tensor([1.0, NAN, 2.0]), torch.tensor([0.25, 0.0, NAN])).tolist() == [0.75, 0.0, 0.0]
    with pytest.raises(ValueError, match="infinite"):
        by_group.remax(torch.tensor([1.0]), torch.tensor([torch.inf]))


def test_remax_by_hand_through_the_configuration() -> None:
    """Also where all samples of a prompt are alike: the greedy response's reward says whether they are good."""
    reward_S, greedy_S = torch.tensor([1.0, 1.0, 0.0, 0.5]), torch.tensor([0.25, 0.25, 0.5, 0.5])
    group_S, lengths_S = torch.tensor([0, 0, 1, 1]), torch.tensor([2, 1, 3, 8])
    algorithm = AlgorithmConfig(advantage="remax", kl_coef=0.5, kl_in="reward")
    kl_S = torch.tensor([0.0, 1.0, 0.0, -1.0])
    found_S = compute_advantages(algorithm, reward_S, group_S, lengths_S, max_tokens=8, kl_S=kl_S, greedy_S=greedy_S)
    assert found_S.tolist() == [0.75, 0.25, -0.5, 0.5]
    with pytest.raises(ValueError, match="reward of a greedy response"):
        compute_advantages(algorithm, reward_S, group_S, lengths_S, max_tokens=8, kl_S=kl_S)


def test_passk_for_the_whole_group_counts_the_lead_of_the_best() -> None:
    reward_S, group_S = torch.tensor([0.5, 3.0, 1.0, 2.5]), torch.zeros(4, dtype=torch.int64)
    assert by_group.passk(reward_S, group_S, 4).tolist() == [0.0, 4 * 0.5, 0.0, 0.0]
    tie_S = torch.tensor([3.0, 3.0, 1.0])
    assert by_group.passk(tie_S, group_S[:3], 3).tolist() == [0.0, 0.0, 0.0]
    assert by_group.passk(torch.tensor([0.0, 1.0]), group_S[:2], 3).tolist() == [0.0, 0.0]  # fewer than k samples
    with pytest.raises(ValueError, match="use rloo"):
        by_group.passk(reward_S, group_S, 1)


def test_passk_of_large_groups_is_finite() -> None:
    reward_S = torch.cat([torch.zeros(1000), torch.ones(24)])
    found = by_group.passk(reward_S, torch.zeros(1024, dtype=torch.int64), 64)
    # A right sample leads where the 63 others are all wrong: C(1000, 63) / C(1023, 63).
    lead = 1.0
    for i in range(63):
        lead *= (1000 - i) / (1023 - i)
    torch.testing.assert_close(found[-1], torch.tensor(64 * lead, dtype=torch.float64))
    assert bool((found[:1000] == 0).all())


# --- shaping --------------------------------------------------------------------------------------------------


def test_soft_overlong_by_hand() -> None:
    lengths_S = torch.tensor([0, 12, 13, 14, 16, 20])
    assert soft_overlong(lengths_S, 16, 4).tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    with pytest.raises(ValueError, match="1..16"):
        soft_overlong(lengths_S, 16, 17)
    found = compute_advantages(
        config("grpo_no_std", overlong_buffer=4, overlong_penalty=2.0),
        torch.tensor([1.0, 1.0]), torch.tensor([0, 0]), torch.tensor([3, 14]), max_tokens=16,
    )  # fmt: skip
    assert found.tolist() == [0.5, -0.5]  # rewards 1 and 1 - 2 * 0.5
    # A buffer below 1 is a fraction of the longest response, rounded up.
    assert (overlong_tokens(0.2, 16), overlong_tokens(0.25, 16), overlong_tokens(5.0, 16)) == (4, 4, 5)


def test_kl_in_the_reward() -> None:
    algorithm = config("rloo", kl_coef=0.5, kl_in="reward")
    reward_S, group_S, lengths_S = torch.tensor([1.0, 1.0]), torch.tensor([0, 0]), torch.tensor([3, 3])
    kl_S = torch.tensor([0.0, 2.0])
    assert kl_penalized(reward_S, kl_S, 0.5).tolist() == [1.0, 0.0]
    found = compute_advantages(algorithm, reward_S, group_S, lengths_S, max_tokens=8, kl_S=kl_S)
    assert found.tolist() == [1.0, -1.0]
    with pytest.raises(ValueError, match="KL of every response"):
        compute_advantages(algorithm, reward_S, group_S, lengths_S, max_tokens=8)
