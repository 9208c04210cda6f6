"""A program over the service API for test_service.py: two trainers, two replicas, weights that say their version.

usage: service_program.py FOLDER whole | fails | STEP (begins after that step)
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spmd_rl.config.schema import CommConfig
from spmd_rl.data.stream.admission import Frontier
from spmd_rl.service import RolloutService, Settings, TrainService, init_engines

STEPS = 6
PROMPTS = list("abcdefg")  # three a step: an epoch ends with a step of one


class Engine:
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.value = float(dict(weights)["value"])


def draw(service: RolloutService, fails: bool) -> None:
    engine, under_way = Engine(), []
    while not service.ended:
        version = service.notify_weight_sync(engine)
        assert version < 0 or engine.value == version
        work = service.next_prompt(wait_s=0.02)
        if work is not None:
            assert PROMPTS[work.index] == work.prompt and work.version == version
            if fails and work.group >= 5:
                raise OSError("the engine is broken")
            under_way.append(work)
        elif under_way:  # several at a time, the latest first
            work = under_way.pop()
            count = 1 + work.group % 3
            rows = [torch.tensor([ord(work.prompt), work.group]) for _ in range(count)]
            service.put_experience(work, {"text": rows, "score": torch.full((count,), engine.value)})


def train(service: TrainService) -> list[Any]:
    seen: list[Any] = []
    service.notify_weight_sync(lambda: [("value", torch.tensor(float(service.step)))])
    while service.step < STEPS:
        step = service.step + 1
        for batch in service.get_experience(["text", "score", "version"]):
            for identity, row, version in zip(
                batch.ids.tolist(), batch["text"].rows(), batch["version"].as_scalars().tolist(), strict=True
            ):
                seen.append([step, identity, row.tolist(), version])
        service.notify_weight_sync(lambda: [("value", torch.tensor(float(service.step)))])
    return seen


def main() -> None:
    folder, what = sys.argv[1:]
    done = int(what) if what.isdigit() else 0
    first = done // 3 * 7 + done % 3 * 3  # groups of the steps before
    comm = CommConfig(timeout_s=60.0, init_timeout_s=60.0)
    settings = Settings(
        train=(0, 3),
        rollout=(1, 2),
        columns=("text", "score"),
        steps=STEPS,
        prompts_per_step=3,
        staleness=1,
        comm=comm,
        progress=(done, Frontier(first)),
    )
    with init_engines(settings) as service:
        service.put_prompts(PROMPTS)
        if isinstance(service, TrainService):
            seen = train(service)
            assert service.progress == (STEPS, Frontier(14))
            (Path(folder) / f"{service.job.rank}.json").write_text(json.dumps(seen))
        else:
            draw(service, what == "fails" and service.job.rank == 2)
            time.sleep(0.01)


if __name__ == "__main__":
    main()
