"""What the two ranks of perf/weights.py do: one trains, the other generates."""

from __future__ import annotations

import time
from collections import deque
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoTokenizer

from spmd_rl.algorithms.policy_loss import policy_loss
from spmd_rl.comm.world import World
from spmd_rl.config.schema import Config, DataConfig, ModelConfig, RolloutConfig
from spmd_rl.data.batch import Batch, Column
from spmd_rl.engines.protocol import InterruptibleEngine, Request, Sampling
from spmd_rl.engines.rollout.build import build_rollout
from spmd_rl.engines.train.engine import TrainEngine
from spmd_rl.observe.metrics import Metrics
from spmd_rl.weights.publish import Publisher
from spmd_rl.weights.receive import Receiver
from spmd_rl.weights.window import Offer

PROMPT, LONGEST = 16, 1000
LIMIT_S = 600.0
TIMES = ("blocking_s", "background_s", "waited_s", "slower_s", "load_s")
NEIGHBOURS = 15  # steps before a transfer that say how long a step takes


def updates(
    job: World,
    mine: World,
    model: str,
    engine: str,
    transport: str,
    rounds: int,
    sequences: int,
    trainer: str,
    send: bool,
) -> dict[str, Any]:
    if send:
        Offer.look = lambda self: None  # type: ignore[method-assign]
    config = Config(
        model=ModelConfig(path=model),
        data=DataConfig(max_prompt_tokens=PROMPT),
        rollout=RolloutConfig(engine=engine, max_tokens=LONGEST, max_sequences=sequences, kv_cache_gib=0.5),
    )
    mesh = mine.mesh([0], {"dp": 1})
    if mine.role == "train":
        return _train(job, mine, TrainEngine(config, mine, mesh, total_steps=1000), config, transport, rounds, trainer)
    rollout = build_rollout(config, mine, mesh, AutoTokenizer.from_pretrained(model))
    rollout.end = type(rollout.end)()  # type: ignore[attr-defined]  # nothing ends a response: the load stays the same
    return _generate(job, mine, rollout, transport, rounds, sequences)


def _train(
    job: World, mine: World, actor: TrainEngine, config: Config, transport: str, rounds: int, trainer: str
) -> dict[str, Any]:
    publisher = Publisher(job, mine, [[1]], transport, LIMIT_S)
    found: dict[str, Any] = {"blocking_s": [], "snapshot_s": [], "waited_s": []}
    loss = policy_loss(config.algorithm, updates_per_step=1, max_tokens=LONGEST)
    batch = _batch()
    publisher.publish(actor.named_weights, 0)
    for version in range(1, rounds + 1):
        dist.barrier(group=job.control)
        begin = time.perf_counter()
        publisher.publish(actor.named_weights, version)
        publisher.wait(version)
        found["blocking_s"].append(time.perf_counter() - begin)
    dist.barrier(group=job.control)
    for version in range(rounds + 1, 2 * rounds + 1):
        if trainer == "trains":
            actor.update(batch, loss, Metrics())
        else:
            time.sleep(3.0)
        published = publisher.publish(actor.named_weights, version)
        found["snapshot_s"].append(published.snapshot_s)
        found["waited_s"].append(published.waited_s)
    dist.barrier(group=job.control)
    publisher.close()
    return found


def _batch() -> Batch:
    """32 samples of 64 tokens: some seconds of training."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(10, 1000, (64,), generator=generator, dtype=torch.int32) for _ in range(32)]
    ids = torch.tensor([[0, i // 4, i % 4] for i in range(32)])
    ones = [torch.ones(48) * (-1) ** i for i in range(32)]
    return Batch(
        ids,
        {
            "prompt": Column.from_rows([row[:16] for row in rows]),
            "response": Column.from_rows([row[16:] for row in rows]),
            "rollout_logprob": Column.from_rows([-one.abs() for one in ones]),
            "advantage": Column.from_rows(ones),
            "loss_mask": Column.from_rows([torch.ones(48, dtype=torch.uint8)] * 32),
        },
    )


def _generate(
    job: World, mine: World, rollout: InterruptibleEngine, transport: str, rounds: int, sequences: int
) -> dict[str, Any]:
    receiver = Receiver(job, mine, [[1]], [0], transport, LIMIT_S)
    receiver.wait(0, LIMIT_S)
    receiver.swap(rollout)
    found: dict[str, Any] = {key: [] for key in (*TIMES, "load_blocking_s")}
    for version in range(1, rounds + 1):
        dist.barrier(group=job.control)
        begin = time.perf_counter()
        receiver.wait(version, LIMIT_S)
        found["blocking_s"].append(time.perf_counter() - begin)
        receiver.swap(rollout)
        found["load_blocking_s"].append(receiver.load_s)
    _fill(rollout, sequences)
    for _ in range(20):
        rollout.step()
    dist.barrier(group=job.control)
    usual: deque[float] = deque(maxlen=NEIGHBOURS)
    slower = 0.0
    while receiver.version < 2 * rounds:
        if not rollout.unfinished():
            _fill(rollout, sequences)
            rollout.step()  # the prompts
        before = receiver.receiving
        begin = time.perf_counter()
        rollout.step()
        seconds = time.perf_counter() - begin
        if before or receiver.receiving:
            slower += seconds - median(usual or [seconds])
        else:
            usual.append(seconds)
        if receiver.newest() > receiver.version:
            begin = time.perf_counter()
            receiver.swap_in_flight(rollout, keep_cache=True)
            found["waited_s"].append(time.perf_counter() - begin - receiver.load_s)
            found["load_s"].append(receiver.load_s)
            found["background_s"].append(receiver.transfer_s)
            found["slower_s"].append(slower)
            slower = 0.0
            rollout.step()  # after a load caches are cold
    found["megabytes"] = receiver.transfer_bytes / 1e6
    dist.barrier(group=job.control)
    receiver.close()
    rollout.close()
    return found


def _fill(rollout: InterruptibleEngine, sequences: int) -> None:
    prompts = torch.randint(10, 1000, (sequences, PROMPT)).tolist()
    sampling = Sampling(max_tokens=LONGEST)
    rollout.submit([Request((0, i, 0), tuple(prompt), sampling, i) for i, prompt in enumerate(prompts)])
