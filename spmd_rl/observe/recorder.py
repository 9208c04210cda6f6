"""`Recorder`: the one object through which the main loop is watched.

Files of a run folder:

| file                   | written by | what                                                             |
| ---------------------- | ---------- | ---------------------------------------------------------------- |
| `metrics.jsonl`        | rank 0     | one object per step; evaluations join their step's (0: at start) |
| `samples.jsonl`        | rank 0     | at most `samples_per_step` per step and per evaluation           |
| `environment.json`     | rank 0     | machine, packages and world of each start                        |
| `tensorboard/`         | rank 0     | the same metrics                                                 |
| `timeline/rank<k>.jsonl` | rank k   | its spans                                                        |
| `timeline.json`        | rank 0     | all ranks' spans, merged at the end                              |
| `report.html`          | rank 0     | at the end                                                       |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from spmd_rl.comm.world import World
from spmd_rl.config.errors import UserError
from spmd_rl.config.schema import ObserveConfig
from spmd_rl.observe.console import Console, change
from spmd_rl.observe.environment import note_start
from spmd_rl.observe.evaluation import EvalResult
from spmd_rl.observe.memory import add_memory
from spmd_rl.observe.metrics import Metrics
from spmd_rl.observe.notes import Notes
from spmd_rl.observe.report import write_report
from spmd_rl.observe.samples import SampleRecord, choose_samples, gather_samples
from spmd_rl.observe.spans import Spans
from spmd_rl.observe.text import number
from spmd_rl.observe.timeline import merge_timeline, rank_file, rank_files
from spmd_rl.observe.writers import MetricsFile, SamplesFile, TensorBoardFile, read_lines


class Recorder:
    """Made by every rank with the same arguments.

    steps: of the whole run; restored_step: of the checkpoint that the run goes on from (0: it starts anew; then what
    an earlier attempt left in the files is removed). Raises UserError where a file can't be used. `step` and
    `evaluation` are collective over all ranks, as is `close`, except after a failure.
    """

    def __init__(
        self, config: ObserveConfig, world: World, run_folder: Path, *, steps: int, restored_step: int = 0
    ) -> None:
        self._config, self._world, self._folder = config, world, run_folder
        self._group = world.control if world.size > 1 else None
        run_folder.mkdir(parents=True, exist_ok=True)
        spans_file = rank_file(run_folder, world.rank) if config.timeline else None
        if restored_step == 0:
            rank_file(run_folder, world.rank).unlink(missing_ok=True)
        self.spans = Spans(world.rank, spans_file, config.nvtx)
        self._shared: _Shared | None = None
        if world.rank == 0:
            try:
                self._shared = _Shared(config, world, run_folder, steps, restored_step)
            except OSError as error:
                raise UserError(f"{error.filename} can't be written: {error.strerror}") from None
            except ValueError as error:
                raise UserError(f"the records in {run_folder} are damaged ({error}): move metrics.jsonl away") from None

    def start(self, title: str, facts: Mapping[str, object]) -> None:
        """The banner: the run folder, and what else the caller has to say (world, model parameters, derived sizes)."""
        if self._shared:
            self._shared.console.banner(title, {"run folder": self._folder, **facts})

    def say(self, text: str) -> None:
        """One line on the console of rank 0."""
        if self._shared:
            self._shared.console.say(text)

    def choose(self, ids: Tensor) -> list[int]:
        """Which samples (positions in `ids`, int64 [S, 3] of this rank) `step` or `evaluation` would write, so that
        only their tokens need be turned into text. Collective."""
        return choose_samples(ids, self._config.samples_per_step, self._group)

    def step(
        self, step: int, metrics: Metrics | Mapping[str, float], samples: Sequence[SampleRecord] = ()
    ) -> dict[str, float]:
        """Record a finished step, after its `step` span has ended; the reduced metrics of all ranks. Collective.

        metrics: this rank's accumulated ones, or results that are already reduced. samples: of this rank; no more
        than `observe.samples_per_step` of all ranks' are written. Adds times, memory and throughput.
        """
        own = Metrics()
        self.spans.collect(own, slowest=self._world.size > 1)
        add_memory(own, self._world.device)
        if isinstance(metrics, Metrics):
            own.merge(metrics)
            values = own.reduce(self._group)
        else:
            values = own.reduce(self._group) | dict(metrics)
        _add_throughput(values)
        records = gather_samples(samples, self._config.samples_per_step, self._group)
        self.spans.flush()
        if self._shared:
            self._shared.step(step, values, records)
        return values

    def unfinished(self, samples: Sequence[SampleRecord]) -> None:
        """Record samples of a step that will not be finished; a run that goes on records the step anew. Collective."""
        records = gather_samples(samples, self._config.samples_per_step, self._group)
        if self._shared:
            self._shared.unfinished(records)

    def evaluation(self, step: int, results: Sequence[EvalResult], samples: Sequence[SampleRecord] = ()) -> None:
        """Record an evaluation after `step` steps (0: before training). results: equal on all ranks; samples: of this
        rank. Collective."""
        records = gather_samples(samples, self._config.samples_per_step, self._group)
        if self._shared:
            self._shared.evaluation(step, results, records)

    def close(self, failed: bool = False) -> Path | None:
        """Write what is left; rank 0 merges the timeline, writes the report (its path is returned there) and prints a
        small table: accuracy before and after, speed, where the report lies.

        failed: other ranks may be gone, so nobody is waited for.
        """
        self.spans.flush()
        if self._group is not None and not failed:
            dist.barrier(group=self._group)  # until all ranks' spans are written
        return self._shared.close() if self._shared else None


def _add_throughput(values: dict[str, float]) -> None:
    seconds = values.get("time/step")
    if not seconds:
        return
    for counter, rate in (("samples", "throughput/samples_per_s"), ("tokens/generated", "throughput/tokens_per_s")):
        if counter in values:
            values.setdefault(rate, values[counter] / seconds)


def _spread(records: Sequence[SampleRecord]) -> list[SampleRecord]:
    """The first of every prompt, then the others."""
    firsts = {(record.source, record.id[1]): record for record in reversed(records)}
    chosen = [record for record in records if firsts[record.source, record.id[1]] is record]
    return chosen + [record for record in records if firsts[record.source, record.id[1]] is not record]


class _Shared:
    """What rank 0 alone does: the console and the shared files."""

    def __init__(self, config: ObserveConfig, world: World, folder: Path, steps: int, restored_step: int) -> None:
        self._config, self._folder = config, folder
        self.console = Console(steps)
        self._steps = steps
        self._notes = Notes()
        self._metrics = MetricsFile(folder / "metrics.jsonl", restored_step)
        self._samples = SamplesFile(folder / "samples.jsonl", restored_step)
        self._tensorboard = TensorBoardFile(folder / "tensorboard", restored_step) if config.tensorboard else None
        self._totals = {"samples": 0.0, "tokens/generated": 0.0, "time/step": 0.0}  # since this start
        self._last: Sequence[EvalResult] = ()
        self._first: dict[str, float] = {}  # values of each set's first evaluation
        self._evaluated: int | None = None  # the last step before this start whose evaluation is on record
        for line in read_lines(folder / "metrics.jsonl"):
            for name, value in line.items():
                if name.startswith("eval/") and value is not None:
                    self._first.setdefault(name, value)
                    self._evaluated = line["step"]
        if restored_step == 0:
            for rank, path in rank_files(folder).items():
                if rank >= world.size:  # of an earlier attempt in a larger world
                    path.unlink()
        note_start(folder, world, restored_step)

    def step(self, step: int, values: Mapping[str, float], records: Sequence[SampleRecord]) -> None:
        self._write(step, values, records)
        for name in self._totals:
            self._totals[name] += values.get(name, 0.0)
        self.console.step(step, values)
        for note in self._notes.about(values):
            self.console.note(note)
        every = self._config.console_every
        if step in (1, self._steps) or (every and step % every == 0):
            self.console.completions(step, _spread(records)[: self._config.console_samples])

    def unfinished(self, records: Sequence[SampleRecord]) -> None:
        self._samples.write(records)

    def evaluation(self, step: int, results: Sequence[EvalResult], records: Sequence[SampleRecord]) -> None:
        values: dict[str, float] = {}
        for result in results:
            values |= result.metrics()
        # A run that was killed at its very end evaluates again: the samples are there.
        self._write(step, values, () if step == self._evaluated else records)
        for result in results:
            self.console.evaluation(result, self._before(result))
        self._first = values | self._first
        self._last = results

    def _before(self, result: EvalResult) -> dict[int, float]:
        """The first evaluation's values of that set by k, if there was one."""
        names = {k: f"eval/{result.source}/pass@{k}" for k in result.pass_at}
        return {k: self._first[name] for k, name in names.items() if name in self._first}

    def _write(self, step: int, values: Mapping[str, float], records: Sequence[SampleRecord]) -> None:
        self._metrics.write(step, values)
        self._samples.write(records)
        if self._tensorboard:
            self._tensorboard.write(step, values)

    def close(self) -> Path:
        self._metrics.close()
        self._samples.close()
        if self._tensorboard:
            self._tensorboard.close()
        merge_timeline(self._folder)
        report = write_report(self._folder)
        self.console.summary("result", self._summary() | {"report": str(report)})
        return report

    def _summary(self) -> dict[str, str]:
        rows = {}
        for result in self._last:
            before = self._before(result)
            for k, estimate in result.pass_at.items():
                rows[f"{result.source} pass@{k}"] = f"{change(before.get(k), estimate)} (n={result.prompts})"
        seconds = self._totals["time/step"]
        for label, name in (("samples/s", "samples"), ("generated tokens/s", "tokens/generated")):
            if seconds and self._totals[name]:
                rows[label] = number(self._totals[name] / seconds)
        return rows
