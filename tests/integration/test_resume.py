"""Killed and started again: the metrics of the run that was never interrupted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.program import MAIN, metrics, samples, start, tiny_config
from tests.processes import running
from tests.world.harness import ROOT, launch_command


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, model):
    folder = tmp_path_factory.mktemp("whole")
    start(tiny_config(folder, model), ranks=2).check()
    return folder / "run"


def slow_rewards(folder: Path) -> None:
    """The same rewards, but step 4 (the second checkpoint is made by then) waits for the executioner."""
    path = folder / "rewards.py"
    path.write_text(
        path.read_text().replace(
            "    return",
            f"    import pathlib, time\n    while pathlib.Path({str(folder / 'wait')!r})"
            ".exists():\n        time.sleep(0.1)\n    return",
        )
    )


def children(pid: int) -> list[int]:
    done = subprocess.run(["pgrep", "-P", str(pid), "-f", "main.py"], capture_output=True, text=True)
    return [int(line) for line in done.stdout.split()]


def test_a_killed_rank_is_named_and_the_next_start_goes_on_as_if_nothing_had_been(tmp_path, model, uninterrupted):
    config = tiny_config(tmp_path, model)
    slow_rewards(tmp_path)
    run = tmp_path / "run"
    command = [*launch_command("torchrun", 2), str(MAIN), str(config)]
    with (tmp_path / "stderr").open("w") as err:
        job = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=err, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT
        )
        deadline = time.monotonic() + 90
        while not (run / "metrics.jsonl").exists() or len(metrics(run)) < 3:
            assert job.poll() is None and time.monotonic() < deadline, (tmp_path / "stderr").read_text()[-3000:]
            time.sleep(0.05)
        (tmp_path / "wait").touch()  # the ranks now stop in the middle of a step, waiting for rewards
        time.sleep(2.0)
        ranks = children(job.pid)
        assert len(ranks) == 2
        victim = next(pid for pid in ranks if b"\0RANK=1\0" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes())
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        job.wait(30)
        while any(map(running, ranks)) and time.monotonic() < killed + 30:
            time.sleep(0.05)
        gone = time.monotonic() - killed
    said = (tmp_path / "stderr").read_text()
    assert gone < 10, f"{gone:.1f} s"
    assert job.returncode != 0
    line = next(line for line in said.splitlines() if "rank 1" in line and "died" in line)
    assert "stage '" in line and "step" in line, line
    (tmp_path / "wait").unlink()

    start(config, ranks=2).check()
    assert samples(run) == samples(uninterrupted)
    for ours, theirs in zip(metrics(run), metrics(uninterrupted), strict=True):
        assert ours["step"] == theirs["step"]
        for name in ("loss/policy", "grad_norm", "lr", "reward/mean", "entropy"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-8), (name, ours["step"])


def test_a_checkpoint_goes_on_in_another_world_size(tmp_path, model, uninterrupted):
    config = tiny_config(tmp_path, model)
    start(config, "train.steps=4", ranks=1, launcher="single").check()
    start(config, ranks=3).check()
    assert samples(tmp_path / "run") == samples(uninterrupted)
    assert metrics(tmp_path / "run")[-1]["loss/policy"] == pytest.approx(
        metrics(uninterrupted)[-1]["loss/policy"], rel=1e-4, abs=1e-7
    )


def test_sigterm_stops_at_a_step_border_with_a_checkpoint(tmp_path, model):
    config = tiny_config(tmp_path, model)
    job = subprocess.Popen(
        [sys.executable, str(MAIN), str(config), "train.steps=100000", "checkpoint.every=0"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")},
    )  # fmt: skip
    run = tmp_path / "run"
    deadline = time.monotonic() + 60
    while not (run / "metrics.jsonl").exists() or len(metrics(run)) < 2:
        assert job.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    out, _ = job.communicate(timeout=60)
    assert job.returncode == 0, out
    steps = metrics(run)[-1]["step"]
    assert f"step_{steps:06d}" in os.listdir(run / "checkpoints"), out


def test_a_finished_run_says_so_and_another_configuration_is_refused(tmp_path, model):
    config = tiny_config(tmp_path, model, eval={"at_end": True}, checkpoint={"export": True})
    run = tmp_path / "run"
    start(config, "train.steps=2", ranks=1, launcher="single").check()
    left = {name: (run / name).read_bytes() for name in ("metrics.jsonl", "samples.jsonl", "model/model.safetensors")}

    # What a kill during the export leaves: the next start makes the end, once.
    content = json.loads((run / "run.json").read_text())
    assert content.pop("finished") == 2
    (run / "run.json").write_text(json.dumps(content))
    shutil.rmtree(run / "model")
    (run / "report.html").unlink()
    end = start(config, "train.steps=2", ranks=1, launcher="single").check()
    assert (run / "report.html").exists() and "held_out pass@1" in end.stdout
    assert {name: (run / name).read_bytes() for name in left} == left

    again = start(config, "train.steps=2", ranks=1, launcher="single").check()
    assert "all 2 steps are done" in again.stdout
    other = start(config, "train.steps=2", "train.optimizer.lr=0.5", ranks=1, launcher="single")
    assert other.returncode == 2
    assert "belongs to another run: train.optimizer.lr is 0.001 there and 0.5 here" in other.stderr
    fresh = start(config, "train.steps=2", "run.resume=none", ranks=1, launcher="single")
    assert fresh.returncode == 2 and "run.resume=none wants a new folder" in fresh.stderr
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    taken = start(config, "train.steps=2", ranks=1, launcher="single")
    assert taken.returncode == 2 and f"error: {run}/metrics.jsonl can't be written: Is a directory" in taken.stderr
    assert "Traceback" not in taken.stderr


def test_epochs_that_end_before_the_steps_still_give_a_checkpoint(tmp_path, model):
    """D1 and D8: 5 prompts, 8 per step, one epoch: one step on all 5, then the end, with a checkpoint."""
    config = tiny_config(tmp_path, model)
    start(config, "data.train[0].size=5", "train.prompts_per_step=8", "data.epochs=1", ranks=2).check()
    (step,) = metrics(tmp_path / "run")
    assert step["samples"] == 5 * 4
    assert len({id[1] for id in samples(tmp_path / "run")}) == 5
    assert os.listdir(tmp_path / "run" / "checkpoints") == ["step_000001"]
    again = start(config, "data.train[0].size=5", "train.prompts_per_step=8", "data.epochs=1", ranks=2)
    assert again.returncode != 0 and "no step was made" in again.stderr


def test_evaluations_and_the_exported_model(tmp_path, model):
    from transformers import AutoModelForCausalLM

    config = tiny_config(
        tmp_path, model, eval={"at_start": True, "at_end": True, "every": 1}, checkpoint={"export": True}
    )
    start(config, "train.steps=2", "observe.samples_per_step=4", ranks=2).check()
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines if "eval/held_out/pass@1" in line] == [0, 1, 2]
    assert lines[0]["eval/held_out/n"] == 6
    records = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().split("\n")[:-1]]
    assert sum(r["eval"] for r in records) == 3 * 4 and sum(not r["eval"] for r in records) == 2 * 4
    before = AutoModelForCausalLM.from_pretrained(model).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").state_dict()
    assert before.keys() == after.keys()
    assert any(not before[name].equal(after[name]) for name in before)
