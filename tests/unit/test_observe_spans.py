from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import nvtx
import pytest
import torch

from spmd_rl.observe.metrics import Metrics
from spmd_rl.observe.spans import Spans
from spmd_rl.observe.timeline import merge_timeline, rank_file, rank_files, read_spans


def collected(spans: Spans, slowest: bool = False) -> dict[str, float]:
    metrics = Metrics()
    spans.collect(metrics, slowest)
    return metrics.reduce()


def test_times_by_nesting() -> None:
    spans = Spans()
    with spans("step", step=1):
        for _ in range(2):
            with spans("rollout", step=1):
                with spans("generate"):
                    time.sleep(0.02)
                time.sleep(0.01)
        assert spans.where() == "step"
    times = collected(spans)
    assert set(times) == {"time/step", "time/rollout", "time/rollout/generate"}
    assert 0.04 <= times["time/rollout/generate"] <= times["time/rollout"] - 0.02
    assert times["time/rollout"] <= times["time/step"] < 5.0
    assert collected(spans) == {}  # moved, not copied
    assert spans.where() == ""


def test_slowest_rank() -> None:
    spans = Spans()
    with spans("step"), spans("train"):
        pass
    assert set(collected(spans, slowest=True)) == {"time/train", "time_max/train", "time/step", "time_max/step"}


def test_what_lies_between_steps() -> None:
    spans = Spans()
    with spans("evaluate"), spans("generate"):
        pass
    assert set(collected(spans)) == {"time/between/evaluate", "time/between/evaluate/generate"}


def test_other_threads_are_told_apart() -> None:
    spans = Spans()
    seen: list[str] = []

    def work() -> None:
        with spans("save"):
            seen.append(spans.where())

    with spans("step"), spans("train"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert set(collected(spans)) == {"time/step", "time/train", "time/background/save"}
    assert seen == ["step > train"]  # what the main thread does, asked from another


def test_an_exception_is_passed_on_and_noted(tmp_path: Path) -> None:
    spans = Spans(3, rank_file(tmp_path, 3))
    before = time.time_ns()
    with pytest.raises(KeyError), spans("reward", step=7):
        raise KeyError("x")
    spans.flush()
    (event,) = read_spans(rank_file(tmp_path, 3))
    assert event["name"] == "reward" and event["step"] == 7 and event["error"] == "KeyError"
    assert before - 10**6 <= event["start_ns"] <= event["start_ns"] + event["duration_ns"] <= time.time_ns() + 10**6
    assert spans.where() == "" and "time/between/reward" in collected(spans)


def test_memory_is_bounded(tmp_path: Path) -> None:
    spans = Spans(0, tmp_path / "t" / "rank0.jsonl")
    for step in range(1300):
        with spans("a", step=step):
            pass
    assert sum(1 for _ in read_spans(tmp_path / "t" / "rank0.jsonl")) >= 1300 - 512
    spans.flush()
    assert [e["step"] for e in read_spans(tmp_path / "t" / "rank0.jsonl")] == list(range(1300))


def test_nvtx_ranges_nest(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(nvtx, "push_range", calls.append)
    monkeypatch.setattr(nvtx, "pop_range", lambda: calls.append("pop"))
    spans = Spans(nvtx=True)
    with spans("step"), spans("train"):
        pass
    assert calls == ["step", "train", "pop", "pop"]


def test_timeline_of_two_ranks(tmp_path: Path) -> None:
    assert merge_timeline(tmp_path) is None
    for rank in (0, 10):
        spans = Spans(rank, rank_file(tmp_path, rank))
        for step in (1, 2, 3, 4):
            with spans("step", step=step), spans("学习"):
                pass
        thread = threading.Thread(target=lambda s=spans: s("save").__enter__(), name="saver")
        thread.start()
        thread.join()  # a span that never ends is not in the timeline
        spans.flush()
    with rank_file(tmp_path, 10).open("a") as torn:
        torn.write('{"name": "half')
    (tmp_path / "timeline" / "rankx.jsonl").write_text("not ours")
    assert list(rank_files(tmp_path)) == [0, 10]

    path = merge_timeline(tmp_path)
    assert path == tmp_path / "timeline.json"
    trace = json.loads(path.read_text(encoding="utf-8"))
    spans_of = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert [(e["pid"], e["args"].get("step")) for e in spans_of if e["name"] == "step"] == [
        (rank, step) for rank in (0, 10) for step in (1, 2, 3, 4)
    ]
    assert sum(e["name"] == "学习" for e in spans_of) == 8
    named = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert named == {0: "rank 0", 10: "rank 10"}
    inner, outer = spans_of[0], spans_of[1]
    assert outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 1e-3


def test_a_long_timeline_keeps_whole_steps(tmp_path: Path) -> None:
    for rank in (0, 1):
        spans = Spans(rank, rank_file(tmp_path, rank))
        for step in range(1, 101):
            with spans("step", step=step), spans("train", step=step):
                pass
        spans.flush()
    path = merge_timeline(tmp_path, max_events=100)
    assert path is not None
    trace = json.loads(path.read_text())
    kept = [(e["pid"], e["name"], e["args"]["step"]) for e in trace["traceEvents"] if e["ph"] == "X"]
    steps = range(4, 101, 4)
    assert sorted(kept) == sorted((r, n, s) for r in (0, 1) for n in ("step", "train") for s in steps)
    assert trace["otherData"] == {"events": 400, "kept": "steps divisible by 4"}
