"""The prompt of a group computed once, to its last token: a connector that vLLM loads by this module's name.

vLLM's prefix cache shares whole blocks, of 32 tokens on the CPU. What a prompt has beyond them, 16 tokens on average,
every sample of a group would compute again: with short answers that is much of all work. Here the sample that came
first gives its unfinished block to the others of its group, as a copy in a block of their own, so that they begin with
the prompt's last token. vLLM's interface for this is that of a KV store outside of the engine; the store is its own
cache, and nothing leaves the process.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)


@dataclass
class Copies(KVConnectorMetadata):
    """Block numbers: what one step copies before its forward pass."""

    sources: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Donor:
    """A running request, and the block that holds the end of its prompt."""

    request_id: str
    block: int


class GroupPrefixConnector(KVConnectorBase_V1):
    """Scheduler side: who may copy from whom. Worker side: the copy."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_size: int = vllm_config.cache_config.block_size
        self._donors: dict[tuple[int, ...], Donor] = {}
        self._computing: dict[tuple[int, ...], Donor] = {}  # their prompts are computed in the coming forward pass
        self._copies = Copies()
        self._caches: list[torch.Tensor] = []

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a lost copy is only computed

    # Scheduler side

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """How many tokens beyond the prefix cache's can be copied: all but the last one, or none."""
        prompt = request.prompt_token_ids
        end = len(prompt) - 1  # the last token must be computed: its output draws the first token of the response
        fresh = request.num_tokens == len(prompt)
        if fresh and num_computed_tokens == end - end % self._block_size and tuple(prompt) in self._donors:
            return end - num_computed_tokens, False
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        prompt = tuple(request.prompt_token_ids)
        last = (len(prompt) - 1) // self._block_size
        (block_ids,) = blocks.get_block_ids()
        if num_external_tokens:
            self._copies.sources.append(self._donors[prompt].block)
            self._copies.targets.append(block_ids[last])
        elif prompt not in self._donors and prompt not in self._computing:
            self._computing[prompt] = Donor(request.request_id, block_ids[last])

    def build_connector_meta(self, scheduler_output: Any) -> Copies:
        copies, self._copies = self._copies, Copies()
        for request_id in scheduler_output.preempted_req_ids or ():
            self._forget(request_id)
        # Only prompts that the coming pass computes whole may be copied from after it.
        scheduled = scheduler_output.num_scheduled_tokens
        for prompt, donor in self._computing.items():
            if donor.request_id in scheduled:
                self._donors[prompt] = donor
        self._computing.clear()
        return copies

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Its blocks are freed now, and may hold anything soon."""
        self._forget(request.request_id)
        return False, None

    def reset_cache(self) -> bool:
        """The weights have changed."""
        self._donors.clear()
        self._computing.clear()
        return True

    def _forget(self, request_id: str) -> None:
        for known in (self._donors, self._computing):
            for prompt in [prompt for prompt, donor in known.items() if donor.request_id == request_id]:
                del known[prompt]

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        copies = self._get_connector_metadata()
        assert isinstance(copies, Copies)
        if copies.sources:
            sources, targets = torch.tensor(copies.sources), torch.tensor(copies.targets)
            for cache in self._caches:  # [blocks, ...]
                cache[targets] = cache[sources]

    def wait_for_layer_load(self, layer_name: str) -> None:
        """The copy is done before the pass."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is stored elsewhere."""

    def wait_for_save(self) -> None:
        """Nothing is stored elsewhere."""
