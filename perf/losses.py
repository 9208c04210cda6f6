"""Log-probability and entropy of tokens from hidden states: by chunks, beside the plain path through all logits.

    .venv/bin/python perf/losses.py --check

Forward and backward pass, interleaved, medians of wall time. Peak memory is what each side adds to a process of its
own that holds the hidden states and the head. The plain path makes all logits, casts them to float32 and takes
log_softmax; its entropy gets no gradient, nor does ours, but in the last case. The sizes are a part of 32,768 tokens x
151,936 (80 GB on the plain path), and so is the memory for kept logits. One JSON object per line and a table; each pass
is a line on stderr. About 2 minutes on 2 idle cores; `--check` exits with 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # when run as a script, from a checkout that is not installed

from spmd_rl.engines.train.logprobs import KEPT_BYTES, token_logprobs  # noqa: E402

TIME_TARGET, MEMORY_TARGET = 1.3, 0.15
TEMPERATURE = 0.7
FULL_SIZE = 32_768 * 151_936


@dataclass(frozen=True)
class Case:
    tokens: int
    vocabulary: int
    width: int
    dtype: str
    entropy_coef: float = 0.0

    @property
    def name(self) -> str:
        bonus = ", entropy bonus" if self.entropy_coef else ""
        return f"{self.tokens:,} x {self.vocabulary:,}, width {self.width}, {self.dtype}{bonus}"

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states, head, targets."""
        torch.manual_seed(0)
        dtype = getattr(torch, self.dtype)
        hidden = torch.randn(self.tokens, self.width).to(dtype).requires_grad_()
        weight = (torch.randn(self.vocabulary, self.width) * 0.05).to(dtype).requires_grad_()
        return hidden, weight, torch.randint(self.vocabulary, (self.tokens,))


CASES = (
    Case(2048, 49_152, 576, "float32"),
    Case(1024, 151_936, 512, "float32"),
    Case(2048, 49_152, 576, "bfloat16"),
    Case(2048, 49_152, 576, "float32", entropy_coef=0.01),
)


def plain(hidden: Tensor, weight: Tensor, target: Tensor, entropy_coef: float) -> Tensor:
    logprobs = (F.linear(hidden, weight).float() / TEMPERATURE).log_softmax(-1)
    with torch.set_grad_enabled(entropy_coef != 0.0):
        entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, target[:, None])[:, 0].mean() + entropy_coef * entropy.mean()


def ours(hidden: Tensor, weight: Tensor, target: Tensor, entropy_coef: float) -> Tensor:
    kept_bytes = KEPT_BYTES * len(hidden) * len(weight) // FULL_SIZE
    logprob, entropy = token_logprobs(hidden, weight, target, temperature=TEMPERATURE, kept_bytes=kept_bytes)
    return logprob.mean() + (entropy_coef * entropy.mean() if entropy_coef else 0.0)


SIDES = {"ours": ours, "plain": plain}


def seconds(side: str, case: Case, inputs: tuple[Tensor, Tensor, Tensor]) -> float:
    for tensor in inputs[:2]:
        tensor.grad = None
    start = time.perf_counter()
    SIDES[side](*inputs, case.entropy_coef).backward()
    return time.perf_counter() - start


def status_mib(field: str) -> float:
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(f"{field}:"))
    return int(line.split()[1]) / 1024


def peak(side: str, number: int) -> float:
    """MiB that one forward and backward pass adds, measured in a fresh process."""
    command = [sys.executable, __file__, "--peak", side, str(number)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def print_peak(side: str, case: Case) -> None:
    inputs = case.inputs()
    tiny = Case(8, 16, 4, case.dtype, case.entropy_coef)
    seconds(side, tiny, tiny.inputs())  # what the libraries allocate once
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    before = status_mib("VmRSS")
    seconds(side, case, inputs)
    print(status_mib("VmHWM") - before)


def agree(case: Case) -> None:
    """Both sides give the same loss and gradients; their warm-up, too."""
    results = []
    for side in SIDES:
        hidden, weight, target = case.inputs()
        loss = SIDES[side](hidden, weight, target, case.entropy_coef)
        loss.backward()
        results.append((loss, hidden.grad, weight.grad))
    for mine, theirs in zip(*results, strict=True):
        assert mine is not None and theirs is not None
        error = float((mine.float() - theirs.float()).detach().norm() / theirs.float().detach().norm())
        assert error < (2e-2 if case.dtype == "bfloat16" else 1e-4), error


def measure(number: int, repeats: int) -> dict[str, Any]:
    case = CASES[number]
    agree(case)
    inputs = case.inputs()
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(repeats):
        for side, values in times.items():
            values.append(seconds(side, case, inputs))
            print(f"# {case.name}: {side} {values[-1]:.2f} s", file=sys.stderr, flush=True)
    del inputs
    mine, other = (median(times[side]) for side in SIDES)
    mine_mib, other_mib = (peak(side, number) for side in SIDES)
    return {
        "case": case.name,
        "ours_s": round(mine, 3),
        "plain_s": round(other, 3),
        "time_ratio": round(mine / other, 3),
        "ours_mib": round(mine_mib),
        "plain_mib": round(other_mib),
        "memory_ratio": round(mine_mib / other_mib, 3),
        "targets": {"time_ratio": TIME_TARGET, "memory_ratio": MEMORY_TARGET},
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--peak", nargs=2, metavar=("SIDE", "CASE"), help="of one side and case, for the script itself")
    arguments = parser.parse_args()
    if arguments.peak:
        print_peak(arguments.peak[0], CASES[int(arguments.peak[1])])
        return 0
    rows = []
    for number in range(len(CASES)):
        rows.append(measure(number, arguments.repeats))
        print(json.dumps(rows[-1]), flush=True)
    print(f"{'case':58} {'ours s':>8} {'plain s':>8} {'ratio':>6} {'ours MiB':>9} {'plain MiB':>10} {'ratio':>6}")
    for row in rows:
        print(
            f"{row['case']:58} {row['ours_s']:8.2f} {row['plain_s']:8.2f} {row['time_ratio']:6.2f} "
            f"{row['ours_mib']:9} {row['plain_mib']:10} {row['memory_ratio']:6.3f}"
        )
    missed = [r["case"] for r in rows if r["time_ratio"] > TIME_TARGET or r["memory_ratio"] > MEMORY_TARGET]
    return int(arguments.check and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
