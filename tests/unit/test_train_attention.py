"""Tiled and flex attention over packed trees against a dense float64 softmax written out by its definition."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from spmd_rl.engines.train.attention import mask_function
from spmd_rl.engines.train.packing import Node
from spmd_rl.engines.train.tiles import TiledAttention, plan_tiles

Tree = list[tuple[int, "Tree"]]  # (tokens of a node, its children)


def nodes_of(tree: Tree) -> tuple[Node, ...]:
    nodes: list[Node] = []

    def add(branches: Tree, parent: int, start: int) -> int:
        for length, children in branches:
            number = len(nodes)
            nodes.append(Node(start, length, parent, start))
            start = add(children, number, start + length)
            nodes[number] = nodes[number]._replace(end=start)
        return start

    add(tree, -1, 0)
    return tuple(nodes)


def visible(nodes: tuple[Node, ...]) -> Tensor:
    """bool [query, key], by listing for each node all tokens on the way from the root to its end."""
    tokens = nodes[-1].start + nodes[-1].length
    mask = torch.zeros(tokens, tokens, dtype=torch.bool)
    ways: list[list[int]] = []
    for node in nodes:
        before = ways[node.parent] if node.parent >= 0 else []
        ways.append(before + list(range(node.start, node.start + node.length)))
        for i in range(len(before), len(ways[-1])):
            mask[ways[-1][i], ways[-1][: i + 1]] = True
    return mask


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor) -> Tensor:
    """[T, Hq, D], [T, Hk, D] -> [T, Hq, D]."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, float("-inf")).softmax(-1), v)


def leaves(*lengths: int) -> Tree:
    return [(length, []) for length in lengths]


SHAPES: dict[str, Tree] = {
    "one sequence": leaves(7),
    "shared prompt, ragged responses": [(5, leaves(3, 1, 4, 4, 2)), (1, leaves(6, 6))],
    "alone and shared": [(3, []), (9, leaves(2, 5)), (4, []), (2, leaves(1, 1, 1))],
    "system prompt over prompts over responses": [(6, [(3, leaves(2, 2)), (5, []), (3, leaves(4, 1, 1, 3))])],
    "deep": [(2, [(1, [(3, [(2, leaves(1, 3)), (1, [])]), (2, leaves(2, 2))]), (4, [])]), (3, [(1, leaves(2))])],
    "long": [(70, [(33, leaves(9)), (40, [])]), (64, [])],
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("heads", [(6, 2), (3, 3)])
@pytest.mark.parametrize("scores_per_tile", [1 << 18, 400])
def test_tiles_equal_dense_attention_and_its_gradients(name: str, heads: tuple[int, int], scores_per_tile: int) -> None:
    nodes = nodes_of(SHAPES[name])
    mask = visible(nodes)
    generator = torch.Generator().manual_seed(3)
    shapes = [(len(mask), count, 8) for count in (heads[0], heads[1], heads[1], heads[0])]
    q, k, v, grad = (torch.randn(shape, generator=generator) * 2 for shape in shapes)
    ours = [x.clone().requires_grad_() for x in (q, k, v)]
    oracle = [x.double().requires_grad_() for x in (q, k, v)]
    out = TiledAttention.apply(*ours, 0.3, plan_tiles(nodes, scores_per_tile))
    want = dense(oracle[0], oracle[1], oracle[2], 0.3, mask)
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
    out.backward(grad)
    want.backward(grad.double())
    for mine, theirs in zip(ours, oracle, strict=True):
        assert mine.grad is not None and theirs.grad is not None
        torch.testing.assert_close(mine.grad.double(), theirs.grad, atol=2e-5, rtol=2e-5)


def test_bfloat16_rounds_products_only() -> None:
    """The error is that of bfloat16 (8 bits) on scores and on probabilities, not that of a bfloat16 softmax."""
    nodes = nodes_of([(40, leaves(9, 7, 9))])
    tokens = 65
    generator = torch.Generator().manual_seed(0)
    ours = [torch.randn(tokens, h, 16, generator=generator).bfloat16().requires_grad_() for h in (4, 2, 2)]
    oracle = [x.detach().double().requires_grad_() for x in ours]
    out = TiledAttention.apply(*ours, 0.25, plan_tiles(nodes))
    want = dense(oracle[0], oracle[1], oracle[2], 0.25, visible(nodes))
    grad = torch.randn(out.shape, generator=generator).bfloat16()
    out.backward(grad)
    want.backward(grad.double())
    for mine, theirs in [(out, want), *((x.grad, y.grad) for x, y in zip(ours, oracle, strict=True))]:
        assert mine is not None and theirs is not None and mine.dtype == torch.bfloat16
        error = (mine.double() - theirs).detach().abs()
        assert float(error.mean()) < 0.004 * float(theirs.detach().std())
        assert float(error.max()) < 0.04 * float(theirs.detach().abs().max())


def test_gradcheck() -> None:
    nodes = nodes_of([(3, [(2, leaves(1, 2)), (1, []), (2, [])]), (2, [])])
    tokens = 13
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(tokens, h, 4, generator=generator, dtype=torch.float64) for h in (4, 2, 2)]
    for budget in (1 << 18, 4):
        tiles = plan_tiles(nodes, budget)
        assert torch.autograd.gradcheck(
            lambda q, k, v, tiles=tiles: TiledAttention.apply(q, k, v, 0.5, tiles), [x.requires_grad_() for x in inputs]
        )


def test_a_group_fits_few_tiles_and_a_long_sequence_is_cut() -> None:
    tiles = plan_tiles(nodes_of([(48, leaves(*[15] * 8))] * 8))
    assert len(tiles) == 1 + 8  # all prompts together, then each group's responses
    assert [(t.rows, t.length) for t in tiles] == [(8, 48)] + [(8, 15)] * 8
    long = plan_tiles(nodes_of(leaves(3000)))
    assert all((t.last - t.first) * t.length <= 1 << 18 for t in long)


@pytest.mark.parametrize("name", SHAPES)
def test_the_flex_mask_is_the_same_rule(name: str) -> None:
    nodes = nodes_of(SHAPES[name])
    want = visible(nodes)
    rule = mask_function(nodes, torch.device("cpu"))
    mask = create_mask(rule, None, None, want.shape[0], want.shape[1], device="cpu")
    assert torch.equal(mask[0, 0], want)
