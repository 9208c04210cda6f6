"""Exact attention over a packed tree without a fused kernel: batched matrix products over tiles.

A tile is some nodes with one parent, padded to one length: they see the prefix (the nodes from the root to the parent)
and causally themselves; a long node is cut into ranges of query rows. The backward pass computes the probabilities
again, as flash attention does (Dao et al., 2022, arXiv:2205.14135), so that nothing of the size query x key outlives
its tile. Products are made in the dtype of the inputs, everything between them (softmax, sums over tiles) in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spmd_rl.engines.train.packing import Node

SCORES_PER_TILE = 1 << 18  # of one query head: 1 MiB of float32
MIN_FILL = 0.75  # a node joins a tile of longer ones if it fills so much of its row,
MAX_WASTE = 1 << 12  # or wastes at most so many scores of one head: less work than a tile of its own


class Span(NamedTuple):
    """Consecutive tokens of the packed row."""

    start: int
    end: int


@dataclass(frozen=True)
class Tile:
    """`rows` nodes of `length` tokens behind one prefix; queries are the tokens `first:last` of each.

    prefix: where the nodes from the root to the parent lie; later_QL: bool, whether own key comes after the query.
    start: of the first node, where all have the same length and lie one behind the other; else None, and
    token_N: int64 [rows * length], where each token lies in the packed row (padding repeats the node's last token);
    real_N: int64, the entries of token_N that are no padding.
    """

    prefix: tuple[Span, ...]
    rows: int
    length: int
    first: int
    last: int
    later_QL: Tensor
    start: int | None
    token_N: Tensor | None = None
    real_N: Tensor | None = None


def plan_tiles(nodes: Sequence[Node], scores_per_tile: int = SCORES_PER_TILE) -> tuple[Tile, ...]:
    """Tiles that cover each query once and each (query, key) pair that may see each other once.

    Parents come before their children: a tile with `token_N` is then always the first with its keys.
    """
    paths: list[tuple[Span, ...]] = []  # from the root to each node; a last entry for "no parent"
    children: dict[int, list[Span]] = {}
    for node in nodes:
        span = Span(node.start, node.start + node.length)
        above = paths[node.parent] if node.parent >= 0 else ()
        joined = bool(above) and above[-1].end == span.start
        paths.append((*above[:-1], Span(above[-1].start, span.end)) if joined else (*above, span))
        children.setdefault(node.parent, []).append(span)
    return tuple(
        tile
        for parent in sorted(children)
        for tile in _bundle(paths[parent] if parent >= 0 else (), children[parent], scores_per_tile)
    )


def _bundle(prefix: tuple[Span, ...], spans: Sequence[Span], budget: int) -> Iterator[Tile]:
    """Nodes of similar length share a tile; one that is too long for a tile is cut by query rows."""
    before = sum(span.end - span.start for span in prefix)
    waiting = sorted(spans, key=lambda s: (s.start - s.end, s.start))  # longest first
    while waiting:
        length = waiting[0].end - waiting[0].start
        keys = before + length
        if length * keys > budget:
            rows = max(budget // keys, 32)
            for first in range(0, length, rows):
                last = min(first + rows, length)
                yield Tile(prefix, 1, last, first, last, _later(first, last), waiting[0].start)
            waiting = waiting[1:]
            continue
        most = max(1, budget // (length * keys))
        least = min(MIN_FILL * length, length - MAX_WASTE / keys)
        count = sum(span.end - span.start >= least for span in waiting[:most])
        yield _tile(prefix, sorted(waiting[:count]), length)
        waiting = waiting[count:]


def _tile(prefix: tuple[Span, ...], spans: Sequence[Span], length: int) -> Tile:
    start = spans[0].start
    whole = Tile(prefix, len(spans), length, 0, length, _later(0, length), start)
    if all(span == (start + i * length, start + (i + 1) * length) for i, span in enumerate(spans)):
        return whole
    starts, ends = torch.tensor(spans).T
    tokens = starts[:, None] + torch.arange(length)
    real_N = (tokens < ends[:, None]).flatten().nonzero()[:, 0]
    return replace(whole, start=None, token_N=torch.minimum(tokens, ends[:, None] - 1).flatten(), real_N=real_N)


def _later(first: int, last: int) -> Tensor:
    return torch.arange(last) > torch.arange(first, last)[:, None]


class TiledAttention(torch.autograd.Function):
    """q_THD [T, Hq, D], k_THD and v_THD [T, Hk, D], Hk a divisor of Hq -> [T, Hq, D]; any float dtype."""

    @staticmethod
    def forward(ctx: Any, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, scale: float, tiles: Sequence[Tile]) -> Tensor:
        q_THD, k_THD, v_THD = q_THD.contiguous(), k_THD.contiguous(), v_THD.contiguous()
        out_THD = torch.empty_like(q_THD)
        for tile in tiles:
            work = _TileWork(tile, q_THD, k_THD, v_THD)
            probs = work.probabilities(scale).to(q_THD.dtype)
            work.put_queries(out_THD, work.weighted(probs, work.prefix_v, work.own_v))
        ctx.save_for_backward(q_THD, k_THD, v_THD, out_THD)
        ctx.scale, ctx.tiles = scale, tiles
        return out_THD

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, k_THD, v_THD, out_THD = ctx.saved_tensors
        grad_THD = grad_THD.contiguous()
        dq_THD = torch.empty_like(q_THD)
        between = torch.float64 if q_THD.dtype == torch.float64 else torch.float32
        dk_THD, dv_THD = torch.zeros(k_THD.shape, dtype=between), torch.zeros(v_THD.shape, dtype=between)
        for tile in ctx.tiles:
            work = _TileWork(tile, q_THD, k_THD, v_THD)
            grad, out = work.take_queries(grad_THD), work.take_queries(out_THD)
            if (real := work.real_rows()) is not None:
                grad.mul_(real)  # padding is no output: nothing flows back through it
            probs = work.probabilities(ctx.scale)
            work.add_keys(dv_THD, *work.transposed(probs.to(grad.dtype), grad))
            delta = (out.to(between) * grad).sum(-1, keepdim=True)
            dscores = work.products(grad, work.prefix_v, work.own_v).sub_(delta).mul_(probs).mul_(ctx.scale)
            dscores = dscores.to(grad.dtype)
            work.add_keys(dk_THD, *work.transposed(dscores, work.q))
            work.put_queries(dq_THD, work.weighted(dscores, work.prefix_k, work.own_k))
        return dq_THD, dk_THD.to(k_THD.dtype), dv_THD.to(v_THD.dtype), None, None


class _TileWork:
    """One tile's operands, laid out so that each product is one call.

    With H key heads, G query heads for each, R rows of Q queries and L own keys behind P prefix keys:
    q [H, R * G * Q, D]; prefix_k, prefix_v [H, P, D]; own_k, own_v [H * R, L, D]; scores [H, R * G * Q, P + L].
    """

    def __init__(self, tile: Tile, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> None:
        self.tile = tile
        self.heads, self.dim = k_THD.shape[1], k_THD.shape[2]
        self.per_head = q_THD.shape[1] // self.heads
        self.queries = tile.last - tile.first
        self.q = self.take_queries(q_THD)
        (self.prefix_k, self.own_k), (self.prefix_v, self.own_v) = self._take_keys(k_THD), self._take_keys(v_THD)

    def _rows(self, x_THD: Tensor, first: int) -> Tensor:
        """The tokens of all rows from `first` on, [R * n, ...]; a view where they are consecutive."""
        if self.tile.token_N is not None:
            return x_THD.index_select(0, self.tile.token_N)
        assert self.tile.start is not None
        return x_THD[self.tile.start + first : self.tile.start + self.tile.rows * self.tile.length]

    def take_queries(self, x_THD: Tensor) -> Tensor:
        """[H, R * G * Q, D], a copy."""
        shape = self.tile.rows, self.queries, self.heads, self.per_head, self.dim
        x = self._rows(x_THD, self.tile.first).view(shape).permute(2, 0, 3, 1, 4)
        return torch.empty(x.shape, dtype=x.dtype).copy_(x).view(self.heads, -1, self.dim)

    def _take_keys(self, x_THD: Tensor) -> tuple[Tensor, Tensor]:
        spans = [x_THD[span.start : span.end] for span in self.tile.prefix]
        prefix = spans[0] if len(spans) == 1 else torch.cat(spans) if spans else x_THD[:0]
        prefix = prefix.transpose(0, 1).contiguous()
        x = self._rows(x_THD, 0).view(self.tile.rows, self.tile.length, self.heads, self.dim).permute(2, 0, 1, 3)
        return prefix, torch.empty(x.shape, dtype=x.dtype).copy_(x).view(-1, self.tile.length, self.dim)

    def real_rows(self) -> Tensor | None:
        """[1, R * G * Q, 1]: 0 for padding, else 1; None where nothing is padded."""
        if self.tile.real_N is None or len(self.tile.real_N) == self.tile.rows * self.tile.length:
            return None
        real = self.q.new_zeros(self.tile.rows * self.tile.length).index_fill_(0, self.tile.real_N, 1.0)
        return real.view(self.tile.rows, 1, -1).expand(-1, self.per_head, -1).reshape(1, -1, 1)

    def products(self, x: Tensor, prefix: Tensor, own: Tensor) -> Tensor:
        """x [H, R * G * Q, D] times each key row -> [H, R * G * Q, P + L], float32 (float64 for float64)."""
        between = torch.float64 if x.dtype == torch.float64 else torch.float32
        own_part = torch.bmm(x.view(own.shape[0], -1, self.dim), own.transpose(1, 2))
        own_part = own_part.view(self.heads, -1, self.tile.length)
        if prefix.shape[1] == 0:
            return own_part.to(between)
        return torch.cat([torch.bmm(x, prefix.transpose(1, 2)), own_part], dim=-1).to(between)

    def probabilities(self, scale: float) -> Tensor:
        """[H, R * G * Q, P + L]; a key after its query has 0."""
        scores = self.products(self.q, self.prefix_k, self.own_k).mul_(scale)
        own_part = scores[..., self.prefix_k.shape[1] :].view(self.heads, -1, *self.tile.later_QL.shape)
        own_part.masked_fill_(self.tile.later_QL, float("-inf"))
        return scores.softmax(-1)

    def weighted(self, weights: Tensor, prefix: Tensor, own: Tensor) -> Tensor:
        """Key rows summed by weights [H, R * G * Q, P + L] -> [H, R * G * Q, D]."""
        split = prefix.shape[1]
        out = torch.bmm(weights.view(own.shape[0], -1, weights.shape[-1])[..., split:], own)
        out = out.view(self.heads, -1, self.dim)
        return out.baddbmm_(weights[..., :split], prefix) if split else out

    def transposed(self, weights: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [H, R * G * Q, D] summed by weights onto the keys -> [H, P, D], [H * R, L, D]."""
        split, batches = self.prefix_k.shape[1], self.heads * self.tile.rows
        own_weights = weights.view(batches, -1, weights.shape[-1])[..., split:]
        own = torch.bmm(own_weights.transpose(1, 2), x.view(batches, -1, self.dim))
        return torch.bmm(weights[..., :split].transpose(1, 2), x), own

    def put_queries(self, target_THD: Tensor, x: Tensor) -> None:
        """The inverse of `take_queries`; padding is dropped."""
        x = x.view(self.heads, self.tile.rows, self.per_head, -1, self.dim).permute(1, 3, 0, 2, 4)
        if self.tile.start is not None:
            self._rows(target_THD, self.tile.first).view(x.shape).copy_(x)
            return
        self._put_real(target_THD, x.reshape(-1, *target_THD.shape[1:]))

    def add_keys(self, target_THD: Tensor, prefix: Tensor, own: Tensor) -> None:
        """Adds what belongs to the prefix and to the own keys. Padding keys are seen by padding alone."""
        done = 0
        for start, end in self.tile.prefix:
            target_THD[start:end] += prefix[:, done : done + end - start].transpose(0, 1)
            done += end - start
        own = own.view(self.heads, -1, self.tile.length, self.dim).permute(1, 2, 0, 3)
        if self.tile.start is not None:
            rows = self._rows(target_THD, 0)
            rows.view(own.shape).add_(own)
            return
        # The first tile with these keys: there is nothing yet to add to.
        self._put_real(target_THD, own.reshape(-1, *target_THD.shape[1:]))

    def _put_real(self, target_THD: Tensor, x_NHD: Tensor) -> None:
        token_N, real_N = self.tile.token_N, self.tile.real_N
        assert token_N is not None and real_N is not None
        if len(real_N) < len(token_N):
            token_N, x_NHD = token_N[real_N], x_NHD.index_select(0, real_N)
        target_THD.index_copy_(0, token_N, x_NHD.to(target_THD.dtype))
