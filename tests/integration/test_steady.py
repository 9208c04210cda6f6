"""What must stay as it is: weights at learning rate 0, the reference and the KL coefficient over a resume."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.integration.program import metrics, samples, start, start_each, tiny_config
from tests.tiny_model import make_tiny_model

SMALL = {"prompts_per_step": 2, "samples_per_prompt": 4, "tokens_per_microbatch": 300}
TARGET, HORIZON = 1e-6, 8.0
KL = {"kl_coef": 0.1, "kl_target": TARGET, "kl_horizon": HORIZON}


def config_in(folder: Path, model: Path, algorithm, **train) -> Path:
    folder.mkdir()
    return tiny_config(
        folder,
        model,
        run={"threads": 1},
        algorithm=algorithm,
        train={**SMALL, "optimizer": {"lr": 1e-5}, **train},
        reward={"functions": [{"function": f"{folder / 'rewards.py'}:letters"}], "workers": 0},
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """Folders of the runs; `half` has made two of its four steps."""
    folder = tmp_path_factory.mktemp("steady")
    model = make_tiny_model(folder / "model")
    shutil.copytree(model, folder / "kept")
    still = config_in(folder / "still", model, {}, steps=20, updates_per_step=2, optimizer={"lr": 0.0})
    whole = config_in(folder / "whole", model, KL, steps=4)
    half = config_in(folder / "half", folder / "kept", KL, steps=4)
    start_each(
        [str(still), "checkpoint.every=0", "checkpoint.export=true", "rollout.max_tokens=6"],
        [str(whole)],
        [str(half), "train.steps=2"],
    )
    return {name: folder / name for name in ("model", "kept", "still", "whole", "half")}


def test_learning_rate_0_moves_nothing_in_20_steps(runs: dict[str, Path]) -> None:
    lines = metrics(runs["still"] / "run")
    assert [line["step"] for line in lines] == list(range(1, 21))
    before, after = (load_file(folder / "model.safetensors") for folder in (runs["model"], runs["still"] / "run/model"))
    assert before.keys() == after.keys() and all(before[name].equal(after[name]) for name in before)
    for line in lines:  # the old log-probabilities come from another pass, so the ratio is 1 up to float32's rounding
        assert line["lr"] == 0.0 and line["grad_norm"] > 0
        assert line["ratio/max"] == pytest.approx(1.0, abs=1e-4) and line["ratio/mean"] == pytest.approx(1.0, abs=1e-5)
        assert line["ratio/clip_fraction"] == 0.0
        # Rounding alone, at every step: no drift of the rollout engine away from the trainer.
        assert abs(line["mismatch/kl"]) < 1e-8 and line["mismatch/logprob_difference"] < 1e-4


def test_the_kl_coefficient_follows_its_rule(runs: dict[str, Path]) -> None:
    lines = metrics(runs["whole"] / "run")
    coef = KL["kl_coef"]
    for line in lines:
        assert line["kl/coef"] == pytest.approx(coef, rel=1e-6)
        # k2, in the loss, and k3, which is reported, are nearly equal near the reference: it is this coefficient's.
        assert line["loss/kl"] == pytest.approx(coef * line["kl/ref"], rel=0.05, abs=1e-12)
        error = min(max(line["kl/ref"] / TARGET - 1, -0.2), 0.2)
        coef *= 1 + error * 8 / HORIZON
    assert lines[1]["kl/coef"] < KL["kl_coef"] < lines[3]["kl/coef"]  # at first the policy is the reference: too near


def test_a_run_goes_on_with_its_coefficient_and_beside_its_own_reference_alone(runs: dict[str, Path]) -> None:
    config, kept = runs["half"] / "tiny.yaml", runs["kept"]
    weights = kept / "model.safetensors"
    original = weights.read_bytes()
    make_tiny_model(kept, seed=1)
    done = start(config, launcher="single")
    assert done.returncode == 2 and f"the model in {kept} is not the one that it began with" in done.stderr
    checkpoint = max((runs["half"] / "run" / "checkpoints").glob("step_??????"))
    done = start(config, f"run.resume={checkpoint}", f"run.folder={runs['half']}/other", launcher="single")
    assert done.returncode == 2
    assert "is not the one that this run began with: its files have changed since" in done.stderr
    weights.write_bytes(original)
    start_each([str(config)])
    assert samples(runs["half"] / "run") == samples(runs["whole"] / "run")
    for ours, theirs in zip(metrics(runs["half"] / "run"), metrics(runs["whole"] / "run"), strict=True):
        for name in ("kl/coef", "kl/ref", "loss/kl", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-9), (name, ours["step"])
