"""`Metrics`: numbers that are accumulated where they arise and reduced over micro-batches and ranks at once.

What is accumulated are sums and weights, never finished averages, so the result does not depend on how the work was
split: 3 of 12 clipped tokens on one rank and 3 of 4 on another are 6 of 16, not the mean of two means.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from math import inf, isnan, nan, sqrt
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

Number = float | int | Tensor


def _detached(value: Number) -> Number:
    """Tensors stay where they are (no device synchronisation), without graph and in float64."""
    if not isinstance(value, Tensor):
        return float(value)
    if value.numel() != 1:
        raise ValueError(f"a single number is wanted, not a tensor of shape {tuple(value.shape)}")
    return value.detach().reshape(()).double()


class _Entry:
    """What one name has gathered. `maxima` and `sums` go through the MAX and the SUM reduction."""

    max_width: ClassVar[int] = 0
    sum_width: ClassVar[int] = 0

    def add(self, other: _Entry) -> None:
        raise NotImplementedError

    def maxima(self) -> list[float]:
        return []

    def sums(self, maxima: list[float]) -> list[float]:
        """`maxima`: the reduced ones."""
        raise NotImplementedError

    @staticmethod
    def results(name: str, maxima: list[float], sums: list[float]) -> dict[str, float]:
        raise NotImplementedError


@dataclass
class _Mean(_Entry):
    total: Number
    weight: Number
    sum_width = 2

    def add(self, other: _Entry) -> None:
        assert isinstance(other, _Mean)
        self.total, self.weight = self.total + other.total, self.weight + other.weight

    def sums(self, maxima: list[float]) -> list[float]:
        return [float(self.total), float(self.weight)]

    @staticmethod
    def results(name: str, maxima: list[float], sums: list[float]) -> dict[str, float]:
        return {name: sums[0] / sums[1]} if sums[1] else {}


@dataclass
class _Sum(_Entry):
    value: Number
    sum_width = 1

    def add(self, other: _Entry) -> None:
        assert isinstance(other, _Sum)
        self.value = self.value + other.value

    def sums(self, maxima: list[float]) -> list[float]:
        return [float(self.value)]

    @staticmethod
    def results(name: str, maxima: list[float], sums: list[float]) -> dict[str, float]:
        return {name: sums[0]}


@dataclass
class _Max(_Entry):
    values: list[Number]
    max_width = 1
    sum_width = 1  # 0, or NaN where a NaN was given: backends order NaN differently in a MAX reduction

    def add(self, other: _Entry) -> None:
        assert isinstance(other, _Max)
        self.values = [self._local([*self.values, *other.values])]

    @staticmethod
    def _local(values: list[Number]) -> Number:
        if any(isinstance(v, Tensor) for v in values):
            on = next(v.device for v in values if isinstance(v, Tensor))
            return torch.stack([torch.as_tensor(v, dtype=torch.float64, device=on) for v in values]).amax()
        return nan if any(isnan(v) for v in values) else max(values)

    def maxima(self) -> list[float]:
        value = float(self.values[0])
        return [-inf if isnan(value) else value]

    def sums(self, maxima: list[float]) -> list[float]:
        return [nan if isnan(float(self.values[0])) else 0.0]

    @staticmethod
    def results(name: str, maxima: list[float], sums: list[float]) -> dict[str, float]:
        return {name: maxima[0] + sums[0]}


@dataclass
class _Same(_Entry):
    value: Number
    max_width = 2  # the value and its negative: greatest and least in one reduction
    sum_width = 1  # NaN where one was given

    def add(self, other: _Entry) -> None:
        assert isinstance(other, _Same)
        self.value = other.value

    def maxima(self) -> list[float]:
        value = float(self.value)
        return [-inf, -inf] if isnan(value) else [value, -value]

    def sums(self, maxima: list[float]) -> list[float]:
        return [nan if isnan(float(self.value)) else 0.0]

    @staticmethod
    def results(name: str, maxima: list[float], sums: list[float]) -> dict[str, float]:
        most, least = maxima[0], -maxima[1]
        if isnan(sums[0]):
            return {name: nan}
        if most != least and most - least > 1e-5 * max(abs(most), abs(least)):
            raise ValueError(f"metric {name!r} must be equal on all ranks, but lies between {least:g} and {most:g}")
        return {name: most}


@dataclass
class _Moments(_Entry):
    count: int
    mean: Number
    squares: Number  # sum of squared deviations from `mean`
    max_width = 1  # the greatest of the ranks' means: a common point near all values, so that nothing cancels
    sum_width = 3

    def add(self, other: _Entry) -> None:
        # Chan, Golub, LeVeque (1979): updating formulae and a pairwise algorithm for computing sample variances.
        assert isinstance(other, _Moments)
        count = self.count + other.count
        if other.count == 0:
            return
        delta = other.mean - self.mean
        self.squares = self.squares + other.squares + delta * delta * (self.count * other.count / count)
        self.mean = self.mean + delta * (other.count / count)
        self.count = count

    def maxima(self) -> list[float]:
        return [float(self.mean) if self.count else -inf]

    def sums(self, maxima: list[float]) -> list[float]:
        if not self.count:
            return [0.0, 0.0, 0.0]
        shift = float(self.mean) - maxima[0]
        return [self.count, self.count * shift, float(self.squares) + self.count * shift * shift]

    @staticmethod
    def results(name: str, maxima: list[float], sums: list[float]) -> dict[str, float]:
        count, shifted, squares = sums
        if not count:
            return {}
        joint = "_" if "/" in name else "/"
        # max(0, .) against rounding, written so that a NaN stays one.
        variance = squares / count - (shifted / count) ** 2
        deviation = 0.0 if variance < 0 else sqrt(variance)
        return {f"{name}{joint}mean": maxima[0] + shifted / count, f"{name}{joint}std": deviation}


_KINDS: dict[str, type[_Entry]] = {"mean": _Mean, "sum": _Sum, "max": _Max, "set": _Same, "moments": _Moments}
_KIND_OF = {entry: kind for kind, entry in _KINDS.items()}


class Metrics:
    """Named accumulators. Values are Python numbers or 0-d tensors; tensors are read (`.item()`) only in `reduce`.

    One name has one kind; using it with another raises ValueError. Not for use from several threads at once.
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def mean(self, name: str, total: Number, weight: Number) -> None:
        """A weighted average: `name` = sum of totals / sum of weights. Left out where all weights are 0."""
        self._add(name, _Mean(_detached(total), _detached(weight)))

    def moments(self, name: str, values: Tensor) -> None:
        """Mean and standard deviation (of the population: divided by the count) of all values, of any shape.

        `reward` gives `reward/mean` and `reward/std`; `response/length` gives `response/length_mean` and `_std`.
        Left out where there are no values at all. NaN is not skipped: leave excluded samples out before.
        """
        values = values.detach().double().reshape(-1)
        if values.numel() == 0:
            self._add(name, _Moments(0, 0.0, 0.0))
            return
        mean = values.mean()
        self._add(name, _Moments(values.numel(), mean, (values - mean).square().sum()))

    def sum(self, name: str, value: Number) -> None:
        self._add(name, _Sum(_detached(value)))

    def max(self, name: str, value: Number) -> None:
        """The greatest; NaN where any value is NaN."""
        self._add(name, _Max([_detached(value)]))

    def set(self, name: str, value: Number) -> None:
        """A value that all ranks that give it agree on; the last one given counts. `reduce` raises ValueError where
        ranks differ by more than 1e-5 relative: they have diverged."""
        self._add(name, _Same(_detached(value)))

    def merge(self, other: Metrics) -> None:
        """Add what `other` has accumulated; `other` should not be used afterwards."""
        for name, entry in other._entries.items():
            self._add(name, entry)

    def average(self, name: str, group: ProcessGroup) -> float | None:
        """The weighted average `name` (of `mean`) over all ranks as it stands now; None where nothing was weighed.
        Collective over `group`, which must carry CPU tensors."""
        entry = self._entries.get(name)
        sums = torch.tensor(entry.sums([]) if isinstance(entry, _Mean) else [0.0, 0.0], dtype=torch.float64)
        dist.all_reduce(sums, group=group)
        total, weight = sums.tolist()
        return total / weight if weight else None

    def reduce(self, group: ProcessGroup | None = None) -> dict[str, float]:
        """Results by name, in alphabetical order, equal on all ranks of `group` (None: this process alone).

        Collective over `group`, which must carry CPU tensors (`World.control`): a digest of the names, one MAX and
        one SUM reduction in float64. Only where the names differ (a rank without samples) are they gathered.
        """
        kinds = {name: _KIND_OF[type(entry)] for name, entry in sorted(self._entries.items())}
        if group is not None:
            kinds = _agree(kinds, group)
        classes = {name: _KINDS[kind] for name, kind in kinds.items()}

        maxima_in = {
            n: self._entries[n].maxima() if n in self._entries else [-inf] * c.max_width for n, c in classes.items()
        }
        maxima = _reduce(maxima_in, dist.ReduceOp.MAX, group)
        sums_in = {
            n: self._entries[n].sums(maxima[n]) if n in self._entries else [0.0] * c.sum_width
            for n, c in classes.items()
        }
        sums = _reduce(sums_in, dist.ReduceOp.SUM, group)

        results: dict[str, float] = {}
        for name, entry in classes.items():
            results.update(entry.results(name, maxima[name], sums[name]))
        return dict(sorted(results.items()))

    def _add(self, name: str, entry: _Entry) -> None:
        there = self._entries.get(name)
        if there is None:
            self._entries[name] = entry
        elif type(there) is type(entry):
            there.add(entry)
        else:
            raise ValueError(f"metric {name!r} is a {_KIND_OF[type(there)]}, not a {_KIND_OF[type(entry)]}")


