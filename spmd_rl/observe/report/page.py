"""Puts the report's page together: one HTML file without any external resource."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from html import escape

from spmd_rl.observe.evaluation import OVERALL
from spmd_rl.observe.report import charts
from spmd_rl.observe.report.assets import SCRIPT, STYLE, THEME
from spmd_rl.observe.report.charts import Series, drawable, line_chart
from spmd_rl.observe.report.data import Curve, Pair, RunData
from spmd_rl.observe.samples import SampleRecord
from spmd_rl.observe.text import duration, number, shorten, visible

MAX_PAIRS = 12
_TEXT_LIMIT = 4000  # characters of one prompt or response on the page

# Charts of the main section: title, explanation, metrics, whether the axis includes 0.
KEY_CHARTS: tuple[tuple[str, str, tuple[str, ...], bool], ...] = (
    ("Reward", "mean over the samples of a step", ("reward/mean",), False),
    ("Response length", "tokens, mean over the samples", ("response/length_mean",), True),
    ("Entropy", "of the policy, nats per token", ("entropy",), True),
    ("Gradient norm", "before clipping", ("grad_norm",), True),
    ("Loss", "policy loss and KL term", ("loss/policy", "loss/kl"), False),
    ("Fractions", "groups without signal; responses cut off at the length limit",
     ("reward/zero_variance_fraction", "response/truncated_fraction"), True),
    ("Mismatch", "KL divergence between rollout engine and trainer", ("mismatch/kl",), True),
    ("Learning rate", "", ("lr",), True),
    ("Samples per second", "of a whole step", ("throughput/samples_per_s",), True),
    ("Memory", "peak, GiB, of the rank that needs most", ("memory/peak_gib",), True),
)  # fmt: skip


def page(run: RunData) -> str:
    """The whole HTML document."""
    sections = [
        _header(run),
        _cards(run),
        _evaluation(run),
        _training(run),
        _breakdown(run),
        _samples(run),
        _all_metrics(run),
        _environment(run),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(run.name)} · training report</title>\n<style>{STYLE}</style>\n"
        f"<script>{THEME}</script>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in sections if part)
        + f'\n</main>\n<div id="tip"></div>\n<script>{SCRIPT}</script>\n</body>\n</html>\n'
    )


def _header(run: RunData) -> str:
    planned = f" of {run.planned_steps}" if run.planned_steps else ""
    facts = [f"{run.steps}{planned} steps"]
    if run.attempts:
        last = run.attempts[-1]
        ranks = last.get("ranks", 1)
        facts.append(f"{ranks} rank{'s' if ranks != 1 else ''} on {last.get('device', 'cpu')}")
        facts.append(f"started {run.attempts[0].get('started', '')}")
        if len(run.attempts) > 1:
            facts.append(f"{len(run.attempts)} starts")
    if seconds := run.curves.get("time/step"):
        facts.append(f"{duration(seconds.total)} in steps")
    return (
        f'<header><div><h1>{_text(run.name)}</h1><p class="soft">{_text(" · ".join(facts))}</p></div>'
        '<button id="theme" type="button">light / dark</button></header>'
    )


def _cards(run: RunData) -> str:
    cards = []
    sets = run.eval_sets()
    for name in [OVERALL] if OVERALL in sets else sets:
        curve = run.curves.get(f"eval/{name}/pass@1")
        if drawable(curve) and curve:
            cards.append(_card(f"held-out pass@1, {name}", curve.first, curve.last, curve.count))
    reward = run.curves.get("reward/mean")
    if drawable(reward) and reward:
        cards.append(_card("reward, first → last step", reward.mean[0], reward.mean[-1], reward.count))
    for label, name in (("samples/s", "samples"), ("generated tokens/s", "tokens/generated")):
        if (rate := run.rate(name)) is not None:
            cards.append(f'<div class="card"><span class="soft">{label}</span><b>{number(rate, 3)}</b></div>')
    memory = run.curves.get("memory/peak_gib")
    if drawable(memory) and memory:
        top = number(max(memory.high), 3)
        cards.append(f'<div class="card"><span class="soft">peak memory of a rank</span><b>{top} GiB</b></div>')
    return f'<section class="cards">{"".join(cards)}</section>' if cards else ""


def _card(label: str, first: float, last: float, count: int) -> str:
    before = f'<span class="from">{number(first, 3)} → </span>' if count > 1 else ""
    return f'<div class="card"><span class="soft">{_text(label)}</span><b>{before}{number(last, 3)}</b></div>'


def _evaluation(run: RunData) -> str:
    rows = []
    for name in run.eval_sets():
        for k in _ks(run, name):
            place = f"eval/{name}/pass@{k}"
            rows.append(_evaluation_row(run, name, k, run.curves[place], _whiskers(run.curves, place)))
    if not rows:
        return ""
    head = '<tr><th>set</th><th></th><th class="right">first</th><th></th><th class="right">last</th><th></th>'
    head += '<th class="right">change</th><th class="right">prompts</th></tr>'
    table = f'<div class="card scroll"><table>{head}{"".join(rows)}</table></div>'
    return (
        '<section><h2>Evaluation</h2><p class="soft">Held-out prompts; bars are 95 % confidence intervals.</p>'
        f"{table}</section>"
    )


def _ks(run: RunData, name: str) -> list[int]:
    """The k of all `eval/<name>/pass@k` that can be drawn."""
    found = [re.fullmatch(rf"eval/{re.escape(name)}/pass@(\d+)", metric) for metric in run.curves]
    return sorted(int(match[1]) for match in found if match and drawable(run.curves[match[0]]))


def _evaluation_figure(run: RunData) -> str:
    """The smallest k of every set over the run, with intervals."""
    series = []
    for name in run.eval_sets():
        for k in _ks(run, name)[:1]:
            place = f"eval/{name}/pass@{k}"
            series.append(Series(f"{name} pass@{k}", run.curves[place], _whiskers(run.curves, place), points=True))
    if not any(s.curve.count > 1 for s in series):
        return ""
    drawing = line_chart(series, "evaluation", from_zero=True)
    return _figure("Evaluation", "held-out prompts, with 95 % confidence intervals", drawing, series, legend=True)


def _evaluation_row(run: RunData, name: str, k: int, curve: Curve, whiskers: tuple[Curve, Curve] | None) -> str:
    def cells(value: float, low: float, high: float, ink: str) -> str:
        if not whiskers:
            return f'<td class="right">{value:.3f}</td><td></td>'
        bounds = f"{low:.3f} – {high:.3f}"
        return f'<td class="right">{value:.3f}</td><td title="{bounds}">{charts.interval(value, low, high, ink)}</td>'

    low, high = whiskers or (curve, curve)
    once = curve.count == 1
    before = "<td></td><td></td>" if once else cells(curve.first, low.first, high.first, "var(--rest)")
    change = 100 * (curve.last - curve.first)
    tone = "good" if change > 0 else "bad" if change < 0 else ""
    difference = "" if once else f'<span class="{tone}">{change:+.1f} pp</span>'
    n = run.curves.get(f"eval/{name}/n")
    prompts = number(n.last) if n else ""
    return (
        f"<tr><td>{_text(name)}</td><td>pass@{k}</td>{before}{cells(curve.last, low.last, high.last, 'var(--c0)')}"
        f'<td class="right">{difference}</td><td class="right">{prompts}</td></tr>'
    )


def _whiskers(curves: Mapping[str, Curve], place: str) -> tuple[Curve, Curve] | None:
    low, high = curves.get(f"{place}_low"), curves.get(f"{place}_high")
    if not (low and high and low.steps == high.steps == curves[place].steps):
        return None
    return low, high


def _training(run: RunData) -> str:
    figures = [_evaluation_figure(run)]
    for title, help_text, names, from_zero in KEY_CHARTS:
        there = [name for name in names if drawable(run.curves.get(name))]
        if there:
            series = [Series(name, run.curves[name]) for name in there]
            figures.append(_figure(title, help_text, line_chart(series, title, from_zero), series))
    if not any(figures):
        return ""
    return f'<section><h2>Training</h2><div class="grid2">{"".join(figures)}</div></section>'


def _figure(title: str, help_text: str, drawing: str, series: Iterable[Series], legend: bool = False) -> str:
    series = list(series)
    lost = sum(s.curve.not_finite for s in series)
    warning = f' <span class="bad">· {lost} values not finite</span>' if lost else ""
    soft = f'<p class="soft">{escape(help_text)}{warning}</p>' if help_text or warning else ""
    labels = ""
    if len(series) > 1 or legend:
        entries = (_legend_entry(s.label, charts.colour(i)) for i, s in enumerate(series))
        labels = f'<div class="legend">{"".join(entries)}</div>'
    return f'<div class="card"><h3>{_text(title)}</h3>{soft}{drawing}{labels}</div>'


def _legend_entry(label: str, ink: str) -> str:
    return f'<span><i class="dot" style="background:{ink}"></i>{_text(label)}</span>'


def _breakdown(run: RunData) -> str:
    if not run.bars:
        return ""
    mean: dict[str, float] = {}
    for bar in run.bars:
        for stage, seconds in bar.seconds.items():
            mean[stage] = mean.get(stage, 0.0) + seconds / len(run.bars)
    total = sum(mean.values()) or 1.0
    stages = sorted((s for s in mean if s != "other"), key=mean.__getitem__, reverse=True) + ["other"]
    rows = "".join(
        f"<tr><td>{_legend_entry(stage, charts.stage_colour(stage, i))}</td>"
        f'<td class="right">{mean[stage]:.3g} s</td><td class="right">{100 * mean[stage] / total:.1f} %</td></tr>'
        for i, stage in enumerate(stages)
    )
    head = '<tr><th>stage</th><th class="right">per step</th><th class="right">share</th></tr>'
    drawing = charts.bar_chart(run.bars, stages, "time of a step by stage")
    between = ", ".join(f"{name.replace('_', ' ')} {duration(total)}" for name, total in run.between_steps().items())
    if between:
        between = f'<p class="soft" style="margin-top:10px">Between the steps, in total: {_text(between)}.</p>'
    return (
        '<section><h2>Where the time goes</h2><p class="soft">Seconds per step, mean over the ranks that run the '
        'stage; “other” is what no stage accounts for.</p><div class="grid2">'
        f'<div class="card"><h3>Step time</h3>{drawing}</div>'
        f'<div class="card scroll"><table>{head}{rows}</table>{between}</div></div></section>'
    )


def _samples(run: RunData) -> str:
    if not run.pairs:
        return ""
    shown = run.pairs[:MAX_PAIRS]
    kind = "held-out prompts of the first and the last evaluation" if run.held_out else "training prompts"
    rule = f"The first {len(shown)} of {len(run.pairs)} recorded {kind}: chosen by a hash, not picked."
    cards = "".join(_sample_card(pair) for pair in shown)
    return f'<section><h2>Samples before and after</h2><p class="soft">{rule}</p>{cards}</section>'


def _sample_card(pair: Pair) -> str:
    records = [record for record in (pair.before, pair.after) if record]
    prompt = records[0].prompt
    answers = "".join(_answer(record) for record in records)
    return (
        f'<div class="card sample"><h3><span>{_text(records[0].source)}</span></h3>'
        f'<div class="text" dir="auto">{_long_text(prompt)}</div><div class="two">{answers}</div></div>'
    )


def _answer(record: SampleRecord) -> str:
    excluded = record.reward != record.reward
    reward = "excluded" if excluded else f"reward {number(record.reward)}"
    parts = ", ".join(f"{name} {number(value)}" for name, value in record.reward_parts.items())
    ending = "" if record.finish == "stop" else f" · {record.finish}"
    tone = "" if excluded else "good" if record.reward > 0 else "bad"
    return (
        f"<div><h3><span>step {record.step} · {record.tokens} tokens{_text(ending)}</span>"
        f'<span class="{tone}" title="{_text(parts)}">{reward}</span></h3>'
        f'<div class="text" dir="auto">{_long_text(record.response)}</div></div>'
    )


def _all_metrics(run: RunData) -> str:
    """Every metric that has no place above, known or not, by the first part of its name."""
    above = {name for _, _, names, _ in KEY_CHARTS for name in names}
    above |= {f"eval/{name}/pass@{k}" for name in run.eval_sets() for k in _ks(run, name)[:1]}
    groups: dict[str, list[str]] = {}
    for name, curve in sorted(run.curves.items()):
        bound = name.endswith(("_low", "_high")) and name.rsplit("_", 1)[0] in run.curves
        if name not in above and not bound and (drawable(curve) or curve.not_finite):
            groups.setdefault(name.split("/")[0] if "/" in name else "general", []).append(name)
    details = []
    for group, names in sorted(groups.items()):
        figures = "".join(_small_figure(name, run.curves[name]) for name in names)
        details.append(
            f'<details class="card"><summary>{_text(group)} <span class="soft">{len(names)}</span></summary>'
            f'<div class="grid2">{figures}</div></details>'
        )
    return f"<section><h2>All other metrics</h2>{''.join(details)}</section>" if details else ""


def _small_figure(name: str, curve: Curve) -> str:
    series = [Series(name, curve)]
    drawing = line_chart(series, name) if drawable(curve) else ""
    return _figure(name, "", drawing, series)


def _environment(run: RunData) -> str:
    parts = []
    if run.attempts:
        last = run.attempts[-1]
        facts = {**{k: v for k, v in last.items() if k != "packages"}, **last.get("packages", {})}
        rows = "".join(f"<tr><td>{_text(str(k))}</td><td>{_text(str(v))}</td></tr>" for k, v in facts.items())
        parts.append(
            f'<details class="card"><summary>Environment and versions</summary><table>{rows}</table></details>'
        )
    if run.config:
        parts.append(f'<details class="card"><summary>config.yaml</summary><pre>{_text(run.config)}</pre></details>')
    return f"<section><h2>How it was run</h2>{''.join(parts)}</section>" if parts else ""


def _text(text: str) -> str:
    """For HTML: markup is shown, not obeyed; line feeds and tabs stay, other control characters are made visible."""
    return escape(
        "".join(part if part in "\n\t" else visible(part) for part in re.split(r"([\n\t])", text)), quote=True
    )


def _long_text(text: str) -> str:
    return _text(shorten(text, _TEXT_LIMIT, keep_tail=0.5))
