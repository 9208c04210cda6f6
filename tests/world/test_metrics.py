"""Metrics, samples and the recorder over real ranks."""

from __future__ import annotations

import json
import time
from math import isnan, nan
from pathlib import Path
from typing import Any

import pytest
import torch

from spmd_rl.comm.world import World
from spmd_rl.config.schema import ObserveConfig
from spmd_rl.observe.evaluation import Outcome, gather_outcomes, summarize
from spmd_rl.observe.metrics import Metrics
from spmd_rl.observe.recorder import Recorder
from spmd_rl.observe.samples import SampleRecord, choose_samples, gather_samples
from tests.world.harness import WorldResult, run_world

REWARDS = [1e6, 1e6 + 1, 1e6 + 2, 1e6 + 5, 1e6 + 7]


def reduce_metrics(world: World) -> dict[str, Any]:
    rank, last = world.rank, world.size - 1
    metrics = Metrics()
    clipped, tokens = [(3, 12), (3, 4), (0, 0)][rank]
    metrics.mean("clip_fraction", clipped, tokens)
    metrics.moments("reward", torch.tensor(REWARDS, dtype=torch.float64)[rank :: world.size])
    metrics.sum("samples", 2 + rank)
    metrics.max("peak", -5.0 - rank)
    metrics.max("broken", nan if rank == last else 1.0)
    metrics.set("lr", torch.tensor(1e-6))
    same_names = metrics.reduce(world.control)

    if rank == last:  # names that only one rank has, and one that it lacks
        metrics.mean("only/last", 1.0, 4.0)
        metrics.max("only/max", -7.0)
        metrics.set("only/set", 3.0)
        metrics.moments("only/moments", torch.tensor([1.0, 3.0]))
    else:
        metrics.sum("but/last", 5)
    other_names = metrics.reduce(world.control)
    idle = Metrics().reduce(world.control)  # nobody has anything

    refusals = []
    for wrong in ("set", "kind"):
        metrics = Metrics()
        if wrong == "set":
            metrics.set("lr", 1e-6 * (1 + rank))
        elif rank == 0:
            metrics.sum("x", 1)
        else:
            metrics.max("x", 1)
        try:
            metrics.reduce(world.control)
        except ValueError as error:
            refusals.append(str(error))
    return {"same": same_names, "other": other_names, "idle": idle, "refusals": refusals}


def test_reduction_over_ranks(results: WorldResult) -> None:
    reduced = [value["metrics"] for value in results.ranks]
    assert all(str(value) == str(reduced[0]) for value in reduced)  # bit-equal on all ranks
    same, other = reduced[0]["same"], reduced[0]["other"]
    assert same["clip_fraction"] == 6 / 16
    values = torch.tensor(REWARDS, dtype=torch.float64)
    assert same["reward/mean"] == pytest.approx(values.mean().item(), rel=1e-15)
    assert same["reward/std"] == pytest.approx(values.std(correction=0).item(), rel=1e-12)
    assert same["samples"] == 9 and same["peak"] == -5.0
    assert same["lr"] == pytest.approx(1e-6, rel=1e-6) and isnan(same["broken"])
    added = {name: value for name, value in other.items() if name not in same}
    assert added == {
        "but/last": 10.0,
        "only/last": 0.25,
        "only/max": -7.0,
        "only/moments_mean": 2.0,
        "only/moments_std": 1.0,
        "only/set": 3.0,
    }
    assert {n: v for n, v in other.items() if n in same and n != "broken"} == {
        n: v for n, v in same.items() if n != "broken"
    }
    assert reduced[0]["idle"] == {}
    different, kind = reduced[0]["refusals"]
    assert different == "metric 'lr' must be equal on all ranks, but lies between 1e-06 and 3e-06"
    assert kind == "metric 'x' is a sum on one rank and a max on another"


