"""Our losses beside TRL's own code on the same random ragged batches: the loss and its gradient per token.

TRL comes with the extra [dev] and runs in a process of its own, so that neither is loaded into the other. One JSON
object per line and a table; `--check` exits with 1 where a difference is above 1e-6.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # when run as a script, from a checkout that is not installed

from spmd_rl.algorithms.aggregate import local_counts  # noqa: E402
from spmd_rl.algorithms.policy_loss import policy_loss  # noqa: E402
from spmd_rl.config.schema import AlgorithmConfig  # noqa: E402
from spmd_rl.data.batch import Batch, Column  # noqa: E402
from spmd_rl.engines.protocol import LossTerms  # noqa: E402
from spmd_rl.observe.metrics import Metrics  # noqa: E402

TOLERANCE = 1e-6
MAX_TOKENS = 40  # of a response; what dr_grpo divides by

# name → (TRL's settings, ours)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"loss_type": "grpo"}, {"aggregation": "seq_mean_token_mean"}),
    "grpo + KL": (
        {"loss_type": "grpo", "beta": 0.04},
        {"aggregation": "seq_mean_token_mean", "kl_coef": 0.04, "kl_estimator": "k3"},
    ),
    "grpo + KL with ratio": (
        {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": True},
        {"aggregation": "seq_mean_token_mean", "kl_coef": 0.04, "kl_estimator": "k3_ratio"},
    ),
    "grpo + dual clip": (
        {"loss_type": "grpo", "delta": 1.5},
        {"aggregation": "seq_mean_token_mean", "dual_clip": 1.5},
    ),
    "dr_grpo": (
        {"loss_type": "dr_grpo", "max_completion_length": MAX_TOKENS},
        {"advantage": "dr_grpo", "aggregation": "constant"},
    ),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, {"clip_high": 0.28}),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.25},  # TRL's bound is on the ratio itself
        {"loss": "cispo", "clip_low": 1.0, "clip_high": 0.25},
    ),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04},
        {"loss": "gspo", "aggregation": "seq_mean_token_mean", "clip_low": 0.03, "clip_high": 0.04},
    ),
    "sapo": (
        {"loss_type": "sapo", "sapo_temperature_neg": 2.0},
        {"loss": "sapo", "aggregation": "seq_mean_token_mean", "sapo_tau_negative": 2.0},
    ),
}


def make_samples(seed: int) -> dict[str, Any]:
    """A random ragged batch: lengths [S] and flat float64 columns [R], advantages [S]."""
    random = torch.Generator().manual_seed(seed)
    lengths_S = torch.randint(1, MAX_TOKENS + 1, (24,), generator=random)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(int(lengths_S.sum()), dtype=torch.float64, generator=random)

    logprob_R = -noise(1.5).abs()
    return {
        "lengths_S": lengths_S,
        "logprob_R": logprob_R,
        "old_logprob_R": logprob_R + noise(0.3),
        "ref_logprob_R": logprob_R + noise(0.3),
        "advantage_S": torch.randn(24, dtype=torch.float64, generator=random),
    }


def theirs(samples: dict[str, Any]) -> tuple[str, dict[str, dict[str, Tensor]]]:
    """(TRL's version, per case its `loss` and flat `gradient_R`)."""
    lengths = samples["lengths_S"].tolist()

    def padded(values_R: Tensor) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(list(values_R.split(lengths)), batch_first=True, padding_value=-7.0)

    columns = {f"{name}_ST": padded(samples[f"{name}_R"]) for name in ("logprob", "old_logprob", "ref_logprob")}
    mask_ST = (torch.arange(max(lengths)) < samples["lengths_S"].unsqueeze(1)).long()
    cases = {
        name: {**columns, "mask_ST": mask_ST, "advantage_S": samples["advantage_S"], "trl": settings}
        for name, (settings, _) in CASES.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        given, answer = Path(folder) / "in.pt", Path(folder) / "out.pt"
        torch.save(cases, given)
        script = Path(__file__).with_name("trl_losses_inside.py")
        subprocess.run([sys.executable, script, given, answer], check=True, timeout=240)
        answers = torch.load(answer)
    results = {
        name: {"loss": result["loss"], "gradient_R": result["gradient_ST"][mask_ST.bool()]}
        for name, result in answers["results"].items()
    }
    return answers["version"], results


def ours(samples: dict[str, Any], settings: dict[str, Any]) -> dict[str, Tensor]:
    """The same from our code."""
    lengths_S = samples["lengths_S"]
    advantage_R = samples["advantage_S"].repeat_interleave(lengths_S)
    columns = {name: samples[f"{name}_R"] for name in ("old_logprob", "ref_logprob")} | {"advantage": advantage_R}
    ids = torch.stack([torch.zeros_like(lengths_S), torch.zeros_like(lengths_S), torch.arange(len(lengths_S))], dim=1)
    batch = Batch(ids, {name: Column(values_R, lengths_S) for name, values_R in columns.items()})
    logprob_R = samples["logprob_R"].clone().requires_grad_()
    cu_seqlens, mask_R = batch["advantage"].offsets, torch.ones(len(logprob_R))
    terms = LossTerms(
        logprob_R=logprob_R,
        entropy_R=torch.zeros_like(logprob_R),
        batch=batch,
        cu_seqlens=cu_seqlens,
        mask_R=mask_R,
        normalizers=local_counts(mask_R, cu_seqlens),
    )
    loss = policy_loss(AlgorithmConfig(**settings), updates_per_step=2, max_tokens=MAX_TOKENS)(terms, Metrics())
    return {"loss": loss.detach(), "gradient_R": torch.autograd.grad(loss, logprob_R)[0]}


def compare(seed: int) -> list[dict[str, Any]]:
    """One row per case: both losses, and the largest differences; gradients relative to the largest one."""
    samples = make_samples(seed)
    version, results = theirs(samples)
    rows = []
    for name, (_, settings) in CASES.items():
        mine, other = ours(samples, settings), results[name]
        difference = (mine["gradient_R"] - other["gradient_R"]).abs().max() / other["gradient_R"].abs().max()
        rows.append(
            {
                "case": name,
                "seed": seed,
                "ours": float(mine["loss"]),
                "trl": float(other["loss"]),
                "loss_difference": float((mine["loss"] - other["loss"]).abs()),
                "gradient_difference": float(difference),
                "versions": {"torch": torch.__version__, "trl": version},
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    rows = [row for seed in range(arguments.seeds) for row in compare(seed)]
    for row in rows:
        print(json.dumps(row))
    print(f"{'case':22} {'ours':>12} {'TRL':>12} {'loss diff.':>11} {'grad. diff.':>11}")
    for row in rows:
        print(
            f"{row['case']:22} {row['ours']:12.8f} {row['trl']:12.8f} {row['loss_difference']:11.1e} "
            f"{row['gradient_difference']:11.1e}"
        )
    worst = max(max(row["loss_difference"], row["gradient_difference"]) for row in rows)
    return int(arguments.check and not worst <= TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
