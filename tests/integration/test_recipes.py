"""Every algorithm of configs/recipes trains, and does what its keys say and no other one does."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from spmd_rl.config.check import check
from spmd_rl.config.load import load_config
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.graph.graph import load_graph, resolve
from tests.integration.program import metrics, samples, start_each, tiny_config
from tests.tiny_model import make_tiny_model
from tests.world.harness import ROOT

RECIPES = [path for path in sorted((ROOT / "configs" / "recipes").glob("*.yaml")) if "algorithm:" in path.read_text()]
NAMES = [path.stem for path in RECIPES]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
LR = 3e-3  # so that the second update of a step is far from the first


@pytest.mark.parametrize("recipe", RECIPES, ids=NAMES)
def test_a_recipe_lies_over_the_quickstart_and_changes_what_it_names(recipe: Path) -> None:
    text = recipe.read_text()
    assert "arXiv:" in text.splitlines()[0] + text.splitlines()[1], "the paper comes first"
    config = load_config(QUICKSTART, [str(recipe)])
    check(config)
    resolve(load_graph(config.run.graph)(config, 2), 2)
    assert config.algorithm != AlgorithmConfig()
    assert config.data == load_config(QUICKSTART).data and config.model == load_config(QUICKSTART).model


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """Two steps with each recipe, and with the default (GRPO), on one tiny model."""
    folder = tmp_path_factory.mktemp("recipes")
    model = make_tiny_model(folder / "model")
    config = tiny_config(
        folder,
        model,
        run={"threads": 1},
        reward={"functions": [{"function": f"{folder / 'rewards.py'}:letters"}], "workers": 0},
        train={
            **{"steps": 2, "prompts_per_step": 4, "samples_per_prompt": 4, "tokens_per_microbatch": 2000},
            "optimizer": {"lr": LR, "grad_clip": 0.0},
        },
        checkpoint={"every": 0, "export": False},
        observe={"timeline": False, "tensorboard": False, "samples_per_step": 1000, "console_samples": 0},
    )
    folders = {name: folder / name for name in ["grpo", *NAMES]}
    start_each(
        [str(config), f"run.folder={folders['grpo']}", "train.updates_per_step=4"],
        *([str(config), str(recipe), f"run.folder={folders[recipe.stem]}"] for recipe in RECIPES),
        timeout_s=280,
    )
    return folders


def first(runs: dict[str, Path], name: str) -> dict[str, float]:
    return metrics(runs[name])[0]


def test_all_make_two_steps_on_the_same_first_samples(runs: dict[str, Path]) -> None:
    for name, run in runs.items():
        lines = metrics(run)
        assert [line["step"] for line in lines] == [1, 2], name
        assert all(line["grad_norm"] > 0 and math.isfinite(line["loss/policy"]) for line in lines), name
        assert {i: s for i, s in samples(run).items() if s[0] == 1} == {
            i: s for i, s in samples(runs["grpo"]).items() if s[0] == 1
        }, name


def test_no_two_recipes_take_the_same_first_gradient(runs: dict[str, Path]) -> None:
    norms = sorted((first(runs, name)["grad_norm"], name) for name in NAMES)
    for (norm, name), (above, other) in zip(norms, norms[1:], strict=False):
        assert above > norm * (1 + 1e-5), (name, other)


ON_POLICY = ("rloo", "opo", "passk", "remax")  # one update per step


@pytest.mark.parametrize("name", NAMES)
def test_several_updates_where_the_recipe_has_a_ratio(runs: dict[str, Path], name: str) -> None:
    ratio = first(runs, name)["ratio/max"]
    assert ratio == 1.0 if name in ON_POLICY else ratio > 1.01


def test_dapo_clips_higher_samples_dynamically_and_punishes_length(runs: dict[str, Path]) -> None:
    line = first(runs, "dapo")
    assert line["dynamic/kept_fraction"] == 1.0 and line["dynamic/rounds"] == 1 and "correction/weight_mean" in line
    assert line["loss/policy"] != pytest.approx(first(runs, "grpo")["loss/policy"], rel=1e-6)


def test_bounds_are_those_of_the_recipe(runs: dict[str, Path]) -> None:
    clipped = {name: first(runs, name)["ratio/clip_fraction"] for name in runs}
    assert clipped["gspo"] > clipped["grpo"] > clipped["gmpo"]  # 4e-4 around 1, 0.2, exp(0.4)
    assert clipped["sapo"] == 0.0 and clipped["cispo"] < clipped["grpo"]


def test_kl_in_the_reward_loads_a_reference(runs: dict[str, Path]) -> None:
    for name in NAMES:
        assert ("kl/ref" in first(runs, name)) == (name in ("rloo", "reinforce_pp", "remax", "ppo")), name


def test_losses_are_of_the_size_that_their_aggregation_gives(runs: dict[str, Path]) -> None:
    """On policy, loss = -mean of A * log-probability or of A: sums over a response are larger than means over it."""
    length = first(runs, "opo")["response/length_mean"]
    by_response, by_token = first(runs, "opo"), first(runs, "passk")
    assert by_response["grad_norm"] > 2 * by_token["grad_norm"] and length > 2
