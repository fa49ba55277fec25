"""Charts of a selection: scores, mix of domains, map, and its effect on the distance to the target."""

from __future__ import annotations

from typing import Any

from flatshift.experiments.report import formats
from flatshift.experiments.report.charts.intervals import annotate_row, label_rows, use_vertical_grid
from flatshift.experiments.report.figure import WIDE, Canvas, Chart, colour, draw_dots, label_ends
from flatshift.experiments.results.run import SelectionResults


def score_histogram(selection: SelectionResults) -> Chart | None:
    """Draw the pool's scores with the selected part filled and the threshold marked."""
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


def domain_chart(selection: SelectionResults) -> Chart | None:
    """Draw the share of each domain in the pool and in the selection."""
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
        height = 74 + 25 * len(rows)
        canvas.text(150, height - 14, "● pool", colour="faint", weight="bold")
        canvas.text(206, height - 14, "● selection", colour="blue", weight="bold")
        canvas.text(540 - 56, height - 14, "lift", colour="muted")
        hidden = (
            " The tags were hidden from the selector and are used only to evaluate it." if selection.judged_only else ""
        )
        caption = f"Each domain’s share of the pool and of the selection; lift is their ratio.{hidden}"
        return canvas.chart("selection-domains", title="What the selection is made of", caption=caption)


def projection_map(selection: SelectionResults) -> Chart | None:
    """Draw pool, selection and target in the plane of map.parquet."""
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
            draw_dots(
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
        return canvas.chart("selection-map", title="Map of the selection", caption=caption)


_COLOURS = {"selection": "blue", "random": "orange"}


def third_arm(found: dict[str, Any]) -> str:
    """Return the third arm besides selection and random draw: "rounds" or "one step"."""
    return next(name for name in found["fitted"] if name not in _COLOURS)


def relative_changes(found: dict[str, Any], arm: str, place: int) -> list[float]:
    """Return the change at the λ with index `place`, as a share of the distance before, one number per split."""
    return [
        values[place] / before for values, before in zip(found["held_out"][arm], found["held_distance"], strict=True)
    ]


def distance_chart(found: dict[str, Any]) -> Chart:
    """Draw the promised change over λ, and the change each arm causes on held-out halves of the target."""
    shares, distance = found["shares"], found["distance"]
    held = found["held_out"]
    with Canvas(WIDE, 330) as canvas:
        ax = canvas.axes(
            y="change of the transport distance, %", x="share λ of the selection in the mixture", right=168
        )
        ax.axhline(0, color=colour("ink"), linewidth=1)
        ends: list[tuple[float, float, str, str]] = []
        drawn = [0.0]
        own = found["fitted"]["selection"]
        promised = [100 * reading["predicted"] / distance for reading in own]
        ax.plot([0, *shares], [0, *promised], color=colour("muted"), linewidth=1.6, linestyle=(0, (4, 3)))
        ends.append((1.0, promised[-1], "promised", "muted"))
        for arm, readings in found["fitted"].items():
            token = _COLOURS.get(arm, "green")
            if held:
                lists = [[100 * v for v in relative_changes(found, arm, place)] for place in range(len(shares))]
                ax.fill_between(
                    [0, *shares],
                    [0, *(min(values) for values in lists)],
                    [0, *(max(values) for values in lists)],
                    color=colour(token),
                    alpha=0.18,
                    linewidth=0,
                )
                line = [sum(values) / len(values) for values in lists]
            else:
                line = [100 * reading["realised"] / distance for reading in readings]
            ax.plot([0, *shares], [0, *line], color=colour(token), linewidth=2.2, marker="o", markersize=5)
            drawn += line
            ends.append((1.0, line[-1], arm if arm != "random" else "random draw", token))
        # The promised line is straight and may leave the chart: the measured values set the scale.
        low, high = min(drawn), max(drawn)
        room = 0.12 * max(high - low, 1.0)
        ax.set_ylim(min(low, max(promised[-1], 2 * low)) - room, high + room)
        ax.set_xlim(0, 1.0)
        bottom, top = ax.get_ylim()
        label_ends(ax, [(x, min(max(y, bottom), top), text, token) for x, y, text, token in ends], height=256)
        seen = (
            f"Lines: mean over {len(found['held_distance'])} halves of the target that were not used to choose; bands: "
            "their range."
            if held
            else "On the target that was used to choose: it has too few rows to hold half of them out."
        )
        caption = f"{seen} Dashed: what the scores promise to first order. Below zero is nearer to the target."
        return canvas.chart("selection-checks", title="Transport distance to the target", caption=caption)