def _agree(kinds: dict[str, str], group: ProcessGroup) -> dict[str, str]:
    """The union of all ranks' names; raises ValueError on every rank where a name has two kinds."""
    digest = hashlib.sha256(repr(list(kinds.items())).encode()).digest()
    number = int.from_bytes(digest[:8], "big") >> 1
    both = torch.tensor([number, -number], dtype=torch.int64)
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    if both[0] == -both[1]:
        return kinds
    gathered: list[dict[str, str]] = [{} for _ in range(group.size())]
    dist.all_gather_object(gathered, kinds, group=group)
    union: dict[str, str] = {}
    for one in gathered:
        for name, kind in one.items():
            if union.setdefault(name, kind) != kind:
                raise ValueError(f"metric {name!r} is a {union[name]} on one rank and a {kind} on another")
    return dict(sorted(union.items()))


def _reduce(
    values: dict[str, list[float]], op: dist.ReduceOp.RedOpType, group: ProcessGroup | None
) -> dict[str, list[float]]:
    """All lists in one reduction."""
    if group is None:
        return values
    flat = torch.tensor([v for row in values.values() for v in row], dtype=torch.float64)
    if flat.numel():
        dist.all_reduce(flat, op, group=group)
    parts = flat.split([len(row) for row in values.values()])
    return {name: part.tolist() for name, part in zip(values, parts, strict=True)}
