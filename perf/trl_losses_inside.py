"""Runs TRL's own loss code on given log-probabilities; called by trl_losses.py as a process of its own:
`python trl_losses_inside.py INPUT OUTPUT`, both files of torch.save."""

from __future__ import annotations

import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer, __version__


class _OneProcess:
    """What the loss asks of accelerate's Accelerator in a run of one process."""

    num_processes = 1
    sync_gradients = True

    def gather(self, value: Tensor) -> Tensor:
        return value

    def reduce(self, value: Tensor, reduction: str) -> Tensor:
        return value


def run(case: dict[str, Any]) -> dict[str, Tensor]:
    """The loss of one micro-batch that is the whole step, and its gradient per token (0 in the padding)."""
    settings = case["trl"]
    logprob_ST = case["logprob_ST"].clone().requires_grad_()
    trainer = object.__new__(GRPOTrainer)
    attributes = {
        "_get_per_token_logps_and_entropies": lambda *a, **k: (logprob_ST, torch.zeros_like(logprob_ST), None),
        "accelerator": _OneProcess(),
        "args": SimpleNamespace(
            use_bias_correction_kl=settings.get("use_bias_correction_kl", False),
            delta=settings.get("delta"),
            sapo_temperature_pos=settings.get("sapo_temperature_pos", 1.0),
            sapo_temperature_neg=settings.get("sapo_temperature_neg", 1.05),
            steps_per_generation=1,
        ),
        "aux_loss_enabled": False,
        "beta": settings.get("beta", 0.0),
        "current_gradient_accumulation_steps": 1,
        "epsilon_high": settings.get("epsilon_high", 0.2),
        "epsilon_low": settings.get("epsilon_low", 0.2),
        "importance_sampling_level": settings.get("importance_sampling_level", "token"),
        "loss_type": settings["loss_type"],
        "max_completion_length": settings.get("max_completion_length", 0),
        "model": SimpleNamespace(training=True),
        "off_policy_mask_threshold": None,
        "top_entropy_quantile": 1.0,
        "use_vllm": False,
        "_entropy_bonus_enabled": False,
        "_metrics": {"train": defaultdict(list)},
    }
    for name, value in attributes.items():
        object.__setattr__(trainer, name, value)
    mask_ST = case["mask_ST"]
    ids_ST = torch.zeros_like(mask_ST, dtype=torch.int64)
    loss = trainer._compute_loss(
        trainer.model,
        {
            "prompt_ids": ids_ST[:, :1],
            "prompt_mask": torch.ones_like(ids_ST[:, :1]),
            "completion_ids": ids_ST,
            "completion_mask": mask_ST,
            "advantages": case["advantage_S"],
            "old_per_token_logps": case["old_logprob_ST"],
            "ref_per_token_logps": case["ref_logprob_ST"],
            "num_items_in_batch": mask_ST.sum(),
        },
    )
    (gradient_ST,) = torch.autograd.grad(loss, logprob_ST)
    return {"loss": loss.detach(), "gradient_ST": gradient_ST}


if __name__ == "__main__":
    cases = torch.load(sys.argv[1])
    torch.save({"version": __version__, "results": {name: run(case) for name, case in cases.items()}}, sys.argv[2])
