"""Charts over many runs: a study's arms with intervals over seeds, a sweep's curves and heat map."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

from experiments.report import formats
from experiments.report.figure import Canvas, Chart, colour, label_ends
from experiments.report.load import Study
from experiments.report.plots_run import WIDE, _interval, _rows, _slug
from experiments.report.sweepdata import INTERPOLATION, SweepData
from experiments.stats import Interval, paired_difference, t_interval

WARMUPS = {"cold": "cold", "random": "random warm-up", "gotd": "GOT-D warm-up"}
REGULARIZERS = {"plain": "plain", "ggpo": "GGPO"}
_ARM_COLOUR = {"cold": "muted", "random": "amber", "gotd": "blue"}


def arm_name(warmup: str, regularizer: str) -> str:
    """`gotd`, `ggpo` → `GOT-D warm-up, GGPO`."""
    return f"{WARMUPS.get(warmup, warmup)}, {REGULARIZERS.get(regularizer, regularizer)}"


def arms(study: Study) -> list[tuple[str, str]]:
    """(warm-up, regularizer) pairs in the order cold, random, gotd × plain, ggpo; others after."""
    found = dict.fromkeys((c["warmup"], c["regularizer"]) for c in study.cells)
    order, regs = list(WARMUPS), list(REGULARIZERS)
    return sorted(
        found,
        key=lambda a: (order.index(a[0]) if a[0] in order else 9, a[0], regs.index(a[1]) if a[1] in regs else 9, a[1]),
    )


@dataclass(frozen=True)
class Contrast:
    """A seed-paired difference between two arms."""

    name: str
    group: str
    interval: Interval


def contrasts(study: Study, metric: str) -> list[Contrast]:
    """Every arm − cold/plain, then what each part adds: GOT-D − random at one regularizer, GGPO − plain at one warm-up.

    Pairs of which all differences are exactly zero (the same runs judged twice) are left out.
    """
    found: list[Contrast] = []
    names = arms(study)
    base = names[0] if ("cold", "plain") not in names else ("cold", "plain")
    plan: list[tuple[str, str, tuple[str, str], tuple[str, str]]] = []
    plan += [(arm_name(*arm), f"against {arm_name(*base)}", arm, base) for arm in names if arm != base]
    for reg in REGULARIZERS:
        plan.append((f"GOT-D − random, {REGULARIZERS[reg]}", "what each part adds", ("gotd", reg), ("random", reg)))
    for warm in WARMUPS:
        plan.append((f"GGPO − plain, {WARMUPS[warm]}", "what each part adds", (warm, "ggpo"), (warm, "plain")))
    for name, group, ours, other in plan:
        a, b = study.values(*ours, metric), study.values(*other, metric)
        interval = paired_difference(a, b)
        if interval is not None and any(a[s] != b[s] for s in set(a) & set(b)):
            found.append(Contrast(name, group, interval))
    return found


def study_charts(study: Study, metric: str) -> list[Chart]:
    """The arms and, beside them at the same height, their paired differences."""
    rows = [c for c in contrasts(study, metric) if c.interval.low is not None]
    height = max(66 + 27 * (len(rows) + len({r.group for r in rows})), 66 + 30 * len(arms(study)))
    return [c for c in (study_means(study, metric, height), forest(study, metric, height)) if c]


def study_means(study: Study, metric: str, height: int) -> Chart | None:
    """Every arm's seeds, mean and interval; filled for plain, hollow for GGPO."""
    rows = [(arm, study.values(*arm, metric)) for arm in arms(study)]
    rows = [(arm, values) for arm, values in rows if values]
    if not rows:
        return None
    floor = study.floor.get(metric)
    means = {arm: t_interval(list(v.values()), bounds=formats.bounds(metric)) for arm, v in rows}
    places = formats.common_decimals([(m.value, m.low, m.high) for m in means.values()])
    with Canvas(540, height) as canvas:
        ax = canvas.axes(left=160, right=66, top=20, bottom=42, x=formats.metric_name(metric))
        ax.grid(axis="x")
        ax.grid(visible=False, axis="y")
        for y, (arm, values) in enumerate(rows):
            mean = means[arm]
            token = _ARM_COLOUR.get(arm[0], "purple")
            _interval(ax, mean.value, mean.low, mean.high, y, token, hollow=arm[1] == "ggpo")
            ax.plot(list(values.values()), [y + 0.3] * len(values), "o", markersize=3, color=colour(token), alpha=0.7)
            shown = f"{mean.value:,.{places}f}"
            ax.annotate(
                shown,
                (1, y),
                xycoords=("axes fraction", "data"),
                xytext=(8, 0),
                va="center",
                textcoords="offset points",
                fontweight="bold",
                color=colour(token),
            )
        _rows(ax, [arm_name(*arm) for arm, _ in rows])
        ax.margins(x=0.06)
        ax.locator_params(axis="x", nbins=6)
        if floor is not None:
            ax.axvline(floor, color=colour("ink"), linewidth=1.4, linestyle=(0, (3, 2)))
            canvas.text(160, height - 9, "dashed: majority floor", colour="muted")
        better = "lower is better" if metric in formats.LOWER_IS_BETTER else "higher is better"
        seeds = sorted({len(v) for _, v in rows})
        count = f"{seeds[0]} seeds" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds"
        caption = (
            f"Mean over {count} with its 95 % t-interval; small dots are the seeds; hollow marks are GGPO; {better}."
        )
        title = f"{formats.metric_name(metric)[:1].upper()}{formats.metric_name(metric)[1:]} of every arm"
        return canvas.chart(f"study-{_slug(metric)}", title=title, caption=caption)


