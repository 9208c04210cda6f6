"""Attention over a packed tree, registered with transformers under the name `spmd_rl`.

A model loaded with `attn_implementation=ATTENTION` calls `packed_attention` in every layer and hands on the keyword
`packed_tree` of its own forward call. On CUDA one compiled flex-attention kernel gets the exact mask; elsewhere the
nodes are computed tile by tile (`tiles.py`), without a [T, T] mask.
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
from spmd_rl.engines.train.packing import Node
from spmd_rl.engines.train.tiles import TiledAttention, plan_tiles

ATTENTION = "spmd_rl"


class PackedTree:
    """What the attention of every layer needs to know of one packed row; made once per forward call."""

    def __init__(self, nodes: Sequence[Node], device: torch.device) -> None:
        depths: list[int] = []
        for node in nodes:
            depths.append(node.length + (depths[node.parent] if node.parent >= 0 else 0))
        self.longest = max(depths)
        self.on_cuda = device.type == "cuda"
        if self.on_cuda:
            self.mask = block_mask(nodes, device)
        else:
            self.tiles = plan_tiles(nodes)


def mask_function(nodes: Sequence[Node], device: torch.device) -> Callable[..., Tensor]:
    """mask(batch, head, query, key) -> bool: may `query` see `key`? In the form that flex attention wants.

    In depth-first order, what may see a key are the tokens from it to the end of its node's last descendant.
    """
    end_T = torch.cat([torch.full((node.length,), node.end, dtype=torch.int32) for node in nodes]).to(device)

    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query < end_T[key])

    return mask


def block_mask(nodes: Sequence[Node], device: torch.device) -> BlockMask:
    tokens = nodes[-1].start + nodes[-1].length
    return create_block_mask(mask_function(nodes, device), None, None, tokens, tokens, device=device)


@cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packed_tree: PackedTree | None = None,
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
    if packed_tree is None:
        raise UserError(f"{name} does not hand its forward keywords to its attention: not supported by the trainer")
    for wanted in ("softcap", "s_aux", "position_bias", "cache"):
        if unused.get(wanted) is not None:
            raise UserError(f"{name} wants attention with {wanted!r}, which the trainer does not compute")
    if dropout != 0.0:
        raise UserError(f"{name} wants attention dropout, which would change the policy's probabilities; set it to 0")
    if sliding_window is not None and packed_tree.longest > sliding_window:
        raise UserError(
            f"a sequence of {packed_tree.longest} tokens is longer than the model's sliding window of {sliding_window}"
            ", which the trainer does not compute; lower data.max_prompt_tokens + rollout.max_tokens"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if packed_tree.on_cuda:
        grouped = query.shape[1] != key.shape[1]
        out = _compiled_flex()(query, key, value, block_mask=packed_tree.mask, scale=scale, enable_gqa=grouped)
        return out.transpose(1, 2).contiguous(), None
    out_THD = TiledAttention.apply(
        query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), scale, packed_tree.tiles
    )
    return out_THD[None], None


AttentionInterface.register(ATTENTION, packed_attention)
