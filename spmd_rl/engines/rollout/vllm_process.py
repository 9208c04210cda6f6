"""vLLM inside a process that is not its own: what it changes in the process while it starts, and what of that stays.

The trainer, the loader and the reward workers live in the same process. vLLM takes it for its own: it seeds the global
random generators, binds all memory to one NUMA node, replaces `torch.set_num_threads`, writes LOCAL_WORLD_SIZE and
LD_PRELOAD into the environment, and destroys the default process group when its engine is collected.
"""

from __future__ import annotations

import logging
import os
import random
import secrets
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from spmd_rl.comm.world import World

# Read by vLLM when it is imported or started. Said again here although some are defaults: a run must not depend on
# what the user's shell says, but for how much vLLM logs.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # threads belong to the trainer too; their number is torch's
    "VLLM_NO_USAGE_STATS": "1",  # no network
}


def prepare_environment() -> None:
    """Set what vLLM reads; to be called before its first import."""
    os.environ.update(ENVIRONMENT)
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # would override rollout.kv_cache_gib, in whole GiB
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])  # lines before vLLM has set up its logging


@contextmanager
def contained(device: torch.device) -> Iterator[None]:
    """While vLLM starts, on `device`: undo at the end what must not stay."""
    on_cuda = device.type == "cuda"
    environment = dict(os.environ)
    set_num_threads = torch.set_num_threads
    python_state, numpy_state = random.getstate(), np.random.get_state()
    generators = torch.random.fork_rng([device] if on_cuda else [])
    with generators, warnings.catch_warnings(), nullcontext() if on_cuda else _no_memory_binding():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            yield
        finally:
            torch.set_num_threads = set_num_threads
            random.setstate(python_state)
            np.random.set_state(numpy_state)
            changed = {name for name in os.environ if os.environ[name] != environment.get(name)}
            for name in changed | (environment.keys() - os.environ.keys()):
                if name.startswith("VLLM_"):
                    continue
                if name in environment:
                    os.environ[name] = environment[name]
                else:
                    del os.environ[name]


@contextmanager
def _no_memory_binding() -> Iterator[None]:
    """vLLM's CPU worker would bind all later allocations of this process, also the trainer's, to one NUMA node."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    operations: Any = torch.ops._C
    original = operations.init_cpu_memory_env
    operations.init_cpu_memory_env = lambda nodes: None
    try:
        yield
    finally:
        operations.init_cpu_memory_env = original


def executor_class(world: World) -> type:
    """vLLM's executor for ranks that someone else started; this rank's place comes from `world`.

    On the CPU, vLLM's tensor-parallel ranks would reduce through shared memory named by the rendezvous method: two
    runs on one machine would meet there, a killed run would leave it behind and stop the next one from starting, and
    a rank whose peer died would spin for ever. With names that differ from rank to rank vLLM uses gloo instead, which
    has deadlines and sees a peer die.
    """
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    identity = secrets.token_hex(4)
    device_index = world.device.index or 0 if world.device.type == "cuda" else world.local_rank

    class Executor(ExecutorWithExternalLauncher):
        def _distributed_args(self) -> tuple[str, int, int]:
            return f"external:{identity}.{world.rank}", world.rank, device_index

    return Executor


def release(engine: Any) -> None:
    """Shut vLLM's engine down without its distributed clean-up, which would destroy the default process group."""
    import gc

    from vllm.distributed.parallel_state import destroy_model_parallel

    core = engine.engine_core.engine_core
    core.model_executor.shutdown()
    core.scheduler.shutdown()
    gc.unfreeze()
    if dist.is_initialized():
        destroy_model_parallel()
