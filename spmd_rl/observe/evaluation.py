"""Estimates from evaluation samples, with their uncertainty. Pure functions, but for the one that gathers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb, isnan, sqrt
from statistics import fmean, stdev

import torch.distributed as dist
from torch.distributed import ProcessGroup

Z95 = 1.959963984540054  # two-sided 95 % quantile of the normal distribution
OVERALL = "overall"


@dataclass(frozen=True)
class Outcome:
    """One evaluated sample. prompt: its index, the same for all samples of a prompt; passed: false where the sample
    was excluded (its reward is NaN then)."""

    source: str
    prompt: int
    passed: bool
    reward: float
    tokens: int


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % confidence interval."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


@dataclass(frozen=True)
class EvalResult:
    """What one data set gave. prompts, samples: how many; pass_at: estimate by k; reward: mean over the samples that
    were not excluded (NaN: all were); tokens: mean response length."""

    source: str
    prompts: int
    samples: int
    pass_at: Mapping[int, Estimate]
    reward: float
    tokens: float

    def metrics(self) -> dict[str, float]:
        """`eval/<set>/pass@k`, `…_low`, `…_high`, `n` (prompts), `samples`, `reward_mean`, `length_mean`."""
        place = f"eval/{self.source}"
        values: dict[str, float] = {f"{place}/n": self.prompts, f"{place}/samples": self.samples}
        for k, estimate in self.pass_at.items():
            values[f"{place}/pass@{k}"] = estimate.value
            values[f"{place}/pass@{k}_low"] = estimate.low
            values[f"{place}/pass@{k}_high"] = estimate.high
        return values | {f"{place}/reward_mean": self.reward, f"{place}/length_mean": self.tokens}


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Unbiased estimate, from `samples` drawn of which `passed` passed, of the chance that one of k passes:
    1 − C(n−c, k) / C(n, k) (Chen et al. 2021, "Evaluating large language models trained on code", eq. 1).

    Raises ValueError where k > samples: there is no unbiased estimate then.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} can't be estimated from {samples} samples of a prompt")
    return 1.0 - comb(samples - passed, k) / comb(samples, k)


def wilson(passed: float, n: int) -> Estimate:
    """Share of `passed` in `n` independent trials with Wilson's score interval (Wilson 1927), which stays right near
    0 and 1 and for small n."""
    share = passed / n
    centre = (share + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 / (1 + Z95**2 / n) * sqrt(share * (1 - share) / n + Z95**2 / (4 * n**2))
    # At shares of 0 and 1 the end of the interval is the share itself; rounding must not move it past.
    return Estimate(share, max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half)))


def estimate(per_prompt: Sequence[float], single: bool) -> Estimate:
    """Mean of one value per prompt (each within 0…1) with its 95 % interval.

    single: each value comes from one sample, 0 or 1: Wilson's interval. Else the samples of a prompt are a cluster:
    mean ± 1.96 standard errors of the prompts' means. Where that error can't be had (one prompt, or all alike) it is
    Wilson's interval over prompts, which is too wide rather than too narrow.
    """
    n = len(per_prompt)
    mean = fmean(per_prompt)
    spread = stdev(per_prompt) if n > 1 else 0.0
    if single or spread == 0.0:
        return wilson(sum(per_prompt), n)
    half = Z95 * spread / sqrt(n)
    return Estimate(mean, max(0.0, mean - half), min(1.0, mean + half))


def summarize(outcomes: Sequence[Outcome], pass_at: Sequence[int] = (1,)) -> list[EvalResult]:
    """One result per source, in alphabetical order, and `overall` over all prompts where there are several sources.

    The order of `outcomes` does not matter. Raises ValueError where a prompt has fewer samples than some k.
    """
    by_source: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_source.setdefault(outcome.source, []).append(outcome)
    results = [_result(source, by_source[source], pass_at) for source in sorted(by_source)]
    if len(results) > 1:
        results.append(_result(OVERALL, outcomes, pass_at))
    return results


def gather_outcomes(outcomes: Sequence[Outcome], group: ProcessGroup | None) -> list[Outcome]:
    """The outcomes of all ranks, on every rank; collective over `group` (None: this process alone). A few tens of
    bytes per sample."""
    if group is None:
        return list(outcomes)
    gathered: list[list[Outcome]] = [[] for _ in range(group.size())]
    dist.all_gather_object(gathered, list(outcomes), group=group)
    return [outcome for part in gathered for outcome in part]


def _result(name: str, outcomes: Sequence[Outcome], pass_at: Sequence[int]) -> EvalResult:
    counts: dict[tuple[str, int], tuple[int, int]] = {}
    for outcome in outcomes:
        samples, passed = counts.get((outcome.source, outcome.prompt), (0, 0))
        counts[outcome.source, outcome.prompt] = (samples + 1, passed + outcome.passed)
    ordered = [counts[key] for key in sorted(counts)]
    single = all(samples == 1 for samples, _ in ordered)
    estimates = {k: estimate([pass_at_k(n, c, k) for n, c in ordered], single) for k in pass_at}
    rewards = [outcome.reward for outcome in outcomes if not isnan(outcome.reward)]
    return EvalResult(
        source=name,
        prompts=len(ordered),
        samples=len(outcomes),
        pass_at=estimates,
        reward=fmean(rewards) if rewards else float("nan"),
        tokens=fmean(outcome.tokens for outcome in outcomes),
    )
