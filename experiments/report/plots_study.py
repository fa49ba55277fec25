"""Charts of a study: its arms with intervals over seeds, and their paired differences."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.report import formats
from experiments.report.figure import Canvas, Chart, colour
from experiments.report.load import Study
from experiments.report.plots_run import draw_interval, label_rows, slug
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
            draw_interval(ax, mean.value, mean.low, mean.high, y, token, hollow=arm[1] == "ggpo")
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
        label_rows(ax, [arm_name(*arm) for arm, _ in rows])
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
        return canvas.chart(f"study-{slug(metric)}", title=title, caption=caption)


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
            draw_interval(ax, i.value, i.low, i.high, y, token)
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
        label_rows(ax, labels)
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
        return canvas.chart(f"study-{slug(metric)}-differences", title=title, caption=caption)
