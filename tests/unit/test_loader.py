from __future__ import annotations

import json
import logging
import threading
import time
import tracemalloc
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from spmd_rl.config.errors import UserError
from spmd_rl.config.schema import Config, DataConfig, EvalConfig, RunConfig, SourceConfig, TrainConfig
from spmd_rl.data.loader import Position, PromptLoader
from spmd_rl.data.order import Order
from tests.tiny_model import make_tiny_tokenizer

NONE = np.empty(0, np.int64)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


def stored(tmp_path, name, prompts, **columns):
    path = tmp_path / f"{name}.jsonl"
    rows = [{"prompt": p, **{k: v[i] for k, v in columns.items()}} for i, p in enumerate(prompts)]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return SourceConfig(name=name, path=str(path))


def configured(*sources, prompts=8, samples=1, seed=0, updates=1, held_out=(), evaluation=None, **data):
    return Config(
        run=RunConfig(seed=seed),
        data=DataConfig(train=list(sources), eval=list(held_out), chat_template=False, **data),
        train=TrainConfig(prompts_per_step=prompts, samples_per_prompt=samples, updates_per_step=updates),
        eval=evaluation or EvalConfig(),
    )


def steps(loader, count, slots=1):
    """The prompt indices of each step, over all slots in order."""
    found = []
    for _ in range(count):
        position = loader.position
        parts = [loader.batch_at(position, slot, slots) for slot in range(1, slots)]
        parts.insert(0, loader.batch(0, slots))
        found.append([tuple(i) for part in parts for i in part.ids.tolist()])
    return found


def test_five_prompts_eight_per_step_one_epoch(tmp_path, tokenizer, caplog):
    """D1: a smaller last batch, and all five are trained on."""
    loader = PromptLoader(configured(stored(tmp_path, "a", "abcde"), samples=2, epochs=1), tokenizer)
    assert "train.prompts_per_step=8, but an epoch has only 5 prompts" in caplog.text
    assert not loader.exhausted
    batch = loader.batch(0, 1)
    assert sorted(batch.ids.tolist()) == [[0, p, s] for p in range(5) for s in range(2)]
    assert loader.exhausted
    with pytest.raises(RuntimeError, match="all 1 epochs are done"):
        loader.batch(0, 1)


def test_a_step_never_crosses_the_end_of_an_epoch(tmp_path, tokenizer):
    loader = PromptLoader(configured(stored(tmp_path, "a", "abcdefgh"), prompts=3), tokenizer)
    found = steps(loader, 6)
    assert [len(step) for step in found] == [3, 3, 2, 3, 3, 2]
    assert [{i[0] for i in step} for step in found] == [{0}] * 3 + [{1}] * 3
    first, second = ([i[1] for step in part for i in step] for part in (found[:3], found[3:]))
    assert sorted(first) == sorted(second) == list(range(8)) and first != second
    assert loader.position == Position(2, 0) and not loader.exhausted


def test_columns(tmp_path, tokenizer):
    text = "漢字 😀"
    source = stored(tmp_path, "a", [text], answer=["مرحبا"])
    batch = PromptLoader(configured(source, samples=3), tokenizer).batch(0, 1)
    assert batch["prompt"].values.dtype == torch.int32
    assert [tokenizer.decode(p) for p in batch["prompt"].rows()] == [text] * 3
    assert [json.loads(row) for row in batch["row"].row_bytes()] == [
        {"prompt": text, "answer": "مرحبا", "source": "a"}
    ] * 3
    assert all(text.encode() in row for row in batch["row"].row_bytes())


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 7])
def test_the_order_does_not_depend_on_the_number_of_slots(tmp_path, tokenizer, slots):
    config = configured(stored(tmp_path, "a", [f"p{i}" for i in range(11)]), prompts=4, samples=2, seed=3)
    alone = steps(PromptLoader(config, tokenizer), 7)
    assert steps(PromptLoader(config, tokenizer), 7, slots) == alone
    sizes = [len(PromptLoader(config, tokenizer).batch_at(Position(0, 8), s, slots)) for s in range(slots)]
    assert sum(sizes) == 6 and max(sizes) - min(sizes) <= 2  # three prompts of two samples, none split


def test_a_slot_without_prompts_has_the_columns(tmp_path, tokenizer):
    batch = PromptLoader(configured(stored(tmp_path, "a", "a")), tokenizer).batch(0, 4)
    assert len(batch) == 0 and set(batch.columns) == {"prompt", "row", "turn"}
    assert batch["prompt"].values.dtype == torch.int32 and batch["row"].values.dtype == torch.uint8


