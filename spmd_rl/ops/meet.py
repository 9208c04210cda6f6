"""A barrier among the processes that map the same memory."""

from __future__ import annotations

import torch
from torch import Tensor

from spmd_rl.ops.library import built


def can_meet() -> bool:
    """Whether `meet` is there: it needs the compiled library, for torch has no atomic operation on a tensor."""
    return built()


def meet(counter: Tensor, expected: int, seconds: float) -> bool:
    """Count the caller in, and wait for the others: until `expected` have come in all. False where that takes longer
    than `seconds`; the counter is then of no more use.

    counter: int32 [1] in shared memory, 0 before the first meeting; expected: N, 2N, 3N, ... for N ranks. What a rank
    wrote before it came is seen by all that have met. Other threads of Python run meanwhile.
    """
    return bool(torch.ops.spmd_rl.meet(counter, expected, seconds))
