"""Reward functions of a user, good and bad, for test_reward.py."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time

import numpy as np

NOT_A_FUNCTION = 7


def length(prompt, response, row, scale=1.0):
    return scale * len(response)


def by_row(prompt, response, row):
    """Does what the row says."""
    match row.get("do"):
        case "raise":
            raise ZeroDivisionError("division by zero")
        case "none":
            return None
        case "nan":
            return float("nan")
        case "huge":
            return 1e308
        case "text":
            return "0.5"
        case "hang":
            time.sleep(3600)
        case "spin":
            while True:
                pass
        case "exit":
            sys.exit(3)
        case "die":
            os.kill(os.getpid(), 9)
        case "numpy":
            return np.float32(0.25)
        case "bool":
            return True
    return 1.0


def parts(prompt, response, row):
    return {"reward": 1.5, "format": row["format"]}


def no_reward(prompt, response, row):
    return {"score": 1.0}


def process(prompt, response, row):
    in_main_thread = threading.current_thread() is threading.main_thread()
    return {"reward": os.getpid(), "torch": "torch" in sys.modules, "main": in_main_thread}


def batched(prompts, responses, rows, drop=0):
    rewards = [len(p) + 10 * len(r) for p, r in zip(prompts, responses, strict=True)]
    return np.array(rewards[drop:], dtype=np.float64)


def batched_number(prompts, responses, rows):
    return 1.0


async def judge(prompt, response, row):
    """A remote judge that takes its time."""
    if row.get("do") == "block":
        time.sleep(3600)
    await asyncio.sleep(3600 if row.get("do") == "hang" else 0.2)
    if row.get("do") == "raise":
        raise ConnectionError("judge is away")
    return len(response)


def slow(prompt, response, row):
    time.sleep(row["seconds"])
    return 1.0


def starts_a_child(prompt, response, row):
    import subprocess

    child = subprocess.Popen(["sleep", "3600"])
    with open(row["file"], "w") as file:
        file.write(str(child.pid))
    time.sleep(3600)


def worth_half(prompt, response, row):
    time.sleep(3600)


worth_half.timeout_value = 0.5  # type: ignore[attr-defined]