def forest(study: Study, metric: str, height: int) -> Chart | None:
    """Seed-paired differences with intervals; those that exclude zero in colour."""
    rows = contrasts(study, metric)
    rows = [row for row in rows if row.interval.low is not None]
    if not rows:
        return None
    lower = metric in formats.LOWER_IS_BETTER
    labels: list[str] = []
    places = formats.common_decimals([(r.interval.value, r.interval.low, r.interval.high) for r in rows])
    with Canvas(540, height) as canvas:
        ax = canvas.axes(left=206, right=62, top=20, bottom=42, x=f"difference in {formats.metric_name(metric)}")
        ax.grid(axis="x")
        ax.grid(visible=False, axis="y")
        ax.axvline(0, color=colour("muted"), linewidth=1.3)
        group = None
        heads = []
        for row in rows:
            if row.group != group:
                group = row.group
                heads.append(len(labels))
                labels.append(group)
            y = len(labels)
            i = row.interval
            good = (i.value < 0) == lower
            token = "muted" if not i.excludes_zero else "green" if good else "orange"
            _interval(ax, i.value, i.low, i.high, y, token)
            ax.annotate(
                formats.estimate(i.value, i.low, i.high, plus=True, places=places)[0],
                (1, y),
                va="center",
                xycoords=("axes fraction", "data"),
                xytext=(8, 0),
                textcoords="offset points",
                color=colour(token),
                fontweight="bold",
            )
            labels.append(row.name)
        _rows(ax, labels)
        for position in heads:
            ax.get_yticklabels()[position].set(color=colour("muted"), style="italic")
        ax.margins(x=0.06)
        ax.locator_params(axis="x", nbins=6)
        canvas.text(206, height - 9, "← better" if lower else "better →", colour="green", weight="bold")
        n = {r.interval.n for r in rows}
        seeds = f"{min(n)}" if len(n) == 1 else f"{min(n)} to {max(n)}"
        caption = (
            f"Mean difference over {seeds} paired seeds with its 95 % t-interval. Green: better, orange: worse, "
            "grey: the interval holds zero. Each interval stands alone; nothing is corrected for their number."
        )
        title = f"Paired differences in {formats.metric_name(metric)}"
        return canvas.chart(f"study-{_slug(metric)}-differences", title=title, caption=caption)


