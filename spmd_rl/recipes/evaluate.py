"""Evaluation on held-out prompts: every replica draws its part, one small all-gather brings the counts together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from spmd_rl.data.batch import Batch
from spmd_rl.graph.stage import Context
from spmd_rl.observe.evaluation import Evaluation, evaluate_counts
from spmd_rl.recipes.stages import draw, score


@dataclass(frozen=True)
class Evaluated:
    """results: by source; samples: this rank's, with `response` and `reward`, for people to read."""

    results: Mapping[str, Evaluation]
    samples: Mapping[str, Batch]
