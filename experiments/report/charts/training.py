"""Charts of a training run: loss of each stage, other per-step metrics, and the evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from flatshift.experiments.report import formats
from flatshift.experiments.report.charts.intervals import IntervalRow, draw_row, use_vertical_grid
from flatshift.experiments.report.figure import WIDE, Canvas, Chart, colour, label_ends
from flatshift.experiments.results.run import Metrics
from flatshift.finetune.evaluate.metrics import METRICS, find_metric

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SPLIT_COLOUR = {"train": "blue", "dev": "green", "test": "orange"}
_STEPS_TITLE = "optimizer steps of the stage"
_KNOWN = {"stage", "attempt", "step", "split", "loss", "tokens", "lr", "time_s", "time", "epoch"}
_COUNTERS = {
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_s": "tokens per second",
    "tflops": "TFLOP/s of a device",
    "mfu": "share of the device's peak, model",
    "hfu": "share of the device's peak, all products",
}
"""Titles of per-step figures; others are titled by their own names."""


def _running_mean(values: list[float], width: int) -> list[float]:
    """Return the centred mean over at most `width` values, fewer at the ends."""
    half = width // 2
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [math.fsum(window) / len(window) for window in windows]


def _smoothing_span(values: Sequence[float]) -> int:
    return 2 * (len(values) // 40) + 5


def loss_charts(metrics: Metrics, *, loss_unit: Callable[[str], str]) -> list[Chart]:
    """Draw one loss chart per stage: train loss, its running mean, dev and test points."""
    charts = []
    stages = [s for s in metrics.stages if any(metrics.series(s, split, "loss") for split in SPLIT_COLOUR)]
    width = WIDE if len(stages) == 1 else 540
    for stage in stages:
        curves = {split: metrics.series(stage, split, "loss") for split in SPLIT_COLOUR}
        broken = sum(not math.isfinite(v) for c in curves.values() for _, v in c)
        curves = {s: [(t, v) for t, v in c if math.isfinite(v)] for s, c in curves.items()}
        if not any(curves.values()):
            continue
        sentences = []
        with Canvas(width, 320 if width == WIDE else 300) as canvas:
            ax = canvas.axes(y=f"loss ({loss_unit(stage)})", x=_STEPS_TITLE, right=96)
            ends: list[tuple[float, float, str, str]] = []
            for split, curve in curves.items():
                if not curve:
                    continue
                steps, values = [t for t, _ in curve], [v for _, v in curve]
                token = SPLIT_COLOUR[split]
                last = values[-1]
                if split == "train" and len(curve) >= 30:
                    span = _smoothing_span(values)
                    smooth = _running_mean(values, span)
                    last = smooth[-1]
                    ax.plot(steps, values, color=colour(token), linewidth=1, alpha=0.35)
                    ax.plot(steps, smooth, color=colour(token), linewidth=2.2)
                    sentences.append(f"Thin line: loss of each step; bold line: its centred mean over {span} steps.")
                elif split == "train":
                    ax.plot(steps, values, color=colour(token))
                    sentences.append("Train loss of each step.")
                else:
                    dots: dict[str, Any] = {"marker": "o", "markersize": 5.5, "markeredgecolor": colour("surface")}
                    ax.plot(steps, values, color=colour(token), linewidth=2, clip_on=False, **dots)
                ends.append((max(steps), last, f"{split} {formats.number(last)}", token))
            _finish(ax, ends)
            best = min(curves["dev"], key=lambda p: p[1], default=None)
            if best:
                sentences.append(f"Lowest dev loss {formats.number(best[1])} after {best[0]:,} steps.")
            if broken:
                sentences.append(f"{broken} values that were not finite are left out: the run diverged there.")
            title = f"Loss during {stage}"
            charts.append(canvas.chart(f"loss-{slugify(stage)}", title=title, caption=" ".join(sentences)))
    return charts


def _finish(ax: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    ax.margins(x=0.01, y=0.08)
    label_ends(ax, ends, height=226)


_Lines = Mapping[str, tuple[str, str]]
_PREFERENCE_CHARTS: tuple[tuple[str, str, _Lines, float, str], ...] = (
    (
        "rewards",
        "Rewards of dev answers",
        {"chosen_reward": ("chosen", "blue"), "rejected_reward": ("rejected", "orange")},
        0.0,
        "Both sides may fall while their distance grows. Dotted: 0.",
    ),
    ("accuracy", "Preference accuracy on dev", {"preference_accuracy": ("accuracy", "green")}, 0.5, "Dotted: chance."),
    (
        "distance",
        "Distance of dev answers from the backbone",
        {"reference_distance": ("distance", "purple")},
        0.0,
        "How far the log-likelihood of an answer has moved, up or down. Dotted: the backbone.",
    ),
)
"""Name, title, (label, colour) by metric, level of the dotted line, and caption of each chart."""


def preference_charts(metrics: Metrics) -> list[Chart]:
    """Draw preference metrics on dev along the steps: rewards of both sides, accuracy, distance from the base model.
    Empty if no stage was evaluated on preferences."""
    charts = []
    for stage in metrics.stages:
        for name, title, lines, level, caption in _PREFERENCE_CHARTS:
            curves = {key: [(t, v) for t, v in metrics.series(stage, "dev", key) if math.isfinite(v)] for key in lines}
            if not all(curves.values()):
                continue
            with Canvas(540, 300) as canvas:
                ax = canvas.axes(y=find_metric(list(lines)[-1]).unit, x=_STEPS_TITLE, right=110)
                ends: list[tuple[float, float, str, str]] = []
                for key, curve in curves.items():
                    label, token = lines[key]
                    steps, values = [t for t, _ in curve], [v for _, v in curve]
                    ax.plot(steps, values, color=colour(token), linewidth=2, marker="o", markersize=4.5, clip_on=False)
                    ends.append((max(steps), values[-1], f"{label} {formats.number(values[-1])}", token))
                ax.axhline(level, color=colour("muted"), linewidth=1, linestyle=":")
                _finish(ax, ends)
                charts.append(canvas.chart(f"{name}-{slugify(stage)}", title=f"{title} · {stage}", caption=caption))
    return charts


_TOKENS = ("blue", "orange", "green", "purple", "amber", "ink")
"""Colours of overlaid runs, in turn; from the seventh on, lines are dashed."""


def overlaid_loss_chart(
    curves: Mapping[str, Sequence[tuple[int, float]]], *, stage: str, split: str, unit: str
) -> Chart | None:
    """Draw the losses in one unit of several runs over the steps of a stage; None if fewer than two have any."""
    finite = {name: [(t, v) for t, v in curve if math.isfinite(v)] for name, curve in curves.items()}
    finite = {name: curve for name, curve in finite.items() if curve}
    if len(finite) < 2:
        return None
    span = 1
    end = max(t for curve in finite.values() for t, _ in curve)
    with Canvas(540, 300) as canvas:
        ax = canvas.axes(y=f"{split} loss ({unit})", x=_STEPS_TITLE, right=min(60 + 7 * max(map(len, finite)), 190))
        ends: list[tuple[float, float, str, str]] = []
        for number, (name, curve) in enumerate(finite.items()):
            steps, values = [t for t, _ in curve], [v for _, v in curve]
            if split == "train" and len(values) >= 30:
                span = max(span, _smoothing_span(values))
                values = _running_mean(values, _smoothing_span(values))
            token = _TOKENS[number % len(_TOKENS)]
            style: dict[str, Any] = {"marker": "o", "markersize": 4.5} if split != "train" else {}
            style["linestyle"] = "-" if number < len(_TOKENS) else "--"
            ax.plot(steps, values, color=colour(token), linewidth=2, clip_on=False, **style)
            ends.append((end, values[-1], name, token))
        _finish(ax, ends)
        caption = "One line a run." + (f" Centred means over up to {span} steps." if span > 1 else "")
        title = f"{split.capitalize()} loss during {stage}"
        return canvas.chart(f"beside-{slugify(f'{stage} {split} {min(finite)}')}", title=title, caption=caption)


def small_multiples(metrics: Metrics) -> list[Chart]:
    """Draw the learning rate and every other per-step metric of loop and regularizer, one small chart each."""
    curves = []
    for stage in metrics.stages:
        names = dict.fromkeys(k for ln in metrics.lines if ln["stage"] == stage and ln["split"] == "train" for k in ln)
        for key in ["lr", *sorted(k for k in names if k not in _KNOWN)]:
            curve = [(t, v) for t, v in metrics.series(stage, "train", key) if math.isfinite(v)]
            if len(curve) >= 2 and (key == "lr" or not _is_constant_or_counter([v for _, v in curve])):
                curves.append((stage, key, curve))
    return [_small_chart(stage, key, curve) for stage, key, curve in curves[:12]]


def _small_chart(stage: str, key: str, curve: Sequence[tuple[int, float]]) -> Chart:
    name = _COUNTERS.get(key) or key.replace("_", " ").replace("/", ": ")
    with Canvas(260, 150) as canvas:
        ax = canvas.axes(left=40, right=10, top=22, bottom=26)
        steps, values = [t for t, _ in curve], [v for _, v in curve]
        ax.plot(steps, values, color=colour("purple" if key == "lr" else "amber"), linewidth=1.7)
        ax.margins(x=0.01, y=0.1)
        if min(values) >= 0:
            ax.set_ylim(bottom=0)
        ax.locator_params(nbins=4)
        ax.ticklabel_format(axis="y", scilimits=(-2, 4), useMathText=False)
        ax.yaxis.get_offset_text().set_visible(False)
        top = max(map(abs, values))
        if top and not 0.01 <= top < 1e4:  # a power of ten is taken out of the tick labels
            power = math.floor(math.log10(top))
            ax.yaxis.set_major_formatter(lambda value, _: f"{value / 10.0**power:g}")
            canvas.text(4, 141, f"×10{str(power).translate(formats.SUPERSCRIPT)}", colour="muted")
        title = f"{formats.capitalise(name)} · {stage}"
        last = formats.number(curve[-1][1])
        return canvas.chart(f"{slugify(key)}-{slugify(stage)}", title=title, caption=f"Ends at {last}.")


def _is_constant_or_counter(values: list[float]) -> bool:
    """Return True for a constant or a plain counter, which are not worth a chart."""
    steps = {b - a for a, b in pairwise(values)}
    return steps == {0} or (len(steps) == 1 and all(v == int(v) for v in values))


def slugify(text: str) -> str:
    return "".join(c if c.isalnum() and c.isascii() else "-" for c in text.lower()).strip("-") or "x"


def evaluation_charts(tree: dict[str, dict[str, dict[str, Any]]], *, loss_unit: str) -> list[Chart]:
    """Draw dots with intervals: shares (accuracy, F1 …) on one axis with the majority baseline, others separately."""
    metrics = list(
        dict.fromkeys(m for split in tree.values() for m in split if m in METRICS and not METRICS[m].is_floor)
    )
    shares = [m for m in METRICS if METRICS[m].shown_as_share and m in metrics]
    groups = [("shares", shares)] if shares else []
    groups += [(m, [m]) for m in metrics if m not in shares]
    floors = {s: t["majority_floor"]["value"] for s, t in tree.items() if "majority_floor" in t}
    # Charts side by side share one height: that of the one with most rows.
    longest = max(
        (sum(m in t for m in members for t in tree.values()) + len(members) for _, members in groups), default=0
    )
    height = 76 + max(22 * longest, 66)
    charts = []
    for name, members in groups:
        rows = [
            (m, split, t[m]) for m in members for split, t in tree.items() if m in t and math.isfinite(t[m]["value"])
        ]
        if rows:
            unit = "share" if name == "shares" else loss_unit if name == "loss" else find_metric(name).unit
            charts.append(_evaluation_chart(name, rows, floors, unit=unit, height=height))
    return charts


def _evaluation_chart(
    name: str, rows: Sequence[tuple[str, str, dict[str, Any]]], floors: Mapping[str, float], *, unit: str, height: int
) -> Chart:
    """Draw (metric, split, cell) as rows from the top; those of one metric share a label."""
    with Canvas(540, height) as canvas:
        ax = canvas.axes(left=110, right=66, top=30, bottom=40, x=unit)
        use_vertical_grid(ax)
        heights: dict[str, list[float]] = {}
        y, left = -1.0, 110.0
        for metric, split, cell in rows:
            y += 1.7 if heights and metric not in heights else 1.0
            token = SPLIT_COLOUR.get(split, "purple")
            text = formats.estimate_figure(cell)[0]
            draw_row(ax, IntervalRow(metric, cell["value"], cell.get("low"), cell.get("high"), text, token), y)
            if metric == "accuracy" and split in floors:
                ax.plot([floors[split]] * 2, [y - 0.5, y + 0.5], color=colour("ink"), linewidth=1.8)
            heights.setdefault(metric, []).append(y)
        ax.set_ylim(y + 0.7, -0.7)
        titles = [find_metric(metric).title for metric in heights]
        ax.set_yticks([sum(ys) / len(ys) for ys in heights.values()], titles, color=colour("ink"))
        if name == "shares":
            ax.set_xlim(min([0.0, *(cell.get("low") or cell["value"] for _, _, cell in rows)]) - 0.02, 1.02)
        else:
            ax.margins(x=0.12)
            ax.locator_params(axis="x", nbins=5)
            ax.xaxis.set_major_formatter("{x:.3g}")  # no power of ten over the axis' title
        for split in dict.fromkeys(split for _, split, _ in rows):
            canvas.text(left, height - 13, f"● {split}", colour=SPLIT_COLOUR.get(split, "purple"), weight="bold")
            left += 30 + 7 * len(split)
        n = max(int(cell.get("n") or 0) for _, _, cell in rows)
        caption = f"Dot: value; bar: interval over up to {n:,} items." if n else "Dot: value."
        if floors and "accuracy" in heights:
            caption += " Upright mark: the majority baseline, which is always answering the commonest class."
        title = f"{formats.capitalise(', '.join(titles))} by split"
        return canvas.chart(f"eval-{slugify(name)}", title=title, caption=caption)
