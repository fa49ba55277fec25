"""Study of warm-ups and regularizers: its arms with intervals over seeds, and their paired differences."""

from __future__ import annotations

from dataclasses import dataclass

from flatshift.experiments.report import formats
from flatshift.experiments.report.blocks import Block, ChapterPart, ChartGroup, KeyFigure, Notes, Section, Table
from flatshift.experiments.report.charts.intervals import IntervalRow, interval_chart
from flatshift.experiments.report.charts.training import slugify
from flatshift.experiments.report.figure import Chart
from flatshift.experiments.results.run import RunResults, Study
from flatshift.experiments.statistics.intervals import Interval, paired_difference, t_interval, t_quantile
from flatshift.finetune.evaluate.metrics import find_metric, sort_for_headline

WARMUPS = {"cold": "cold", "random": "random warm-up", "gotd": "GOT-D warm-up"}
REGULARIZERS = {"plain": "plain", "ggpo": "GGPO"}
_ARM_COLOUR = {"cold": "muted", "random": "amber", "gotd": "blue"}


def part(run: RunResults) -> ChapterPart | None:
    """Return the part for a directory with study.json."""
    if run.study is None:
        return None
    return ChapterPart("study", [study_finding(run.study)], study_tiles(run.study), study_sections(run.study))


def study_question(study: Study) -> tuple[tuple[str, str], tuple[str, str]] | None:
    """Return the pair of arms in the headline: GOT-D against the random control, else against the cold start."""
    names = {(c["warmup"], c["regularizer"]) for c in study.cells}
    pairs = [
        (("gotd", "plain"), ("random", "plain")),
        (("gotd", "plain"), ("cold", "plain")),
        (("cold", "ggpo"), ("cold", "plain")),
    ]
    return next(((a, b) for a, b in pairs if a in names and b in names), None)


def study_differences(study: Study) -> list[tuple[str, Interval]]:
    """Return (metric, paired difference) of the question, in headline order."""
    question = study_question(study)
    if question is None:
        return []
    ours, base = question
    pairs = [
        (m, paired_difference(study.values(*ours, m), study.values(*base, m))) for m in sort_for_headline(study.metrics)
    ]
    return [(m, d) for m, d in pairs if d is not None]


def study_finding(study: Study) -> str:
    """Return a sentence that answers the question for the first two metrics."""
    question, differences = study_question(study), study_differences(study)
    if question is None or not differences:
        return f"{len(study.cells)} runs; no two arms share a seed, so nothing can be compared in pairs."
    parts = []
    for metric, d in differences[:2]:
        name = find_metric(metric).title
        if d.low is None:
            parts.append(f"{name} differs by {formats.signed_number(d.value)} on a single seed, which proves nothing")
        elif not d.excludes_zero:
            parts.append(f"shows no clear difference in {name} ({formats.with_interval(d, plus=True)})")
        else:
            verb = "lowers" if d.value < 0 else "raises"
            size = formats.estimate(abs(d.value), *sorted((abs(d.low), abs(d.high or 0))))
            parts.append(f"{verb} {name} by {size[0]} ({size[1]})")
    n = differences[0][1].n
    ours, base = (arm_name(*arm) for arm in question)
    same = question[0][1] == question[1][1] == "plain"
    ours, base = (ours.removesuffix(", plain"), base.removesuffix(", plain")) if same else (ours, base)
    seeds = f", over {n} paired seeds" if n > 1 else ""
    against = "the cold start" if base == "cold" else f"a {base}" if base.startswith("random") else base
    return f"Against {against}, {ours if ours.startswith('GOT') else 'a ' + ours} {' and '.join(parts)}{seeds}."


def arm_name(warmup: str, regularizer: str) -> str:
    """Return an arm's title: `gotd`, `ggpo` → `GOT-D warm-up, GGPO`."""
    return f"{WARMUPS.get(warmup, warmup)}, {REGULARIZERS.get(regularizer, regularizer)}"


def sorted_arms(study: Study) -> list[tuple[str, str]]:
    """Return (warm-up, regularizer) pairs in the order cold, random, gotd × plain, ggpo; others after."""
    found = dict.fromkeys((c["warmup"], c["regularizer"]) for c in study.cells)
    order, regs = list(WARMUPS), list(REGULARIZERS)
    return sorted(
        found,
        key=lambda a: (order.index(a[0]) if a[0] in order else 9, a[0], regs.index(a[1]) if a[1] in regs else 9, a[1]),
    )


