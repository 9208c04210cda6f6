"""Sample records, and how a bounded number of them comes to rank 0.

Rank 0 writes one `samples.jsonl`, but it is no centre: which samples are shown is decided by a rule that every rank
evaluates (the prompts with the smallest hashes), and no more than `observe.samples_per_step` records per step move,
however many ranks there are. The rule looks at the prompt alone, so that a run shows the same samples on any number
of ranks, and the same held-out prompts at every evaluation.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite, nan
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

_SURROGATE = re.compile("[\ud800-\udfff]")
_SAMPLE_BITS = 18
_LAST = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class SampleRecord:
    """One line of `samples.jsonl`.

    step: optimizer rounds before and including the one that it belongs to (0: before training); id: (epoch,
    prompt_index, sample_index); source: label of the data set; reward: the weighted total, NaN where excluded;
    reward_parts: by the names of the functions; finish: stop | length | aborted; tokens: of the response; eval: of an
    evaluation, not trained on.
    """

    step: int
    id: tuple[int, int, int]
    source: str
    prompt: str
    response: str
    reward: float
    reward_parts: Mapping[str, float]
    finish: str
    tokens: int
    eval: bool = False

    def to_json(self) -> str:
        return to_json(asdict(self))

    @classmethod
    def from_json(cls, line: str | bytes) -> SampleRecord:
        return cls.from_fields(json.loads(line))

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> SampleRecord:
        """From the object that a line holds."""
        parts = {name: _number(value) for name, value in fields["reward_parts"].items()}
        known = {"id": tuple(fields["id"]), "reward": _number(fields["reward"]), "reward_parts": parts}
        return cls(**(fields | known))


def to_json(value: Any) -> str:
    """One line of strict JSON: characters of every script as they are, NaN and infinities as null.

    Lone surrogates, which no UTF-8 file can hold, are the one thing that is escaped.
    """
    line = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)
    return _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", line)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def _number(value: float | None) -> float:
    return nan if value is None else value


def sample_key(id: Sequence[int]) -> int:
    """Where a sample stands in the order of choice: by a hash of its prompt, then by its index in the group."""
    _, prompt, sample = id
    digest = hashlib.blake2b(int(prompt).to_bytes(8, "little", signed=True), digest_size=8).digest()
    hashed = int.from_bytes(digest, "little") >> (_SAMPLE_BITS + 1)  # 45 bits: the key stays a positive int64
    return hashed << _SAMPLE_BITS | min(int(sample), (1 << _SAMPLE_BITS) - 1)


def choose_samples(ids: Tensor | Sequence[Sequence[int]], count: int, group: ProcessGroup | None = None) -> list[int]:
    """Positions in `ids` (int64 [S, 3] of this rank) of the samples that are among the `count` first of all ranks.

    Collective over `group` (CPU tensors): an all-gather of `count` int64 per rank. Over all ranks `count` samples are
    chosen, or all where there are fewer; more only where the same sample of a prompt occurs in several epochs.
    """
    rows = ids.tolist() if isinstance(ids, Tensor) else ids
    keys = [sample_key(row) for row in rows]
    if count <= 0:
        return []
    own = sorted(keys)[:count]
    everyone = own
    if group is not None:
        padded = torch.tensor(own + [_LAST] * (count - len(own)), dtype=torch.int64)
        gathered = [torch.empty_like(padded) for _ in range(group.size())]
        dist.all_gather(gathered, padded, group=group)
        everyone = sorted(key for part in gathered for key in part.tolist() if key != _LAST)
    if not everyone:
        return []
    bound = everyone[min(count, len(everyone)) - 1]
    return sorted((i for i, key in enumerate(keys) if key <= bound), key=keys.__getitem__)


def gather_samples(records: Sequence[SampleRecord], count: int, group: ProcessGroup | None) -> list[SampleRecord]:
    """On rank 0 of `group` at most `count` records of all ranks, in order of choice; on the others an empty list.

    Collective over `group`. Only the chosen records move: their bytes do not grow with the number of ranks.
    """
    chosen = [records[i] for i in choose_samples([record.id for record in records], count, group)]
    if group is not None:
        chosen = _to_first([record.to_json() for record in chosen], group)
    return sorted(chosen, key=lambda record: (sample_key(record.id), record.id))[:count]


def _to_first(lines: Sequence[str], group: ProcessGroup) -> list[SampleRecord]:
    data = "".join(line + "\n" for line in lines).encode()
    size = torch.tensor([len(data)], dtype=torch.int64)
    sizes = [torch.empty_like(size) for _ in range(group.size())]
    dist.all_gather(sizes, size, group=group)
    lengths = [int(one) for one in sizes] if group.rank() == 0 else [0] * group.size()
    received = torch.empty(sum(lengths), dtype=torch.uint8)
    sent = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    dist.all_to_all_single(received, sent, lengths, [len(data)] + [0] * (group.size() - 1), group=group)
    # JSON escapes line feeds, so a line feed ends a record.
    return [SampleRecord.from_json(line) for line in received.numpy().tobytes().split(b"\n") if line]
