"""What a run was judged with: every metric of every split, with its interval."""

from __future__ import annotations

import math
from typing import Any

from experiments.report import formats
from experiments.report.charts.intervals import Row, draw_row, horizontal
from experiments.report.charts.training import SPLIT_COLOUR, capitalised, slug
from experiments.report.figure import Canvas, Chart, colour
from finetune.evaluate.metrics import METRICS, metric_of


def evaluation(tree: dict[str, dict[str, dict[str, Any]]], *, loss_unit: str) -> list[Chart]:
    """Dots with intervals: shares (accuracy, F1 …) on one axis with the majority floor, others on their own."""
    metrics = list(
        dict.fromkeys(m for split in tree.values() for m in split if m in METRICS and not METRICS[m].is_floor)
    )
    shares = [m for m in METRICS if METRICS[m].shown_as_share and m in metrics]
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
                x="share" if name == "shares" else loss_unit if name == "loss" else metric_of(name).unit,
            )
            horizontal(ax)
            ticks, y = [], -1.0
            for position, (metric, split, cell) in enumerate(rows):
                y += 1.0 if position and rows[position - 1][0] == metric else 1.7 if position else 1.0
                token = SPLIT_COLOUR.get(split, "purple")
                low, high = cell.get("low"), cell.get("high")
                said = formats.estimate(cell["value"], low, high)[0]
                draw_row(ax, Row(metric, cell["value"], low, high, said, token), y)
                if metric == "accuracy" and split in floors:
                    ax.plot([floors[split]] * 2, [y - 0.5, y + 0.5], color=colour("ink"), linewidth=1.8)
                ticks.append((y, metric))
            ax.set_ylim(y + 0.7, -0.7)
            middles = [[at for at, m in ticks if m == metric] for metric in dict.fromkeys(m for _, m in ticks)]
            names = [metric_of(m).title for m in dict.fromkeys(m for _, m in ticks)]
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
            title = capitalised(", ".join(names))
            charts.append(canvas.chart(f"eval-{slug(name)}", title=f"{title} by split", caption=caption))
    return charts
