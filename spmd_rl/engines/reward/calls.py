"""Calling reward functions, and making sure of what they return: in the workers, or, without them, in the rank."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from spmd_rl.engines.reward.functions import RewardFunction, describe

VALUE = "reward"  # the entry of a returned dict that is the score
LARGEST = 1e12  # times the largest weight (config/values.py) its square is still a float32: gradient norms stay finite
_WANTED = f"a number is wanted, at most {LARGEST:g} in size"


class Sample(NamedTuple):
    prompt: str
    response: str
    row: dict[str, Any]


class Call(NamedTuple):
    """One call of one function: on one sample, or, where the function is batched, on all of them."""

    function: int
    samples: tuple[int, ...]


@dataclass(frozen=True)
class Outcome:
    """What a function made of one sample.

    value: NaN where `error` says why there is none; extras: the other entries of a returned dict; late: the call was
    ended by the time limit.
    """

    value: float
    extras: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    late: bool = False

    @classmethod
    def failed(cls, error: str) -> Outcome:
        return cls(math.nan, error=error)


Report = Callable[[Call, list[Outcome]], None]


def run_calls(
    functions: Sequence[RewardFunction],
    calls: Sequence[Call],
    samples: Mapping[int, Sample],
    runner: asyncio.Runner,
    timeout_s: float,
    report: Report,
) -> None:
    """Make the calls and report each one's outcomes as soon as it is done; whatever a function raises is an outcome.

    First the ordinary functions, one call after the other in the given order; then the async ones, all at once, each
    with the time limit `timeout_s`.
    """
    for call in calls:
        function = functions[call.function]
        if function.is_async:
            continue
        try:
            outcomes = judge(function, call, function.call(*_arguments(function, call, samples), **function.spec.args))
        except (Exception, SystemExit) as error:
            outcomes = [Outcome.failed(f"raised {describe(error)}")] * len(call.samples)
        report(call, outcomes)
    waiting = [call for call in calls if functions[call.function].is_async]
    if waiting:
        runner.run(_together(functions, waiting, samples, timeout_s, report))


async def _together(
    functions: Sequence[RewardFunction],
    calls: Sequence[Call],
    samples: Mapping[int, Sample],
    timeout_s: float,
    report: Report,
) -> None:
    async def one(call: Call) -> None:
        function = functions[call.function]
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                result = await function.call(*_arguments(function, call, samples), **function.spec.args)
            outcomes = judge(function, call, result)
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            late = limit.expired()
            outcome = (
                too_late(timeout_s, function.timeout_value) if late else Outcome.failed(f"raised {describe(error)}")
            )
            outcomes = [outcome] * len(call.samples)
        report(call, outcomes)

    await asyncio.gather(*(one(call) for call in calls))


def judge(function: RewardFunction, call: Call, result: Any) -> list[Outcome]:
    """One outcome per sample of the call, from what the function returned."""
    if not function.spec.batched:
        return [_outcome(result)]
    if (
        isinstance(result, str | bytes | Mapping)
        or not hasattr(result, "__len__")
        or not hasattr(result, "__getitem__")
    ):
        wrong = f"returned {_shown(result)}; a list of {len(call.samples)} rewards is wanted"
    elif len(result) != len(call.samples):
        wrong = f"returned {len(result)} rewards for {len(call.samples)} samples"
    else:
        return [_outcome(result[i]) for i in range(len(result))]
    return [Outcome.failed(wrong)] * len(call.samples)


def too_late(timeout_s: float, timeout_value: float | None) -> Outcome:
    """Of a call that was ended by the time limit: an error, unless its function says what that is worth."""
    if timeout_value is None:
        return Outcome(math.nan, error=f"took longer than reward.timeout_s={timeout_s:g}", late=True)
    return Outcome(timeout_value, late=True)


def _arguments(function: RewardFunction, call: Call, samples: Mapping[int, Sample]) -> tuple[Any, Any, Any]:
    chosen = [samples[i] for i in call.samples]
    if function.spec.batched:
        return [s.prompt for s in chosen], [s.response for s in chosen], [s.row for s in chosen]
    return chosen[0]


def _outcome(result: Any) -> Outcome:
    if not isinstance(result, Mapping):
        value = _number(result)
        return Outcome(value) if value is not None else Outcome.failed(f"returned {_shown(result)}; {_WANTED}")
    if VALUE not in result:
        return Outcome.failed(f"returned a dict without {VALUE!r}: {_shown(dict(result))}")
    numbers = {str(key): _number(value) for key, value in result.items()}
    wrong = next((key for key, number in numbers.items() if number is None), None)
    if wrong is not None:
        return Outcome.failed(f"returned {wrong!r}: {_shown(result[wrong])}; {_WANTED}")
    known = {key: number for key, number in numbers.items() if number is not None}
    return Outcome(known.pop(VALUE), known)


def _number(value: Any) -> float | None:
    """A number up to LARGEST (int, float, bool, of numpy, a tensor with one element), else None."""
    if value is None or isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) <= LARGEST else None  # NaN is not


def _shown(value: Any) -> str:
    text = repr(value).replace("\n", " ")
    return text if len(text) <= 80 else f"{text[:77]}..."
