"""Attention over packed blocks, registered with transformers under the name `spmd_rl`.

A model loaded with `attn_implementation=ATTENTION` calls `packed_attention` in every layer and hands on the keyword
`blocks` of its own forward call. On CUDA one compiled flex-attention kernel gets the exact block mask; elsewhere the
blocks are computed tile by tile in float32 (`tiles.py`), without a [T, T] mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface

from spmd_rl.config.errors import UserError
from spmd_rl.engines.train.packing import Block
from spmd_rl.engines.train.tiles import TiledAttention, plan_tiles

ATTENTION = "spmd_rl"


class PackedBlocks:
    """What the attention of every layer needs to know of one packed row; made once per forward call."""

    def __init__(self, blocks: Sequence[Block], device: torch.device) -> None:
        last = blocks[-1].tails[-1] if blocks[-1].tails else blocks[-1].prefix
        self.tokens = last.start + last.length
        self.longest = max(b.prefix.length + max((t.length for t in b.tails), default=0) for b in blocks)
        self.on_cuda = device.type == "cuda"
        if self.on_cuda:
            self.mask = block_mask(blocks, self.tokens, device)
        else:
            self.tiles = plan_tiles(blocks)


def mask_function(blocks: Sequence[Block], tokens: int, device: torch.device) -> Callable[..., Tensor]:
    """mask(batch, head, query, key) -> bool: may `query` see `key`? In the form that flex attention wants."""
    block_T = torch.empty(tokens, dtype=torch.int32)
    tail_T = torch.zeros(tokens, dtype=torch.int32)  # 0: prefix
    for i, (prefix, tails) in enumerate(blocks):
        block_T[prefix.start : prefix.start + prefix.length] = i
        for j, tail in enumerate(tails):
            block_T[tail.start : tail.start + tail.length] = i
            tail_T[tail.start : tail.start + tail.length] = j + 1
    block_T, tail_T = block_T.to(device), tail_T.to(device)

    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = (tail_T[key] == 0) | (tail_T[key] == tail_T[query])
        return (block_T[query] == block_T[key]) & (query >= key) & visible

    return mask


def block_mask(blocks: Sequence[Block], tokens: int, device: torch.device) -> BlockMask:
    return create_block_mask(mask_function(blocks, tokens, device), None, None, tokens, tokens, device=device)


@cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    blocks: PackedBlocks | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """query [1, Hq, T, D], key and value [1, Hk, T, D] -> [1, T, Hq, D] of the query's dtype.

    Raises UserError where the model wants what this attention does not compute.
    """
    del attention_mask  # none is made for an implementation without a mask function of its own
    name = type(module).__name__
    if blocks is None:
        raise UserError(f"{name} does not hand its forward keywords to its attention: not supported by the trainer")
    for wanted in ("softcap", "s_aux", "position_bias", "cache"):
        if unused.get(wanted) is not None:
            raise UserError(f"{name} wants attention with {wanted!r}, which the trainer does not compute")
    if dropout != 0.0:
        raise UserError(f"{name} wants attention dropout, which would change the policy's probabilities; set it to 0")
    if sliding_window is not None and blocks.longest > sliding_window:
        raise UserError(
            f"a sequence of {blocks.longest} tokens is longer than the model's sliding window of {sliding_window}, "
            "which the trainer does not compute; lower data.max_prompt_tokens + rollout.max_tokens"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if blocks.on_cuda:
        grouped = query.shape[1] != key.shape[1]
        out = _compiled_flex()(query, key, value, block_mask=blocks.mask, scale=scale, enable_gqa=grouped)
        return out.transpose(1, 2).contiguous(), None
    out_THD = TiledAttention.apply(
        query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), scale, blocks.tiles
    )
    return out_THD[None], None


AttentionInterface.register(ATTENTION, packed_attention)
