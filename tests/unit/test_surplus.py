"""Which waiting groups a step takes, and that a saved state holds them all."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.algorithms.group_advantages import teaching
from spmd_rl.data.batch import Batch, Column
from spmd_rl.data.surplus import CURSOR, Surplus, choose, keys_of


def groups(*keys: tuple[int, int, int], samples: int = 2) -> Batch:
    """Groups (epoch, cursor, prompt) with responses of different lengths."""
    rows = [(e, p, s) for e, _, p in keys for s in range(samples)]
    cursors = [c for _, c, _ in keys for _ in range(samples)]
    responses = [torch.arange(p % 3 + s, dtype=torch.int32) for _, p, s in rows]
    return Batch(
        torch.tensor(rows, dtype=torch.int64).reshape(-1, 3),
        {CURSOR: Column.scalars(torch.tensor(cursors)), "response": Column.from_rows(responses, torch.int32)},
    )


def test_the_oldest_are_taken_first() -> None:
    keys = [(1, 0, 5), (0, 8, 3), (0, 4, 9), (0, 8, 1)]
    assert choose(keys, 3) == {(0, 4, 9): 0, (0, 8, 1): 1, (0, 8, 3): 2}
    assert choose(keys[:1], 3) == {(1, 0, 5): 0}
    with pytest.raises(ValueError, match="kept by two slots"):
        choose([*keys, keys[0]], 3)


@given(st.lists(st.tuples(*[st.integers(0, 9)] * 3), unique=True), st.integers(0, 12), st.randoms())
def test_the_choice_does_not_depend_on_who_has_what(keys: list[tuple[int, int, int]], wanted: int, random) -> None:
    shuffled = random.sample(keys, len(keys))
    assert choose(shuffled, wanted) == choose(keys, wanted)
    assert len(choose(keys, wanted)) == min(wanted, len(keys))


@pytest.fixture(scope="module")
def group():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_state_is_shared_out_over_any_number_of_slots(group) -> None:
    keys = [(0, 4, 7), (0, 0, 8), (1, 0, 2), (0, 0, 3), (0, 4, 1)]
    kept = Surplus(0, 1, True, group)
    assert kept.exhausted
    kept.put(groups(*keys), count=5)
    state = kept.state_dict()
    assert not kept.exhausted and len(kept.take()) == 10 and kept.exhausted
    for slots in (1, 2, 3, 7):
        parts = []
        for slot in range(slots):
            surplus = Surplus(slot, slots, True, group)
            surplus.load_state_dict(state)
            assert surplus.count == 5
            parts.append(surplus.take())
        found = Batch.concat(parts)
        assert keys_of(found)[::2] == sorted(keys)
        for (_, prompt, sample), row in zip(found.ids.tolist(), found["response"].rows(), strict=True):
            assert row.tolist() == list(range(prompt % 3 + sample))
        assert max(len(part) for part in parts) <= -(-5 // slots) * 2
    empty = Surplus(0, 1, True, group)
    empty.load_state_dict(Surplus(0, 1, True, group).state_dict())
    assert empty.exhausted and len(empty.take()) == 0


def test_a_group_teaches_where_its_valid_rewards_differ() -> None:
    reward_S = torch.tensor([1.0, 1, 1, 0, 1, float("nan"), float("nan"), float("nan"), 3])
    group_S = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 4])
    assert teaching(reward_S, group_S).tolist() == [False, True, False, False, False]
    assert teaching(torch.empty(0), torch.empty(0, dtype=torch.int64)).tolist() == []
