"""TransferQueue's side of perf/exchange.py: put and get of the same samples through its simple storage.

Runs in .venvs/tq (perf/peer_env.sh tq). Prints one line of JSON: seconds of each put and of each get.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path

import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict

sys.path.insert(0, str(Path(__file__).parent))

from exchange_samples import columns, lengths  # noqa: E402


def main() -> None:
    samples, tokens, repeats = map(int, sys.argv[1:])
    logging.disable(logging.WARNING)
    ray.init(num_cpus=4, log_to_driver=False, include_dashboard=False)
    tq.init()
    lengths_S = lengths(samples, tokens)
    fields = TensorDict(
        {
            name: torch.nested.as_nested_tensor(list(values.split(own.tolist())), layout=torch.jagged)
            for name, (values, own) in columns(lengths_S, tokens).items()
        },
        batch_size=[samples],
    )
    puts, gets = [], []
    for repeat in range(repeats + 1):  # the first warms up
        partition = f"step{repeat}"
        keys = [f"{repeat}/{sample}" for sample in range(samples)]
        begin = time.perf_counter()
        tq.kv_batch_put(keys=keys, partition_id=partition, fields=fields)
        middle = time.perf_counter()
        got = tq.kv_batch_get(keys=keys, partition_id=partition)
        end = time.perf_counter()
        assert torch.equal(got["response"].values(), fields["response"].values())
        tq.kv_clear(keys=keys, partition_id=partition)
        if repeat:
            puts.append(middle - begin)
            gets.append(end - middle)
    print("RESULT " + json.dumps({"put_s": puts, "get_s": gets}), flush=True)
    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
