"""Advantages of whole responses from rewards: one number per sample, to be repeated over its tokens.

Shapes: S samples; `reward_S` float [S], NaN where a sample is excluded; `group_S` int64 [S], dense group numbers (the
samples of one prompt). Everything is computed in float64. Two rules hold for every function:

- An excluded sample has advantage 0 and is in nobody's statistics.
- A group whose rewards are all equal, or that has one sample, teaches nothing: its advantages are exactly 0. Division
  by a tiny standard deviation never turns rounding into a signal.

A group must be complete in the call: statistics are never mixed between groups, nor a group split over calls.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spmd_rl.algorithms.ragged import group_extremes, group_sum


@dataclass(frozen=True)
class Groups:
    """Statistics of the G groups of S samples, over the samples that are not excluded.

    reward_S: float64, 0 where excluded; valid_S: bool; count_G: float64; flat_G: bool, all rewards equal (also none,
    or one); mean_G: float64.
    """

    reward_S: Tensor
    group_S: Tensor
    valid_S: Tensor
    count_G: Tensor
    mean_G: Tensor
    flat_G: Tensor

    @classmethod
    def of(cls, reward_S: Tensor, group_S: Tensor) -> Groups:
        """Raises ValueError for an infinite reward, or where the two lengths differ."""
        if reward_S.shape != group_S.shape:
            raise ValueError(f"{reward_S.shape[0]} rewards, but {group_S.shape[0]} group numbers")
        if bool(reward_S.isinf().any()):
            raise ValueError(f"infinite reward of sample {int(reward_S.isinf().nonzero()[0])} of this batch")
        groups = int(group_S.max()) + 1 if len(group_S) else 0
        valid_S = ~reward_S.isnan()
        values_S = torch.where(valid_S, reward_S.double(), 0.0)
        count_G = group_sum(valid_S.double(), group_S, groups)
        least_G, largest_G = group_extremes(values_S[valid_S], group_S[valid_S], groups)
        mean_G = group_sum(values_S, group_S, groups) / count_G.clamp(min=1)
        return cls(values_S, group_S, valid_S, count_G, mean_G, ~(largest_G > least_G))

    def of_sample(self, values_G: Tensor) -> Tensor:
        """[S]: each sample's value of its group."""
        return values_G[self.group_S]

    def sum(self, values_S: Tensor) -> Tensor:
        """[G]: sums over the samples that count."""
        return group_sum(torch.where(self.valid_S, values_S, 0.0), self.group_S, len(self.count_G))

    def minus(self, baseline_G: Tensor) -> Tensor:
        """[S]: reward - its group's baseline; exactly 0 for excluded samples and flat groups."""
        teaches_S = self.valid_S & ~self.of_sample(self.flat_G)
        return torch.where(teaches_S, self.reward_S - self.of_sample(baseline_G), 0.0)

    def std(self) -> Tensor:
        """float64 [G]: sample standard deviation (divided by count - 1); 0 for flat groups."""
        squares_G = self.sum(self.minus(self.mean_G).square())
        return (squares_G / (self.count_G - 1).clamp(min=1)).sqrt()

    def zero_variance(self) -> tuple[Tensor, Tensor]:
        """(groups without variance, groups), of those that have any valid sample; float64 scalars."""
        present_G = self.count_G > 0
        return (present_G & self.flat_G).sum().double(), present_G.sum().double()


def grpo(reward_S: Tensor, group_S: Tensor, std: bool = True, leave_one_out: bool = False, eps: float = 1e-6) -> Tensor:
    """float64 [S]: (reward - group mean) / (group std + eps).

    GRPO, DeepSeekMath, arXiv:2402.03300, equation 3 (outcome supervision). std=False is the centred form of Dr. GRPO,
    arXiv:2503.20783. leave_one_out takes the mean of the *other* samples, a baseline independent of the sample.
    """
    groups = Groups.of(reward_S, group_S)
    advantage_S = groups.minus(groups.mean_G)
    if leave_one_out:
        # r - mean of the others = (r - mean of all) n / (n - 1)
        advantage_S = advantage_S * groups.of_sample(groups.count_G / (groups.count_G - 1).clamp(min=1))
    return advantage_S / (groups.of_sample(groups.std()) + eps) if std else advantage_S


def rloo(reward_S: Tensor, group_S: Tensor) -> Tensor:
    """float64 [S]: reward - mean of the group's other rewards. RLOO, arXiv:2402.14740."""
    return grpo(reward_S, group_S, std=False, leave_one_out=True)


def opo(reward_S: Tensor, group_S: Tensor, lengths_S: Tensor) -> Tensor:
    """float64 [S]: reward - the group's mean weighted by response length. On-policy RL with optimal baseline,
    arXiv:2505.23585: the variance-optimal baseline where the squared gradient norm grows with the length.

    lengths_S: tokens of each response.
    """
    groups = Groups.of(reward_S, group_S)
    weight_S = lengths_S.double()
    baseline_G = groups.sum(weight_S * groups.reward_S) / groups.sum(weight_S).clamp(min=1)
    return groups.minus(baseline_G)


