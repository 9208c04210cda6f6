"""The report of run folders that the real recorder wrote."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from math import inf, nan
from pathlib import Path
from typing import cast

import pytest
import torch
from torch.distributed import ProcessGroup

from spmd_rl.comm.world import World
from spmd_rl.config.errors import UserError
from spmd_rl.config.schema import ObserveConfig
from spmd_rl.observe.evaluation import Outcome, summarize
from spmd_rl.observe.metrics import Metrics
from spmd_rl.observe.recorder import Recorder
from spmd_rl.observe.report import write_report
from spmd_rl.observe.report.__main__ import main
from spmd_rl.observe.report.charts import smoothed, ticks
from spmd_rl.observe.report.data import MAX_BARS, MAX_POINTS, read_run
from spmd_rl.observe.samples import SampleRecord
from spmd_rl.observe.writers import read_lines

VOID = {"meta", "line", "circle", "rect", "polyline", "polygon", "br"}


class Checker(HTMLParser):
    """Balanced tags, no external resources, no script but the page's own; collects text and hover data."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.hover: dict[str, dict] = {}
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = dict(attrs)
        assert not {"src", "href", "onload", "onerror", "onclick"} & set(names), (tag, attrs)
        assert tag not in ("link", "img", "iframe", "object", "b" if "evil" in str(attrs) else "embed")
        self.scripts += tag == "script"
        if tag == "svg" and names.get("data-hover"):
            self.hover[str(names["aria-label"])] = json.loads(str(names["data-hover"]))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID, tag
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def checked(path: Path) -> Checker:
    html = path.read_text(encoding="utf-8")
    assert not re.search(r"https?://|//cdn|@import|url\(", html)
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert checker.open == [] and checker.scripts == 2
    assert not re.search(r"(?<![\w.])(nan|inf|None)(?![\w])", re.sub(r"<(script|style).*?</\1>", "", html, flags=re.S))
    return checker


def single() -> World:
    none = cast(ProcessGroup, None)  # one rank: no group is used
    return World(0, 1, 0, 1, 0, 1, torch.device("cpu"), "single", 60.0, none, none)


def sample(step: int, prompt: int, text: str, held_out: bool, reward: float = 0.0) -> SampleRecord:
    question = f"what is {prompt}?\nSay <b>it</b> &amp; </script><script>evil()</script>"
    return SampleRecord(step, (0, prompt, 0), "sums", question, text, reward, {"f<": reward}, "length", 3, held_out)


def record_run(folder: Path, steps: int = 4, every: int = 2) -> dict[str, float]:
    recorder = Recorder(ObserveConfig(tensorboard=False, console_samples=0), single(), folder, steps=steps)
    recorder.start("test", {"model": "none"})

    def evaluate(step: int) -> None:
        passed = [prompt * steps < step * 20 for prompt in range(20)]
        outcomes = [Outcome("sums", p, ok, float(ok), 3) for p, ok in enumerate(passed)]
        records = [sample(step, p, f"answer of {step} <i>x</i>\x1b[1m", True, float(ok)) for p, ok in enumerate(passed)]
        recorder.evaluation(step, summarize(outcomes), records)

    evaluate(0)
    values: dict[str, float] = {}
    for step in range(1, steps + 1):
        with recorder.spans("evaluate"):
            pass
        with recorder.spans("step", step=step):
            with recorder.spans("rollout", step=step), recorder.spans("generate", step=step):
                pass
            with recorder.spans("train", step=step):
                pass
        metrics = Metrics()
        metrics.moments("reward", torch.tensor([0.0, step / steps]))
        metrics.sum("samples", 64)
        metrics.sum("tokens/generated", 640)
        metrics.set("loss/policy", 0.01 * step)
        metrics.set("somebody/else's <metric>", step)
        metrics.set("plain", step)
        metrics.set("broken", nan if step == 2 else inf if step == 3 else 1.0)
        values = recorder.step(step, metrics, [sample(step, 100 + step, "ok", False, 1.0)])
        if step % every == 0:
            evaluate(step)
    report = recorder.close()
    assert report == folder / "report.html"
    return values


