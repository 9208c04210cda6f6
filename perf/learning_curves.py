"""What a recipe has learned, and the drawing of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from pathlib import Path
from statistics import mean, stdev

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # in a checkout that is not installed

from spmd_rl.observe.report.charts import smoothed, ticks  # noqa: E402

BASELINE = "grpo"  # what every panel shows beside its own recipe
# One-sided 95 % quantiles of Student's t by degrees of freedom; beyond them the normal one is near enough.
T_95 = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 6: 1.943, 7: 1.895, 8: 1.860, 9: 1.833}


@dataclass(frozen=True)
class Learned:
    """What one recipe did. rewards: mean reward per step, one list per seed; gain: mean over the seeds; lower: the
    lower end of its interval, -inf for a single seed."""

    recipe: str
    rewards: list[list[float]]
    gain: float
    lower: float
    seconds: float  # of a step, mean

    @classmethod
    def of(cls, recipe: str, lines: list[list[dict[str, float]]]) -> Learned:
        rewards = [[line["reward/mean"] for line in run] for run in lines]
        gains = [gain(curve) for curve in rewards]
        lower = -inf
        if len(gains) > 1:
            lower = mean(gains) - T_95.get(len(gains) - 1, 1.7) * stdev(gains) / sqrt(len(gains))
        return cls(recipe, rewards, mean(gains), lower, mean(line["time/step"] for run in lines for line in run))

    def line(self) -> dict[str, object]:
        return {
            "case": self.recipe,
            "seeds": len(self.rewards),
            "steps": len(self.rewards[0]),
            "gain": round(self.gain, 4),
            "gain_lower_95": round(self.lower, 4) if self.lower > -inf else None,
            "seconds_per_step": round(self.seconds, 2),
            "met": self.lower > 0,
        }


def gain(curve: Sequence[float]) -> float:
    part = max(1, len(curve) // 5)
    return mean(curve[-part:]) - mean(curve[:part])


# --- the drawing: one panel per recipe, its seeds thin, their mean thick, the baseline's mean dashed ---------------

WIDTH, HEIGHT, COLUMNS = 260, 170, 3
LEFT, TOP, BOTTOM, RIGHT = 38, 26, 22, 10


def panels(results: Sequence[Learned]) -> str:
    """All recipes on the same axes, as one SVG file."""
    values = [reward for result in results for curve in result.rewards for reward in curve]
    scale = ticks(min(values), max(values))
    baseline = next((average(result) for result in results if result.recipe == BASELINE), None)
    rows = -(-len(results) // COLUMNS)
    size = f'width="{WIDTH * COLUMNS}" height="{HEIGHT * rows}" viewBox="0 0 {WIDTH * COLUMNS} {HEIGHT * rows}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for place, result in enumerate(results):
        x, y = place % COLUMNS * WIDTH, place // COLUMNS * HEIGHT
        parts.append(f'<g transform="translate({x},{y})">{panel(result, scale, baseline)}</g>')
    return "\n".join([*parts, "</svg>\n"])


def average(result: Learned) -> list[float]:
    return [mean(at_step) for at_step in zip(*result.rewards, strict=True)]


def panel(result: Learned, scale: Sequence[float], baseline: Sequence[float] | None) -> str:
    steps = len(result.rewards[0])

    def line(curve: Sequence[float], style: str) -> str:
        points = [
            (
                LEFT + i / max(1, steps - 1) * (WIDTH - LEFT - RIGHT),
                HEIGHT - BOTTOM - (v - scale[0]) / (scale[-1] - scale[0]) * (HEIGHT - TOP - BOTTOM),
            )
            for i, v in enumerate(curve)
        ]
        return f'<polyline fill="none" {style} points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'

    parts = [f'<text x="{LEFT}" y="16" font-weight="bold">{result.recipe}</text>']
    lower = f", 95 % above {result.lower:.2f}" if result.lower > -inf else ""
    parts.append(f'<text x="{WIDTH - RIGHT}" y="16" text-anchor="end">+{result.gain:.2f}{lower}</text>')
    for tick in (scale[0], scale[-1]):
        parts.append(line([tick] * steps, 'stroke="#ddd"'))
        y = HEIGHT - BOTTOM if tick == scale[0] else TOP
        parts.append(f'<text x="{LEFT - 4}" y="{y + 4}" text-anchor="end" fill="#666">{tick:g}</text>')
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 6}" fill="#666">step 1</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end" fill="#666">{steps}</text>')
    parts += [line(curve, 'stroke="#9bc" stroke-width="0.8"') for curve in result.rewards]
    if baseline is not None and result.recipe != BASELINE:
        parts.append(line(smoothed(baseline), 'stroke="#888" stroke-dasharray="3 3"'))
    parts.append(line(smoothed(average(result)), 'stroke="#147" stroke-width="2"'))
    return "".join(parts)