@dataclass(frozen=True)
class Contrast:
    """Seed-paired difference between two arms."""

    name: str
    group: str
    interval: Interval


def arm_contrasts(study: Study, metric: str) -> list[Contrast]:
    """Compare every arm with cold/plain, then isolate each part: GOT-D − random per regularizer, GGPO − plain per
    warm-up.

    Pairs whose differences are all exactly zero (the same runs evaluated twice) are left out.
    """
    found: list[Contrast] = []
    names = sorted_arms(study)
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


def study_tiles(study: Study) -> list[KeyFigure]:
    question = study_question(study)
    if question is None:
        return []
    ours, base = (arm_name(*arm) for arm in question)
    tiles = []
    for metric, d in study_differences(study)[:3]:
        value, interval = formats.estimate(d.value, d.low, d.high, plus=True)
        note = f"{ours} − {base}, {d.n} paired seeds" if d.n > 1 else f"{ours} − {base}, one seed: no interval"
        if d.low is not None and not d.excludes_zero:
            note += "; the interval holds zero"
        tiles.append(KeyFigure(f"Δ {find_metric(metric).title}", value, interval, note))
    return tiles


def study_sections(study: Study) -> list[Section]:
    metrics = sort_for_headline(study.metrics)
    charts = [c for m in metrics[:3] for c in study_charts(study, m)]
    rows = []
    for arm in sorted_arms(study):
        row = [arm_name(*arm)]
        count = 0
        for metric in metrics:
            values = list(study.values(*arm, metric).values())
            count = max(count, len(values))
            mean = t_interval(values, bounds=find_metric(metric).bounds) if values else None
            row.append(formats.with_interval(mean))
        rows.append([*row, str(count)])
    names = [find_metric(m).title for m in metrics]
    table = Table(
        ["arm", *names, "seeds"], rows, "Mean over seeds with its 95 % t-interval.", frozenset(range(1, len(names) + 2))
    )
    differences = []
    for metric in metrics:
        for c in arm_contrasts(study, metric):
            value, interval = formats.estimate(c.interval.value, c.interval.low, c.interval.high, plus=True)
            said = "excludes zero" if c.interval.excludes_zero else "holds zero"
            against = c.group.removeprefix("against ") if c.group.startswith("against") else ""
            differences.append(
                {
                    "metric": find_metric(metric).title,
                    "difference": f"{c.name} − {against}" if against else c.name,
                    "mean": value,
                    "95 % interval": interval or "–",
                    "it": "no interval" if c.interval.low is None else said,
                    "pairs": str(c.interval.n),
                }
            )
    blocks: list[Block] = [ChartGroup(charts), table]
    blocks.append(Notes(_study_notes(study, differences)))
    target = study.about.get("target")
    title = f"Cold, random and GOT-D warm-up × plain and GGPO{f' on {target}' if target else ''}"
    found = [
        Section(
            title, [b for b in blocks if not (isinstance(b, Notes) and not b.sentences)], _metric_descriptions(study)
        )
    ]
    if differences:
        caption = "Seed-paired differences. Not corrected for the number of comparisons."
        paired = Table.of(differences, caption, words=("metric", "difference", "it"))
        found.append(Section("All paired differences", [paired], folded=True))
    tuned = study.about.get("tuned")
    if isinstance(tuned, dict) and tuned:
        keys = list(dict.fromkeys(k for v in tuned.values() if isinstance(v, dict) for k in v))
        cells = [
            [arm, *(formats.json_value(v.get(k)) for k in keys)] for arm, v in tuned.items() if isinstance(v, dict)
        ]
        names, numeric = ["arm", *(k.replace("_", " ") for k in keys)], frozenset(range(1, len(keys) + 1))
        rates = Table(names, cells, "Equal trials for every arm.", numeric)
        found.append(Section("Learning rates, tuned on dev with a seed of their own", [rates], folded=True))
    return found


def _metric_descriptions(study: Study) -> str:
    """Describe how each metric was measured, if the study records it."""
    said = study.about.get("describe")
    return (
        " ".join(f"{find_metric(k).title.capitalize()}: {v}" for k, v in said.items()) if isinstance(said, dict) else ""
    )


