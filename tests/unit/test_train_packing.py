"""Packing of batches and planning of micro-batches."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.config.errors import UserError
from spmd_rl.data.batch import Batch, Column
from spmd_rl.engines.train.microbatch import microbatches, plan_microbatches
from spmd_rl.engines.train.packing import Node, Packed, pack


def batch_of(*samples: tuple[int, list[int], list[int]]) -> Batch:
    """(prompt index, prompt, response) of each sample."""
    ids = torch.tensor([[0, prompt, i] for i, (prompt, _, _) in enumerate(samples)])
    return Batch(
        ids,
        {
            "prompt": Column.from_rows([torch.tensor(p, dtype=torch.int32) for _, p, _ in samples], torch.int32),
            "response": Column.from_rows([torch.tensor(r, dtype=torch.int32) for _, _, r in samples], torch.int32),
        },
    )


MIXED = batch_of(
    (4, [1, 2, 3], [10, 11]),
    (9, [5], [20, 21, 22]),
    (4, [1, 2, 3], [12]),
    (4, [1, 2, 3], []),
    (4, [1, 2, 3], [13, 14, 15]),
)


def test_a_group_shares_its_prompt() -> None:
    packed = pack(MIXED, shared=True, min_shared=3)
    assert packed.input_ids_T.tolist() == [1, 2, 3, 10, 13, 14, 5, 20, 21]
    assert packed.position_ids_T.tolist() == [0, 1, 2, 3, 3, 4, 0, 1, 2]
    # Response tokens in batch order: each is predicted by the token before it, the first by the prompt's last.
    assert packed.target_R.tolist() == [10, 11, 20, 21, 22, 12, 13, 14, 15]
    assert packed.predict_R.tolist() == [2, 3, 6, 7, 8, 2, 2, 4, 5]
    assert packed.nodes == (Node(0, 3, -1, 6), Node(3, 1, 0, 4), Node(4, 2, 0, 6), Node(6, 3, -1, 9))
    assert packed.tokens == 9


def test_without_sharing_each_sample_is_a_root() -> None:
    packed = pack(MIXED, shared=False)
    assert packed.input_ids_T.tolist() == [1, 2, 3, 10, 5, 20, 21, 1, 2, 3, 1, 2, 3, 13, 14]
    assert packed.position_ids_T.tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 0, 1, 2, 3, 4]
    assert packed.predict_R.tolist() == [2, 3, 4, 5, 6, 9, 12, 13, 14]
    assert all(node.parent == -1 for node in packed.nodes)


def test_prompts_share_what_they_begin_with_and_equal_responses_all() -> None:
    batch = batch_of(
        (0, [1, 2, 3, 4], [7, 8]), (1, [1, 2, 5], [7, 9]), (0, [1, 2, 3, 4], [7, 8]), (1, [1, 2, 5], [6, 7, 8])
    )
    packed = pack(batch, shared=True, min_shared=2)
    assert packed.input_ids_T.tolist() == [1, 2, 3, 4, 7, 5, 7, 5, 6, 7]
    assert packed.position_ids_T.tolist() == [0, 1, 2, 3, 4, 2, 3, 2, 3, 4]
    assert packed.predict_R.tolist() == [3, 4, 5, 6, 3, 4, 7, 8, 9]  # [5] is shorter than 2: not shared
    assert packed.nodes == (Node(0, 2, -1, 10), Node(2, 3, 0, 5), Node(5, 2, 0, 7), Node(7, 3, 0, 10))
    finer = pack(batch, shared=True, min_shared=1)
    assert finer.input_ids_T.tolist() == [1, 2, 3, 4, 7, 5, 7, 6, 7]
    assert pack(batch, shared=True).tokens == 5 + 4 + 5  # the default shares no 2 tokens, but what is equal altogether


def walk(packed: Packed, token: int) -> list[int]:
    """The tokens that the packed token follows, and itself, by the nodes alone."""
    number = next(i for i, n in enumerate(packed.nodes) if n.start <= token < n.start + n.length)
    last = token + 1
    seen: list[int] = []
    while number >= 0:
        node = packed.nodes[number]
        seen = packed.input_ids_T[node.start : last].tolist() + seen
        number, last = node.parent, (packed.nodes[node.parent].start + packed.nodes[node.parent].length)
    return seen


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.lists(st.integers(1, 2), min_size=1, max_size=6), st.lists(st.integers(1, 2), max_size=6)),
        min_size=1,
        max_size=8,
    ),
    shared=st.booleans(),
    min_shared=st.integers(1, 4),
)
def test_each_token_follows_its_own_sample(
    rows: list[tuple[list[int], list[int]]], shared: bool, min_shared: int
) -> None:
    """Whatever is shared: what predicts a response token has seen exactly the prompt and the response before it."""
    packed = pack(batch_of(*[(i % 3, *row) for i, row in enumerate(rows)]), shared, min_shared)
    want = [prompt + response[:i] for prompt, response in rows for i in range(len(response))]
    got = [walk(packed, token) for token in packed.predict_R.tolist()]
    assert got == want
    assert [int(packed.position_ids_T[t]) for t in packed.predict_R] == [len(seen) - 1 for seen in want]
    for number, node in enumerate(packed.nodes):  # depth first: descendants lie before `end`, all others not
        inside = {number}
        for other, n in enumerate(packed.nodes):
            if n.parent in inside:
                inside.add(other)
            assert (node.start <= n.start < node.end) == (other in inside)


@pytest.mark.parametrize("batch", [Batch.empty(), batch_of((0, [1, 2], []))], ids=["no samples", "empty response"])
def test_nothing_to_predict_still_gives_one_token_to_compute(batch: Batch) -> None:
    packed = pack(batch, shared=True)
    assert packed.tokens == 0 and packed.input_ids_T.shape == (1,) and packed.predict_R.shape == (0,)


def test_a_response_without_prompt_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"sample \(0, 3, 0\) has an empty prompt"):
        pack(batch_of((3, [], [1])), shared=True)


def plan(prompts: list[int], responses: list[int], groups: list[int], budget: int) -> list[list[int]]:
    parts = plan_microbatches(torch.tensor(prompts), torch.tensor(responses), torch.tensor(groups), budget)
    return [p.tolist() for p in parts]


def cost(samples: list[int], prompts: list[int], responses: list[int], groups: list[int]) -> int:
    shared = {groups[s]: prompts[s] for s in samples}
    return sum(shared.values()) + sum(max(responses[s] - 1, 0) for s in samples)


def test_groups_stay_whole_where_they_fit() -> None:
    assert plan([10] * 4, [6] * 4, [0, 0, 1, 1], budget=20) == [[0, 1], [2, 3]]
    assert plan([10] * 4, [6] * 4, [0, 0, 1, 1], budget=40) == [[0, 1, 2, 3]]
    assert plan([10] * 4, [6] * 4, [0, 1, 2, 3], budget=30) == [[0, 1], [2, 3]]  # unshared: 15 each


def test_equal_index_but_other_prompt_is_another_group() -> None:
    """One prompt index with different tokens (a rendered template that changed): the tokens decide."""
    batch = batch_of((1, [1, 2, 8], [7]), (1, [1, 2, 9], [7]), (1, [1, 2, 8], [8]))
    # Two tokens are common to all: 2 + 1 + 1 fit a budget of 4; with a budget of 3, the two samples of [1, 2, 8] stay.
    assert [part.tolist() for part in microbatches(batch, shared=True, budget=4)] == [[0, 1, 2]]
    assert sorted(part.tolist() for part in microbatches(batch, shared=True, budget=3)) == [[0, 2], [1]]
    assert [part.tolist() for part in microbatches(batch, shared=False, budget=6)] == [[0, 1], [2]]
    assert microbatches(Batch.empty(), shared=True, budget=3) == []


def test_what_all_prompts_begin_with_is_paid_once() -> None:
    prompts = [list(range(50)) + [60 + i] * 10 for i in range(4)]
    batch = batch_of(*[(i // 2, prompts[i // 2], [1, 2, 3]) for i in range(8)])
    # 50 + 4 x (10 + 2 x 2) = 106 tokens.
    assert len(microbatches(batch, shared=True, budget=106)) == 1
    assert pack(batch, shared=True).tokens <= 106
    assert len(microbatches(batch, shared=True, budget=105)) == 2


def test_a_large_group_is_cut_evenly_and_pays_its_prompt_again() -> None:
    # 10 + 4 x 10 = 50 tokens: two parts of 30.
    assert sorted(plan([10] * 4, [11] * 4, [0] * 4, budget=30)) == [[0, 2], [1, 3]]


def test_case_d3_long_and_short_samples() -> None:
    """5 samples of 95 tokens on one rank, 5 of 20 on the other, budget 100 (T tokens of a sample: its length - 1)."""
    long = plan([90] * 5, [6] * 5, list(range(5)), budget=100)
    short = plan([15] * 5, [6] * 5, list(range(5)), budget=100)
    assert (len(long), len(short)) == (5, 1)


def test_a_sample_over_the_budget_is_computed_alone() -> None:
    assert sorted(plan([500, 3, 3], [1, 2, 2], [0, 1, 2], budget=100)) == [[0], [1, 2]]


@settings(max_examples=200, deadline=None)
@given(
    groups=st.lists(st.tuples(st.integers(1, 40), st.lists(st.integers(0, 40), min_size=1, max_size=6)), max_size=8),
    budget=st.integers(1, 120),
)
def test_every_sample_once_and_within_the_budget(groups: list[tuple[int, list[int]]], budget: int) -> None:
    prompts = [p for p, responses in groups for _ in responses]
    responses = [r for _, group in groups for r in group]
    numbers = [i for i, (_, group) in enumerate(groups) for _ in group]
    parts = plan(prompts, responses, numbers, budget)
    assert sorted(s for part in parts for s in part) == list(range(len(prompts)))
    for part in parts:
        assert part == sorted(part)
        alone = len({numbers[s] for s in part}) == 1 and sum(responses[s] > 1 for s in part) <= 1
        assert alone or cost(part, prompts, responses, numbers) <= budget
