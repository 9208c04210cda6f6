"""What the graph expects of an engine. The core knows these protocols and no engine's library."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from spmd_rl.data.batch import Batch, Finish
from spmd_rl.observe.metrics import Metrics

SampleId = tuple[int, int, int]


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Every parameter is explicit: no model default slips in."""

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    max_tokens: int = 256
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Request:
    """One response to draw. `seed` depends on the sample's identity alone, never on rank or batch.

    begun: an aborted completion of this request to go on from: its tokens, log-probabilities and versions are kept,
    and count in `sampling.max_tokens`.
    """

    id: SampleId
    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int
    begun: Completion | None = None


@dataclass(frozen=True)
class Completion:
    """A response, finished or aborted. tokens: with the end token where one was drawn; logprobs: one natural
    logarithm per token, at the sampling temperature; version: of the weights that drew the first token; versions: of
    all tokens, as (version, number of tokens) runs."""

    id: SampleId
    tokens: list[int]
    logprobs: list[float]
    finish: Finish
    version: int
    versions: tuple[tuple[int, int], ...]


class EngineFailure(RuntimeError):
    """A rollout engine does not do what it should; nothing more can be had of it."""


class RolloutEngine(Protocol):
    """Draws responses. All ranks of one tensor-parallel group make the same calls in the same order."""

    def submit(self, requests: Sequence[Request]) -> None: ...

    def step(self) -> list[Completion]:
        """Advance all submitted requests by one token; the ones that finished."""
        ...

    def unfinished(self) -> int: ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights by (Hugging Face name, full tensor) pairs; drops every cache made with the old ones."""
        ...

    def sleep(self) -> None:
        """Give memory back to others in the process until `wake`; only while no request is unfinished."""
        ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


class InterruptibleEngine(RolloutEngine, Protocol):
    """One whose requests may be under way when weights change, or be taken out and go on later."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int, keep_cache: bool = False) -> None:
        """Replace all weights, between two calls of `step`. Running requests go on with the new ones.

        What was cached with the old ones is dropped and computed anew. keep_cache: running requests keep the keys and
        values of their own tokens; new requests never see old ones.
        """
        ...

    def abort(self, ids: Sequence[SampleId] | None = None) -> list[Completion]:
        """Take unfinished requests out (all, unless `ids` names some), in the order of their submission.

        Each comes as a completion with `Finish.ABORTED` and what was drawn so far, to go on from as `Request.begun`.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What any loss function sees of one micro-batch, R response tokens of S samples, flat and in batch order.

    batch: all columns of these samples; cu_seqlens: int64 [S + 1]; mask_R: float32, 1 where the token counts;
    normalizers: counts over *all* ranks and micro-batches of the optimizer step (`tokens`, `sequences`), so that the
    sum of all micro-batch losses is the loss.
    """

    batch: Batch
    cu_seqlens: Tensor
    mask_R: Tensor
    normalizers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LossTerms(Terms):
    """Of a policy. logprob_R, entropy_R: float32, under the current policy, with gradient."""

    logprob_R: Tensor
    entropy_R: Tensor


@dataclass(frozen=True, kw_only=True)
class ValueTerms(Terms):
    """Of a critic. value_R: float32, before each token, with gradient."""

    value_R: Tensor


LossFunction = Callable[[LossTerms, Metrics], Tensor]
ValueLossFunction = Callable[[ValueTerms, Metrics], Tensor]


class TrainEngine(Protocol):
    """A model that is trained or evaluated on packed ragged batches. Calls are collective over its ranks."""

    version: int  # updates made, the skipped ones among them
    skipped: int  # updates that changed nothing, because no token counted

    def logprobs(self, batch: Batch) -> Tensor:
        """float32 [R]: log-probability of every response token, at the rollout temperature; no gradient."""
        ...

    def update(self, batch: Batch, loss: LossFunction, metrics: Metrics, last: bool = True) -> None:
        """One optimizer step over this rank's part of the batch; the loss is normalised globally. Skipped where no
        token counts on any rank. last: false where more samples of the step come with another call."""
        ...

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor), in one fixed order on all ranks; collective."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Critic(Protocol):
    """A model that is trained to know returns. Calls are collective over its ranks."""

    version: int  # as a TrainEngine's
    skipped: int

    def values(self, batch: Batch) -> Tensor:
        """float32 [R]: the value before each response token; no gradient."""
        ...

    def update(self, batch: Batch, loss: ValueLossFunction, metrics: Metrics) -> None:
        """As a TrainEngine's."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
