"""The samples of perf/exchange.py, made alike for both programs. Needs torch alone.

Nine columns; lengths of responses are long-tailed (lognormal, clipped to four times the mean).
"""

from __future__ import annotations

import torch
from torch import Tensor

# name → dtype; `prompt` is a quarter of the mean response long, all others as long as the response
COLUMNS: dict[str, torch.dtype] = {
    "prompt": torch.int64,
    "response": torch.int64,
    "position": torch.int64,
    "loss_mask": torch.uint8,
    "rollout_logprob": torch.float32,
    "old_logprob": torch.float32,
    "ref_logprob": torch.float32,
    "value": torch.float32,
    "advantage": torch.float32,
}


def lengths(samples: int, tokens: int, seed: int = 0) -> Tensor:
    """int64 [samples]: response lengths of mean `tokens`."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(samples, generator=generator).mul(0.8).exp()
    scaled = drawn * (tokens / float(drawn.mean()))
    return scaled.clamp(1, 4 * tokens).round().long()


def columns(lengths_S: Tensor, tokens: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Values and lengths of every column."""
    made = {}
    for name, dtype in COLUMNS.items():
        own = torch.full_like(lengths_S, max(1, tokens // 4)) if name == "prompt" else lengths_S
        total = int(own.sum())
        values = torch.rand(total) if dtype.is_floating_point else torch.randint(0, 100, (total,))
        made[name] = (values.to(dtype), own)
    return made
