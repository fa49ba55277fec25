"""Charts of a selection: scores, mix of domains, map, and its effect on the distance to the target."""

from __future__ import annotations

from typing import Any

import numpy as np

from flatshift.experiments.report import formats
from flatshift.experiments.report.charts.intervals import annotate_row, label_rows, use_vertical_grid
from flatshift.experiments.report.figure import WIDE, Canvas, Chart, colour, draw_dots, label_ends
from flatshift.experiments.results.run import SelectionResults


def score_histogram(selection: SelectionResults) -> Chart | None:
    """Draw the pool's scores with the selected part filled and the threshold marked."""
    score, chosen = selection.scores
    if len(score) == 0:
        return None
    low, high = np.quantile(score, [0.0005, 0.9995])
    low, high = min(low, float(score[chosen].min())) if chosen.any() else low, high
    if low == high:
        low, high = low - 0.5, high + 0.5
    beyond = int((score > high).sum() + (score < low).sum())
    edges = np.linspace(low, high, 73)
    counts, _ = np.histogram(np.clip(score, low, high), edges)
    chosen_counts, _ = np.histogram(np.clip(score[chosen], low, high), edges)
    # As tall as the chart of the domains next to it.
    with Canvas(540, max(300, _domain_chart_height(selection))) as canvas:
        ax = canvas.axes(y="records, logarithmic", x="score (smaller is better)", left=52)
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(lambda v, _: f"{v:,.0f}")
        width = edges[1] - edges[0]
        style: dict[str, Any] = {"align": "edge", "linewidth": 0}
        ax.bar(edges[:-1], counts, width * 0.86, color=colour("faint"), alpha=0.55, **style)
        ax.bar(edges[:-1], chosen_counts, width * 0.86, color=colour("blue"), **style)
        ax.margins(x=0.01)
        if chosen.any():
            threshold = float(score[chosen].max())
            ax.axvline(threshold, color=colour("ink"), linewidth=1.4, linestyle=(0, (3, 2)))
            ax.set_ylim(bottom=0.6, top=2.5 * ax.get_ylim()[1])
            right = (threshold - low) / (high - low) <= 0.22
            place: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "va": "top"}
            place |= {"xytext": (8 if right else -8, -2), "ha": "left" if right else "right"}
            text = f"{int(chosen.sum()):,} chosen"
            ax.annotate(text, (threshold, 1.0), fontweight="bold", color=colour("blue"), **place)
        caption = f"{len(score):,} records of the pool in grey, the chosen ones in blue."
        if selection.about.get("method") == "gotd" and low < 0 < high:
            caption += " Below zero, more mass on a record lowers the transport cost."
        caption += f" {beyond:,} scores beyond the edges stand in the outer bars." if beyond else ""
        return canvas.chart("selection-scores", title="Scores and the budget", caption=caption)


_DOMAINS = 16


def _domain_chart_height(selection: SelectionResults) -> int:
    return 74 + 25 * min(_DOMAINS, len(selection.domains))


def domain_chart(selection: SelectionResults) -> Chart | None:
    """Draw the share of each domain in the pool and in the selection."""
    counts = selection.domains
    pool, chosen = sum(p for p, _ in counts.values()), sum(c for _, c in counts.values())
    if len(counts) < 2 or not chosen:
        return None
    ranked = sorted(counts.items(), key=lambda item: (-item[1][1] / chosen, -item[1][0], item[0]))
    if len(ranked) > _DOMAINS:
        small = [pair for _, pair in ranked[_DOMAINS - 1 :]]
        ranked = [*ranked[: _DOMAINS - 1], (f"{len(small)} more", (sum(p for p, _ in small), sum(c for _, c in small)))]
    rows = [(name, p / pool, c / chosen) for name, (p, c) in ranked]
    height = _domain_chart_height(selection)
    with Canvas(540, height) as canvas:
        ax = canvas.axes(left=150, right=62, top=32, bottom=40, x="share of records")
        use_vertical_grid(ax)
        for y, (_, before, after) in enumerate(rows):
            ax.plot([before, after], [y, y], color=colour("blue"), linewidth=3, alpha=0.35, solid_capstyle="round")
            ax.plot([before], [y], "o", markersize=7, color=colour("faint"))
            ax.plot([after], [y], "o", markersize=8, color=colour("blue"))
            lift = f"× {formats.number(after / before, 2)}" if before else "–"
            annotate_row(ax, y, lift, "ink" if after > before else "muted")
        label_rows(ax, [name if len(name) <= 20 else name[:19] + "…" for name, _, _ in rows])
        ax.set_xlim(left=-0.01)
        ax.xaxis.set_major_formatter(lambda v, _: f"{100 * v:g} %")
        canvas.text(150, height - 14, "● pool", colour="faint", weight="bold")
        canvas.text(206, height - 14, "● selection", colour="blue", weight="bold")
        canvas.text(540 - 56, height - 14, "lift", colour="muted")
        caption = "Each domain’s share of the pool and of the selection; lift is their ratio."
        if selection.judged_only:
            caption += " The tags were hidden from the selector and are used only to evaluate it."
        return canvas.chart("selection-domains", title="What the selection is made of", caption=caption)


