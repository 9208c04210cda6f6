"""Tiled and flex attention over packed blocks against a dense float64 softmax written out by its definition."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from spmd_rl.engines.train.attention import mask_function
from spmd_rl.engines.train.packing import Block, Span
from spmd_rl.engines.train.tiles import TiledAttention, plan_tiles


def blocks_of(*groups: tuple[int, list[int]]) -> tuple[tuple[Block, ...], int]:
    """(prefix length, tail lengths) of each group -> blocks and the number of tokens."""
    blocks, total = [], 0
    for prefix, tails in groups:
        start, total = total, total + prefix
        spans = []
        for tail in tails:
            spans.append(Span(total, tail))
            total += tail
        blocks.append(Block(Span(start, prefix), tuple(spans)))
    return tuple(blocks), total


def visible(blocks: tuple[Block, ...], tokens: int) -> Tensor:
    """bool [query, key], by listing for each sequence what it consists of."""
    mask = torch.zeros(tokens, tokens, dtype=torch.bool)
    for prefix, tails in blocks:
        before = list(range(prefix.start, prefix.start + prefix.length))
        sequences = [before] + [before + list(range(t.start, t.start + t.length)) for t in tails]
        for sequence in sequences:
            for i, query in enumerate(sequence):
                mask[query, sequence[: i + 1]] = True
    return mask


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor) -> Tensor:
    """[T, Hq, D], [T, Hk, D] -> [T, Hq, D]."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, float("-inf")).softmax(-1), v)


SHAPES: dict[str, list[tuple[int, list[int]]]] = {
    "one sequence": [(7, [])],
    "shared prefix, ragged tails": [(5, [3, 1, 4, 4, 2]), (1, [6, 6])],
    "mixed": [(3, []), (9, [2, 5]), (4, []), (2, [1, 1, 1])],
    "long prefix": [(70, [33, 40]), (64, [])],
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("heads", [(6, 2), (3, 3)])
@pytest.mark.parametrize("scores_per_tile", [1 << 18, 400])
def test_tiles_equal_dense_attention_and_its_gradients(name: str, heads: tuple[int, int], scores_per_tile: int) -> None:
    blocks, tokens = blocks_of(*SHAPES[name])
    generator = torch.Generator().manual_seed(3)
    shapes = [(tokens, count, 8) for count in (heads[0], heads[1], heads[1], heads[0])]
    q, k, v, grad = (torch.randn(shape, generator=generator) * 2 for shape in shapes)
    ours = [x.clone().requires_grad_() for x in (q, k, v)]
    oracle = [x.double().requires_grad_() for x in (q, k, v)]
    out = TiledAttention.apply(*ours, 0.3, plan_tiles(blocks, scores_per_tile))
    want = dense(oracle[0], oracle[1], oracle[2], 0.3, visible(blocks, tokens))
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
    out.backward(grad)
    want.backward(grad.double())
    for mine, theirs in zip(ours, oracle, strict=True):
        assert mine.grad is not None and theirs.grad is not None
        torch.testing.assert_close(mine.grad.double(), theirs.grad, atol=2e-5, rtol=2e-5)


def test_bfloat16_rounds_products_only() -> None:
    """The error is that of bfloat16 (8 bits) on scores and on probabilities, not that of a bfloat16 softmax."""
    blocks, tokens = blocks_of((40, [9, 7, 9]))
    generator = torch.Generator().manual_seed(0)
    ours = [torch.randn(tokens, h, 16, generator=generator).bfloat16().requires_grad_() for h in (4, 2, 2)]
    oracle = [x.detach().double().requires_grad_() for x in ours]
    out = TiledAttention.apply(*ours, 0.25, plan_tiles(blocks))
    want = dense(oracle[0], oracle[1], oracle[2], 0.25, visible(blocks, tokens))
    grad = torch.randn(out.shape, generator=generator).bfloat16()
    out.backward(grad)
    want.backward(grad.double())
    for mine, theirs in [(out, want), *((x.grad, y.grad) for x, y in zip(ours, oracle, strict=True))]:
        assert mine is not None and theirs is not None and mine.dtype == torch.bfloat16
        error = (mine.double() - theirs).detach().abs()
        assert float(error.mean()) < 0.004 * float(theirs.detach().std())
        assert float(error.max()) < 0.04 * float(theirs.detach().abs().max())


def test_gradcheck() -> None:
    blocks, tokens = blocks_of((3, [2, 1, 2]), (2, []))
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(tokens, h, 4, generator=generator, dtype=torch.float64) for h in (4, 2, 2)]
    for budget in (1 << 18, 4):
        tiles = plan_tiles(blocks, budget)
        assert torch.autograd.gradcheck(
            lambda q, k, v, tiles=tiles: TiledAttention.apply(q, k, v, 0.5, tiles), [x.requires_grad_() for x in inputs]
        )


def test_a_group_fits_few_tiles_and_a_long_sequence_is_cut() -> None:
    blocks, _ = blocks_of(*[(48, [15] * 8)] * 8)
    tiles = plan_tiles(blocks)
    assert len(tiles) == 1 + 8  # all prompts together, then each group's responses
    assert [(t.rows, t.length) for t in tiles] == [(8, 48)] + [(8, 15)] * 8
    long, _ = blocks_of((3000, []))
    assert all((t.last - t.first) * t.length <= 1 << 18 for t in plan_tiles(long))


def test_the_flex_mask_is_the_same_rule() -> None:
    blocks, tokens = blocks_of(*SHAPES["mixed"])
    mask = create_mask(mask_function(blocks, tokens, torch.device("cpu")), None, None, tokens, tokens, device="cpu")
    assert torch.equal(mask[0, 0], visible(blocks, tokens))
