"""How vLLM's engine is started: every setting that is not its default, and why."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig

from spmd_rl.comm.world import World
from spmd_rl.config.schema import RolloutConfig
from spmd_rl.engines.rollout.vllm_process import executor_class


def start(path: str, rollout: RolloutConfig, world: World, max_model_tokens: int) -> Any:
    """vLLM's engine for this rank's part; collective over `world`. To be called within `contained`."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    timeout_s = max(1, int(world.timeout_s))
    arguments: dict[str, Any] = {
        "model": path,
        "dtype": rollout.dtype,
        "seed": 0,
        "tensor_parallel_size": rollout.tensor_parallel,
        "distributed_executor_backend": "external_launcher",
        "distributed_timeout_seconds": timeout_s,
        "cpu_distributed_timeout_seconds": timeout_s,
        "max_model_len": max_model_tokens,
        "max_num_seqs": rollout.max_sequences,
        "enable_prefix_caching": rollout.prefix_caching,
        "enforce_eager": rollout.enforce_eager,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "async_scheduling": False,  # no step may be under way when weights change
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if world.device.type == "cuda":
        arguments["gpu_memory_utilization"] = rollout.gpu_memory_fraction
        arguments["enable_sleep_mode"] = True
    else:
        arguments["kv_cache_memory_bytes"] = int(rollout.kv_cache_gib * 2**30)
        # Prefixes are shared in whole blocks; 32 tokens is the smallest block that the CPU kernels take.
        arguments["block_size"] = 32
        # vLLM takes back the random number of a prefill chunk through a generator offset, which CPUs do not have.
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(4096, max_model_tokens)
        if rollout.prefix_caching and _plain_attention(path):
            arguments["kv_transfer_config"] = KVTransferConfig(
                kv_connector="GroupPrefixConnector",
                kv_connector_module_path="spmd_rl.engines.rollout.vllm_group_prefix",
                kv_role="kv_both",
            )
    vllm_config = EngineArgs(**arguments).create_engine_config()
    engine = LLMEngine(
        vllm_config=vllm_config, executor_class=executor_class(world), log_stats=False, multiprocess_mode=False
    )
    engine.engine_core._finalizer.detach()  # it would destroy the default process group; see `release`
    return engine


def _plain_attention(path: str) -> bool:
    """Whether every layer keeps keys and values of all earlier tokens, so that blocks of the cache can be copied."""
    described = AutoConfig.from_pretrained(path).get_text_config()
    kinds = set(getattr(described, "layer_types", None) or ["full_attention"])
    windows = getattr(described, "sliding_window", None) is not None and kinds != {"full_attention"}
    return kinds == {"full_attention"} and not windows and not hasattr(described, "kv_lora_rank")