def _study_notes(study: Study, differences: list[dict[str, str]]) -> list[str]:
    notes = []
    clear = sum(row["it"] == "excludes zero" for row in differences)
    asked = sum(row["it"] != "no interval" for row in differences)
    if asked:
        notes.append(
            f"{clear} of {asked} intervals exclude zero; "
            f"if nothing differed at all, about {max(round(asked * 0.05), 1)} would by chance."
        )
    seeds = {c["seed"] for c in study.cells}
    if 1 < len(seeds) < 5:
        notes.append(
            f"With {len(seeds)} seeds a t-interval is wide, "
            f"{formats.number(t_quantile(0.975, len(seeds) - 1), 2)} standard errors either way: "
            "read this as a demonstration, not as evidence."
        )
    for metric, floor in study.floor.items():
        values = [v for arm in sorted_arms(study) for v in study.values(*arm, metric).values()]
        if values and max(values) <= floor:
            notes.append(
                f"No run rises above the majority {metric} of {formats.number(floor)}: the task is uninformative here."
            )
    return notes


def study_charts(study: Study, metric: str) -> list[Chart]:
    """Draw the arms and, next to them at the same height, their paired differences."""
    shown = [c for c in arm_contrasts(study, metric) if c.interval.low is not None]
    height = max(66 + 27 * (len(shown) + len({c.group for c in shown})), 66 + 30 * len(sorted_arms(study)))
    return [c for c in (_arm_chart(study, metric, height), _difference_chart(shown, metric, height)) if c]


def _arm_chart(study: Study, metric: str, height: int) -> Chart | None:
    """Draw every arm's seeds, mean and interval; filled: plain, hollow: GGPO."""
    found = {arm: values for arm in sorted_arms(study) if (values := list(study.values(*arm, metric).values()))}
    if not found:
        return None
    means = {arm: t_interval(values, bounds=find_metric(metric).bounds) for arm, values in found.items()}
    places = formats.common_decimals([(m.value, m.low, m.high) for m in means.values()])
    rows = [
        IntervalRow(
            arm_name(*arm), m.value, m.low, m.high, f"{m.value:,.{places}f}", _ARM_COLOUR.get(arm[0], "purple"),
            hollow=arm[1] == "ggpo", singles=found[arm],
        )
        for arm, m in means.items()
    ]  # fmt: skip
    floor = study.floor.get(metric)
    seeds = sorted({len(values) for values in found.values()})
    count = f"{seeds[0]} seeds" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds"
    better = "lower is better" if find_metric(metric).lower else "higher is better"
    name = find_metric(metric).title
    return interval_chart(
        f"study-{slugify(metric)}",
        rows,
        title=f"{name[:1].upper()}{name[1:]} of every arm",
        caption=f"Mean over {count} with its 95 % t-interval; small dots are the seeds; hollow marks are GGPO; "
        f"{better}.",
        x=name,
        width=540,
        height=height,
        left=160,
        right=66,
        rule=floor,
        note=("dashed: majority baseline", "muted") if floor is not None else None,
    )


def _difference_chart(shown: list[Contrast], metric: str, height: int) -> Chart | None:
    """Draw seed-paired differences with intervals; those that exclude zero are coloured."""
    if not shown:
        return None
    lower = find_metric(metric).lower
    places = formats.common_decimals([(c.interval.value, c.interval.low, c.interval.high) for c in shown])
    rows: list[IntervalRow | str] = []
    for number, contrast in enumerate(shown):
        if number == 0 or contrast.group != shown[number - 1].group:
            rows.append(contrast.group)
        i = contrast.interval
        token = "muted" if not i.excludes_zero else "green" if (i.value < 0) == lower else "orange"
        said = formats.estimate(i.value, i.low, i.high, plus=True, places=places)[0]
        rows.append(IntervalRow(contrast.name, i.value, i.low, i.high, said, token))
    n = {c.interval.n for c in shown}
    seeds = f"{min(n)}" if len(n) == 1 else f"{min(n)} to {max(n)}"
    return interval_chart(
        f"study-{slugify(metric)}-differences",
        rows,
        title=f"Paired differences in {find_metric(metric).title}",
        caption=f"Mean difference over {seeds} paired seeds with its 95 % t-interval. Green: better, orange: worse, "
        "grey: the interval holds zero. Each interval stands alone; nothing is corrected for their number.",
        x=f"difference in {find_metric(metric).title}",
        width=540,
        height=height,
        left=206,
        right=62,
        zero=True,
        note=("← better" if lower else "better →", "green"),
    )
