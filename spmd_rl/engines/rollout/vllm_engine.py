"""Rollout with vLLM in this process. The only modules that import vllm are this one and vllm_process.py, lazily."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from spmd_rl.comm.world import World
from spmd_rl.config.errors import UserError
from spmd_rl.config.schema import RolloutConfig
from spmd_rl.data.batch import Finish
from spmd_rl.engines.protocol import Completion, Request, Sampling
from spmd_rl.engines.rollout.sampling import check_request
from spmd_rl.engines.rollout.vllm_process import contained, executor_class, prepare_environment, release

FINISH = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORTED}
LEAST_TEMPERATURE = 0.01  # vLLM silently raises smaller ones to this


class VllmEngine:
    """A `RolloutEngine`: this rank's part of the vLLM engine of its tensor-parallel group.

    Collective over all ranks of the world, which must be consecutive groups of `rollout.tensor_parallel` ranks; each
    group then draws its own requests. The default process group must exist. path: folder in Hugging Face format;
    end: ids that end a response; max_model_tokens: of prompt and response together.
    """

    def __init__(
        self, path: str, rollout: RolloutConfig, world: World, end: frozenset[int], max_model_tokens: int
    ) -> None:
        if 0 < rollout.temperature < LEAST_TEMPERATURE:
            raise UserError(
                f"rollout.temperature={rollout.temperature:g}: vLLM draws at {LEAST_TEMPERATURE} at least; 0 is greedy"
            )
        self.end = sorted(end)
        self.max_model_tokens = max_model_tokens
        self.version = 0
        self._on_cuda = world.device.type == "cuda"
        self._enforce_eager = rollout.enforce_eager
        self._open: dict[str, tuple[Request, int]] = {}  # vLLM's id → request, version at its submission
        self._submitted = 0
        self._held: deque[str] = deque()  # not handed to vLLM yet, in their order
        self._followers: list[str] = []  # their group's first sample computes the prompt in the step under way
        self._max_sequences = rollout.max_sequences
        self._names: set[str] = set()  # of the weights that the last update brought
        self._poisoned = False  # a NaN was computed, so the KV cache may hold some
        prepare_environment()
        with contained(world.device):
            self._engine = _start(path, rollout, world, max_model_tokens)
        self._shares_prompts = self._engine.vllm_config.kv_transfer_config is not None

    def submit(self, requests: Sequence[Request]) -> None:
        """Raises ValueError for a request that does not fit into `max_model_tokens`."""
        for request in requests:
            check_request(request, self.max_model_tokens)
        self.wake()
        for request in requests:
            name = str(self._submitted)
            self._submitted += 1
            self._open[name] = (request, self.version)
            self._held.append(name)

    def unfinished(self) -> int:
        return len(self._open)

    def step(self) -> list[Completion]:
        """One step of vLLM's scheduler."""
        if not self._open:
            return []
        self._feed()
        with torch.random.fork_rng(devices=[]), self._without_compilation():
            outputs = self._engine.step()
        return [self._completion(output) for output in outputs if output.finished]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights; names and shapes are those of the Hugging Face checkpoint.

        Goes through vLLM's layer-wise reload, because on the CPU the linear weights were repacked at the start and
        are not there to be written to; a layer is processed when its last tensor has come. The prefix cache is
        emptied, and requests that are running go on with the new weights: their keys and values are computed anew.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        self.wake()
        runner = self._engine.model_executor.driver_worker.worker.model_runner
        model = runner.get_model()
        expected = {name for name, _ in model.named_parameters()}
        names: set[str] = set()
        with torch.no_grad(), set_current_vllm_config(self._engine.vllm_config):
            initialize_layerwise_reload(model)
            loaded = model.load_weights(_owned(weights, names))
            finalize_layerwise_reload(model, self._engine.vllm_config.model_config)
            _process_tied(model)
        missing = sorted((expected - loaded) | (self._names - names))
        if missing:
            some = ", ".join(missing[:3])
            raise ValueError(f"weights of version {version}: {len(missing)} parameters were not sent, e.g. {some}")
        self._names = names
        self._engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        if self._poisoned:
            # Free columns of a block have weight 0 in attention, but 0 times NaN is NaN: requests would inherit it.
            for cache in runner.kv_caches:
                cache.zero_()
            self._poisoned = False
        self.version = version

    def sleep(self) -> None:
        """On CUDA: move the weights to host memory and drop the KV cache, so that the trainer may use the GPU.

        Nothing on the CPU, where the memory stays reserved. Only between calls of `generate`.
        """
        if self._open:
            raise RuntimeError(f"{len(self._open)} requests are not finished: the engine cannot sleep")
        if self._on_cuda and not self._engine.is_sleeping():
            self._engine.sleep(level=1)

    def wake(self) -> None:
        """Undo `sleep`. `submit` and `load_weights` do it too."""
        if self._on_cuda and self._engine.is_sleeping():
            self._engine.wake_up()

    def close(self) -> None:
        """Free the engine. Another one may be made afterwards."""
        release(self._engine)
        self._open.clear()
        self._held.clear()
        self._followers.clear()
        del self._engine

    def _feed(self) -> None:
        """Hand requests to vLLM as slots are free: the first of each group, and the others one step later.

        By then the group's prompt is computed, and they take it over (vllm_group_prefix.py).
        """
        for name in self._followers:
            self._add(name)
        self._followers.clear()
        free = self._max_sequences - (len(self._open) - len(self._held))
        leading: set[tuple[int, ...]] = set()
        for _ in range(min(free, len(self._held))):
            name = self._held.popleft()
            prompt = self._open[name][0].prompt
            if self._shares_prompts and prompt in leading:
                self._followers.append(name)
            else:
                leading.add(prompt)
                self._add(name)

    def _add(self, name: str) -> None:
        request, _ = self._open[name]
        prompt = {"prompt_token_ids": list(request.prompt)}
        self._engine.add_request(name, prompt, self._parameters(request.sampling, request.seed))

    def _parameters(self, sampling: Sampling, seed: int) -> Any:
        """vLLM's SamplingParams with every parameter said that could come from elsewhere."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            n=1,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=0.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            repetition_penalty=1.0,
            seed=seed,
            max_tokens=sampling.max_tokens,
            min_tokens=0,
            stop=list(sampling.stop),
            include_stop_str_in_output=True,
            stop_token_ids=self.end,
            ignore_eos=True,  # `end` says it all
            logprobs=0,  # of the drawn token alone
            flat_logprobs=True,
            detokenize=bool(sampling.stop),
            skip_special_tokens=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _without_compilation(self) -> AbstractContextManager[Any]:
        """vLLM's sampler compiles small helpers even in eager mode: 20 s at the first step, and a C++ compiler."""
        eager = self._enforce_eager and not self._on_cuda
        return torch.compiler.set_stance("force_eager") if eager else nullcontext()

    def _completion(self, output: Any) -> Completion:
        request, version = self._open.pop(output.request_id)
        response = output.outputs[0]
        if response.finish_reason not in FINISH:
            raise RuntimeError(f"sample {request.id}: vLLM ended it with {response.finish_reason!r}")
        tokens, logprobs = list(response.token_ids), list(response.logprobs.logprobs)
        if len(tokens) != len(logprobs):
            raise RuntimeError(f"sample {request.id}: {len(tokens)} tokens, but {len(logprobs)} log-probabilities")
        self._poisoned |= not all(map(isfinite, logprobs))
        return Completion(request.id, tokens, logprobs, FINISH[response.finish_reason], version)


def _start(path: str, rollout: RolloutConfig, world: World, max_model_tokens: int) -> Any:
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


def _process_tied(model: torch.nn.Module) -> None:
    """Let the modules that share another's weight make what they derive from it anew.

    vLLM's reload processes only the module under whose name the weight came. On the CPU the output layer of a model
    with tied embeddings would go on with the copy that was packed from the first weights.
    """
    owners: set[int] = set()
    for module in model.modules():
        own = {id(parameter) for parameter in module.parameters(recurse=False)}
        quant_method = getattr(module, "quant_method", None)
        if own & owners and quant_method is not None:
            quant_method.process_weights_after_loading(module)
        owners |= own


def _owned(weights: Iterable[tuple[str, Tensor]], names: set[str]) -> Iterator[tuple[str, Tensor]]:
    """Copies, because a layer's tensors are kept until all have come and the sender may reuse its buffer by then."""
    for name, tensor in weights:
        names.add(name)
        yield name, tensor.clone()
