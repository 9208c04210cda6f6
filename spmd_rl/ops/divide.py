"""The kernel that decides which slot gets which sample. Its reference is `data.assignment.divide_reference`."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from spmd_rl.ops.library import built

Int64 = NDArray[np.int64]


def can_divide() -> bool:
    return built()


def divide_kernel(
    ids_T3: Int64,
    source_T: Int64,
    lengths_T: Int64,
    costs: tuple[float, float],
    constraints: tuple[bool, bool],
    stay_up_to: float | None,
    slots: tuple[int, int],
) -> tuple[Int64, Int64, float, float, int]:
    """Sort T samples by identity and divide them among slots.

    source_T: slots where they are; costs: linear and quadratic factor of lengths_T; constraints: whether groups stay
    together, and whether slots get equal counts; stay_up_to: max / mean load up to which samples that meet the
    constraints stay where they are (None: they may not); slots: of the source and of the target. Returns, in the
    order of identities, the row of each sample and its slot; max / mean load before and after; and the place of the
    first sample whose identity the next one has, too (-1: none). Raises RuntimeError for costs that are negative or
    not finite.
    """
    arrays = (torch.from_numpy(part) for part in (ids_T3, source_T, lengths_T))
    slack = 0.0 if stay_up_to is None else stay_up_to
    order, slot, figures = torch.ops.spmd_rl.divide(
        *arrays, *costs, *constraints, slack, stay_up_to is not None, *slots
    )
    before, after, twice = figures.tolist()
    return order.numpy(), slot.numpy(), before, after, int(twice)
