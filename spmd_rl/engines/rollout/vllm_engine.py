"""Rollout with vLLM in this process. The only modules that import vllm are called vllm_*, and do it lazily."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from spmd_rl.comm.world import World
from spmd_rl.config.errors import UserError
from spmd_rl.config.schema import RolloutConfig
from spmd_rl.data.batch import Finish
from spmd_rl.engines.protocol import Completion, Request, SampleId, Sampling
from spmd_rl.engines.rollout.sampling import check_request
from spmd_rl.engines.rollout.seeds import continued_seed
from spmd_rl.engines.rollout.versions import Versions, first_version
from spmd_rl.engines.rollout.vllm_process import contained, prepare_environment, release
from spmd_rl.engines.rollout.vllm_start import start

FINISH = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORTED}
LEAST_TEMPERATURE = 0.01  # vLLM silently raises smaller ones to this


class VllmEngine:
    """An `InterruptibleEngine`: this rank's part of the vLLM engine of its tensor-parallel group.

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
        self._open: dict[str, _Open] = {}  # by our name
        self._submitted = 0
        self._held: deque[str] = deque()  # not handed to vLLM yet, in their order
        self._followers: list[str] = []  # their group's first sample computes the prompt in the step under way
        self._max_sequences = rollout.max_sequences
        self._names: set[str] = set()  # of the weights that the last update brought
        self._poisoned = False  # a NaN was computed, so the KV cache may hold some
        prepare_environment()
        with contained(world.device):
            self._engine = start(path, rollout, world, max_model_tokens)
        self._shares_prompts = self._engine.vllm_config.kv_transfer_config is not None

    def submit(self, requests: Sequence[Request]) -> None:
        """Raises ValueError for a request that does not fit into `max_model_tokens`, and for one with stop strings
        that goes on from another: vLLM would not see a string that begins in the tokens before."""
        for request in requests:
            check_request(request, self.max_model_tokens)
            if request.begun and request.sampling.stop:
                raise ValueError(f"sample {request.id}: vLLM cannot go on with a response that has stop strings")
        self.wake()
        for request in requests:
            name = str(self._submitted)
            self._submitted += 1
            self._open[name] = _Open(request)
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
        return [self._completion(self._open.pop(output.request_id), output) for output in outputs if output.finished]

    def abort(self, ids: Sequence[SampleId] | None = None) -> list[Completion]:
        """See `InterruptibleEngine`. What goes on from the completion draws by a seed of its own."""
        chosen = None if ids is None else set(ids)
        names = [name for name, opened in self._open.items() if chosen is None or opened.request.id in chosen]
        ended = []
        for name in names:
            opened = self._open.pop(name)
            output = None if opened.inside is None else _so_far(self._engine, opened.inside)
            ended.append(self._completion(opened, output))
        self._engine.abort_request(names)
        gone = set(names)
        self._held = deque(name for name in self._held if name not in gone)
        self._followers = [name for name in self._followers if name not in gone]
        return ended

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int, keep_cache: bool = False) -> None:
        """Replace all weights; names and shapes are those of the Hugging Face checkpoint.

        Goes through vLLM's layer-wise reload, because on the CPU the linear weights were repacked at the start and
        are not there to be written to; a layer is processed when its last tensor has come. Requests that are running
        go on with the new weights: their keys and values are computed anew, unless `keep_cache` (or a NaN among
        them) says otherwise. Prefixes are shared only by requests that begin under one version (see `_add`).
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
        for opened in self._open.values():
            if opened.inside is not None:
                opened.versions.upto(opened.begun + _tokens_so_far(self._engine, opened.inside), self.version)
        if keep_cache and not self._poisoned:
            if self._shares_prompts:
                self._engine.engine_core.engine_core.scheduler.reset_connector_cache()
        else:
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
            prompt = self._open[name].context()
            if self._shares_prompts and prompt in leading:
                self._followers.append(name)
            else:
                leading.add(prompt)
                self._add(name)

    def _add(self, name: str) -> None:
        opened = self._open[name]
        sampling, seed = opened.request.sampling, opened.request.seed
        if opened.begun:
            sampling = replace(sampling, max_tokens=sampling.max_tokens - opened.begun)
            seed = continued_seed(seed, opened.begun)
        # The salt keeps a request from taking over what another one computed under older weights.
        prompt = {"prompt_token_ids": list(opened.context()), "cache_salt": f"version {self.version}"}
        opened.inside = self._engine.add_request(name, prompt, self._parameters(sampling, seed))

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

    def _completion(self, opened: _Open, output: Any) -> Completion:
        """output: vLLM's, of a request that has ended; None for one that it was never given."""
        request, begun = opened.request, opened.request.begun
        tokens, logprobs = ([], []) if begun is None else (list(begun.tokens), list(begun.logprobs))
        finish = Finish.ABORTED
        if output is not None:
            response = output.outputs[0]
            if response.finish_reason not in FINISH:
                raise RuntimeError(f"sample {request.id}: vLLM ended it with {response.finish_reason!r}")
            finish = FINISH[response.finish_reason]
            tokens += response.token_ids
            logprobs += response.logprobs.logprobs
        if len(tokens) != len(logprobs):
            raise RuntimeError(f"sample {request.id}: {len(tokens)} tokens, but {len(logprobs)} log-probabilities")
        self._poisoned |= not all(map(isfinite, logprobs))
        runs = opened.versions.upto(len(tokens), self.version)
        return Completion(request.id, tokens, logprobs, finish, first_version(runs, self.version), runs)


class _Open:
    """A request under way. begun: tokens that it came with; inside: vLLM's name for it, once it was handed over."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.inside: str | None = None
        self.begun = len(request.begun.tokens) if request.begun else 0
        self.versions = Versions(request.begun.versions if request.begun else ())

    def context(self) -> tuple[int, ...]:
        """The prompt, and what was drawn before this engine was given the request."""
        return (*self.request.prompt, *(self.request.begun.tokens if self.request.begun else ()))


def _tokens_so_far(engine: Any, inside: str) -> int:
    return int(engine.output_processor.request_states[inside].detokenizer.num_output_tokens())


def _so_far(engine: Any, inside: str) -> Any:
    """vLLM's output of a request, as if it were aborted now."""
    from vllm.v1.engine import FinishReason

    return engine.output_processor.request_states[inside].make_request_output([], None, FinishReason.ABORT, None)


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
