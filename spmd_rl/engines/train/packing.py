"""From a ragged batch to one row of tokens, in which each group's prompt may stand once for all of its responses.

A *block* is a causal prefix and tails that see the prefix and, causally, themselves, but not each other. With
prefix sharing a block is a prompt and the responses to it; without, each sample is a block of its own, all prefix.
The last token of a response predicts nothing and is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from spmd_rl.config.errors import UserError
from spmd_rl.data.batch import Batch


class Span(NamedTuple):
    """Consecutive tokens of the packed row."""

    start: int
    length: int


class Block(NamedTuple):
    prefix: Span
    tails: tuple[Span, ...]


@dataclass(frozen=True)
class Packed:
    """T packed tokens that predict R response tokens.

    input_ids_T, position_ids_T: int64 [T], T >= 1; predict_R: int64 [R], the packed token whose hidden state predicts
    each response token, in batch order; target_R: int64 [R], those tokens; blocks: cover the T tokens in order;
    tokens: T, or 0 where the batch has no response token and the one packed token is only there to be computed.
    """

    input_ids_T: Tensor
    position_ids_T: Tensor
    predict_R: Tensor
    target_R: Tensor
    blocks: tuple[Block, ...]
    tokens: int


def prefix_groups(batch: Batch, shared: bool) -> Tensor:
    """int64 [S]: samples with the same number are packed behind one prompt.

    With `shared`: those of one (epoch, prompt_index) whose prompt tokens are equal; else every sample has its own.
    """
    if not shared:
        return torch.arange(len(batch))
    numbers: dict[tuple[int, bytes], int] = {}
    prompts = batch["prompt"].rows() if len(batch) else ()
    keys = zip(batch.groups().tolist(), (p.cpu().numpy().tobytes() for p in prompts), strict=True)
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys], dtype=torch.int64)


def pack(batch: Batch, shared: bool) -> Packed:
    """Packs the columns `prompt` and `response`.

    Raises UserError for a response without a prompt: nothing predicts its first token.
    """
    if len(batch) == 0 or batch["response"].values.numel() == 0:
        zero, none = torch.zeros(1, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
        return Packed(zero, zero, none, none, (Block(Span(0, 1), ()),), tokens=0)
    prompts, responses = batch["prompt"].rows(), batch["response"].rows()
    members: dict[int, list[int]] = {}
    for sample, group in enumerate(prefix_groups(batch, shared).tolist()):
        if len(responses[sample]) == 0:
            continue
        if len(prompts[sample]) == 0:
            identity = tuple(batch.ids[sample].tolist())
            raise UserError(f"sample {identity} has an empty prompt; give it at least one token")
        members.setdefault(group, []).append(sample)

    ids: list[Tensor] = []
    positions: list[Tensor] = []
    blocks: list[Block] = []
    predict: list[Tensor] = [torch.empty(0, dtype=torch.int64)] * len(batch)
    total = 0
    for samples in members.values():
        prompt = prompts[samples[0]]
        ids.append(prompt)
        positions.append(torch.arange(len(prompt)))
        last, end = total + len(prompt) - 1, total + len(prompt)
        tails = []
        for sample in samples:
            tail = responses[sample][:-1]
            ids.append(tail)
            positions.append(torch.arange(len(prompt), len(prompt) + len(tail)))
            predict[sample] = torch.cat([torch.tensor([last]), torch.arange(end, end + len(tail))])
            if len(tail):
                tails.append(Span(end, len(tail)))
            end += len(tail)
        alone = len(samples) == 1  # prompt and response are then simply one causal sequence
        prefix = Span(total, end - total if alone else len(prompt))
        blocks.append(Block(prefix, () if alone else tuple(tails)))
        total = end
    return Packed(
        input_ids_T=torch.cat(ids).long(),
        position_ids_T=torch.cat(positions),
        predict_R=torch.cat(predict),
        target_R=batch["response"].values.long(),
        blocks=tuple(blocks),
        tokens=total,
    )