def record(prompt: int, sample: int) -> SampleRecord:
    text = f"{prompt}-{sample} 漢字 👩‍👩‍👧 \u2028\n\udc80" * (prompt + 1)
    return SampleRecord(5, (0, prompt, sample), "s", text, text, nan if sample else 1.0, {"r": 0.5}, "stop", 1)


def all_records() -> list[SampleRecord]:
    return [record(prompt, sample) for prompt in range(9) for sample in range(2)]


def move_samples(world: World) -> list[Any]:
    # The last rank has none, the others have uneven shares; a group lies on two ranks.
    own = all_records()[world.rank :: world.size - 1] if world.rank < world.size - 1 else []
    results: list[Any] = []
    for count in (0, 5, 100):
        chosen = choose_samples([r.id for r in own], count, world.control)
        gathered = gather_samples(own, count, world.control)
        results.append([len(chosen), [r.to_json() for r in gathered]])
    return results


def test_samples_come_to_rank_0_the_same_on_any_world(results: WorldResult) -> None:
    moved = [value["samples"] for value in results.ranks]
    for i, count in enumerate((0, 5, 100)):
        alone = [r.to_json() for r in gather_samples(all_records(), count, None)]
        assert len(alone) == min(count, 18)
        assert moved[0][i][1] == alone
        assert moved[1][i][1] == moved[2][i][1] == []
        assert sum(rank[i][0] for rank in moved) == len(alone)


def record_run(world: World, folder: str) -> dict[str, float]:
    recorder = Recorder(ObserveConfig(samples_per_step=3), world, Path(folder), steps=1)
    recorder.start("a run", {})
    passed = [Outcome("s", world.rank * 10 + i, i < 3, float(i < 3), 1) for i in range(10)]
    recorder.evaluation(0, summarize(gather_outcomes(passed, world.control)))
    with recorder.spans("step", step=1), recorder.spans(f"train{world.rank}", step=1):
        pass
    metrics = Metrics()
    metrics.sum("samples", 9)
    ids = torch.tensor([r.id for r in all_records()[world.rank :: world.size]])
    chosen = recorder.choose(ids)
    records = [record(int(ids[i, 1]), int(ids[i, 2])) for i in chosen]
    values = recorder.step(1, metrics, records)
    if world.rank == world.size - 1:
        with recorder.spans("late"):
            time.sleep(0.3)
    recorder.close()
    return values


def run_all(world: World, folder: str) -> dict[str, Any]:
    return {"metrics": reduce_metrics(world), "samples": move_samples(world), "run": record_run(world, folder)}


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def results(run_folder: Path) -> WorldResult:
    """One world of three ranks for all tests: starting it is what takes the time."""
    return run_world(run_all, ranks=3, timeout_s=120, args={"folder": str(run_folder)}).check()


def test_recorder_over_ranks(results: WorldResult, run_folder: Path) -> None:
    values = results.ranks[0]["run"]
    assert values == results.ranks[1]["run"] == results.ranks[2]["run"]
    assert values["samples"] == 27 and {"time/train0", "time/train2", "time_max/step"} < set(values)
    start, step = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    assert start["eval/s/n"] == 30 and start["eval/s/pass@1"] == 0.3
    assert step == {"step": 1, **values}
    written = [SampleRecord.from_json(line) for line in (run_folder / "samples.jsonl").read_bytes().splitlines()]
    assert [r.id for r in written] == [r.id for r in gather_samples(all_records(), 3, None)]
    trace = json.loads((run_folder / "timeline.json").read_text())
    assert {(e["pid"], e["name"]) for e in trace["traceEvents"] if e["ph"] == "X"} == {
        (2, "late"),
        *((rank, name) for rank in range(3) for name in ("step", f"train{rank}")),
    }
    assert (run_folder / "report.html").stat().st_size > 10_000
    assert results.stdout.count("step 1/1") == 1 and results.stdout.count("run folder") == 1  # rank 0 alone speaks