def remax(reward_S: Tensor, greedy_reward_S: Tensor) -> Tensor:
    """float64 [S]: reward - reward of the greedy response to the same prompt. ReMax, arXiv:2310.10505.

    greedy_reward_S: float [S], already repeated over the prompt's samples. A sample with NaN in either is excluded.
    A group whose rewards are all equal teaches, too, where the greedy response's is another. Raises ValueError for an
    infinite reward.
    """
    if bool(reward_S.isinf().any()) or bool(greedy_reward_S.isinf().any()):
        raise ValueError("infinite reward of a sample, or of the greedy response to its prompt")
    return (reward_S.double() - greedy_reward_S.double()).nan_to_num(nan=0.0)


def passk(reward_S: Tensor, group_S: Tensor, k: int) -> Tensor:
    """float64 [S]: advantages whose policy gradient, averaged over the group, is that of E[max of k rewards].

    A_i = k * mean over the sets I of k - 1 other samples of (max(I and i) - max(I)): unbiased, with each sample left
    out of its own baseline. arXiv:2505.15201 (PKPO, "sloo_minus_one"); for k = group size it is arXiv:2503.19595, where
    only the best sample counts, by its lead over the second. A group with fewer than k valid samples gives 0.

    Raises ValueError for k < 2 (the objective is then the mean: use `rloo`).
    """
    if k < 2:
        raise ValueError(f"passk needs k >= 2, not {k}; for the mean reward use rloo")
    groups = Groups.of(reward_S, group_S)
    # Sorted by (group, excluded first, reward): position j within the valid samples of the group, ascending.
    order_S = torch.argsort(torch.where(groups.valid_S, groups.reward_S, float("-inf")), stable=True)
    order_S = order_S[torch.argsort(group_S[order_S], stable=True)]
    sorted_S, sorted_group_S = groups.reward_S[order_S], group_S[order_S]
    samples_G = torch.bincount(group_S, minlength=len(groups.count_G))
    first_G = samples_G.cumsum(0) - groups.count_G.to(torch.int64)  # its first valid sample
    position_S = (torch.arange(len(order_S), device=group_S.device) - first_G[sorted_group_S]).double()

    # Of the sets I, the fraction whose members all lie among the j samples below: C(j, k-1) / C(n-1, k-1). Each step
    # from one sorted reward to the next counts by that fraction: only sums of non-negative terms, nothing cancels.
    others_S = (groups.count_G[sorted_group_S] - 1).clamp(min=k - 1)
    share_S = (_log_choose(position_S, k - 1) - _log_choose(others_S, k - 1)).exp()
    step_S = torch.where(position_S > 0, sorted_S.diff(prepend=sorted_S[:1]), 0.0) * share_S
    counts_S = groups.valid_S[order_S] & (groups.count_G[sorted_group_S] >= k)
    running_S = torch.where(counts_S, step_S, 0.0).cumsum(0)
    before_G = torch.nn.functional.pad(running_S, (1, 0))[first_G]
    lead_S = torch.empty_like(running_S)
    lead_S[order_S] = torch.where(counts_S, running_S - before_G[sorted_group_S], 0.0)
    return torch.where(groups.of_sample(groups.flat_G), 0.0, k * lead_S)


def _log_choose(n: Tensor, k: int) -> Tensor:
    """Natural logarithm of the binomial coefficient; -inf where n < k."""
    safe = n.clamp(min=k)
    log = torch.lgamma(safe + 1) - torch.lgamma(safe - k + 1) - torch.lgamma(torch.tensor(k + 1.0, dtype=n.dtype))
    return torch.where(n < k, float("-inf"), log)


def cpgd(reward_S: Tensor, group_S: Tensor, groups_sums: Tensor, weight_cap: float = 3.0) -> Tensor:
    """float64 [S]: (reward - group mean) * min(groups / groups with variance, weight_cap), over the whole batch.

    The clip-filter-like weight of CPGD, arXiv:2505.12504: batches in which few groups teach anything keep their step
    size, as if the others had been filtered out. groups_sums: `group_counts` summed over all ranks.
    """
    groups = Groups.of(reward_S, group_S)
    flat, present = groups_sums.unbind()
    weight = (present / (present - flat).clamp(min=1)).clamp(max=weight_cap)
    return groups.minus(groups.mean_G) * weight


def teaching(reward_S: Tensor, group_S: Tensor) -> Tensor:
    """bool [G]: whether the group's rewards differ, so that it has advantages other than 0."""
    return ~Groups.of(reward_S, group_S).flat_G


def group_counts(reward_S: Tensor, group_S: Tensor) -> Tensor:
    """float64 [2]: groups without variance, groups; to be summed over ranks."""
    return torch.stack(Groups.of(reward_S, group_S).zero_variance())
