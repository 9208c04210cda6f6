"""Which samples of a batch are computed together, under a budget of packed tokens. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spmd_rl.data.batch import Batch


def microbatches(batch: Batch, shared: bool, budget: int) -> list[Tensor]:
    """Sample indices (int64, ascending) of each micro-batch of at most `budget` packed tokens.

    shared: samples of one (epoch, prompt_index) with equal prompts go together where they can, since their prompt is
    then computed once; and what all prompts begin with (the system prompt) is counted once per micro-batch.
    """
    if not len(batch):
        return []
    groups_S, common = torch.arange(len(batch)), 0
    if shared:
        prompts = [prompt.cpu() for prompt in batch["prompt"].rows()]
        numbers: dict[tuple[int, bytes], int] = {}
        keys = zip(batch.groups().tolist(), (p.numpy().tobytes() for p in prompts), strict=True)
        groups_S = torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys], dtype=torch.int64)
        common = _common_beginning(prompts)
    return plan_microbatches(batch["prompt"].lengths, batch["response"].lengths, groups_S, budget, common)


def plan_microbatches(
    prompt_lengths_S: Tensor, response_lengths_S: Tensor, groups_S: Tensor, budget: int, common: int = 0
) -> list[Tensor]:
    """Sample indices (int64, ascending) of each micro-batch; every sample is in exactly one.

    A micro-batch's cost is its packed tokens: the first `common` tokens of every prompt once, the rest of a prompt
    once per group (`groups_S`, equal numbers share a prompt) and each response but for its last token. A group stays
    whole where it fits the budget by itself; otherwise it is cut into parts, each with the prompt again. A single
    sample over the budget is computed alone. Groups are taken largest first and put where they still fit (first-fit
    decreasing).
    """
    budget = max(budget - common, 1)
    prompts, tails = (prompt_lengths_S - common).tolist(), (response_lengths_S - 1).clamp(min=0).tolist()
    members: dict[int, list[int]] = {}
    for sample, group in enumerate(groups_S.tolist()):
        members.setdefault(group, []).append(sample)
    parts = [part for samples in members.values() for part in _cut(samples, prompts, tails, budget)]
    parts.sort(key=lambda part: (-part[0], part[1][0]))  # ties by position: the same on every machine

    loads: list[int] = []
    bins: list[list[int]] = []
    for cost, samples in parts:
        for i, load in enumerate(loads):
            if load + cost <= budget:
                loads[i] += cost
                bins[i].extend(samples)
                break
        else:
            loads.append(cost)
            bins.append(list(samples))
    return [torch.tensor(sorted(samples), dtype=torch.int64) for samples in bins]


def _cut(
    samples: Sequence[int], prompts: Sequence[int], tails: Sequence[int], budget: int
) -> list[tuple[int, list[int]]]:
    """One group as (cost, samples) parts of at most `budget` tokens, as even as their number allows."""
    prompt = prompts[samples[0]]
    room = max(budget - prompt, 1)
    count = max(1, -(-sum(tails[s] for s in samples) // room))
    while True:
        # Longest first onto the shortest part: even parts, so that few are needed and none towers over the rest.
        parts: list[tuple[int, list[int]]] = [(prompt, []) for _ in range(min(count, len(samples)))]
        for sample in sorted(samples, key=lambda s: (-tails[s], s)):
            i = min(range(len(parts)), key=lambda k: (parts[k][0], k))
            parts[i] = (parts[i][0] + tails[sample], [*parts[i][1], sample])
        if len(parts) == len(samples) or all(cost <= budget for cost, _ in parts):
            return [(cost, part) for cost, part in parts if part]
        count += 1


def _common_beginning(rows: Sequence[Tensor]) -> int:
    """How many first tokens all rows have in common; 0 where there is one row."""
    common = len(rows[0]) if len(rows) > 1 else 0
    for row in rows[1:]:
        common = min(common, len(row))
        different = (rows[0][:common] != row[:common]).nonzero()
        if len(different):
            common = int(different[0])
    return common
