"""Whole asynchronous runs on a tiny model: on-policy they are the synchronous run; ahead of it they keep the bound."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.integration import pairs
from tests.integration.program import MAIN, metrics, samples, start, tiny_config
from tests.processes import running
from tests.world.harness import ROOT, find_mpirun, launch_command

SAME = ("loss/policy", "grad_norm", "reward/mean", "reward/std", "entropy", "lr", "samples", "response/length_mean",
        "tokens/generated", "mismatch/kl", "reward/zero_variance_fraction")  # fmt: skip


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory, model):
    folder = tmp_path_factory.mktemp("sync")
    start(tiny_config(folder, model), launcher="single").check()
    return folder / "run"


def same_training(ours: Path, theirs: Path) -> None:
    assert samples(ours) == samples(theirs)  # ids, steps, sampled tokens, rewards
    assert len(samples(ours)) == 5 * 4 * 5 - 4 * 1  # 24 prompts: the last step of the epoch has 4
    for mine, other in zip(metrics(ours), metrics(theirs), strict=True):
        assert mine["step"] == other["step"]
        for name in SAME:
            assert mine[name] == pytest.approx(other[name], rel=1e-4, abs=1e-5), (name, mine["step"])


def test_what_needs_a_whole_step_gets_it(tmp_path, model):
    """Statistics over the step, a penalty from the trainers, two updates: as in the synchronous run."""
    overrides = ["algorithm.advantage=reinforce_pp", "algorithm.kl_coef=0.1", "algorithm.kl_in=reward"]
    overrides += ["train.updates_per_step=2", "algorithm.aggregation=seq_mean_token_mean"]
    runs = []
    for mode, ranks, own in (("sync", 1, []), ("async", 3, ["placement.train=2", "stream.train_on=step"])):
        folder = tmp_path / mode
        folder.mkdir()
        both = ["train.steps=2", "checkpoint.every=0", *overrides]
        start(tiny_config(folder, model), f"mode={mode}", *both, *own, "stream.staleness=0", ranks=ranks).check()
        runs.append(folder / "run")
    assert samples(runs[0]) == samples(runs[1])
    for ours, theirs in zip(metrics(runs[1]), metrics(runs[0]), strict=True):
        for name in ("loss/policy", "grad_norm", "ratio/max", "kl/ref"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name


def ages(run: Path) -> list[float]:
    return [step["staleness/max"] for step in metrics(run)]


@pytest.mark.parametrize(
    ("ranks", "launcher", "overrides"),
    [
        (3, "torchrun", ["placement.rollout=[0]", "placement.train=2", "train.shard=keep"]),
        (3, "torchrun", ["placement.train=1", "train.tokens_per_microbatch=150", "stream.swap=in_flight"]),
        (2, "mpirun", ["placement.rollout=0.5", "comm.transport=mpi"]),
    ],
)
def test_on_policy_is_the_synchronous_run(tmp_path, model, synchronous, ranks, launcher, overrides):
    """eta = 0: the same prompts, tokens and losses, on any placement, with any transport."""
    if launcher == "mpirun" and find_mpirun() is None:
        pytest.skip("no mpirun")
    config = tiny_config(tmp_path, model)
    start(config, "mode=async", "stream.staleness=0", *overrides, ranks=ranks, launcher=launcher).check()
    same_training(tmp_path / "run", synchronous)
    assert ages(tmp_path / "run") == [0.0] * 5


@pytest.mark.parametrize(
    "overrides",
    [
        ["stream.staleness=2", "stream.limit_mib=0.02", "stream.swap=in_flight", "eval.every=2"],
        ["stream.staleness=1", "stream.on_stale=drop", "stream.swap=rolling", "stream.send=blocking"],
        ["stream.staleness=2", "stream.surplus=4", "stream.swap=in_flight", "rollout.max_sequences=6"],
        ["stream.staleness=2", "stream.surplus=5", "stream.tail_tokens=4"],
    ],
)
def test_ahead_of_the_trainers_the_bound_holds(tmp_path, model, overrides):
    config = tiny_config(tmp_path, model, train={"steps": 8})
    ranks = 3 if "stream.swap=rolling" in overrides else 2
    start(config, "mode=async", "placement.train=1", *overrides, ranks=ranks).check()
    run = tmp_path / "run"
    bound = int(overrides[0].partition("=")[2])
    assert len(ages(run)) == 8 and max(ages(run)) <= bound and max(ages(run)) > 0
    assert len(samples(run)) == sum(4 if step in (5,) else 5 for step in range(1, 9)) * 4  # none lost, none twice
    for step in metrics(run):
        assert 0 <= step["staleness/token_mean"] <= step["staleness/max"]
        one_version = not {"stream.swap=in_flight", "stream.tail_tokens=4"} & set(overrides)
        assert step["staleness/changed_fraction"] == 0 or not one_version
    last = metrics(run)[-1]
    assert {"stream/ready", "stream/bytes", "stream/wait_s", "stream/given_back", "staleness/mean"} <= set(last)
    early, late = (sum(step[name] for step in metrics(run)) for name in ("stream/early", "stream/late"))
    in_order = not any("surplus" in key or "drop" in key for key in overrides)
    assert early == late == 0 if in_order else late <= early  # who comes early takes the place of one who is late
    tails = "stream.tail_tokens=4" in overrides
    assert (sum(step.get("stream/put_aside", 0.0) for step in metrics(run)) > 0) == tails


def test_a_replica_of_several_ranks_draws_on_policy(tmp_path, model, monkeypatch):
    """vLLM over two ranks; a head that decides alone. In float32 its log-probabilities are the trainer's, so any token
    of older weights, or ranks that part ways, would show. Only the head reads prompts, each once."""
    monkeypatch.setenv(pairs.TOLD, str(tmp_path / "tokenised"))
    config = tiny_config(tmp_path, model, run={"graph": "tests.integration.pairs:noted"}, eval={"at_end": True})
    overrides = ["placement.train=1", "stream.staleness=0", "rollout.engine=vllm", "rollout.tensor_parallel=2"]
    start(config, "mode=async", *overrides, "rollout.kv_cache_gib=0.125", ranks=3).check()
    run = tmp_path / "run"
    assert ages(run) == [0.0] * 5 and len(samples(run)) == (4 * 5 + 4) * 4
    assert max(abs(step["mismatch/kl"]) for step in metrics(run)) < 1e-5
    told = Counter(pairs.tokenised(tmp_path / "tokenised"))
    assert len(told) == 24 + 6 and set(told.values()) == {1} and {rank for rank, _ in told} == {1}


def test_a_killed_replica_is_named_and_the_next_start_trains_on_every_group_once(tmp_path, model):
    """A1, A5: what was drawn ahead of the checkpoint is drawn again, by identity; the bound still holds. With groups
    trained out of order (a surplus), which the checkpoint must know one by one."""
    config = tiny_config(tmp_path, model, train={"steps": 6})
    (tmp_path / "rewards.py").write_text(
        (tmp_path / "rewards.py").read_text().replace(
            "    return",
            f"    import pathlib, time\n    while pathlib.Path({str(tmp_path / 'wait')!r}).exists():\n"
            "        time.sleep(0.1)\n    return",
        )
    )  # fmt: skip
    overrides = ["mode=async", "placement.train=1", "stream.staleness=2", "checkpoint.every=2", "stream.surplus=6"]
    run = tmp_path / "run"
    command = [*launch_command("torchrun", 2), str(MAIN), str(config), *overrides]
    with (tmp_path / "stderr").open("w") as err:
        job = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=err, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT
        )
        deadline = time.monotonic() + 90
        while not (run / "metrics.jsonl").exists() or len(metrics(run)) < 3:
            assert job.poll() is None and time.monotonic() < deadline, (tmp_path / "stderr").read_text()[-3000:]
            time.sleep(0.05)
        (tmp_path / "wait").touch()
        done = subprocess.run(["pgrep", "-P", str(job.pid), "-f", "main.py"], capture_output=True, text=True)
        ranks = [int(line) for line in done.stdout.split()]
        victim = next(pid for pid in ranks if b"\0RANK=1\0" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes())
        os.kill(victim, signal.SIGKILL)
        job.wait(60)
        until = time.monotonic() + 30
        while any(map(running, ranks)) and time.monotonic() < until:
            time.sleep(0.05)
    assert job.returncode != 0 and not any(map(running, ranks))
    said = (tmp_path / "stderr").read_text()
    assert any("rank 1" in line and "died" in line for line in said.splitlines()), said[-2000:]
    (tmp_path / "wait").unlink()

    done_before = max(int(path.name.partition("_")[2]) for path in (run / "checkpoints").glob("step_??????"))
    before = {id for id, (step, *_) in samples(run).items() if step <= done_before}
    start(config, *overrides, ranks=2).check()
    found = samples(run)
    assert before <= set(found) and len(found) == (5 * 5 + 4) * 4
    assert [step["step"] for step in metrics(run)] == [1, 2, 3, 4, 5, 6]
    assert max(ages(run)) <= 2
    assert "all 6 steps are done" in start(config, *overrides, ranks=2).check().stdout

    # Killed behind its last step, it has its end to make: an evaluation by the replica, and the model.
    content = json.loads((run / "run.json").read_text())
    assert content.pop("finished") == 6
    (run / "run.json").write_text(json.dumps(content))
    start(config, *overrides, "eval.at_end=true", "checkpoint.export=true", ranks=2).check()
    assert (run / "model" / "model.safetensors").exists() and "eval/held_out/pass@1" in metrics(run)[-1]
    assert len(metrics(run)) == 6 and len(samples(run)) == (5 * 5 + 4) * 4


def test_a_signal_to_a_replica_alone_stops_the_run_with_a_checkpoint(tmp_path, model):
    config = tiny_config(tmp_path, model)
    with (tmp_path / "rewards.py").open("a") as rewards:  # runs in a worker, whose parent is the replica
        rewards.write("\nimport os, signal\nos.kill(os.getppid(), signal.SIGTERM)\n")
    done = start(config, "mode=async", "placement.train=1", "train.steps=100000", "checkpoint.every=0", ranks=2).check()
    assert "stopped by a signal to rank 1 after step" in done.stdout
    assert len(list((tmp_path / "run" / "checkpoints").glob("step_??????"))) == 1


def test_evaluations_are_of_the_weights_they_are_named_after(tmp_path, model):
    """Against the synchronous run: with eta = 0 both evaluate the same weights."""
    evaluated = {}
    for mode, ranks in (("sync", 1), ("async", 2)):
        folder = tmp_path / mode
        folder.mkdir()
        config = tiny_config(folder, model, eval={"at_start": True, "at_end": True, "every": 1})
        overrides = [] if mode == "sync" else ["mode=async", "placement.train=1", "stream.staleness=0"]
        start(config, "train.steps=2", *overrides, ranks=ranks).check()
        evaluated[mode] = [
            (line["step"], line["eval/held_out/n"], line["eval/held_out/reward_mean"])
            for line in metrics(folder / "run")
        ]
    assert [step for step, *_ in evaluated["sync"]] == [0, 1, 2]
    for ours, theirs in zip(evaluated["async"], evaluated["sync"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "mode=async wants placement.rollout or placement.train"),
        (["placement.rollout=2"], "placement.rollout=2 on 2 ranks: at least one is wanted, and one left for a trainer"),
        (["placement.train=[0, 1]"], "leaves no rollout replica"),
        (["placement.train=[0]", "placement.rollout=[0]"], "rank 0 is in both"),
        (["placement.train=many"], "a number of ranks (2), a fraction (0.5) or a list of ranks is wanted"),
        (["placement.train=1", "stream.staleness=-1"], "stream.staleness=-1: at least 0 is wanted"),
        (["placement.train=1", "stream.limit_mib=0.001"], "is less than one group"),
        (["placement.train=1", "algorithm.advantage=reinforce_pp"], "set stream.train_on=step, or choose an advantage"),
        (["placement.train=1", "train.updates_per_step=2"], "needs stream.train_on=step"),
        (
            ["placement.train=1", "stream.surplus=5"],
            "less than stream.staleness * train.prompts_per_step = 5 is wanted",
        ),
        (["placement.train=1", "stream.staleness=0", "stream.surplus=1"], "staleness=0 trains each step on its own"),
        (["mode=sync", "stream.surplus=1"], "stream.surplus=1 needs mode=async"),
        (["mode=sync", "stream.tail_tokens=8"], "stream.tail_tokens=8 needs stream.surplus (with mode=async)"),
        (["stream.surplus=3", "stream.tail_tokens=12"], "less than rollout.max_tokens=12 is wanted, or no response"),
        (["stream.surplus=3", "stream.tail_tokens=8", "stream.swap=in_flight"], "long responses hold up nothing"),
        (["stream.surplus=3", "stream.tail_tokens=8", "rollout.stop=[a]"], "cannot be interrupted"),
        (["mode=sync", "placement.train=1"], "placement.train=1 needs mode=async"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path, model, capsys, overrides, message):
    from spmd_rl.main import main

    config = tiny_config(tmp_path, model)
    assert main([str(config), "--dry-run", "--ranks", "2", "mode=async", *overrides]) == 2
    said = capsys.readouterr().err
    assert message in said and len(said.strip().splitlines()) == 1
