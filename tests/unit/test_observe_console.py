from __future__ import annotations

import io
import subprocess
import sys
from math import nan

import pytest
from rich.console import Console as RichConsole

from spmd_rl.observe.console import Console
from spmd_rl.observe.evaluation import Estimate, EvalResult
from spmd_rl.observe.notes import Notes
from spmd_rl.observe.samples import SampleRecord
from spmd_rl.observe.text import duration, number, shorten, visible


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def console(steps: int = 20, clock: Clock | None = None) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(steps, RichConsole(file=out, width=100, highlight=False), clock or Clock()), out


def test_a_line_per_step_with_rate_and_eta() -> None:
    clock = Clock()
    shown, out = console(20, clock)
    metrics = {
        "reward/mean": 0.125,
        "loss/policy": -0.0012,
        "response/length_mean": 12.34,
        "throughput/samples_per_s": 5.25,
        "throughput/tokens_per_s": 12345.6,
        "time/step": 12.2,
        "time/other": 1.0,
    }
    for step, now in ((1, 100.0), (2, 130.0), (3, 140.0), (20, 300.0)):
        clock.now = now
        shown.step(step, metrics)
    lines = out.getvalue().splitlines()
    assert len(lines) == 4  # none is wrapped, though the console is 100 wide
    assert lines[0].startswith("step  1/20 ")
    for text in ("reward 0.125", "loss -0.0012", "length 12.34", "samples/s 5.25", "tokens/s 12346", "time 12.2 s"):
        assert text in lines[0]
    assert "eta" not in lines[0]
    assert lines[1].endswith("eta 9 min 00 s")  # 30 s a step, 18 to go
    assert lines[2].endswith("eta 5 min 40 s")  # (140 - 100) / 2 a step, 17 to go
    assert "eta" not in lines[3]
    assert "\x1b" not in out.getvalue()


def test_missing_metrics_are_left_out() -> None:
    shown, out = console()
    shown.step(1, {"reward/mean": 1.0})
    assert "reward 1" in out.getvalue() and "loss" not in out.getvalue()


def test_evaluation_line() -> None:
    shown, out = console()
    result = EvalResult("chain_sum", 200, 200, {1: Estimate(0.41, 0.35, 0.47)}, 0.4, 3.0)
    shown.evaluation(result, {})
    shown.evaluation(result, {1: 0.03})
    first, second = out.getvalue().splitlines()
    assert first == "eval chain_sum  pass@1 0.41 ±0.06 (n=200)"
    assert second == "eval chain_sum  pass@1 0.03 → 0.41 ±0.06 (n=200)"


def test_completions_are_shortened_and_harmless() -> None:
    shown, out = console()
    attack = "\x1b[2J[bold red]hi[/]\r\x07 \u202eabc" + "z" * 1000
    records = [
        SampleRecord(3, (0, 1, 2), "集", "start " + "p" * 500 + " =?", attack, 0.5, {}, "length", 9),
        SampleRecord(3, (0, 1, 3), "集", "q", "שלום 👩‍👩‍👧", nan, {}, "stop", 2),
    ]
    shown.completions(3, records)
    shown.completions(4, [])
    text = out.getvalue()
    joined = "".join(text.split())
    assert "\x1b" not in text and "\r" not in text and "\u202e" not in text and "\x07" not in text
    assert "␛[2J[boldred]hi[/]␍␇" in joined.replace("│", "") or "␛[2J[bold" in text  # shown, not obeyed
    assert "\\u202e" in joined.replace("│", "")
    assert "=?" in text and "start" not in text  # the end of a prompt
    assert "…" in text and "0.5" in text and "excluded" in text and "[length]" in joined
    assert "שלום" in text and "👩‍👩‍👧" in text and "集" in text
    assert text.count("z") < 300
    assert "samples of step 4" not in text


def test_banner_aligns_and_escapes() -> None:
    shown, out = console()
    shown.banner("spmd_rl", {"run": "a[b]\n", "world size": 2})
    assert out.getvalue() == "spmd_rl\n  run         a[b]␊\n  world size  2\n"


def test_notes_are_said_once() -> None:
    notes = Notes()
    start = {"loss/policy": 0.0, "grad_norm": 0.7, "mismatch/kl": 0.001, "reward/zero_variance_fraction": 0.5}
    said = notes.about(start)
    assert len(said) == 2 and said[0].startswith("loss/policy near 0 is right") and said[1].startswith("mismatch/kl")
    assert notes.about(start) == []
    (signal,) = notes.about(start | {"reward/zero_variance_fraction": 1.0})
    assert "teaches nothing" in signal
    (large,) = notes.about({"mismatch/kl": 3.0})
    assert "above 0.1" in large
    (broken,) = notes.about({"grad_norm": nan})
    assert "not finite" in broken


@pytest.mark.parametrize(
    "metrics",
    [
        {},
        {"loss/policy": 0.0, "grad_norm": 0.0},  # no gradient: not to be explained away
        {"loss/policy": 0.0, "reward/zero_variance_fraction": 1.0 - 1e-9, "grad_norm": 0.0},
        {"loss/policy": 0.3, "mismatch/kl": 0.0, "lr": 1e-6},
    ],
)
def test_no_note_without_reason(metrics: dict[str, float]) -> None:
    assert Notes().about(metrics) == []


def test_visible() -> None:
    assert visible("a\nb\t\x00\x7f\x85") == "a␊b␉␀␡\\u0085"
    assert visible("x\ud800\u2066\u2029") == "x\\ud800\\u2066\\u2029"
    kept = "👩‍👩‍👧 ❤️ e\u0301 नमस्ते שָׁלוֹם \u200f漢"
    assert visible(kept) == kept


def test_shorten() -> None:
    assert shorten("abc", 3) == "abc"
    assert shorten("abcdef", 3) == "abc…"
    assert shorten("abcdef", 3, keep_tail=1.0) == "…def"
    assert shorten("abcdefgh", 4, keep_tail=0.5) == "ab…gh"
    assert shorten("abe\u0301def", 3) == "ab…"  # the accent is not torn off
    assert shorten("abe\u0301", 1, keep_tail=1.0) == "…"


def test_numbers() -> None:
    values = [0, 1, 0.5, 0.12345, 12.3456, 1234.56, 99999.4, 1.2345e7, 1.234e-5, -3, nan, float("inf")]
    assert [number(v) for v in values] == [
        "0", "1", "0.5", "0.1235", "12.35", "1235", "99999", "1.23e+07", "1.2e-05", "-3", "nan", "inf",
    ]  # fmt: skip
    assert [duration(s) for s in (0.123, 12.34, 59.99, 245, 12000, 187200)] == [
        "0.12 s", "12.3 s", "60.0 s", "4 min 05 s", "3 h 20 min", "2 d 04 h",
    ]  # fmt: skip


def test_a_reader_that_has_gone_or_a_full_disk_does_not_end_the_run() -> None:
    """In a process of its own: rich closes standard output where a pipe is broken."""
    program = (
        "from spmd_rl.observe.console import Console\nshown = Console(3)\n"
        "[shown.say('x' * 100000) for _ in range(3)]\nprint('on', file=__import__('sys').stderr)"
    )
    for where, why in (("| true", "its reader has gone"), ("> /dev/full", "No space left on device")):
        shell = f'set -o pipefail; "$0" -c "$1" {where}'
        done = subprocess.run(
            ["bash", "-c", shell, sys.executable, program], capture_output=True, text=True, timeout=60
        )
        lines = done.stderr.splitlines()
        assert lines[:2] == [f"standard output can't be written to ({why}): the run goes on without it", "on"]
