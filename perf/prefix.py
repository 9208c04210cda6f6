"""Training passes with the prompt of a group computed once, beside the same samples packed one by one.

    .venv/bin/python perf/prefix.py --check

A random model of the shape of SmolLM2-135M (hidden 576, 9 heads, 3 key heads, vocabulary 49,152) in bfloat16; forward
and backward pass of a packed micro-batch, interleaved, medians of wall time; peak memory is what each side adds to a
process of its own. The long case has fewer layers and one repeat: a small machine would need minutes for 30. The two
sides' log-probabilities must agree. One JSON object per line and a table; what it is at goes to stderr. About 1 minute
on 2 idle cores; `--check` exits with 1 where a target is missed.
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
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # when run as a script, from a checkout that is not installed

from spmd_rl.data.batch import Batch, Column  # noqa: E402
from spmd_rl.engines.train.attention import ATTENTION, PackedTree  # noqa: E402
from spmd_rl.engines.train.model import PolicyModel  # noqa: E402
from spmd_rl.engines.train.packing import pack  # noqa: E402

VOCABULARY = 49_152


@dataclass(frozen=True)
class Case:
    groups: int
    samples: int
    prompt: int
    response: int
    layers: int
    target: float | None  # times faster than unshared, at least
    repeats: int

    @property
    def name(self) -> str:
        return f"{self.groups} x {self.samples} responses of {self.response} on {self.prompt}, {self.layers} layers"

    def batch(self) -> Batch:
        generator = torch.Generator().manual_seed(0)
        ids = torch.tensor([[0, group, i] for group in range(self.groups) for i in range(self.samples)])

        def draw(length: int) -> Tensor:
            return torch.randint(VOCABULARY, (length,), generator=generator, dtype=torch.int32)

        prompts = [draw(self.prompt) for _ in range(self.groups)]
        return Batch(
            ids,
            {
                "prompt": Column.from_rows([p for p in prompts for _ in range(self.samples)]),
                "response": Column.from_rows([draw(self.response) for _ in range(len(ids))]),
            },
        )


CASES = (
    Case(4, 8, 48, 16, layers=30, target=2.0, repeats=3),
    Case(1, 16, 1024, 512, layers=3, target=None, repeats=1),
)


def policy(layers: int) -> PolicyModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        attn_implementation=ATTENTION,
    )
    return PolicyModel(LlamaForCausalLM(config).to(torch.bfloat16).eval(), temperature=1.0, chunk=1024)


def step(model: PolicyModel, batch: Batch, shared: bool) -> tuple[float, int, Tensor]:
    """Seconds of one forward and backward pass (packing included), packed tokens, log-probabilities."""
    model.zero_grad()
    start = time.perf_counter()
    packed = pack(batch, shared)
    logprob_R, _ = model(packed, PackedTree(packed.nodes, torch.device("cpu")))
    logprob_R.mean().backward()
    return time.perf_counter() - start, packed.tokens, logprob_R.detach()


def status_mib(field: str) -> float:
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(f"{field}:"))
    return int(line.split()[1]) / 1024


def print_peak(case: Case, shared: bool) -> None:
    model, batch = policy(case.layers), case.batch()
    step(model, Case(1, 1, 2, 2, case.layers, None, 1).batch(), shared)  # gradients, and what is allocated once
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    before = status_mib("VmRSS")
    step(model, batch, shared)
    print(status_mib("VmHWM") - before)


def peak(number: int, shared: bool) -> float:
    command = [sys.executable, __file__, "--peak", str(number), str(int(shared))]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def measure(number: int) -> dict[str, Any]:
    case = CASES[number]
    model, batch = policy(case.layers), case.batch()
    times: dict[bool, list[float]] = {True: [], False: []}
    tokens, logprobs = {}, {}
    for repeat in range(case.repeats + 1):
        for shared, values in times.items():
            taken, tokens[shared], logprobs[shared] = step(model, batch, shared)
            print(f"# {case.name}: {'shared' if shared else 'alone'} {taken:.2f} s", file=sys.stderr, flush=True)
            if repeat:  # the first is the warm-up
                values.append(taken)
    assert float((logprobs[True] - logprobs[False]).abs().mean()) < 0.05  # of bfloat16
    del model
    mine, other = median(times[True]), median(times[False])
    mine_mib, other_mib = peak(number, True), peak(number, False)
    return {
        "case": case.name,
        "shared_s": round(mine, 3),
        "unshared_s": round(other, 3),
        "ratio": round(other / mine, 2),
        "target": case.target,
        "shared_tokens": tokens[True],
        "unshared_tokens": tokens[False],
        "shared_mib": round(mine_mib),
        "unshared_mib": round(other_mib),
        "threads": torch.get_num_threads(),
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--only", type=int, choices=range(len(CASES)), help="one case")
    parser.add_argument("--peak", nargs=2, metavar=("CASE", "SHARED"), help="of one side, for the script itself")
    arguments = parser.parse_args()
    if arguments.peak:
        print_peak(CASES[int(arguments.peak[0])], arguments.peak[1] == "1")
        return 0
    numbers = range(len(CASES)) if arguments.only is None else [arguments.only]
    rows = []
    for number in numbers:
        rows.append(measure(number))
        print(json.dumps(rows[-1]), flush=True)
    print(f"{'case':50} {'shared s':>9} {'alone s':>9} {'ratio':>6} {'tokens':>15} {'MiB':>13}")
    for row in rows:
        counts = f"{row['shared_tokens']:,}/{row['unshared_tokens']:,}"
        memory = f"{row['shared_mib']}/{row['unshared_mib']}"
        print(
            f"{row['case']:50} {row['shared_s']:9.2f} {row['unshared_s']:9.2f} {row['ratio']:6.2f} "
            f"{counts:>15} {memory:>13}"
        )
    missed = [row["case"] for row in rows if row["target"] is not None and row["ratio"] < row["target"]]
    return int(arguments.check and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
