"""Charts of one run: training curves, evaluation, and what a selection chose."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from experiments.report import formats
from experiments.report.figure import Canvas, Chart, colour, dots, label_ends
from experiments.report.load import Metrics, Selection

SPLIT_COLOUR = {"train": "blue", "dev": "green", "test": "orange"}
WIDE = 1112
"""Width in px of a chart that has a row to itself; 540 of one that shares it."""
_KNOWN = {"stage", "attempt", "step", "split", "loss", "tokens", "lr", "time_s", "time", "epoch"}


def _running_mean(values: list[float], width: int) -> list[float]:
    """Centred mean over at most `width` values, shorter at the ends."""
    half = width // 2
    return [
        math.fsum(part) / len(part) for i in range(len(values)) if (part := values[max(0, i - half) : i + half + 1])
    ]


def training(metrics: Metrics, *, loss_unit: Callable[[str], str]) -> list[Chart]:
    """One loss chart per stage: train as drawn, its running mean, dev and test points."""
    charts = []
    shown = [s for s in metrics.stages if any(metrics.series(s, split, "loss") for split in SPLIT_COLOUR)]
    width = WIDE if len(shown) == 1 else 540
    for stage in shown:
        curves = {split: metrics.series(stage, split, "loss") for split in ("train", "dev", "test")}
        broken = sum(not math.isfinite(v) for c in curves.values() for _, v in c)
        curves = {s: [(t, v) for t, v in c if math.isfinite(v)] for s, c in curves.items()}
        if not any(curves.values()):
            continue
        said = []
        with Canvas(width, 320 if width == WIDE else 300) as canvas:
            ax = canvas.axes(y=f"loss ({loss_unit(stage)})", x="optimizer updates of the stage", right=96)
            ends: list[tuple[float, float, str, str]] = []
            for split, curve in curves.items():
                if not curve:
                    continue
                steps, values = [t for t, _ in curve], [v for _, v in curve]
                token = SPLIT_COLOUR[split]
                last = values[-1]
                if split == "train" and len(curve) >= 30:
                    span = 2 * (len(curve) // 40) + 5
                    smooth = _running_mean(values, span)
                    last = smooth[-1]
                    ax.plot(steps, values, color=colour(token), linewidth=1, alpha=0.35)
                    ax.plot(steps, smooth, color=colour(token), linewidth=2.2)
                    said.append(f"Thin line: loss of each update; bold line: its centred mean over {span} updates.")
                elif split == "train":
                    ax.plot(steps, values, color=colour(token))
                    said.append("Train loss of each update.")
                else:
                    ax.plot(
                        steps,
                        values,
                        color=colour(token),
                        linewidth=2,
                        marker="o",
                        markersize=5.5,
                        markeredgecolor=colour("surface"),
                        clip_on=False,
                    )
                ends.append((max(steps), last, f"{split} {formats.number(last)}", token))
            ax.margins(x=0.01, y=0.08)
            label_ends(ax, ends, height=226)
            best = min(curves["dev"], key=lambda p: p[1], default=None)
            if best:
                said.append(f"Lowest dev loss {formats.number(best[1])} after {best[0]:,} updates.")
            if broken:
                said.append(f"{broken} values that were not finite are left out: the run diverged there.")
            title = f"Loss during {stage}"
            charts.append(canvas.chart(f"loss-{slug(stage)}", title=title, caption=" ".join(said)))
    return charts


def small_multiples(metrics: Metrics) -> list[Chart]:
    """Learning rate and whatever else the loop and the regularizer logged per update, one small chart each."""
    charts = []
    for stage in metrics.stages:
        names = dict.fromkeys(k for ln in metrics.lines if ln["stage"] == stage and ln["split"] == "train" for k in ln)
        for key in ["lr", *sorted(k for k in names if k not in _KNOWN)]:
            curve = [(t, v) for t, v in metrics.series(stage, "train", key) if math.isfinite(v)]
            if len(curve) < 2 or (key != "lr" and _is_dull([v for _, v in curve])):
                continue
            name = "learning rate" if key == "lr" else key.replace("_", " ").replace("/", ": ")
            with Canvas(260, 150) as canvas:
                ax = canvas.axes(left=40, right=10, top=22, bottom=26)
                ax.plot(
                    [t for t, _ in curve],
                    [v for _, v in curve],
                    color=colour("purple" if key == "lr" else "amber"),
                    linewidth=1.7,
                )
                ax.margins(x=0.01, y=0.1)
                if min(v for _, v in curve) >= 0:
                    ax.set_ylim(bottom=0)
                ax.locator_params(nbins=4)
                ax.ticklabel_format(axis="y", scilimits=(-2, 4), useMathText=False)
                ax.yaxis.get_offset_text().set_visible(False)
                power = _power(max(abs(v) for _, v in curve))
                if power:
                    ax.yaxis.set_major_formatter(_in_units(10.0**power))
                    canvas.text(4, 141, f"×10{str(power).translate(formats.SUPERSCRIPT)}", colour="muted")
                title = f"{_upper(name)} · {stage}"
                last = formats.number(curve[-1][1])
                charts.append(canvas.chart(f"{slug(key)}-{slug(stage)}", title=title, caption=f"Ends at {last}."))
    return charts[:12]


def _is_dull(values: list[float]) -> bool:
    """A constant or a counter, which say nothing when drawn."""
    steps = {b - a for a, b in pairwise(values)}
    return steps == {0} or (len(steps) == 1 and all(v == int(v) for v in values))


def _in_units(unit: float) -> Callable[[float, float], str]:
    """A tick formatter that shows multiples of `unit`."""
    return lambda value, _position: f"{value / unit:g}"


def _power(top: float) -> int:
    """Power of ten to take out of tick labels: 0 between 0.01 and 10⁴."""
    return 0 if top == 0 or 0.01 <= top < 1e4 else math.floor(math.log10(top))


def slug(text: str) -> str:
    return "".join(c if c.isalnum() and c.isascii() else "-" for c in text.lower()).strip("-") or "x"


def evaluation(tree: dict[str, dict[str, dict[str, Any]]], *, loss_unit: str) -> list[Chart]:
    """Dots with intervals: shares (accuracy, F1 …) on one axis with the majority floor, others on their own."""
    metrics = list(dict.fromkeys(m for split in tree.values() for m in split if m in formats.METRICS))
    shares = [m for m in formats.SHARES if m in metrics]
    groups = [("shares", shares)] if shares else []
    groups += [(m, [m]) for m in metrics if m not in shares]
    floors = {s: t["majority_floor"]["value"] for s, t in tree.items() if "majority_floor" in t}
    # Charts beside each other have one height: that of the one with most rows.
    longest = max(
        (sum(m in t for m in members for t in tree.values()) + len(members) for _, members in groups), default=0
    )
    charts = []
    for name, members in groups:
        rows = [
            (m, split, t[m]) for m in members for split, t in tree.items() if m in t and math.isfinite(t[m]["value"])
        ]
        if not rows:
            continue
        height = 76 + max(22 * longest, 66)
        with Canvas(540, height) as canvas:
            ax = canvas.axes(
                left=110,
                right=66,
                top=30,
                bottom=40,
                x="share" if name == "shares" else loss_unit if name == "loss" else formats.metric_unit(name),
            )
            ax.grid(axis="x")
            ax.grid(visible=False, axis="y")
            ticks, y = [], -1.0
            for position, (metric, split, cell) in enumerate(rows):
                y += 1.0 if position and rows[position - 1][0] == metric else 1.7 if position else 1.0
                token = SPLIT_COLOUR.get(split, "purple")
                draw_interval(ax, cell["value"], cell.get("low"), cell.get("high"), y, token)
                if metric == "accuracy" and split in floors:
                    ax.plot([floors[split]] * 2, [y - 0.5, y + 0.5], color=colour("ink"), linewidth=1.8)
                ticks.append((y, metric))
                shown = formats.estimate(cell["value"], cell.get("low"), cell.get("high"))[0]
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
            ax.set_ylim(y + 0.7, -0.7)
            middles = [[at for at, m in ticks if m == metric] for metric in dict.fromkeys(m for _, m in ticks)]
            names = [formats.metric_name(m) for m in dict.fromkeys(m for _, m in ticks)]
            ax.set_yticks([sum(at) / len(at) for at in middles], names, color=colour("ink"))
            if name == "shares":
                low = min([0.0, *(r[2].get("low") or r[2]["value"] for r in rows)])
                ax.set_xlim(low - 0.02, 1.02)
            else:
                ax.margins(x=0.12)
                ax.locator_params(axis="x", nbins=5)
            x = 110.0
            for split in dict.fromkeys(r[1] for r in rows):
                canvas.text(x, height - 13, f"● {split}", colour=SPLIT_COLOUR.get(split, "purple"), weight="bold")
                x += 30 + 7 * len(split)
            n = max(int(cell.get("n") or 0) for _, _, cell in rows)
            caption = f"Dot: value; bar: bootstrap interval over up to {n:,} items." if n else "Dot: value."
            if floors and "accuracy" in members:
                caption += " Upright mark: the majority floor, which is always answering the commonest class."
            title = _upper(", ".join(names))
            charts.append(canvas.chart(f"eval-{slug(name)}", title=f"{title} by split", caption=caption))
    return charts


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def draw_interval(
    ax: Any, value: float, low: float | None, high: float | None, y: float, token: str, hollow: bool = False
) -> None:
    """A dot at `value` on row `y` with its interval as a bar."""
    if low is not None and high is not None and math.isfinite(low) and math.isfinite(high):
        ax.plot([low, high], [y, y], color=colour(token), linewidth=3, alpha=0.45, solid_capstyle="round")
    face = colour("surface") if hollow else colour(token)
    ax.plot([value], [y], "o", markersize=8, markerfacecolor=face, markeredgecolor=colour(token), markeredgewidth=2)


def label_rows(ax: Any, labels: list[str]) -> None:
    """Rows 0, 1, … from the top with these names at their left."""
    ax.set_ylim(len(labels) - 0.4, -0.6)
    ax.set_yticks(range(len(labels)), labels, color=colour("ink"))


def histogram(selection: Selection) -> Chart | None:
    """Scores of the pool, the chosen part filled, the threshold marked."""
    import numpy as np

    score, chosen = selection.scores
    if len(score) == 0:
        return None
    low, high = np.quantile(score, [0.0005, 0.9995])
    low, high = min(low, float(score[chosen].min())) if chosen.any() else low, high
    if low == high:
        low, high = low - 0.5, high + 0.5
    beyond = int((score > high).sum() + (score < low).sum())
    edges = np.linspace(low, high, 73)
    everyone, _ = np.histogram(np.clip(score, low, high), edges)
    taken, _ = np.histogram(np.clip(score[chosen], low, high), edges)
    method = selection.about.get("method", "")
    method = method.get("kind", "") if isinstance(method, dict) else str(method)
    helps = (
        " Below zero, more mass on a record lowers the transport cost." if method == "gotd" and low < 0 < high else ""
    )
    with Canvas(540, 300) as canvas:
        ax = canvas.axes(y="records", x="score (smaller is better)", left=52)
        width = edges[1] - edges[0]
        ax.bar(edges[:-1], everyone, width * 0.86, align="edge", color=colour("faint"), alpha=0.55, linewidth=0)
        ax.bar(edges[:-1], taken, width * 0.86, align="edge", color=colour("blue"), linewidth=0)
        ax.margins(x=0.01)
        if chosen.any():
            threshold = float(score[chosen].max())
            ax.axvline(threshold, color=colour("ink"), linewidth=1.4, linestyle=(0, (3, 2)))
            ax.set_ylim(top=1.12 * ax.get_ylim()[1])
            side = -1 if (threshold - low) / (high - low) > 0.22 else 1
            ax.annotate(
                f"{int(chosen.sum()):,} chosen",
                (threshold, 1.0),
                xycoords=("data", "axes fraction"),
                va="top",
                xytext=(8 * side, -2),
                textcoords="offset points",
                fontweight="bold",
                color=colour("blue"),
                ha="left" if side > 0 else "right",
            )
        tail = f" {beyond:,} scores beyond the edges stand in the outer bars." if beyond else ""
        caption = f"{len(score):,} records of the pool in grey, the chosen ones in blue.{helps}{tail}"
        return canvas.chart("selection-scores", title="Scores and the budget", caption=caption)


def domain_mix(selection: Selection) -> Chart | None:
    """Share of each domain in the pool and in the selection."""
    counts = selection.domains
    pool, taken = sum(p for p, _ in counts.values()), sum(t for _, t in counts.values())
    if len(counts) < 2 or not taken:
        return None
    ranked = sorted(counts.items(), key=lambda item: (-item[1][1] / taken, -item[1][0], item[0]))
    shown, rest = (ranked, []) if len(ranked) <= 16 else (ranked[:15], ranked[15:])
    rows = [(name, p / pool, t / taken) for name, (p, t) in shown]
    if rest:
        rows.append((f"{len(rest)} more", sum(p for _, (p, _) in rest) / pool, sum(t for _, (_, t) in rest) / taken))
    with Canvas(540, 74 + 25 * len(rows)) as canvas:
        ax = canvas.axes(left=150, right=62, top=32, bottom=40, x="share of records")
        ax.grid(axis="x")
        ax.grid(visible=False, axis="y")
        for y, (_, before, after) in enumerate(rows):
            ax.plot([before, after], [y, y], color=colour("blue"), linewidth=3, alpha=0.35, solid_capstyle="round")
            ax.plot([before], [y], "o", markersize=7, color=colour("faint"))
            ax.plot([after], [y], "o", markersize=8, color=colour("blue"))
            lift = f"× {formats.number(after / before, 2)}" if before else "–"
            ax.annotate(
                lift,
                (1, y),
                xycoords=("axes fraction", "data"),
                xytext=(8, 0),
                textcoords="offset points",
                va="center",
                color=colour("ink" if after > before else "muted"),
            )
        label_rows(ax, [name if len(name) <= 20 else name[:19] + "…" for name, _, _ in rows])
        ax.set_xlim(left=-0.01)
        ax.xaxis.set_major_formatter(lambda v, _: f"{100 * v:g} %")
        height = 74 + 25 * len(rows)
        canvas.text(150, height - 14, "● pool", colour="faint", weight="bold")
        canvas.text(206, height - 14, "● selection", colour="blue", weight="bold")
        canvas.text(540 - 56, height - 14, "lift", colour="muted")
        hidden = (
            " The tags were hidden from the selector and are used only to judge it." if selection.judged_only else ""
        )
        caption = f"Each domain’s share of the pool and of the selection; lift is their ratio.{hidden}"
        return canvas.chart("selection-domains", title="What the selection is made of", caption=caption)


def projection_map(selection: Selection) -> Chart | None:
    """Pool, selection and target in the plane of map.parquet."""
    points = selection.points
    if not points or not points["x"]:
        return None
    groups = {k: [i for i, kind in enumerate(points["kind"]) if kind == k] for k in ("pool", "selection", "target")}
    with Canvas(WIDE, 520) as canvas:
        ax = canvas.axes(left=6, right=6, top=36, bottom=34)
        ax.grid(visible=False)
        ax.spines["bottom"].set_visible(False)
        for kind, token, size, alpha in (
            ("pool", "faint", 4.0, 0.55),
            ("selection", "blue", 5.4, 0.75),
            ("target", "orange", 5.4, 0.75),
        ):
            rows = groups[kind]
            dots(
                ax,
                [points["x"][i] for i in rows],
                [points["y"][i] for i in rows],
                token=token,
                size=size,
                alpha=alpha,
                gid=kind,
            )
        ax.autoscale_view()
        ax.margins(0.03)
        ax.set_xticks([])
        ax.set_yticks([])
        shares = points.get("explained")
        named = [f" ({formats.percent(s)} of the variance)" for s in shares] if isinstance(shares, list) else ["", ""]
        canvas.text(WIDE - 6, 14, f"principal axis 1{named[0]} →", colour="muted", ha="right")
        canvas.text(6, 14, f"↑ principal axis 2{named[1]}", colour="muted")
        x = 6
        for kind, token in (("pool", "muted"), ("selection", "blue"), ("target", "orange")):
            if groups[kind]:
                label = f"● {kind} {len(groups[kind]):,}"
                canvas.text(x, 504, label, colour=token, weight="bold")
                x += 22 + 7 * len(label)
        caption = (
            "Features projected on the first two principal axes, fitted with equal weight on target and pool; "
            "a seeded sample of points. Two axes show little of the space: near here need not mean near there."
        )
        return canvas.chart("selection-map", title="Where the selection lies", caption=caption)
