"""Charts as inline SVG. Colours are CSS variables of the page, so that one drawing serves light and dark."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, isfinite, log10
from typing import Any

from spmd_rl.observe.report.data import Bar, Curve
from spmd_rl.observe.text import number

WIDTH, HEIGHT = 520, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 26
COLOURS = 8  # --c0 … --c7 of the page; --rest for what is left over
_SMOOTH_FROM = 20  # points below which a curve is drawn as it is


def colour(index: int) -> str:
    return f"var(--c{index % COLOURS})"


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round values (1, 2 or 5 times a power of ten apart) that cover low…high."""
    if not high > low:
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    raw = (high - low) / about
    power = 10.0 ** floor(log10(raw))
    distance = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = floor(low / distance + 1e-9), ceil(high / distance - 1e-9)
    return [i * distance for i in range(first, last + 1)]


@dataclass(frozen=True)
class Frame:
    """Maps values to the drawing, and draws the axes."""

    x_low: float
    x_high: float
    y_ticks: list[float]

    def x(self, value: float) -> float:
        span = (self.x_high - self.x_low) or 1.0
        return round(LEFT + (value - self.x_low) / span * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return round(HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM), 1)

    def axes(self, x_ticks: Sequence[float]) -> str:
        parts = []
        for value in self.y_ticks:
            y = self.y(value)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
            label = number(0.0 if abs(value) < 1e-12 else float(f"{value:.6g}"))
            parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{label}</text>')
        for value in x_ticks:
            parts.append(
                f'<text class="tick" x="{self.x(value)}" y="{HEIGHT - 8}" text-anchor="middle">{number(value)}</text>'
            )
        return "".join(parts)


@dataclass(frozen=True)
class Series:
    """One line of a chart. whiskers: the ends of each value's confidence interval, at the same steps."""

    label: str
    curve: Curve
    whiskers: tuple[Curve, Curve] | None = None
    points: bool = False  # mark each value


def line_chart(series: Sequence[Series], title: str, from_zero: bool = False) -> str:
    """Lines over steps, with hover values. from_zero: the axis includes 0."""
    steps = [step for s in series for step in s.curve.steps]
    values = [v for s in series for v in (*s.curve.low, *s.curve.high)]
    for s in series:
        if s.whiskers:
            values += [*s.whiskers[0].low, *s.whiskers[1].high]
    low, high = min(values), max(values)
    y_ticks = ticks(min(0.0, low), max(0.0, high)) if from_zero else ticks(low, high)
    frame = Frame(min(steps), max(steps), y_ticks)
    x_ticks = sorted(
        {t for t in ticks(frame.x_low, frame.x_high, 6) if frame.x_low <= t <= frame.x_high and t % 1 == 0}
    )
    body = [frame.axes(x_ticks or [frame.x_low])]
    hover = []
    for index, s in enumerate(series):
        body.append(_draw(s, frame, colour(index), index - (len(series) - 1) / 2))
        hover.append(_hover_series(s, frame, colour(index)))
    x_all = sorted({*steps})
    points: dict[str, Any] = {"x": [frame.x(step) for step in x_all], "t": [f"step {step}" for step in x_all], "s": []}
    for entry in hover:
        by_step = entry.pop("by_step")
        entry["v"] = [by_step.get(step, [None, None])[0] for step in x_all]
        entry["y"] = [by_step.get(step, [None, None])[1] for step in x_all]
        points["s"].append(entry)
    return _svg("".join(body), points, title)


def _draw(s: Series, frame: Frame, ink: str, place: float) -> str:
    """place: of this series among all, from the middle; whiskers stand side by side, not one upon the other."""
    shift = 5 * place if s.whiskers else 0.0
    xs = [round(frame.x(step) + shift, 1) for step in s.curve.steps]
    parts = []
    if s.curve.width > 1:
        outline = [*zip(xs, s.curve.high, strict=True), *reversed([*zip(xs, s.curve.low, strict=True)])]
        path = " ".join(f"{x},{frame.y(v)}" for x, v in outline)
        parts.append(f'<polygon class="band" points="{path}" fill="{ink}"/>')
    if s.whiskers:
        for x, low, high in zip(xs, s.whiskers[0].mean, s.whiskers[1].mean, strict=True):
            ends = f'x1="{x}" x2="{x}" y1="{frame.y(low)}" y2="{frame.y(high)}"'
            parts.append(f'<line class="whisker" {ends} stroke="{ink}"/>')
    smooth = smoothed(s.curve.mean) if len(xs) >= _SMOOTH_FROM and not s.points else None
    if smooth:
        parts.append(_polyline(xs, s.curve.mean, frame, ink, "raw"))
    parts.append(_polyline(xs, smooth or s.curve.mean, frame, ink, "line"))
    if s.points or len(xs) == 1:
        for x, value in zip(xs, s.curve.mean, strict=True):
            parts.append(f'<circle cx="{x}" cy="{frame.y(value)}" r="3.5" fill="{ink}"/>')
    return "".join(parts)


