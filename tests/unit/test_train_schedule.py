"""Learning-rate factors by hand, and what the optimizer decays."""

import pytest
import torch
from torch import nn

from spmd_rl.config.errors import UserError
from spmd_rl.config.schema import OptimizerConfig
from spmd_rl.engines.train.optimizer import build_optimizer, lr_factor


@pytest.mark.parametrize(
    ("config", "want"),
    [
        (OptimizerConfig(), [1, 1, 1, 1, 1]),
        (OptimizerConfig(warmup_steps=4), [0.25, 0.5, 0.75, 1, 1]),
        (OptimizerConfig(schedule="linear"), [1, 0.75, 0.5, 0.25, 0]),
        (OptimizerConfig(schedule="linear", warmup_steps=2, min_lr_ratio=0.2), [0.5, 1, 1, 0.6, 0.2]),
        (OptimizerConfig(schedule="cosine"), [1, 0.8535533905932737, 0.5, 0.14644660940672624, 0]),
        (OptimizerConfig(schedule="cosine", min_lr_ratio=0.5), [1, 0.9267766952966369, 0.75, 0.5732233047033631, 0.5]),
        (OptimizerConfig(schedule="linear", warmup_steps=9), [1 / 9, 2 / 9, 3 / 9, 4 / 9, 5 / 9]),
    ],
)
def test_factors(config: OptimizerConfig, want: list[float]) -> None:
    assert [lr_factor(config, step, total_steps=5) for step in range(5)] == pytest.approx(want)


def test_after_the_last_step_the_rate_stays() -> None:
    assert lr_factor(OptimizerConfig(schedule="cosine", min_lr_ratio=0.1), 50, total_steps=5) == pytest.approx(0.1)
    assert lr_factor(OptimizerConfig(schedule="linear"), 0, total_steps=1) == 1.0


def test_unknown_schedule() -> None:
    with pytest.raises(UserError, match="constant, linear or cosine, not 'polynomial'"):
        build_optimizer([nn.Parameter(torch.ones(1))], OptimizerConfig(schedule="polynomial"), 5)


def test_steps_follow_the_schedule_and_vectors_are_not_decayed() -> None:
    matrix, vector = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(3))
    config = OptimizerConfig(lr=0.1, weight_decay=0.5, schedule="linear")
    optimizer, schedule = build_optimizer([matrix, vector], config, total_steps=3)
    want = 1.0
    for factor in (1.0, 0.5, 0.0):
        matrix.grad, vector.grad = torch.zeros(2, 2), torch.zeros(3)
        optimizer.step()
        schedule.step()
        want *= 1 - 0.1 * factor * 0.5  # decoupled decay; with gradient 0 nothing else moves
        torch.testing.assert_close(matrix.detach(), torch.full((2, 2), want))
        assert torch.equal(vector.detach(), torch.ones(3))
