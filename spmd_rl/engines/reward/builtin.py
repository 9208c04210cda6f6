"""The reward functions that come with the program. Each is called as f(prompt, response, row, **args).

The right answer is the row's `answer`, which the data source takes from its answer column.
"""

from __future__ import annotations

import json
import logging
import re
from functools import lru_cache
from typing import Any

Row = dict[str, Any]

# Their scorers compare tuples, which JSON turned into lists.
TUPLE_TASKS = {"arc_agi", "rearc"}


def exact_match(prompt: str, response: str, row: Row, tag: str = "") -> float:
    """1 where the response is the row's answer, but for white space around it; else 0. tag: see `extracted`."""
    return float(extracted(response, tag) == str(_answer(row)).strip())


def near_number(prompt: str, response: str, row: Row, scale: float = 5.0, tag: str = "") -> float:
    """1 where the response is the row's answer, a number; 0.5 / (1 + error / scale) for another number; else 0.

    A wrong number is worth more the nearer it is, so that a model that is rarely right still learns from its groups.
    Raises ValueError where the answer is no number. tag: see `extracted`.
    """
    gold = float(_answer(row))
    number = re.fullmatch(r"[+-]?\d+(\.\d+)?", extracted(response, tag))
    if number is None:
        return 0.0
    error = abs(float(number[0]) - gold)
    return 1.0 if error == 0 else 0.5 / (1.0 + error / scale)


def math_verify(prompt: str, response: str, row: Row, tag: str = "") -> float:
    """1 where math-verify finds the last expression of the response equal to the row's answer, else 0.

    The answer may be plain (`1/2`), LaTeX (`\\frac{1}{2}`), in `$…$` or `\\boxed{…}`, or stand behind `####`. Raises
    ValueError where no expression is found in it. tag: see `extracted`.
    """
    parse, verify = _math_verify()
    gold = str(_answer(row)).rsplit("####", 1)[-1].strip()
    wanted = [] if re.search(r"\$|\\boxed|\\\(|\\\[", gold) else parse(f"\\boxed{{{gold}}}", parsing_timeout=None)
    wanted = wanted or parse(gold, parsing_timeout=None)
    if not wanted:
        raise ValueError(f"math-verify finds no expression in the answer {gold[:80]!r}")
    # Its own time-outs use SIGALRM, which works in main threads only and then turns right answers into wrong ones;
    # the limit is the worker's.
    return float(verify(wanted, parse(extracted(response, tag), parsing_timeout=None), timeout_seconds=None))


# Only a response can make a comparison take for ever (9^9^9^9): then it is not the answer.
math_verify.timeout_value = 0.0  # type: ignore[attr-defined]


def reasoning_gym(prompt: str, response: str, row: Row, strict: bool = False, tag: str = "") -> float:
    """The score, 0 to 1, that the reasoning-gym task of the row gives the response.

    strict: scores below 1 (a right answer within more text, a near miss) count as 0. tag: see `extracted`.
    """
    made_by = row.get("generator")
    if not isinstance(made_by, dict):
        raise ValueError("the row does not come from a reasoning-gym generator")
    task = made_by["task"]
    entry = {**row, "metadata": _tuples(row["metadata"])} if task in TUPLE_TASKS else row
    scorer = _scorer(task, json.dumps(made_by["params"], sort_keys=True))
    try:
        score = float(scorer.score_answer(answer=extracted(response, tag), entry=entry))
    except Exception:
        # Several scorers choke on malformed answers. If this one can judge the right answer, the response is at fault.
        scorer.score_answer(answer=row.get("answer"), entry=entry)
        score = 0.0
    return float(score >= 1) if strict else score


reasoning_gym.timeout_value = 0.0  # type: ignore[attr-defined]


def extracted(response: str, tag: str) -> str:
    """The response without white space around it; with a tag, what stands in its last <tag>…</tag>, else nothing."""
    if not tag:
        return response.strip()
    found = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", response, flags=re.DOTALL)
    return found[-1].strip() if found else ""


def _answer(row: Row) -> Any:
    if row.get("answer") is None:
        raise ValueError("the row has no answer: name its column in answer_column")
    return row["answer"]


@lru_cache(maxsize=1)
def _math_verify() -> Any:
    """Imported on first use: it takes a second."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time-outs are off
    return parse, verify


@lru_cache(maxsize=64)
def _scorer(task: str, params: str) -> Any:
    from reasoning_gym.factory import create_dataset

    return create_dataset(task, size=1, seed=0, **json.loads(params))


def _tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_tuples(v) for v in value)
    if isinstance(value, dict):
        return {key: _tuples(v) for key, v in value.items()}
    return value