def sweep_axes(data: SweepData) -> tuple[str | None, str | None, tuple[str, ...]]:
    """(x axis, second axis, the rest): the rank where it varies, else the numeric axis with most values."""
    if not data.axes:
        return None, None, ()

    def key(axis: str) -> tuple[bool, bool, int]:
        values = data.values(axis)
        numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
        return (not axis.endswith("rank"), not numeric, -len(values))

    ordered = sorted(data.axes, key=key)
    return ordered[0], (ordered[1] if len(ordered) > 1 else None), tuple(ordered[2:])


def _positions(values: list[Any]) -> tuple[list[float], bool]:
    """x positions of axis values: powers of two apart on a log scale, in their order if they are no numbers."""
    numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    if numeric and min(values) > 0 and max(values) / min(values) >= 8:
        return [math.log2(v) for v in values], True
    return ([float(v) for v in values], False) if numeric else ([float(i) for i in range(len(values))], False)


def panels(data: SweepData) -> list[dict[str, Any]]:
    """Settings of the axes other than x, one panel each; at most 12."""
    _, second, rest = sweep_axes(data)
    others = [a for a in (second, *rest) if a]
    combos = [dict(zip(others, c, strict=True)) for c in itertools.product(*(data.values(a) for a in others))]
    return combos[:12]


def sweep_curves(data: SweepData) -> list[Chart]:
    """Train and test curves along the x axis with intervals over seeds, one chart per setting of the other axes."""
    axis = sweep_axes(data)[0]
    if axis is None:
        return []
    test, train = data.error_columns()
    values = data.values(axis)
    where_x, log = _positions(values)
    at = dict(zip(values, where_x, strict=True))
    settings = panels(data)
    everything = [p for w in settings for c in (test, train) for _, p in data.curve(c, axis, w)]
    if not everything:
        return []
    top = max(p.high if p.high is not None else p.value for p in everything)
    bottom = min([0.0 if "error" in test else math.inf, *(p.low if p.low is not None else p.value for p in everything)])
    pad = 0.06 * (top - bottom or 1)
    width = WIDE if len(settings) == 1 else 540
    charts = []
    for number, where in enumerate(settings):
        name = ", ".join(f"{k.rpartition('.')[2]} = {v}" for k, v in where.items())
        unit = "error (share wrong)" if "error" in test else "loss (nats)"
        with Canvas(width, 360 if width == WIDE else 300) as canvas:
            ax = canvas.axes(y=unit, x=axis + (" (log scale)" if log else ""), right=100)
            threshold = data.threshold(axis, where)
            if threshold is not None:
                leftmost = at[threshold] == min(at.values())  # beside the axis there is no room for words
                ax.axvline(at[threshold], color=colour("muted"), linewidth=1.3, linestyle=(0, (3, 2)))
                ax.annotate(
                    f"train error ≤ {INTERPOLATION:g}",
                    (at[threshold], 1.0),
                    xycoords=("data", "axes fraction"),
                    xytext=(5 if leftmost else -5, -2),
                    textcoords="offset points",
                    color=colour("muted"),
                    va="top",
                    ha="left" if leftmost else "right",
                )
            ends = []
            for column, token in ((train, "blue"), (test, "orange")):
                curve = data.curve(column, axis, where)
                if not curve:
                    continue
                xs, ys = [at[v] for v, _ in curve], [p.value for _, p in curve]
                if all(p.low is not None for _, p in curve):
                    lows, highs = [p.low or 0.0 for _, p in curve], [p.high or 0.0 for _, p in curve]
                    ax.fill_between(xs, lows, highs, color=colour(token), alpha=0.16, linewidth=0)
                ax.plot(xs, ys, color=colour(token), marker="o", markersize=6, markeredgecolor=colour("surface"))
                split = column.split(".")[0]
                for row in data.done:
                    value = row.get(column)
                    if (
                        isinstance(value, int | float)
                        and math.isfinite(value)
                        and all(row.get(k) == v for k, v in where.items())
                    ):
                        ax.plot([at[row[axis]]], [value], "o", markersize=2.6, color=colour(token), alpha=0.55)
                ends.append((xs[-1], ys[-1], f"{split} {formats.number(ys[-1], 2)}", token))
            ax.set_xticks(where_x, [f"{v:g}" if isinstance(v, float) else str(v) for v in values])
            ax.set_ylim(bottom - pad, top + pad)
            label_ends(ax, ends, height=canvas.height - 74)
            caption = "Lines: means over seeds; bands: 95 % t-intervals; small dots: single runs."
            if data.seeds < 2:
                caption = "One seed: no interval can be given."
            if threshold is not None:
                caption += f" Dashed: first {axis} whose mean train error is at most {INTERPOLATION:g}."
            kind = "error" if "error" in test else "loss"
            title = f"Train and {test.split('.')[0]} {kind} along {axis}" + (f", {name}" if name else "")
            charts.append(canvas.chart(f"sweep-{number}", title=title, caption=caption))
    return charts


