"""TransferQueue's side of perf/stream.py: requests for one row's metadata with many rows waiting; a put while somebody
waits. Runs in .venvs/tq (perf/peer_env.sh tq). Prints one line of JSON."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from statistics import median
from typing import Any

import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict

REQUESTS = 100
CHUNK = 4096  # rows of one put


def main() -> None:
    logging.disable(logging.WARNING)
    ray.init(num_cpus=4, log_to_driver=False, include_dashboard=False)
    tq.init()
    client = tq.get_client()
    found: dict[str, Any] = {"requests_per_s": {}, "put_ms": put_ms(client, "warm", 20)}
    for waiting in map(int, sys.argv[1:]):
        partition = f"waiting{waiting}"
        for first in range(0, waiting, CHUNK):
            client.put(rows(min(CHUNK, waiting - first)), partition_id=partition)
        begin = time.perf_counter()
        for _ in range(REQUESTS):
            client.get_meta(data_fields=["reward"], batch_size=1, partition_id=partition, task_name="train")
        found["requests_per_s"][str(waiting)] = round(REQUESTS / (time.perf_counter() - begin), 1)
    found["put_while_a_consumer_waits_ms"] = round(beside_waiting(client), 1)
    print("RESULT " + json.dumps(found), flush=True)
    tq.close()
    ray.shutdown()


def rows(count: int) -> TensorDict:
    return TensorDict({"reward": torch.zeros(count, 1)}, batch_size=[count])


def put_ms(client: Any, partition: str, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        client.put(rows(1), partition_id=partition)
        times.append(1e3 * (time.perf_counter() - begin))
    return round(median(times), 2)


def beside_waiting(client: Any) -> float:
    """Milliseconds of a put of the row that somebody else waits for, two rows being wanted and one there."""
    client.put(rows(1), partition_id="wanted")

    def consume() -> None:
        client.get_meta(data_fields=["reward"], batch_size=2, partition_id="wanted", task_name="train")

    waiting = threading.Thread(target=consume, daemon=True)
    waiting.start()
    time.sleep(0.5)
    begin = time.perf_counter()
    client.put(rows(1), partition_id="wanted")
    seconds = time.perf_counter() - begin
    waiting.join(60)
    return 1e3 * seconds


if __name__ == "__main__":
    main()
