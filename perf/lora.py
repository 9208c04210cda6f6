"""Memory and time of training LoRA adapters beside training all weights, each with a reference policy.

    .venv/bin/python perf/lora.py --check

The quickstart's model (30 layers, 135 million weights) in bfloat16 on one rank, each side in its own process. Actor
and reference are built; then an update on 8 groups of 8 responses of 16 tokens on prompts of 48, the reference's
log-probabilities and the weights for the rollout engine are computed `--repeats` times. Sizes are sums over the tensors
that are held; resident memory is the process's, after the last round and at its peak. One JSON object per side and a
table; `--check` exits with 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # when run as a script, from a checkout that is not installed

from spmd_rl.comm.bootstrap import bootstrap, shutdown  # noqa: E402
from spmd_rl.config.schema import CommConfig, Config, ModelConfig, OptimizerConfig, TrainConfig  # noqa: E402
from spmd_rl.data.batch import Batch, Column  # noqa: E402
from spmd_rl.engines.protocol import LossTerms  # noqa: E402
from spmd_rl.engines.train.engine import TrainEngine  # noqa: E402
from spmd_rl.engines.train.lora_engine import BasePolicy, LoraEngine  # noqa: E402
from spmd_rl.observe.metrics import Metrics  # noqa: E402

GIB = 1024**3
# figure → the adapters' part of the full one, at most
TARGETS = {"optimizer_gib": 0.1, "checkpoint_gib": 0.1, "resident_gib": 0.6}


def samples() -> Batch:
    generator = torch.Generator().manual_seed(0)

    def draw(length: int) -> Tensor:
        return torch.randint(1000, 40_000, (length,), generator=generator, dtype=torch.int32)

    prompts = [draw(48) for _ in range(8)]
    rows = [(group, i) for group in range(8) for i in range(8)]
    return Batch(
        torch.tensor([[0, group, i] for group, i in rows]),
        {
            "prompt": Column.from_rows([prompts[group] for group, _ in rows]),
            "response": Column.from_rows([draw(16) for _ in rows]),
            "sign": Column.from_rows([torch.full((16,), (-1.0) ** i) for _, i in rows]),
        },
    )


def loss(terms: LossTerms, metrics: Metrics) -> Tensor:
    return -(terms.logprob_R * terms.batch["sign"].values).sum() / terms.normalizers["tokens"]


def seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def resident_gib(field: str) -> float:
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024 / GIB


def size_gib(state: Any) -> float:
    """Of all tensors in nested mappings and lists."""
    if isinstance(state, Tensor):
        return state.numel() * state.element_size() / GIB
    inner = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return sum(map(size_gib, inner))


def measure(path: str, rank: int, repeats: int) -> dict[str, Any]:
    """One side's figures. rank: of the adapters; 0: all weights are trained."""
    world = bootstrap(CommConfig())
    mesh = world.mesh(range(1), {"dp": 1})
    train = TrainConfig(tokens_per_microbatch=2048, optimizer=OptimizerConfig(lr=1e-5))
    config = Config(model=ModelConfig(path=path, lora_rank=rank), train=train)
    actor = (LoraEngine if rank else TrainEngine)(config, world, mesh, total_steps=10)
    reference: Any = None
    if isinstance(actor, LoraEngine):
        reference = BasePolicy(actor)
    else:
        reference = TrainEngine(config, world, mesh, total_steps=0, trainable=False)
    batch = samples()
    times: dict[str, list[float]] = {"update_s": [], "reference_s": [], "weights_s": []}
    for _ in range(repeats + 1):  # the first is for warming up
        times["reference_s"].append(seconds(lambda: reference.logprobs(batch)))
        times["update_s"].append(seconds(lambda: actor.update(batch, loss, Metrics())))
        times["weights_s"].append(seconds(lambda: [None for _ in actor.named_weights()]))
    state = actor.state_dict()
    figures = {
        "trained": sum(moments["exp_avg"].numel() for moments in state["optimizer"]["state"].values()),
        "optimizer_gib": size_gib(state["optimizer"]),
        "checkpoint_gib": size_gib(state),
        "resident_gib": resident_gib("VmRSS"),
        "peak_gib": resident_gib("VmHWM"),
        **{name: median(values[1:]) for name, values in times.items()},
    }
    shutdown(world)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "models" / "SmolLM2-135M-Instruct"))
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--side", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side is not None:
        print(json.dumps(measure(options.model, options.side, options.repeats)))
        return 0
    sides: dict[str, dict[str, float]] = {}
    for name, rank in (("full", 0), ("lora", options.rank)):
        command = [sys.executable, __file__, "--model", options.model, "--repeats", str(options.repeats)]
        done = subprocess.run([*command, "--side", str(rank)], stdout=subprocess.PIPE, text=True, check=True)
        sides[name] = json.loads(done.stdout.splitlines()[-1])
        print(json.dumps({"side": name, "rank": rank, **sides[name]}), flush=True)
    print(f"\n| figure | all weights | rank {options.rank} | part | target |\n| --- | --- | --- | --- | --- |")
    missed = False
    for name, full in sides["full"].items():
        part, target = sides["lora"][name] / full, TARGETS.get(name)
        missed |= target is not None and part > target
        print(f"| {name} | {full:.4g} | {sides['lora'][name]:.4g} | {part:.3f} | {target or ''} |")
    return int(options.check and missed)


if __name__ == "__main__":
    sys.exit(main())