def test_a_rank_that_reads_for_no_slot_only_keeps_count(tmp_path, tokenizer, monkeypatch):
    source = stored(tmp_path, "a", [f"p{i}" for i in range(11)])
    reads, counts = (
        PromptLoader(configured(source, prompts=4, epochs=2, held_out=[source]), tokenizer) for _ in range(2)
    )
    monkeypatch.setattr(counts._encoder, "encode", None)  # a call would fail
    while not reads.exhausted:
        assert not counts.exhausted
        batch, empty = reads.batch(0, 2), counts.batch(None, 2)
        assert len(empty) == 0 and set(empty.columns) == set(batch.columns)
        assert all(empty[name].values.dtype == batch[name].values.dtype for name in batch.columns)
        assert counts.state_dict() == reads.state_dict()
    assert counts.exhausted and len(counts.eval_batches(None, 2)["a"]) == 0


def test_seed_decides_and_shuffle_can_be_off(tmp_path, tokenizer):
    source = stored(tmp_path, "a", [f"p{i}" for i in range(20)])
    orders = [steps(PromptLoader(configured(source, prompts=20, seed=seed), tokenizer), 1) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    plain = steps(PromptLoader(configured(source, prompts=20, shuffle=False), tokenizer), 2)
    assert [i[1] for i in plain[0]] == [i[1] for i in plain[1]] == list(range(20))


def test_resume_goes_on_with_any_slots_and_any_batch(tmp_path, tokenizer):
    """D7: nothing skipped, nothing seen twice."""
    source = stored(tmp_path, "a", [f"p{i}" for i in range(23)])
    config = configured(source, prompts=4, samples=2)
    whole = steps(PromptLoader(config, tokenizer), 9)
    for done in (0, 3, 5, 6):
        first = PromptLoader(config, tokenizer)
        steps(first, done)
        state = json.loads(json.dumps(first.state_dict()))
        second = PromptLoader(config, tokenizer)
        second.load_state_dict(state)
        assert steps(second, 9 - done, slots=3) == whole[done:]
    larger = PromptLoader(replace(config, train=replace(config.train, prompts_per_step=19)), tokenizer)
    larger.load_state_dict({**first.state_dict(), "epoch": 0, "cursor": 4})
    assert [i for step in steps(larger, 1) for i in step] == [i for step in whole[1:6] for i in step]


def test_resume_with_other_data_is_refused(tmp_path, tokenizer):
    state = PromptLoader(configured(stored(tmp_path, "a", "abc")), tokenizer).state_dict()
    with pytest.raises(UserError, match="had 3 prompts in an epoch, now there are 4"):
        PromptLoader(configured(stored(tmp_path, "b", "abcd")), tokenizer).load_state_dict(state)


def test_overlong_prompts_are_left_out_and_said(tmp_path, tokenizer, caplog):
    prompts = ["a" * (50 if i % 3 == 0 else 5) for i in range(20)]
    source, held_out = stored(tmp_path, "a", prompts), stored(tmp_path, "e", ["b", "b" * 99, "b"])
    config = configured(source, prompts=5, max_prompt_tokens=49, held_out=[held_out])
    with caplog.at_level(logging.INFO):
        loader = PromptLoader(config, tokenizer)
    assert "training prompts: 13 in 1 sources, 7 left out (more than 49 tokens)" in caplog.text
    assert loader.epoch_length == 13
    found = steps(loader, 3)
    assert [len(step) for step in found] == [5, 5, 3]
    assert sorted(i[1] for step in found for i in step) == [i for i in range(20) if i % 3]
    assert [i[1] for i in loader.eval_batches(0, 1)["e"].ids.tolist()] == [0, 2]


def test_all_prompts_overlong(tmp_path, tokenizer):
    sources = [stored(tmp_path, "a", ["x"]), stored(tmp_path, "b", ["x" * 50] * 4)]
    with pytest.raises(UserError, match="source 'b': all 4 prompts are longer than data.max_prompt_tokens"):
        PromptLoader(configured(*sources, max_prompt_tokens=10), tokenizer)
    with pytest.raises(UserError, match="source 'b': all 4 prompts"):
        PromptLoader(configured(sources[0], held_out=sources[1:], max_prompt_tokens=10), tokenizer)


def test_a_set_too_large_to_screen(tmp_path, tokenizer, monkeypatch, caplog):
    """The schedule ignores lengths; an overlong prompt is missing from its step, on any number of slots."""
    monkeypatch.setattr("spmd_rl.data.screen.SCREEN_ROWS", 10)
    prompts = ["a" * (50 if i % 3 == 0 else 5) for i in range(20)]
    config = configured(stored(tmp_path, "a", prompts), prompts=5, max_prompt_tokens=49)
    loader = PromptLoader(config, tokenizer)
    assert loader.epoch_length == 20
    found = steps(loader, 4)
    assert sorted(i[1] for step in found for i in step) == [i for i in range(20) if i % 3]
    assert "left out, 50 tokens (data.max_prompt_tokens=49)" in caplog.text
    assert steps(PromptLoader(config, tokenizer), 4, slots=3) == found
    with pytest.raises(UserError, match="source 'b': 20 of 20 prompts looked at are longer"):
        PromptLoader(configured(stored(tmp_path, "b", ["a" * 50] * 20), max_prompt_tokens=49), tokenizer)


def test_broken_rows_are_found_before_the_first_step(tmp_path, tokenizer):
    source = stored(tmp_path, "a", "abc")
    with open(source.path, "a") as file:
        file.write('{"prompt": "d"\n')
    with pytest.raises(UserError, match=r"a.jsonl:4: broken JSON"):
        PromptLoader(configured(source), tokenizer)


@pytest.mark.parametrize("key", ["samples_per_prompt", "prompts_per_step"])
def test_group_size_zero_and_no_data(tmp_path, tokenizer, key):
    config = configured(stored(tmp_path, "a", "abc"))
    with pytest.raises(UserError, match=f"train.{key}=0: at least 1 is wanted"):
        PromptLoader(replace(config, train=replace(config.train, **{key: 0})), tokenizer)
    with pytest.raises(UserError, match="data.train is empty"):
        PromptLoader(configured(), tokenizer)


def test_evaluation_batches(tmp_path, tokenizer):
    held_out = [stored(tmp_path, "e", [f"e{i}" for i in range(5)]), stored(tmp_path, "f", ["f0", "f1"])]
    train = stored(tmp_path, "a", "abc")
    greedy = PromptLoader(configured(train, held_out=held_out, evaluation=EvalConfig(samples_per_prompt=3)), tokenizer)
    assert [b.ids.tolist() for b in greedy.eval_batches(0, 1).values()] == [
        [[-1, p, 0] for p in range(5)], [[-1, p, 0] for p in (5, 6)]
    ]  # fmt: skip
    drawn = PromptLoader(
        configured(train, held_out=held_out, evaluation=EvalConfig(samples_per_prompt=2, temperature=1.0)), tokenizer
    )
    parts = [drawn.eval_batches(slot, 3) for slot in range(3)]
    assert [i for part in parts for i in part["e"].ids.tolist()] == [[-1, p, s] for p in range(5) for s in range(2)]
    assert [i for part in parts for i in part["f"].ids.tolist()] == [[-1, p, s] for p in (5, 6) for s in range(2)]
    assert [tokenizer.decode(p) for p in parts[2]["f"]["prompt"].rows()] == ["f1", "f1"]
    assert drawn.position == Position(0, 0)


def test_the_next_step_is_made_while_this_one_is_used(tmp_path, tokenizer, monkeypatch):
    loader = PromptLoader(
        configured(stored(tmp_path, "a", [f"p{i}" for i in range(40)]), prompts=4, epochs=1), tokenizer
    )
    made: list[str] = []
    read = loader._read

    def watched(rows, prompts):
        made.append(threading.current_thread().name)
        return read(rows, prompts)

    monkeypatch.setattr(loader, "_read", watched)
    for step in range(10):
        loader.batch(0, 1)
        deadline = time.monotonic() + 10
        while len(made) < min(step + 2, 10) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert len(made) == min(step + 2, 10)  # one ahead, none twice, none behind the last epoch
    assert all(name.startswith("loader") for name in made)


def test_what_is_foreseen_is_read_once_and_in_the_background(tmp_path, tokenizer, monkeypatch):
    loader = PromptLoader(configured(stored(tmp_path, "a", [f"p{i}" for i in range(40)]), prompts=4), tokenizer)
    made: list[list[int]] = []
    read = loader._read

    def watched(rows, prompts):
        made.append(prompts)
        return read(rows, prompts)

    monkeypatch.setattr(loader, "_read", watched)
    first, second = Position(0, 0), Position(0, 4)
    wanted = [loader.batch_at(first, slot, 4).ids.tolist() for slot in range(2)]
    made.clear()
    for slot in range(2):
        loader.foresee(first, slot, 4)
        deadline = time.monotonic() + 10
        while len(made) <= slot and time.monotonic() < deadline:
            time.sleep(0.001)
        assert len(made) == slot + 1  # before anybody waits for it
        assert loader.batch_at(first, slot, 4).ids.tolist() == wanted[slot]
    loader.foresee(first, 2, 4)
    loader.batch_at(second, 0, 4)  # something else came
    assert len(made) == 4 and loader.position == first


def test_updates_take_turns_on_every_slot(tmp_path, tokenizer):
    loader = PromptLoader(
        configured(stored(tmp_path, "a", "abcdefgh"), prompts=8, samples=2, updates=2, shuffle=False), tokenizer
    )
    for slot in range(4):
        batch = loader.batch_at(Position(0, 0), slot, 4)
        assert batch["turn"].as_scalars().tolist() == [0, 0, 1, 1]


# --- order


def order(sizes, weights=None, seed=0, shuffle=True, overlong=None, values=None):
    starts = np.cumsum([0, *sizes]).tolist()
    out = [np.array(o, dtype=np.int64) for o in overlong] if overlong else [NONE] * len(sizes)
    return Order(starts, out, weights or [1.0] * len(sizes), seed, shuffle, values)


def test_parts_of_an_epoch_make_the_whole():
    made = order([7, 5], [1.0, 2.5], overlong=[[0, 6], [9]], seed=4)
    whole = made.prompts(3, 0, made.length).tolist()
    assert [p for k in range(made.length) for p in made.prompts(3, k, k + 1).tolist()] == whole
    assert len(set(whole)) == len(whole)


def test_left_out_rows_do_not_occur():
    made = order([6, 4], overlong=[[0, 1, 5], [7]])
    assert made.length == 6
    assert sorted(made.prompts(0, 0, 6).tolist()) == [2, 3, 4, 6, 8, 9]
    assert order([6, 4], overlong=[[0, 1, 5], [7]], shuffle=False).prompts(0, 0, 6).tolist() == [2, 3, 4, 6, 8, 9]


@pytest.mark.parametrize("shuffle", [True, False])
def test_weights(shuffle):
    """A source of weight 2 is seen twice per epoch, one of weight 0.5 in every other: in turns, none forgotten."""
    made = order([10, 6, 4], [0.5, 1.0, 2.0], shuffle=shuffle)
    assert made.length == 5 + 6 + 8
    epochs = [made.prompts(e, 0, made.length).tolist() for e in range(4)]
    for number, prompts in enumerate(epochs):
        assert len(set(prompts)) == len(prompts)
        rows = Counter(p % 20 for p in prompts)
        assert [sum(rows[r] for r in range(a, b)) for a, b in ((0, 10), (10, 16), (16, 20))] == [5, 6, 8]
        assert {rows[r] for r in range(16, 20)} == {2}
        if number % 2:
            halves = Counter(p % 20 for p in epochs[number - 1] + prompts if p % 20 < 10)
            assert halves == {r: 1 for r in range(10)}


def test_each_pass_through_a_weighted_source_has_its_own_order():
    made = order([40], [0.5])
    halves = [frozenset(made.prompts(e, 0, 20).tolist()) for e in range(8)]
    assert all(halves[e] | halves[e + 1] == set(range(40)) for e in range(0, 8, 2)) and len(set(halves)) == 8


def test_uneven_weight_uses_all_rows_equally():
    made = order([7], [0.3], seed=2)
    seen = Counter(int(p) % 7 for e in range(70) for p in made.prompts(e, 0, made.length))
    assert made.length == 2 and set(seen.values()) == {20}


def test_curriculum_runs_from_easy_to_hard():
    values = np.array([3.0, 1.0, 2.0, 1.0, 3.0, 2.0, 1.0, 0.5])
    made = order([8], values=values)
    epochs = [made.prompts(e, 0, 8).tolist() for e in range(5)]
    for prompts in epochs:
        assert [values[p] for p in prompts] == sorted(values) and sorted(prompts) == list(range(8))
    assert len({tuple(p) for p in epochs}) > 1  # equal ones change places
    assert [int(p) for k in range(8) for p in made.prompts(1, k, k + 1)] == epochs[1]


def test_curriculum_from_a_column(tmp_path, tokenizer):
    source = stored(tmp_path, "a", "abcde", level=[5, 1.5, 4, 2, 3])
    assert [i[1] for i in steps(PromptLoader(configured(source, curriculum="level"), tokenizer), 1)[0]] == [
        1,
        3,
        4,
        2,
        0,
    ]
    for column, message in (("levle", "not nothing"), ("prompt", "not str")):
        with pytest.raises(UserError, match=f"a.jsonl:1: data.curriculum='{column}' wants a number there, {message}"):
            PromptLoader(configured(source, curriculum=column), tokenizer)


def test_hundred_million_rows_start_at_once(tokenizer):
    """A generator of 10^8 rows: none is made that is not needed."""
    source = SourceConfig(name="many", generator="chain_sum", size=100_000_000, seed=1)
    PromptLoader(configured(replace(source, size=10)), tokenizer)  # import the generators before the clock starts
    tracemalloc.start()
    begin = time.perf_counter()
    loader = PromptLoader(configured(source, prompts=4), tokenizer)
    loader.load_state_dict({"epoch": 2, "cursor": 99_999_996, "epoch_length": 100_000_000})
    batch = loader.batch(0, 1)
    seconds, (_, peak) = time.perf_counter() - begin, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(batch) == 4 and loader.position == Position(3, 0)
    assert seconds < 1 and peak < 50e6, (seconds, peak)
