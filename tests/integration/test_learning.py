"""The whole program learns: a small random model gets better at a task, by more than chance would have it."""

from __future__ import annotations

from pathlib import Path

import pytest

from perf import small_task
from tests.integration.program import metrics, start_each
from tests.world.harness import ROOT

RECIPES = {
    "grpo": [],
    "remax": [str(ROOT / "configs/recipes/remax.yaml")],
    "ppo": [str(ROOT / "configs/recipes/ppo.yaml"), "critic.optimizer.lr=5e-3"],
}
# At least; they reach 0.6, 0.2 and 0.6. A mean over 4 x 64 samples of a policy that has learned nothing moves by 0.02.
RISE = {"grpo": 0.3, "remax": 0.1, "ppo": 0.3}
STEPS = 16


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("learning")
    config = small_task.make(folder, STEPS, lr=5e-3)
    quiet = ["checkpoint.export=false", "observe.timeline=false", "observe.tensorboard=false"]
    start_each(*[[str(config), *own, f"run.folder={folder / name}", *quiet] for name, own in RECIPES.items()])
    return {name: folder / name for name in RECIPES}


def test_the_reward_of_the_task() -> None:
    row = {"answer": "b"}
    assert [small_task.share("b:", response, row) for response in ("", "b", "abba", "cd")] == [0.0, 1.0, 0.5, 0.0]


@pytest.mark.parametrize("name", RECIPES)
def test_the_reward_rises(runs: dict[str, Path], name: str) -> None:
    rewards = [line["reward/mean"] for line in metrics(runs[name])]
    assert len(rewards) == STEPS
    assert sum(rewards[:2]) / 2 < 0.2
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + RISE[name]
