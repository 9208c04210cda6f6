"""What the tests of weight transfer share."""

from __future__ import annotations

import torch
from torch import Tensor


def make_weights(seed: int, scale: int = 1) -> dict[str, Tensor]:
    """Weights of every kind: two dtypes, no dimension, no element, odd sizes; the smallest is a byte of its own."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "embedding": ((37 * scale, 16), torch.bfloat16),
        "scale": ((), torch.float32),
        "empty": ((0, 4), torch.float32),
        "bias": ((5,), torch.bfloat16),
        "mask": ((1,), torch.uint8),
        "head": ((16, 37 * scale), torch.float32),
    }
    return {
        name: torch.randint(-100, 100, shape, generator=generator).to(dtype) for name, (shape, dtype) in shapes.items()
    }
