"""AdamW and its learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from spmd_rl.config.errors import UserError
from spmd_rl.config.schema import OptimizerConfig


def lr_factor(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """What multiplies `config.lr` in optimizer step `step` (0-based) of `total_steps`.

    Warm-up: (step + 1) / warmup_steps, so that no step is lost to a rate of 0. After it, with x running from 0 at the
    first full step to 1 at the last one: constant 1; linear 1 - x (1 - m); cosine m + (1 - m)(1 + cos(pi x)) / 2,
    with m = min_lr_ratio.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    span = total_steps - 1 - config.warmup_steps
    x = min(max((step - config.warmup_steps) / span, 0.0), 1.0) if span > 0 else 0.0
    least = config.min_lr_ratio
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "linear":
        return 1.0 - x * (1.0 - least)
    if config.schedule == "cosine":
        return least + (1.0 - least) * 0.5 * (1.0 + math.cos(math.pi * x))
    raise UserError(f"train.optimizer.schedule must be constant, linear or cosine, not {config.schedule!r}")


def build_optimizer(
    parameters: Iterable[nn.Parameter], config: OptimizerConfig, total_steps: int
) -> tuple[AdamW, LambdaLR]:
    """AdamW in one fused kernel over all parameters, and its schedule (one scheduler step per optimizer step).

    Weight decay leaves out vectors (norms, biases), as is usual: they scale and shift, and have nothing to decay to.
    """
    lr_factor(config, 0, total_steps)  # refuse an unknown schedule now, not at the first step
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for parameter in parameters:
        (matrices if parameter.dim() > 1 else vectors).append(parameter)
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    first, second = config.betas
    used = [group for group in groups if group["params"]]
    optimizer = AdamW(used, lr=config.lr, betas=(first, second), eps=config.eps, fused=True)
    return optimizer, LambdaLR(optimizer, lambda step: lr_factor(config, step, total_steps))
