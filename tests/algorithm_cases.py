"""Micro-batches and exact oracles for the tests of the algorithms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product

import torch
from torch import Tensor

from spmd_rl.algorithms.aggregate import local_counts
from spmd_rl.algorithms.ragged import offsets_of
from spmd_rl.data.batch import Batch, Column
from spmd_rl.engines.protocol import LossTerms


def make_batch(lengths: Sequence[int], columns: Mapping[str, Tensor], groups: Sequence[int] | None = None) -> Batch:
    """A batch with the given flat per-token columns; groups: prompt index per sample."""
    prompts = list(groups) if groups is not None else [0] * len(lengths)
    ids = torch.tensor([[0, prompt, i] for i, prompt in enumerate(prompts)], dtype=torch.int64).reshape(-1, 3)
    lengths_S = torch.tensor(lengths, dtype=torch.int64)
    return Batch(ids, {name: Column(values, lengths_S) for name, values in columns.items()})


def make_terms(
    batch: Batch,
    logprob_R: Tensor,
    mask_R: Tensor | None = None,
    normalizers: Mapping[str, float] | None = None,
    entropy_R: Tensor | None = None,
) -> LossTerms:
    """What a loss function sees of `batch` as one micro-batch; by default it is the whole optimizer step."""
    cu_seqlens = offsets_of(next(iter(batch.columns.values())).lengths)
    mask_R = torch.ones(logprob_R.shape[0]) if mask_R is None else mask_R
    return LossTerms(
        logprob_R=logprob_R,
        entropy_R=torch.zeros_like(logprob_R) if entropy_R is None else entropy_R,
        batch=batch,
        cu_seqlens=cu_seqlens,
        mask_R=mask_R,
        normalizers=local_counts(mask_R, cu_seqlens) if normalizers is None else normalizers,
    )


def expectation(probs_A: Tensor, draws: int, value: Callable[[tuple[int, ...]], Tensor]) -> Tensor:
    """The exact mean of `value(actions)` over all tuples of independent draws; the probabilities are constants."""
    total = torch.zeros((), dtype=torch.float64)
    for actions in product(range(len(probs_A)), repeat=draws):
        weight = torch.stack([probs_A.detach()[a] for a in actions]).prod()
        total = total + weight * value(actions)
    return total


def gradient(value: Tensor, of: Tensor) -> Tensor:
    return torch.autograd.grad(value, of)[0]


def as_good_as_the_best(reward_S: Tensor, group_S: Tensor) -> Tensor:
    """float [S]: the reward of a greedy response (for ReMax) that is worth as much as the best sample of its group."""
    found_S = reward_S.clone()
    for group in group_S.unique():
        found_S[group_S == group] = reward_S[group_S == group].nan_to_num(nan=-torch.inf).max()
    return found_S.nan_to_num(neginf=0.0)
