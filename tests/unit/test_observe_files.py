"""metrics.jsonl, samples.jsonl and TensorBoard: what is written, and what is left after a resume."""

from __future__ import annotations

import json
from math import inf, isnan, nan
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from spmd_rl.observe.samples import SampleRecord, choose_samples, gather_samples, sample_key, to_json
from spmd_rl.observe.writers import MetricsFile, SamplesFile, TensorBoardFile, read_lines

SCRIPTS = '漢字かな 한글 עברית العربية हिन्दी 👩‍👩‍👧‍👦🏳️‍🌈 ñ \u2028 \x00\x1b[31m \\ " \t\r\n end'


def record(step: int, prompt: int = 0, sample: int = 0, text: str = "x", **other: object) -> SampleRecord:
    values: dict = dict(reward=1.0, reward_parts={"f": 1.0}, finish="stop", tokens=3, eval=False) | other
    return SampleRecord(step, (0, prompt, sample), "set", text, text, **values)


def steps_of(path: Path) -> list[int]:
    return [line["step"] for line in read_lines(path)]


def test_one_object_per_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.write(0, {"eval/a/pass@1": 0.1})
    file.write(1, {"loss": nan, "grad_norm": inf, "reward/mean": 0.5})
    file.write(2, {"loss": 0.123456789})
    file.write(2, {"eval/a/pass@1": 0.2})  # an evaluation after step 2 joins its line
    file.write(2, {"loss": 0.25})  # a shorter line leaves nothing of the longer one
    with pytest.raises(ValueError, match="step 1 come after those of step 2"):
        file.write(1, {})
    file.close()
    assert path.read_text().splitlines() == [
        '{"step": 0, "eval/a/pass@1": 0.1}',
        '{"step": 1, "loss": null, "grad_norm": null, "reward/mean": 0.5}',
        '{"step": 2, "loss": 0.25, "eval/a/pass@1": 0.2}',
    ]


def test_lines_reach_the_system_at_once(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(1, {"loss": 1.0})
    assert steps_of(tmp_path / "metrics.jsonl") == [1]  # not closed, not flushed
    file.close()


@pytest.mark.parametrize("torn", [b"", b'{"step": 8, "lo', b'{"step": 6, "loss": 1.0}'])
def test_resume_cuts_what_the_checkpoint_does_not_know(tmp_path: Path, torn: bytes) -> None:
    path, samples = tmp_path / "metrics.jsonl", tmp_path / "samples.jsonl"
    file, lines = MetricsFile(path), SamplesFile(samples)
    for step in range(8):
        file.write(step, {"loss": float(step)})
        lines.write([record(step, sample=i) for i in range(3)])
    file.close()
    lines.close()
    for one in (path, samples):
        one.write_bytes(one.read_bytes() + torn)

    file, lines = MetricsFile(path, restored_step=5), SamplesFile(samples, restored_step=5)
    assert steps_of(path) == [0, 1, 2, 3, 4, 5]
    file.write(5, {"eval/a/pass@1": 0.5})  # the evaluation that the killed run did not come to
    for step in (6, 7):
        file.write(step, {"loss": float(step)})
        lines.write([record(step)])
    file.close()
    lines.close()
    written = list(read_lines(path))
    assert [line["step"] for line in written] == list(range(8))
    assert written[5] == {"step": 5, "loss": 5.0, "eval/a/pass@1": 0.5}
    assert steps_of(samples) == [s for s in range(6) for _ in range(3)] + [6, 7]


def test_a_new_start_begins_empty(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.write(0, {"a": 1.0})
    file.close()
    MetricsFile(path, restored_step=0).close()
    assert path.read_bytes() == b""


def test_samples_hold_every_script_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    file = SamplesFile(path)
    written = record(4, prompt=2, sample=1, text=SCRIPTS, finish="length", eval=True)
    file.write([written, record(5, reward=nan, reward_parts={"数学": nan, "b": 2.0})])
    file.close()
    raw = path.read_bytes()
    for word in ("漢字かな", "한글", "עברית", "العربية", "हिन्दी", "👩‍👩‍👧‍👦🏳️‍🌈", "ñ", "数学"):
        assert word.encode() in raw
    first, second = raw.decode().split("\n")[:2]
    assert json.loads(first)["prompt"].encode() == SCRIPTS.encode()
    assert SampleRecord.from_json(first) == written
    assert list(json.loads(first)) == [
        "step", "id", "source", "prompt", "response", "reward", "reward_parts", "finish", "tokens", "eval",
    ]  # fmt: skip
    excluded = SampleRecord.from_json(second)
    assert isnan(excluded.reward) and isnan(excluded.reward_parts["数学"]) and excluded.reward_parts["b"] == 2.0
    assert json.loads(second)["reward"] is None


def test_lone_surrogates_survive() -> None:
    text = "a\ud83d\ude00 b\udc80"  # half characters, as broken byte sequences leave them
    line = to_json({"t": "a\ud83d b\udc80 é"})
    assert line == '{"t": "a\\ud83d b\\udc80 é"}'
    line.encode()
    assert json.loads(to_json(["x\udc80"])) == ["x\udc80"]
    assert json.loads(to_json({"t": text}))["t"].encode("utf-16", "surrogatepass") == text.encode(
        "utf-16", "surrogatepass"
    )


def test_choice_takes_whole_groups_of_the_same_prompts() -> None:
    ids = [(epoch, prompt, sample) for epoch in (3,) for prompt in range(40) for sample in range(4)]
    chosen = [ids[i] for i in choose_samples(ids, 8)]
    assert len(chosen) == 8
    assert len({i[1] for i in chosen}) == 2 and {i[2] for i in chosen} == {0, 1, 2, 3}
    again = [(9, prompt, sample) for _, prompt, sample in reversed(ids)]  # another epoch, another order
    assert [again[i][1:] for i in choose_samples(again, 8)] == [i[1:] for i in chosen]
    assert choose_samples(ids, 0) == [] and choose_samples([], 5) == []
    assert sorted(choose_samples(ids[:3], 8)) == [0, 1, 2]
    assert all(0 <= sample_key(i) < 2**63 for i in [*ids, (0, 2**40, 2**30), (0, -1, 0)])


def test_choice_does_not_favour_low_indices() -> None:
    ids = [(0, prompt, 0) for prompt in range(1000)]
    mean = sum(choose_samples(ids, 100)) / 100
    assert 400 < mean < 600  # standard error 29


def test_gather_on_one_process_keeps_the_limit() -> None:
    records = [record(1, prompt=p, sample=s) for p in range(5) for s in range(2)]
    kept = gather_samples(records, 4, None)
    assert len(kept) == 4 and [r.id for r in kept] == sorted([r.id for r in kept], key=sample_key)


def test_tensorboard_after_a_resume_shows_each_step_once(tmp_path: Path) -> None:
    first = TensorBoardFile(tmp_path)
    for step in (1, 2, 3):
        first.write(step, {"loss": 10.0 * step, "broken": nan})
    first.close()
    second = TensorBoardFile(tmp_path, restored_step=1)
    second.write(2, {"loss": 2.0})
    second.close()
    events = EventAccumulator(str(tmp_path), purge_orphaned_data=True)
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 10.0), (2, 2.0)]
    assert "broken" not in events.Tags()["scalars"]
