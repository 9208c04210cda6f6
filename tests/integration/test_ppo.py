"""Whole runs with a critic: any number of ranks, a warm-up that leaves the actor alone, a resume, what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.integration.program import metrics, samples, start, tiny_config

PPO = {"graph": "spmd_rl.recipes.ppo:graph"}
NAMES = (
    "loss/policy", "loss/value", "value/mean", "value/explained_variance", "grad_norm", "critic/grad_norm",
    "reward/mean", "entropy", "ratio/max",
)  # fmt: skip


def ppo_config(folder: Path, model: Path, algorithm=(), critic=()) -> Path:
    folder.mkdir(exist_ok=True)
    return tiny_config(
        folder,
        model,
        run={"name": "tiny", "folder": str(folder / "run"), "seed": 7, **PPO},
        algorithm={"advantage": "gae", **dict(algorithm)},
        critic={"optimizer": {"lr": 5e-3, "grad_clip": 0.0}, **dict(critic)},
    )


def same_training(ours: Path, theirs: Path, tolerance: float = 1e-4) -> None:
    assert samples(ours) == samples(theirs)
    for mine, other in zip(metrics(ours), metrics(theirs), strict=True):
        for name in NAMES:
            assert (name in mine) == (name in other), (name, mine["step"])
            if name in mine:
                assert mine[name] == pytest.approx(other[name], rel=tolerance, abs=1e-6), (name, mine["step"])


def test_world_size_does_not_change_the_training(tmp_path, model):
    """With all that there is: two updates, two critic epochs, value clipping, KL in the token rewards."""
    algorithm = {"kl_coef": 0.05, "kl_in": "reward", "gae_gamma": 0.99, "gae_lambda": 0.9}
    apart = ["mode=async", "placement.train=2", "stream.staleness=0", "stream.train_on=step"]  # on-policy: the same
    for ranks in (1, 2, 3):
        config = ppo_config(tmp_path / str(ranks), model, algorithm, {"epochs": 2, "value_clip": 0.5})
        overrides = ["train.steps=3", "train.updates_per_step=2", "train.samples_per_prompt=2"]
        overrides += apart if ranks == 3 else []
        start(config, *overrides, ranks=ranks, launcher="single" if ranks == 1 else "torchrun").check()
    same_training(tmp_path / "2" / "run", tmp_path / "1" / "run")
    same_training(tmp_path / "3" / "run", tmp_path / "1" / "run")
    last = metrics(tmp_path / "1" / "run")[-1]
    assert last["value/clip_fraction"] > 0 and last["ratio/max"] > 1.001 and last["kl/ref"] > 0
    assert last["critic/lr"] == 5e-3 and last["value/mean"] != 0


def weights(checkpoint: Path, engine: str, out: Path) -> dict[str, torch.Tensor]:
    dcp_to_torch_save(checkpoint, out)
    return torch.load(out, weights_only=False)[engine]["model"]


def test_warm_up_leaves_the_actor_to_the_bit_and_a_resume_goes_on(tmp_path, model):
    critic = {"warmup_steps": 2}
    whole = ppo_config(tmp_path / "whole", model, critic=critic)
    start(whole, "train.steps=4", ranks=1, launcher="single").check()
    run = tmp_path / "whole" / "run"
    steps = metrics(run)
    assert [m["train/actor_frozen"] for m in steps] == [1.0, 1.0, 0.0, 0.0]
    assert ["grad_norm" in m for m in steps] == [False, False, True, True]
    assert [m["lr"] for m in steps[2:]] == pytest.approx([5e-4, 1e-3])  # its schedule has waited
    assert steps[-1]["loss/value"] < 0.75 * steps[0]["loss/value"]
    at_start = load_file(model / "model.safetensors")
    frozen = weights(run / "checkpoints" / "step_000002", "actor", tmp_path / "frozen.pt")
    trained = weights(run / "checkpoints" / "step_000004", "actor", tmp_path / "trained.pt")
    for name, tensor in at_start.items():
        assert torch.equal(frozen[name], tensor), name
        assert not torch.equal(trained[name], tensor), name

    # As if it had ended after step 2: continued, and on two ranks.
    shutil.copytree(run, tmp_path / "uninterrupted")
    shutil.rmtree(run / "checkpoints" / "step_000004")
    resumed = start(whole, "train.steps=4", ranks=2).check()
    assert "after step 2" in resumed.stdout
    same_training(run, tmp_path / "uninterrupted")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["run.graph=spmd_rl.recipes.grpo:graph"], "algorithm.advantage='gae' needs a critic"),
        (
            ["run.graph=spmd_rl.recipes.grpo:graph", "algorithm.advantage=grpo"],
            "critic.optimizer",
        ),
        (["algorithm.advantage=rloo"], "algorithm.advantage=rloo makes no use of this graph's critic"),
        (["critic.warmup_steps=5"], "critic.warmup_steps=5 leaves no step of train.steps=5"),
        (["critic.optimizer.schedule=cosin"], "did you mean cosine"),
    ],
)
def test_refused_in_one_line(tmp_path, model, overrides, said):
    from spmd_rl.config.check import check
    from spmd_rl.config.errors import UserError
    from spmd_rl.config.load import load_config
    from spmd_rl.graph.graph import load_graph

    with pytest.raises(UserError) as error:
        config = load_config(ppo_config(tmp_path, model), overrides)
        check(config)
        load_graph(config.run.graph)(config, 2)
    assert said in str(error.value) and "\n" not in str(error.value)