def projection_map(selection: SelectionResults) -> Chart | None:
    """Draw pool, selection and target in the plane of map.parquet."""
    points = selection.points
    if not points or not points["x"]:
        return None
    groups: dict[str, list[tuple[float, float]]] = {"pool": [], "selection": [], "target": []}
    for kind, *point in zip(points["kind"], points["x"], points["y"], strict=True):
        if kind in groups:
            groups[kind].append((point[0], point[1]))
    with Canvas(WIDE, 520) as canvas:
        ax = canvas.axes(left=6, right=6, top=36, bottom=34)
        ax.grid(visible=False)
        ax.spines["bottom"].set_visible(False)
        for kind, token, size, alpha in (
            ("pool", "faint", 4.0, 0.55),
            ("selection", "blue", 5.4, 0.75),
            ("target", "orange", 5.4, 0.75),
        ):
            draw_dots(ax, groups[kind], token=token, size=size, alpha=alpha, gid=kind)
        ax.autoscale_view()
        ax.margins(0.03)
        ax.set(xticks=[], yticks=[])
        shares = points.get("explained")
        notes = [f" ({formats.percent(s)} of the variance)" for s in shares] if isinstance(shares, list) else ["", ""]
        canvas.text(WIDE - 6, 14, f"principal axis 1{notes[0]} →", colour="muted", ha="right")
        canvas.text(6, 14, f"↑ principal axis 2{notes[1]}", colour="muted")
        left = 6
        for kind, token in (("pool", "muted"), ("selection", "blue"), ("target", "orange")):
            if groups[kind]:
                label = f"● {kind} {len(groups[kind]):,}"
                canvas.text(left, 504, label, colour=token, weight="bold")
                left += 22 + 7 * len(label)
        caption = (
            "Features projected on the first two principal axes, fitted with equal weight on target and pool; "
            "a seeded sample of points. Two axes show little of the space: near here need not mean near there."
        )
        return canvas.chart("selection-map", title="Map of the selection", caption=caption)


_COLOURS = {"selection": "blue", "random": "orange"}


def third_arm(checks: dict[str, Any]) -> str:
    """Return the third arm besides selection and random draw: "rounds" or "one step"."""
    return next(name for name in checks["fitted"] if name not in _COLOURS)


def relative_changes(checks: dict[str, Any], arm: str, index: int) -> list[float]:
    """Return the change at the λ with this index, as a share of the distance before, one number per split."""
    pairs = zip(checks["held_out"][arm], checks["held_distance"], strict=True)
    return [values[index] / before for values, before in pairs]


def distance_chart(checks: dict[str, Any]) -> Chart:
    """Draw the promised change over λ, and the change each arm causes on held-out halves of the target."""
    shares, distance, held_out = checks["shares"], checks["distance"], checks["held_out"]
    with Canvas(WIDE, 330) as canvas:
        ax = canvas.axes(
            y="change of the transport distance, %", x="share λ of the selection in the mixture", right=168
        )
        ax.axhline(0, color=colour("ink"), linewidth=1)
        drawn = [0.0]
        promised = [100 * reading["predicted"] / distance for reading in checks["fitted"]["selection"]]
        ax.plot([0, *shares], [0, *promised], color=colour("muted"), linewidth=1.6, linestyle=(0, (4, 3)))
        ends = [(1.0, promised[-1], "promised", "muted")]
        for arm, readings in checks["fitted"].items():
            token = _COLOURS.get(arm, "green")
            if held_out:
                lists = [[100 * v for v in relative_changes(checks, arm, index)] for index in range(len(shares))]
                bounds = [0, *map(min, lists)], [0, *map(max, lists)]
                ax.fill_between([0, *shares], *bounds, color=colour(token), alpha=0.18, linewidth=0)
                line = [sum(values) / len(values) for values in lists]
            else:
                line = [100 * reading["realised"] / distance for reading in readings]
            ax.plot([0, *shares], [0, *line], color=colour(token), linewidth=2.2, marker="o", markersize=5)
            drawn += line
            ends.append((1.0, line[-1], arm if arm != "random" else "random draw", token))
        # The promised line is straight and may leave the chart: the measured values set the scale.
        low, high = min(drawn), max(drawn)
        margin = 0.12 * max(high - low, 1.0)
        ax.set_ylim(min(low, max(promised[-1], 2 * low)) - margin, high + margin)
        ax.set_xlim(0, 1.0)
        bottom, top = ax.get_ylim()
        label_ends(ax, [(x, min(max(y, bottom), top), text, token) for x, y, text, token in ends], height=256)
        basis = (
            f"Lines: mean over {len(checks['held_distance'])} halves of the target that were not used to choose; "
            "bands: their range."
            if held_out
            else "On the target that was used to choose: it has too few rows to hold half of them out."
        )
        caption = f"{basis} Dashed: what the scores promise to first order. Below zero is nearer to the target."
        return canvas.chart("selection-checks", title="Transport distance to the target", caption=caption)
