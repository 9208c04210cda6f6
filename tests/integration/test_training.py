"""Whole runs on a tiny model: any number of ranks and any launcher give the same training."""

from __future__ import annotations

import json

import pytest

from tests.integration.program import metrics, samples, start, tiny_config


@pytest.fixture(scope="module")
def alone(tmp_path_factory, model):
    """The run of a single process, the reference of the others."""
    folder = tmp_path_factory.mktemp("alone")
    start(tiny_config(folder, model), launcher="single").check()
    return folder / "run"


def same_training(reference, other, tolerance=1e-4):
    assert samples(other) == samples(reference)  # prompts, sampled tokens, rewards
    assert len(samples(other)) == 5 * 4 * 5 - 4 * 1  # 24 prompts: the last step of the epoch has 4
    for ours, theirs in zip(metrics(other), metrics(reference), strict=True):
        assert ours["step"] == theirs["step"]
        for name in (
            "loss/policy",
            "grad_norm",
            "reward/mean",
            "reward/std",
            "entropy",
            "lr",
            "samples",
            "response/length_mean",
            "tokens/generated",
            "ratio/clip_fraction",
            "mismatch/kl",
        ):
            assert ours[name] == pytest.approx(theirs[name], rel=tolerance, abs=1e-7), (name, ours["step"])


@pytest.mark.parametrize(("ranks", "launcher"), [(2, "torchrun"), (4, "torchrun"), (2, "mpirun")])
def test_world_size_and_launcher_do_not_change_the_training(tmp_path, model, alone, ranks, launcher):
    start(tiny_config(tmp_path, model), ranks=ranks, launcher=launcher).check()
    same_training(alone, tmp_path / "run")


def test_micro_batches_updates_and_sharing_do_not_change_the_training(tmp_path, model, alone):
    config = tiny_config(tmp_path, model)
    start(
        config, "train.tokens_per_microbatch=100000", "model.prefix_sharing=false", "train.shard=keep", ranks=2
    ).check()
    same_training(alone, tmp_path / "run")


def test_the_run_folder_holds_what_the_readme_says(alone):
    for name in ("metrics.jsonl", "samples.jsonl", "report.html", "timeline.json", "config.yaml", "checkpoints"):
        assert (alone / name).exists(), name
    steps = metrics(alone)
    wanted = {
        "step", "samples", "reward/mean", "reward/std", "reward/zero_variance_fraction", "response/length_mean",
        "response/truncated_fraction", "loss/policy", "loss/kl", "entropy", "grad_norm", "lr", "mismatch/kl",
        "time/step",
        "time/rollout", "time/update", "time/sync", "tokens/generated", "tokens/trained", "throughput/samples_per_s",
        "memory/peak_gib",
    }  # fmt: skip
    assert [m["step"] for m in steps] == [1, 2, 3, 4, 5]
    assert wanted <= set(steps[-1])
    assert [m["lr"] for m in steps] == pytest.approx([5e-4, 1e-3, 1e-3, 1e-3, 1e-3])
    assert {event["name"] for event in json.loads((alone / "timeline.json").read_text())["traceEvents"]} >= {"rollout"}


def test_two_updates_and_a_reference_model_on_any_number_of_ranks(tmp_path, model):
    """Off-policy second update (old log-probabilities), KL to the reference in the loss, other aggregation."""
    runs = []
    for ranks in (1, 3):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        config = tiny_config(folder, model, algorithm={"kl_coef": 0.1, "aggregation": "seq_mean_token_mean"})
        start(config, "train.steps=3", "train.updates_per_step=2", ranks=ranks).check()
        runs.append(folder / "run")
    assert samples(runs[0]) == samples(runs[1])
    for ours, theirs in zip(metrics(runs[1]), metrics(runs[0]), strict=True):
        for name in ("loss/policy", "loss/kl", "ratio/max", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-7), name
    last = metrics(runs[0])[-1]
    assert last["loss/kl"] > 0 and last["ratio/max"] > 1.001


def test_ray_is_never_imported(tmp_path, model):
    probe = tmp_path / "probe.py"
    probe.write_text(
        "import sys\nfrom spmd_rl.main import main\n"
        "status = main(sys.argv[1:])\n"
        "print('RAY', any(m.split('.')[0] == 'ray' for m in sys.modules))\nsys.exit(status)\n"
    )
    from tests.world.harness import run_world

    done = run_world(probe, 1, "single", 120, [str(tiny_config(tmp_path, model)), "train.steps=1"]).check()
    assert "RAY False" in done.stdout