def smoothed(values: Sequence[float]) -> list[float]:
    """Centred moving average over about a tenth of the curve; the window shrinks evenly at the ends."""
    half = max(1, len(values) // 20)
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    result = []
    for i in range(len(values)):
        reach = min(half, i, len(values) - 1 - i)
        result.append((sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1))
    return result


def _polyline(xs: Sequence[float], values: Sequence[float], frame: Frame, ink: str, kind: str) -> str:
    path = " ".join(f"{x},{frame.y(v)}" for x, v in zip(xs, values, strict=True))
    return f'<polyline class="{kind}" points="{path}" stroke="{ink}"/>'


def _hover_series(s: Series, frame: Frame, ink: str) -> dict[str, Any]:
    by_step = {}
    columns = zip(s.curve.steps, s.curve.mean, s.curve.low, s.curve.high, strict=True)
    for i, (step, mean, low, high) in enumerate(columns):
        text = number(mean)
        if s.whiskers:
            low, high = s.whiskers[0].mean[i], s.whiskers[1].mean[i]
        if low < high:
            text += f" ({number(low, 3)} – {number(high, 3)})"
        by_step[step] = [text, frame.y(mean)]
    return {"n": s.label, "c": ink, "by_step": by_step}


def bar_chart(bars: Sequence[Bar], stages: Sequence[str], title: str) -> str:
    """Stacked seconds per step, in the order of `stages` from the bottom; `other` in the neutral colour."""
    top = max(sum(bar.seconds.values()) for bar in bars)
    frame = Frame(0, len(bars), ticks(0.0, top))
    wide = len(bars) / max(1, min(8, len(bars)))
    labelled = [int(i * wide) for i in range(min(8, len(bars)))]
    slot = frame.x(1) - frame.x(0)
    gap = min(4.0, slot * 0.2)
    body = [frame.axes([])]
    for i in labelled:
        x = frame.x(i + 0.5)
        body.append(f'<text class="tick" x="{x}" y="{HEIGHT - 8}" text-anchor="middle">{bars[i].first}</text>')
    hover: dict[str, Any] = {
        "x": [frame.x(i + 0.5) for i in range(len(bars))],
        "t": [_span(bar) for bar in bars],
        "s": [],
    }
    base = [0.0] * len(bars)
    for index, stage in enumerate(stages):
        ink = stage_colour(stage, index)
        for i, bar in enumerate(bars):
            seconds = bar.seconds.get(stage, 0.0)
            y_top, y_low = frame.y(base[i] + seconds), frame.y(base[i])
            base[i] += seconds
            if y_low > y_top:
                x = round(frame.x(i) + gap / 2, 1)
                size = f'width="{round(slot - gap, 1)}" height="{round(y_low - y_top, 1)}"'
                body.append(f'<rect x="{x}" y="{y_top}" {size} fill="{ink}"/>')
        texts = [f"{bar.seconds.get(stage, 0.0):.3g} s" for bar in bars]
        hover["s"].append({"n": stage, "c": ink, "v": texts, "y": [None] * len(bars)})
    hover["s"].reverse()  # listed as they are stacked
    return _svg("".join(body), hover, title)


def stage_colour(stage: str, index: int) -> str:
    return "var(--rest)" if stage == "other" else colour(index)


def _span(bar: Bar) -> str:
    return f"step {bar.first}" if bar.first == bar.last else f"steps {bar.first}–{bar.last}, mean"


def interval(value: float, low: float, high: float, ink: str) -> str:
    """A dot with its interval on a scale from 0 to 1."""
    at = [round(4 + 152 * min(1.0, max(0.0, v)), 1) for v in (low, value, high)]
    return (
        '<svg class="interval" viewBox="0 0 160 16" aria-hidden="true">'
        '<line class="grid" x1="4" x2="156" y1="8" y2="8"/>'
        f'<line x1="{at[0]}" x2="{at[2]}" y1="8" y2="8" stroke="{ink}" class="whisker"/>'
        f'<circle cx="{at[1]}" cy="8" r="4" fill="{ink}"/></svg>'
    )


def _svg(body: str, hover: dict[str, Any], title: str) -> str:
    data = escape(json.dumps(hover, ensure_ascii=False, separators=(",", ":")), quote=True)
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}" '
        f'data-hover="{data}">'
        f'{body}<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg>'
    )


def drawable(curve: Curve | None) -> bool:
    return curve is not None and bool(curve.steps) and all(map(isfinite, curve.mean))
