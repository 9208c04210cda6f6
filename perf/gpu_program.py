"""The whole program on one GPU beside the same on the CPU: a tiny random model, float32, transformers rollout.

Three steps each. The first step's loss, gradient norm and log-probabilities must agree, and on the GPU the trainer's
compiled attention must give the log-probabilities of the rollout engine. One JSON object per line; exits with 1 where
something differs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # when run as a script, from a checkout that is not installed

from tests.integration.program import MAIN, metrics, tiny_config  # noqa: E402
from tests.tiny_model import make_tiny_model  # noqa: E402

STEPS = 3
CLOSE = 1e-3  # relative; the two devices sum in another order, and a token near a border may be drawn differently
MISMATCH = 1e-6  # nats per token, float32


def train(folder: Path, model: Path, device: str) -> list[dict[str, Any]]:
    folder.mkdir()
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"say {n}", "answer": str(n)}) + "\n" for n in range(24)))
    source = {"name": "rows", "path": str(rows)}
    config = tiny_config(folder, model, data={"train": [source], "eval": [], "max_prompt_tokens": 160})
    environment = {**os.environ} if device == "cuda" else {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(MAIN), str(config), f"train.steps={STEPS}", "checkpoint.every=0"]
    command += ["algorithm.kl_coef=0.1", f"algorithm.offload_reference={str(device == 'cuda').lower()}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        sys.exit(f"gpu_program: the run on {device} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return metrics(folder / "run")


def main() -> int:
    if not torch.cuda.is_available():
        sys.exit("gpu_program: torch sees no GPU")
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model")
        runs = {device: train(Path(folder) / device, model, device) for device in ("cpu", "cuda")}
    failed = False
    for name in ("loss/policy", "grad_norm", "entropy", "reward/mean", "tokens/generated"):
        cpu, cuda = (runs[device][0][name] for device in ("cpu", "cuda"))
        close = abs(cpu - cuda) <= CLOSE * max(abs(cpu), 1e-3)
        failed |= not close
        print(json.dumps({"case": f"first step, {name}", "cpu": cpu, "cuda": cuda, "met": close}))
    distance = runs["cuda"][0]["kl/ref"]  # of the policy that was loaded twice, once to stay on the host
    failed |= not abs(distance) <= MISMATCH
    print(json.dumps({"case": "first step, kl/ref on cuda", "value": distance, "met": abs(distance) <= MISMATCH}))
    for step in runs["cuda"]:
        small = abs(step["mismatch/kl"]) <= MISMATCH
        failed |= not small
        line = {"case": f"step {step['step']}, mismatch/kl on cuda", "value": step["mismatch/kl"], "met": small}
        print(json.dumps({**line, "time/step": step["time/step"], "memory/peak_gib": step["memory/peak_gib"]}))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