def heat_map(data: SweepData) -> Chart | None:
    """Mean test metric over the two first axes, where exactly two vary."""
    x, second, rest = sweep_axes(data)
    if x is None or second is None or rest:
        return None
    test, _ = data.error_columns()
    columns, rows = data.values(x), data.values(second)
    cells = {(c, r): p.value for c in columns for r in rows if (p := data.at(test, {x: c, second: r})) is not None}
    if len(cells) < 2:
        return None
    low, high = min(cells.values()), max(cells.values())
    # Beside an odd number of curves it fills a row; with an even number it has one to itself.
    width = WIDE if len(rows) % 2 == 0 or len(rows) > 12 else 540
    height = 84 + 40 * len(rows) if width == WIDE else max(300, 84 + 40 * len(rows))
    with Canvas(width, height) as canvas:
        ax = canvas.axes(left=76, right=16, top=30, bottom=54, x=x, y=second)
        ax.grid(visible=False)
        for spine in ax.spines.values():
            spine.set_visible(False)
        from matplotlib.patches import Rectangle

        for (c, r), value in cells.items():
            i, j = columns.index(c), rows.index(r)
            share = (value - low) / (high - low) if high > low else 0.0
            ax.add_patch(
                Rectangle(
                    (i + 0.02, j + 0.03), 0.96, 0.94, facecolor=colour("orange"), alpha=0.06 + 0.64 * share, linewidth=0
                )
            )
            best = value == low
            ax.annotate(
                formats.number(value, 3),
                (i + 0.5, j + 0.5),
                ha="center",
                va="center",
                fontweight="bold" if best else "normal",
                color=colour("ink"),
            )
            if best:
                ax.add_patch(
                    Rectangle(
                        (i + 0.02, j + 0.03), 0.96, 0.94, facecolor="none", edgecolor=colour("ink"), linewidth=1.6
                    )
                )
        ax.set_xlim(0, len(columns))
        ax.set_ylim(len(rows), 0)
        ax.set_xticks([i + 0.5 for i in range(len(columns))], [str(v) for v in columns])
        ax.set_yticks([j + 0.5 for j in range(len(rows))], [str(v) for v in rows], color=colour("ink"))
        ax.tick_params(bottom=False)
        split, _, metric = test.partition(".")
        caption = (
            f"Mean {split} {formats.metric_name(metric)} over seeds; "
            "stronger colour is worse; the frame marks the lowest mean."
        )
        return canvas.chart(
            "sweep-map",
            title=f"{split.capitalize()} {formats.metric_name(metric)} over {x} and {second}",
            caption=caption,
        )