def test_run_folder_of_the_recorder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = record_run(tmp_path)
    assert values["reward/mean"] == 0.5 and values["memory/peak_gib"] > 0.05
    assert values["throughput/samples_per_s"] == pytest.approx(64 / values["time/step"])
    assert values["throughput/tokens_per_s"] == pytest.approx(640 / values["time/step"])
    assert values["time/rollout"] + values["time/train"] <= values["time/step"]
    lines = list(read_lines(tmp_path / "metrics.jsonl"))
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert ["eval/sums/pass@1" in line for line in lines] == [True, False, True, False, True]
    assert lines[4]["eval/sums/pass@1"] == 1.0 and lines[4]["reward/mean"] == 0.5
    assert lines[2]["broken"] is None
    trace = json.loads((tmp_path / "timeline.json").read_text())
    assert sum(e["name"] == "generate" for e in trace["traceEvents"]) == 4
    (attempt,) = json.loads((tmp_path / "environment.json").read_text())
    assert attempt["ranks"] == 1 and attempt["packages"]["torch"] == torch.__version__
    out = capsys.readouterr().out
    assert "eval sums  pass@1 0.00 → 1.00 ±0.08 (n=20)" in out
    table = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out[out.index("result") :].splitlines()]
    assert ["sums pass@1", "0.00 → 1.00 ±0.08 (n=20)"] in table and ["samples/s"] in [row[:1] for row in table]
    assert out.count("note:") == 0 and "step 4/4" in out and "\x1b" not in out


def test_report_is_whole_and_self_contained(tmp_path: Path) -> None:
    record_run(tmp_path)
    (tmp_path / "config.yaml").write_text("run:\n  name: my <run> 数\ntrain:\n  steps: 4\nnote: '</pre>'\n", "utf-8")
    checker = checked(write_report(tmp_path))
    text = " ".join("".join(checker.text).split())
    for part in (
        "my <run> 数", "4 of 4 steps", "1 rank on cpu", "+100.0 pp", "sums", "Where the time goes", "rollout", "train",
        "answer of 0 <i>x</i>␛[1m", "answer of 4", "what is ", "</script><script>evil()", "&amp;", "reward 1",
        "somebody/else's <metric>", "plain", "broken", "2 values not finite", "note: '</pre>'", torch.__version__,
        "0.125 → 0.5",
    ):  # fmt: skip
        assert part in text or part in unescape(text), part
    assert "answer of 2" not in text  # before and after, nothing between
    reward = checker.hover["Reward"]
    assert reward["t"] == ["step 1", "step 2", "step 3", "step 4"]
    assert reward["s"][0]["v"] == ["0.125", "0.25", "0.375", "0.5"]
    assert reward["x"] == sorted(reward["x"])
    evaluation = checker.hover["evaluation"]["s"][0]
    assert evaluation["n"] == "sums pass@1" and evaluation["v"][0].startswith("0 (0 – 0.16")
    stages = checker.hover["time of a step by stage"]["s"]
    assert {s["n"] for s in stages} == {"rollout", "train", "other"}  # without rollout/generate, a part of rollout


