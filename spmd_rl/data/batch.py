"""`Batch`: ragged, columnar samples. The one form in which samples are stored, exchanged and consumed.

Nothing is padded. A column is one flat tensor of values plus one length per sample; the identity of a
sample, `(epoch, prompt_index, sample_index)`, travels with it and is never recycled.

Columns of the standard recipes (S samples, R response tokens of one sample, P prompt tokens):

| column            | dtype   | length | meaning                                                        |
| ----------------- | ------- | ------ | -------------------------------------------------------------- |
| `prompt`          | int32   | P      | token ids                                                      |
| `row`             | uint8   | bytes  | the data set's row as UTF-8 JSON, with `source` = its label    |
| `response`        | int32   | R      | token ids, with the end-of-sequence token where one was drawn  |
| `rollout_logprob` | float32 | R      | of the response under the rollout engine, at the temperature   |
| `finish`          | uint8   | 1      | a `Finish`                                                     |
| `version`         | int64   | 1      | optimizer steps behind the weights that generated it           |
| `versions`        | int64   | runs   | [2] each: a version, and how many tokens in a row it drew      |
| `reward`          | float32 | 1      | weighted total; NaN where excluded                             |
| `reward_parts`    | float32 | F      | one value per reward function                                  |
| `greedy_response` | int32   | G      | token ids of the greedy response to the same prompt (ReMax)    |
| `greedy_logprob`  | float32 | G      | of it, under the rollout engine                                |
| `greedy_reward`   | float32 | 1      | of it, with what is added for its length; NaN where excluded   |
| `advantage`       | float32 | R      | per token                                                      |
| `old_logprob`     | float32 | R      | under the policy at the start of the round                     |
| `ref_logprob`     | float32 | R      | under the reference model                                      |
| `loss_mask`       | uint8   | R      | 1: the token counts in the loss                                |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import torch
from torch import Tensor

from spmd_rl.ops.padded import pad, unpad
from spmd_rl.ops.segments import as_bytes, copy_segments


class Finish(IntEnum):
    """Why a response ended."""

    STOP = 0
    LENGTH = 1
    ABORTED = 2


@dataclass(frozen=True)
class Column:
    """Ragged values of S samples.

    values: [sum(lengths), *inner] of any dtype; lengths: int64 [S], on the CPU.
    """

    values: Tensor
    lengths: Tensor

    def __post_init__(self) -> None:
        if self.lengths.dtype != torch.int64 or self.lengths.dim() != 1:
            raise ValueError(f"lengths must be int64 [S], not {self.lengths.dtype} {tuple(self.lengths.shape)}")
        if self.values.shape[0] != int(self.lengths.sum()):
            raise ValueError(f"{self.values.shape[0]} values, but the lengths add up to {int(self.lengths.sum())}")

    @classmethod
    def known(cls, values: Tensor, lengths: Tensor) -> Column:
        """Of a pair that is known to agree: nothing is checked."""
        column = object.__new__(cls)
        column.__dict__.update(values=values, lengths=lengths)
        return column

    @classmethod
    def from_rows(cls, rows: Sequence[Tensor], dtype: torch.dtype | None = None) -> Column:
        """One tensor [length, *inner] per sample. With no rows, `dtype` says what the empty column holds."""
        lengths = torch.tensor([r.shape[0] for r in rows], dtype=torch.int64)
        values = torch.cat(list(rows)) if rows else torch.empty(0, dtype=dtype or torch.float32)
        return cls(values if dtype is None else values.to(dtype), lengths)

    @classmethod
    def from_bytes(cls, rows: Sequence[bytes]) -> Column:
        lengths = torch.tensor([len(r) for r in rows], dtype=torch.int64)
        joined = bytearray(b"".join(rows))
        values = torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
        return cls(values, lengths)

    @classmethod
    def from_padded(cls, padded: Tensor, lengths: Tensor) -> Column:
        """The first `lengths[s]` entries of each row of [S, longest, *inner]. For engine borders only."""
        return cls(unpad(padded, lengths), lengths)

    @classmethod
    def scalars(cls, values_S: Tensor) -> Column:
        """One value per sample."""
        return cls(values_S, torch.ones(values_S.shape[0], dtype=torch.int64))

    def __len__(self) -> int:
        return self.lengths.shape[0]

    @cached_property
    def offsets(self) -> Tensor:
        """int64 [S + 1]: where each sample starts (`cu_seqlens`)."""
        return torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0))

    def rows(self) -> tuple[Tensor, ...]:
        """Views, one per sample."""
        return self.values.split(self.lengths.tolist())

    def row_bytes(self) -> list[bytes]:
        if self.values.dtype != torch.uint8:
            raise TypeError(f"bytes wanted, but the column holds {self.values.dtype}")
        joined, ends = self.values.cpu().numpy().tobytes(), self.offsets.tolist()
        return [joined[begin:end] for begin, end in zip(ends[:-1], ends[1:], strict=True)]

    def as_scalars(self) -> Tensor:
        """[S, *inner]; every sample must hold exactly one value."""
        if not bool((self.lengths == 1).all()):
            raise ValueError("a column of one value per sample is wanted, but lengths differ from 1")
        return self.values

    def select(self, index_K: Tensor) -> Column:
        """The samples `index_K` (int64 [K]), in that order; a view where they are consecutive."""
        if index_K.numel() == 0:
            return Column(self.values[:0], self.lengths[:0])
        if bool((index_K.diff() == 1).all()):
            first, last = int(index_K[0]), int(index_K[-1])
            offsets = self.offsets
            return Column(self.values[offsets[first] : offsets[last + 1]], self.lengths[first : last + 1])
        lengths = self.lengths[index_K]
        selected = self.values.new_empty(int(lengths.sum()), *self.values.shape[1:])
        unit = selected.element_size() * selected.shape[1:].numel()
        begin, size = self.offsets[:-1][index_K] * unit, lengths * unit
        table = torch.stack([torch.zeros_like(size), begin, size.cumsum(0) - size, size])
        copy_segments([as_bytes(self.values.contiguous())], as_bytes(selected), table)
        return Column(selected, lengths)

    def padded(self, fill: float | int = 0) -> Tensor:
        """[S, longest, *inner], filled up at the right. For engine borders only."""
        return pad(self.values, self.lengths, fill)


@dataclass(frozen=True)
class Batch:
    """Samples with identities and named ragged columns.

    ids: int64 [S, 3] of (epoch, prompt_index, sample_index), no two equal; every column has S samples.
    """

    ids: Tensor
    columns: Mapping[str, Column]

    def __post_init__(self) -> None:
        if self.ids.dtype != torch.int64 or self.ids.dim() != 2 or self.ids.shape[1] != 3:
            raise ValueError(f"ids must be int64 [S, 3], not {self.ids.dtype} {tuple(self.ids.shape)}")
        for name, column in self.columns.items():
            if len(column) != len(self):
                raise ValueError(f"column {name!r} has {len(column)} samples, the batch has {len(self)}")

    @classmethod
    def empty(cls) -> Batch:
        return cls(torch.empty(0, 3, dtype=torch.int64), {})

    def __len__(self) -> int:
        return self.ids.shape[0]

    def __getitem__(self, name: str) -> Column:
        try:
            return self.columns[name]
        except KeyError:
            raise KeyError(f"no column {name!r}; there are {', '.join(sorted(self.columns)) or 'none'}") from None

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def check_ids(self) -> None:
        """Raises ValueError where two samples have one identity."""
        unique, counts = torch.unique(self.ids, dim=0, return_counts=True)
        if unique.shape[0] != len(self):
            twice = tuple(unique[counts > 1][0].tolist())
            raise ValueError(f"sample (epoch, prompt, sample) = {twice} occurs more than once")

    def with_columns(self, columns: Mapping[str, Column]) -> Batch:
        return Batch(self.ids, {**self.columns, **columns})

    def only(self, names: Iterable[str]) -> Batch:
        return Batch(self.ids, {name: self[name] for name in names})

    def select(self, index_K: Tensor) -> Batch:
        """The samples `index_K` (int64 [K]), in that order."""
        return Batch(self.ids[index_K], {name: column.select(index_K) for name, column in self.columns.items()})

    def split(self, sizes: Sequence[int]) -> list[Batch]:
        """Consecutive parts of the given numbers of samples; views."""
        if sum(sizes) != len(self):
            raise ValueError(f"parts of {list(sizes)} samples do not add up to {len(self)}")
        return [self.select(part) for part in torch.arange(len(self)).split(list(sizes))]

    def groups(self) -> Tensor:
        """int64 [S]: a dense group number per sample (first seen first); a group shares (epoch, prompt_index)."""
        if len(self) == 0:
            return torch.empty(0, dtype=torch.int64)
        _, inverse = torch.unique(self.ids[:, :2], dim=0, return_inverse=True)
        first = torch.full((int(inverse.max()) + 1,), len(self)).scatter_reduce(
            0, inverse, torch.arange(len(self)), reduce="amin"
        )
        return first.argsort().argsort()[inverse]

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """All samples of `batches`, in order; all must have the same columns, except those with none at all."""
        parts = [b for b in batches if len(b) or b.columns]
        if not parts:
            return Batch.empty()
        if len(parts) == 1:
            return parts[0]
        names = list(parts[0].columns)
        for part in parts[1:]:
            if set(part.columns) != set(names):
                raise ValueError(f"columns differ: {sorted(names)} and {sorted(part.columns)}")
        return Batch(
            torch.cat([b.ids for b in parts]),
            {
                name: Column(torch.cat([b[name].values for b in parts]), torch.cat([b[name].lengths for b in parts]))
                for name in names
            },
        )
