"""Group advantages and GAE for 1,000 samples of up to 2,048 tokens, beside the padded loops that are usual elsewhere.

Ours: from rewards to one value per token (GRPO), and from rewards and values to advantages and returns (GAE), on ragged
columns. The other: a Python loop over samples with a dictionary of groups, and one over token positions of padded
[S, T] tensors. One JSON object per line and a table; `--check` exits with 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # when run as a script, from a checkout that is not installed

from spmd_rl.algorithms.advantages import compute_advantages  # noqa: E402
from spmd_rl.algorithms.gae import gae, terminal_rewards  # noqa: E402
from spmd_rl.algorithms.masks import spread  # noqa: E402
from spmd_rl.algorithms.ragged import offsets_of  # noqa: E402
from spmd_rl.config.schema import AlgorithmConfig  # noqa: E402

SAMPLES, TOKENS, GROUP = 1000, 2048, 8
TARGET_MS = {"group advantages": 6.0, "GAE": 40.0}
GAMMA, LAM = 0.99, 0.95


def looped_advantages(reward_S: Tensor, group_S: Tensor, mask_ST: Tensor) -> Tensor:
    """The same numbers by a loop over samples; [S, T]."""
    by_group: dict[int, list[Tensor]] = defaultdict(list)
    for i in range(len(reward_S)):
        by_group[int(group_S[i])].append(reward_S[i])
    statistics = {}
    for group, rewards in by_group.items():
        stacked = torch.stack(rewards)
        statistics[group] = (stacked.mean(), stacked.std())
    advantage_S = reward_S.clone()
    for i in range(len(reward_S)):
        mean, std = statistics[int(group_S[i])]
        advantage_S[i] = (reward_S[i] - mean) / (std + 1e-6)
    return advantage_S.unsqueeze(1) * mask_ST


def looped_gae(reward_ST: Tensor, value_ST: Tensor, mask_ST: Tensor) -> Tensor:
    """The same numbers by a loop over the token positions of padded tensors; [S, T]."""
    next_value_S = running_S = torch.zeros(len(reward_ST))
    columns = []
    for t in reversed(range(reward_ST.shape[1])):
        delta_S = reward_ST[:, t] + GAMMA * next_value_S - value_ST[:, t]
        candidate_S = delta_S + GAMMA * LAM * running_S
        next_value_S = torch.where(mask_ST[:, t] != 0, value_ST[:, t], next_value_S)
        running_S = torch.where(mask_ST[:, t] != 0, candidate_S, running_S)
        columns.append(running_S)
    return torch.stack(columns[::-1], dim=1)


def milliseconds(function: Callable[[], Any], repeats: int) -> float:
    """Median wall time of one call, after a warm-up."""
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return 1e3 * median(times)


def measure(kind: str, repeats: int) -> list[dict[str, Any]]:
    """kind: `full`, all responses of 2,048 tokens, or `ragged`, of 1 to 2,048. Asserts that both sides agree."""
    torch.manual_seed(0)
    lengths_S = torch.full((SAMPLES,), TOKENS) if kind == "full" else torch.randint(1, TOKENS + 1, (SAMPLES,))
    group_S = torch.arange(SAMPLES) // GROUP
    reward_S, cu_seqlens = torch.randn(SAMPLES), offsets_of(lengths_S)
    value_R = torch.randn(int(cu_seqlens[-1]))
    mask_ST = (torch.arange(int(lengths_S.max())) < lengths_S.unsqueeze(1)).float()
    padded = mask_ST.bool()
    value_ST = torch.zeros_like(mask_ST).masked_scatter(padded, value_R)
    reward_R = terminal_rewards(reward_S, cu_seqlens)
    reward_ST = torch.zeros_like(mask_ST).masked_scatter(padded, reward_R)
    algorithm = AlgorithmConfig()

    def ours() -> Tensor:
        advantage_S = compute_advantages(algorithm, reward_S, group_S, lengths_S, max_tokens=TOKENS)
        return spread(advantage_S, lengths_S)

    torch.testing.assert_close(ours(), looped_advantages(reward_S, group_S, mask_ST)[padded], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        gae(reward_R, value_R, cu_seqlens, GAMMA, LAM)[0],
        looped_gae(reward_ST, value_ST, mask_ST)[padded], rtol=1e-4, atol=1e-4,
    )  # fmt: skip
    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "group advantages": (ours, lambda: looped_advantages(reward_S, group_S, mask_ST)),
        "GAE": (
            lambda: gae(terminal_rewards(reward_S, cu_seqlens), value_R, cu_seqlens, GAMMA, LAM),
            lambda: looped_gae(reward_ST, value_ST, mask_ST),
        ),
    }
    rows = []
    for name, (mine, other) in pairs.items():
        ours_ms, other_ms = milliseconds(mine, repeats), milliseconds(other, max(3, repeats // 4))
        rows.append(
            {
                "case": f"{name}, {kind}",
                "ours_ms": round(ours_ms, 2),
                "padded_loop_ms": round(other_ms, 2),
                "ratio": round(other_ms / ours_ms, 1),
                "target_ms": TARGET_MS[name],
                "threads": torch.get_num_threads(),
                "versions": {"torch": torch.__version__, "python": platform.python_version()},
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    rows = [row for kind in ("full", "ragged") for row in measure(kind, arguments.repeats)]
    for row in rows:
        print(json.dumps(row))
    print(f"{'case':26} {'ours ms':>9} {'loop ms':>9} {'ratio':>7} {'target ms':>10}")
    for row in rows:
        print(
            f"{row['case']:26} {row['ours_ms']:9.2f} {row['padded_loop_ms']:9.2f} {row['ratio']:7.1f} "
            f"{row['target_ms']:10.1f}"
        )
    missed = [row["case"] for row in rows if row["ours_ms"] > row["target_ms"]]
    return int(arguments.check and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