def test_long_runs_are_downsampled_and_nothing_is_lost(tmp_path: Path) -> None:
    steps = 3001
    with (tmp_path / "metrics.jsonl").open("w") as out:
        for step in range(1, steps + 1):
            values = {
                "step": step,
                "reward/mean": float(step == 1777),
                "time/step": 2.0,
                "time/train": 1.5,
                "time/train/forward": 0.7,
                "time/exchange_total": 9.0,
                "time/exchange_exposed": 1.0,
                "time/between/save_it": 0.02,
                "time/between/save_it/part": 0.01,
            }
            if step % 1000 == 0:
                values |= {"time/checkpoint": 0.5, "eval/a/pass@1": step / 3000}
            out.write(json.dumps(values) + "\n")
    run = read_run(tmp_path)
    reward = run.curves["reward/mean"]
    assert len(reward.steps) <= MAX_POINTS and reward.steps[-1] == steps and reward.width == 11
    assert max(reward.high) == 1.0 and min(reward.low) == 0.0  # one spike of one step is still there
    assert sum(m * reward.width for m in reward.mean) == pytest.approx(1.0)
    assert run.curves["eval/a/pass@1"].steps == [1000, 2000, 3000]  # rare ones are kept as they are
    assert len(run.bars) <= MAX_BARS and run.bars[0].first == 1 and run.bars[-1].last == steps
    width = run.bars[0].last
    with_checkpoint = run.bars[1000 // width].seconds if 1000 % width else run.bars[1000 // width - 1].seconds
    assert with_checkpoint["checkpoint"] == pytest.approx(0.5 / width)
    assert with_checkpoint["train"] == 1.5 and sum(with_checkpoint.values()) == pytest.approx(2.0)
    assert run.rate("time/step") == 1.0
    checker = checked(write_report(tmp_path))
    assert "Between the steps, in total: save it 1 min 00 s." in "".join(checker.text)
    assert len(checker.hover["Reward"]["x"]) <= MAX_POINTS
    assert (tmp_path / "report.html").stat().st_size < 600_000


def test_report_of_an_interrupted_run(tmp_path: Path) -> None:
    record_run(tmp_path)
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (tmp_path / name).open("a", encoding="utf-8") as out:
            out.write('{"step": 5, "los')
    checker = checked(write_report(tmp_path))
    assert "5 steps" not in "".join(checker.text)


def test_report_before_the_first_step(tmp_path: Path) -> None:
    recorder = Recorder(ObserveConfig(tensorboard=False, timeline=False), single(), tmp_path, steps=3)
    path = recorder.close(failed=True)
    assert path is not None
    checked(path)
    assert not (tmp_path / "timeline.json").exists()


def test_not_a_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "spmd_rl.observe.report", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    expected = f"error: {tmp_path} holds no metrics.jsonl: give the folder of a run\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    assert main([]) == 2 and capsys.readouterr().err.startswith("usage:")
    (tmp_path / "metrics.jsonl").write_text("no json\n")
    with pytest.raises(UserError, match="damaged"):
        write_report(tmp_path)


def test_resumed_recorder_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_run(tmp_path, steps=4, every=2)
    before = list(read_lines(tmp_path / "metrics.jsonl"))[:4]
    recorder = Recorder(ObserveConfig(tensorboard=False), single(), tmp_path, steps=4, restored_step=3)
    assert list(read_lines(tmp_path / "metrics.jsonl")) == before
    assert {line["step"] for line in read_lines(tmp_path / "samples.jsonl")} == {0, 1, 2, 3}
    with recorder.spans("step", step=4):
        pass
    recorder.step(4, {"reward/mean": 0.75}, [])
    capsys.readouterr()
    recorder.evaluation(4, summarize([Outcome("sums", 0, True, 1.0, 1)]))
    assert "pass@1 0.00 → 1.00" in capsys.readouterr().out  # the first value is that of the first start
    recorder.close()
    after = list(read_lines(tmp_path / "metrics.jsonl"))
    assert [line["step"] for line in after] == [0, 1, 2, 3, 4] and after[4]["reward/mean"] == 0.75
    starts = json.loads((tmp_path / "environment.json").read_text())
    assert [start["restored step"] for start in starts] == [0, 3]


def test_ticks_are_round_and_cover() -> None:
    assert ticks(0.0, 1.0) == pytest.approx([0.0, 0.5, 1.0])
    assert ticks(0.0, 0.83) == pytest.approx([0.0, 0.5, 1.0])
    assert ticks(-3.0, 17.0) == pytest.approx([-5.0, 0.0, 5.0, 10.0, 15.0, 20.0])
    for low, high in ((1e-6, 2e-5), (-1e9, 3e9), (5.0, 5.0), (0.0, 0.0), (-1e-12, 0.0)):
        found = ticks(low, high)
        rounding = 1e-9 * (abs(low) + abs(high))
        assert found[0] <= low + rounding and found[-1] >= high - rounding and 2 <= len(found) <= 8


def test_smoothing_keeps_lines_and_ends() -> None:
    line = [0.5 * i for i in range(100)]
    assert smoothed(line) == pytest.approx(line)
    assert smoothed([1.0] * 5 + [11.0] + [1.0] * 5)[5] == pytest.approx(13 / 3)
