"""Exact attention over packed blocks without a fused kernel: batched matrix products over tiles, in float32.

A tile is a prefix (possibly empty) and sequences, padded to one length, that see the prefix and causally themselves;
a long sequence is cut into ranges of query rows. The backward pass computes the probabilities again, as flash
attention does (Dao et al., 2022, arXiv:2205.14135), so that nothing of the size query x key outlives its tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spmd_rl.engines.train.packing import Block, Span

SCORES_PER_TILE = 1 << 18  # of one query head: 1 MiB of float32
MIN_FILL = 0.75  # a sequence joins a tile of longer ones if it fills so much of its row


@dataclass(frozen=True)
class Tile:
    """`rows` sequences of `length` tokens (padded) behind one prefix; queries are the rows `first:last` of each.

    token_RL: int64 [rows, length], where each token lies in the packed row (padding repeats the sequence's last
    token); real_RQ: bool [rows, last - first], false for padding, or None where there is none.
    """

    prefix: Span
    token_RL: Tensor
    first: int
    last: int
    real_RQ: Tensor | None


def plan_tiles(blocks: Sequence[Block], scores_per_tile: int = SCORES_PER_TILE) -> tuple[Tile, ...]:
    """Tiles that cover each query once and each (query, key) pair that may see each other once."""
    none = Span(0, 0)
    tiles = list(_bundle(none, [block.prefix for block in blocks], scores_per_tile))
    for block in blocks:
        tiles.extend(_bundle(block.prefix, block.tails, scores_per_tile))
    return tuple(tiles)


def _bundle(prefix: Span, sequences: Sequence[Span], budget: int) -> Iterator[Tile]:
    """Sequences of similar length share a tile; one that is too long for a tile is cut by query rows."""
    waiting = sorted(sequences, key=lambda s: (-s.length, s.start))
    while waiting:
        length = waiting[0].length
        keys = prefix.length + length
        if length * keys > budget:
            rows = max(budget // keys, 32)
            token_RL = torch.arange(waiting[0].start, waiting[0].start + length)[None]
            for first in range(0, length, rows):
                last = min(first + rows, length)
                yield Tile(prefix, token_RL[:, :last], first, last, None)
            waiting = waiting[1:]
            continue
        most = max(1, budget // (length * keys))
        count = sum(s.length >= MIN_FILL * length for s in waiting[:most])
        lengths = torch.tensor([s.length for s in waiting[:count]])
        starts = torch.tensor([s.start for s in waiting[:count]])
        column = torch.arange(length)
        token_RL = starts[:, None] + torch.minimum(column, lengths[:, None] - 1)
        real_RQ = None if bool((lengths == length).all()) else column < lengths[:, None]
        yield Tile(prefix, token_RL, 0, length, real_RQ)
        waiting = waiting[count:]


class TiledAttention(torch.autograd.Function):
    """q_THD [T, Hq, D], k_THD and v_THD [T, Hk, D], Hk a divisor of Hq -> [T, Hq, D]; any float dtype."""

    @staticmethod
    def forward(ctx: Any, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, scale: float, tiles: Sequence[Tile]) -> Tensor:
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype)
        for tile in tiles:
            work = _TileWork(tile, q_THD, k_THD, v_THD, scale)
            work.scatter_queries(out_THD, work.weighted(work.probabilities(), work.prefix_v, work.own_v))
        ctx.save_for_backward(q_THD, k_THD, v_THD, out_THD)
        ctx.scale, ctx.tiles = scale, tiles
        return out_THD

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, k_THD, v_THD, out_THD = ctx.saved_tensors
        dq_THD = torch.empty(q_THD.shape, dtype=torch.float32)
        dk_THD = torch.zeros(k_THD.shape, dtype=torch.float32)
        dv_THD = torch.zeros(v_THD.shape, dtype=torch.float32)
        for tile in ctx.tiles:
            work = _TileWork(tile, q_THD, k_THD, v_THD, ctx.scale)
            grad, out = work.gather_queries(grad_THD), work.gather_queries(out_THD)
            if (real := work.real_rows()) is not None:
                grad = grad * real  # padding rows are no output: nothing flows back through them
            delta = (grad * out).sum(-1, keepdim=True)
            probs = work.probabilities()
            work.scatter_keys(dv_THD, *work.transposed(probs, grad))
            dscores = work.products(grad, work.prefix_v, work.own_v).sub_(delta).mul_(probs)
            work.scatter_keys(dk_THD, *work.transposed(dscores, work.q))
            work.scatter_queries(dq_THD, work.weighted(dscores, work.prefix_k, work.own_k).mul_(ctx.scale))
        return dq_THD.to(q_THD.dtype), dk_THD.to(k_THD.dtype), dv_THD.to(v_THD.dtype), None, None


class _TileWork:
    """One tile's operands in float32, laid out so that each product is one call.

    With H key heads, G query heads for each, R rows of Q queries and L own keys behind P prefix keys:
    q [H, R * G * Q, D]; prefix_k, prefix_v [H, P, D]; own_k, own_v [H * R, L, D]; scores [H, R * G * Q, P + L].
    """

    def __init__(self, tile: Tile, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, scale: float) -> None:
        self.tile = tile
        self.heads, self.dim = k_THD.shape[1], k_THD.shape[2]
        self.per_head = q_THD.shape[1] // self.heads
        self.rows, self.length = tile.token_RL.shape
        self.query_tokens = tile.token_RL[:, tile.first : tile.last]
        self.q = self.gather_queries(q_THD).mul_(scale)
        (self.prefix_k, self.own_k), (self.prefix_v, self.own_v) = self._gather_keys(k_THD), self._gather_keys(v_THD)

    def gather_queries(self, x_THD: Tensor) -> Tensor:
        """[H, R * G * Q, D], float32, a copy."""
        x = x_THD[self.query_tokens].view(*self.query_tokens.shape, self.heads, self.per_head, self.dim)
        out = torch.empty(self.heads, self.rows, self.per_head, self.query_tokens.shape[1], self.dim)
        return out.copy_(x.permute(2, 0, 3, 1, 4)).view(self.heads, -1, self.dim)

    def _gather_keys(self, x_THD: Tensor) -> tuple[Tensor, Tensor]:
        start, length = self.tile.prefix
        prefix = torch.empty(self.heads, length, self.dim).copy_(x_THD[start : start + length].transpose(0, 1))
        own = torch.empty(self.heads, self.rows, self.length, self.dim)
        own.copy_(x_THD[self.tile.token_RL].permute(2, 0, 1, 3))
        return prefix, own.view(-1, self.length, self.dim)

    def real_rows(self) -> Tensor | None:
        """float32 [1, R * G * Q, 1]: 0 for padding; None where nothing is padded."""
        if self.tile.real_RQ is None:
            return None
        return self.tile.real_RQ[:, None].expand(-1, self.per_head, -1).reshape(1, -1, 1).float()

    def products(self, x: Tensor, prefix: Tensor, own: Tensor) -> Tensor:
        """x [H, R * G * Q, D] times each key row -> [H, R * G * Q, P + L]."""
        own_part = torch.bmm(x.view(self.heads * self.rows, -1, self.dim), own.transpose(1, 2))
        own_part = own_part.view(self.heads, -1, self.length)
        if prefix.shape[1] == 0:
            return own_part
        return torch.cat([torch.bmm(x, prefix.transpose(1, 2)), own_part], dim=-1)

    def probabilities(self) -> Tensor:
        """[H, R * G * Q, P + L]; a key after its query has 0."""
        scores = self.products(self.q, self.prefix_k, self.own_k)
        queries = torch.arange(self.tile.first, self.tile.last)
        later = torch.arange(self.length) > queries[:, None]
        own_part = scores[..., self.tile.prefix.length :].view(self.heads, -1, len(queries), self.length)
        own_part.masked_fill_(later, float("-inf"))
        return scores.softmax(-1)

    def weighted(self, weights: Tensor, prefix: Tensor, own: Tensor) -> Tensor:
        """Key rows summed by weights [H, R * G * Q, P + L] -> [H, R * G * Q, D]."""
        split = prefix.shape[1]
        own_weights = weights.view(self.heads * self.rows, -1, weights.shape[-1])[..., split:]
        out = torch.bmm(own_weights, own).view(self.heads, -1, self.dim)
        return out.baddbmm_(weights[..., :split], prefix) if split else out

    def transposed(self, weights: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [H, R * G * Q, D] summed by weights onto the keys -> [H, P, D], [H * R, L, D]."""
        split = self.tile.prefix.length
        own_weights = weights.view(self.heads * self.rows, -1, weights.shape[-1])[..., split:]
        own = torch.bmm(own_weights.transpose(1, 2), x.view(self.heads * self.rows, -1, self.dim))
        return torch.bmm(weights[..., :split].transpose(1, 2), x), own

    def scatter_queries(self, target_THD: Tensor, x: Tensor) -> None:
        """The inverse of `gather_queries`; padding is dropped."""
        x = x.view(self.heads, self.rows, self.per_head, -1, self.dim).permute(1, 3, 0, 2, 4)
        x = x.reshape(*self.query_tokens.shape, -1, self.dim).to(target_THD.dtype)
        tokens = self.query_tokens
        if (real := self.tile.real_RQ) is not None:
            x, tokens = x[real], tokens[real]
        target_THD[tokens] = x

    def scatter_keys(self, target_THD: Tensor, prefix: Tensor, own: Tensor) -> None:
        """Adds gradients of the prefix and of the own keys. A padding key is seen by padding alone: it adds 0."""
        start, length = self.tile.prefix
        target_THD[start : start + length] += prefix.transpose(0, 1)
        own = own.view(self.heads, -1, self.length, self.dim)
        own = own.permute(1, 2, 0, 3).reshape(-1, self.heads, self.dim)
        target_THD.index_add_(0, self.tile.token_RL.flatten(), own)
