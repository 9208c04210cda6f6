"""What a person sees: a banner, a line per step, a table of completions now and then, the evaluations.

Nothing moves on the screen and nothing is overwritten, so that other libraries' output does no harm and the log of a
batch job reads like a terminal. Colours appear on a terminal only.
"""

from __future__ import annotations

import io
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console as RichConsole
from rich.table import Table
from rich.text import Text

from spmd_rl.observe.evaluation import Estimate, EvalResult
from spmd_rl.observe.samples import SampleRecord
from spmd_rl.observe.text import duration, number, shorten, visible

_BAR = 12  # cells
_PROMPT, _RESPONSE = 160, 240  # characters of a completion shown
_PLAIN_WIDTH = 140  # of tables that go to a file
log = logging.getLogger(__name__)


class Progress:
    """Mean time of a step, of those since the second (the first one warms up), and from it the time to go."""

    def __init__(self, steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._steps, self._clock = steps, clock
        self._first: tuple[int, float] | None = None

    def eta(self, step: int) -> float | None:
        """Seconds from the end of `step` to the end of the run, with all that happens in between."""
        now = self._clock()
        if self._first is None:
            self._first = (step, now)
            return None
        first, then = self._first
        return (now - then) / max(1, step - first) * (self._steps - step)


class Console:
    """steps: of the whole run. console: where to write (tests); by default standard output."""

    def __init__(
        self, steps: int, console: RichConsole | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._out = console or _standard_output()
        self._lost = False
        self._steps = steps
        self._progress = Progress(steps, clock)

    def say(self, text: str | Text, style: str = "") -> None:
        """One line, however long."""
        self._print(text if isinstance(text, Text) else Text(text, style=style), soft_wrap=True)

    def _print(self, what: Text | Table, soft_wrap: bool = False) -> None:
        """A run does not end because nobody can read its lines any more: all of it is in the run folder."""
        if self._lost:
            return
        try:
            self._out.print(what, soft_wrap=soft_wrap)
        except (OSError, SystemExit) as error:  # rich ends the program where the reader of a pipe has gone
            self._lost = True
            why = "its reader has gone" if isinstance(error, SystemExit) else error.strerror
            log.warning("standard output can't be written to (%s): the run goes on without it", why)

    def banner(self, title: str, facts: Mapping[str, object]) -> None:
        """The title and one aligned line per fact."""
        self.say(title, "bold")
        width = max((len(name) for name in facts), default=0)
        for name, value in facts.items():
            line = Text("  ")
            line.append(name.ljust(width), "dim")
            text = number(value) if isinstance(value, float) else visible(str(value))
            self.say(line.append(f"  {text}"))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """The progress line. What `metrics` does not hold is left out."""
        line = Text("step ")
        line.append(f"{step:>{len(str(self._steps))}}/{self._steps} ", "bold")
        done = round(_BAR * step / self._steps) if self._steps else _BAR
        line.append("━" * done, "green").append("─" * (_BAR - done), "dim")
        for label, name, style in (
            ("reward", "reward/mean", "bold cyan"),
            ("loss", "loss/policy", ""),
            ("length", "response/length_mean", ""),
            ("samples/s", "throughput/samples_per_s", ""),
            ("tokens/s", "throughput/tokens_per_s", ""),
        ):
            if name in metrics:
                line.append(f"  {label} ", "dim").append(number(metrics[name]), style)
        if "time/step" in metrics:
            line.append("  time ", "dim").append(duration(metrics["time/step"]))
        eta = self._progress.eta(step)
        if eta is not None and step < self._steps:
            line.append("  eta ", "dim").append(duration(eta), "bold")
        self.say(line)

    def note(self, text: str) -> None:
        self.say(Text("  note: ", "yellow").append(text, "dim"))

    def evaluation(self, result: EvalResult, before: Mapping[int, float]) -> None:
        """`eval chain_sum pass@1 0.03 → 0.41 ±0.06 (n=200)`; before: the first evaluation's values by k."""
        line = Text("eval ", "magenta").append(visible(result.source), "bold")
        for k, estimate in result.pass_at.items():
            line.append(f"  pass@{k} ", "dim").append(change(before.get(k), estimate), "bold green")
        self.say(line.append(f" (n={result.prompts})", "dim"))

    def summary(self, title: str, rows: Mapping[str, str]) -> None:
        """The small table at the end of a run."""
        table = Table(title=title, title_justify="left", title_style="bold", show_header=False)
        table.add_column(style="dim", overflow="fold")
        table.add_column(overflow="fold")
        for name, value in rows.items():
            table.add_row(Text(visible(name)), Text(visible(value)))
        self._print(table)

    def completions(self, step: int, records: Sequence[SampleRecord]) -> None:
        """A table of completions; long text is shortened, control characters are made visible."""
        if not records:
            return
        table = Table(title=f"samples of step {step}", title_justify="left", title_style="dim", expand=True)
        table.add_column("source", ratio=2, overflow="fold")
        table.add_column("end of the prompt", ratio=6, overflow="fold")
        table.add_column("response", ratio=8, overflow="fold")
        table.add_column("reward", justify="right", no_wrap=True, min_width=6)
        for record in records:
            prompt = shorten(visible(record.prompt), _PROMPT, keep_tail=1.0)
            response = shorten(visible(record.response), _RESPONSE, keep_tail=0.4)
            ending = "" if record.finish == "stop" else f" [{record.finish}]"
            table.add_row(
                Text(visible(record.source)),
                Text(prompt),
                Text(response).append(ending, "dim"),
                Text("excluded" if record.reward != record.reward else number(record.reward), "bold"),
            )
        self._print(table)


def change(before: float | None, after: Estimate) -> str:
    """`0.03 → 0.41 ±0.06`."""
    start = "" if before is None else f"{before:.2f} → "
    return f"{start}{after.value:.2f} ±{after.half_width:.2f}"


def _standard_output() -> RichConsole:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without UTF-8 must not end a run
    out = RichConsole(highlight=False)
    return out if out.is_terminal else RichConsole(highlight=False, width=_PLAIN_WIDTH, no_color=True)
