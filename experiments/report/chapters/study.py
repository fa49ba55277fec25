"""Study of warm-ups and regularizers: its arms with intervals over seeds, and their paired differences."""

from __future__ import annotations

from dataclasses import dataclass

from flatshift.experiments.report import formats
from flatshift.experiments.report.blocks import ChapterPart, ChartGroup, KeyFigure, Notes, Section, Table
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
    return ChapterPart("study", [study_finding(run.study)], _tiles(run.study), _sections(run.study))


def _question(study: Study) -> tuple[tuple[str, str], tuple[str, str]] | None:
    """Return the pair of arms in the headline: GOT-D against the random control, else against the cold start."""
    names = {(c["warmup"], c["regularizer"]) for c in study.cells}
    pairs = [
        (("gotd", "plain"), ("random", "plain")),
        (("gotd", "plain"), ("cold", "plain")),
        (("cold", "ggpo"), ("cold", "plain")),
    ]
    return next(((a, b) for a, b in pairs if a in names and b in names), None)


def _differences(study: Study) -> list[tuple[str, Interval]]:
    """Return (metric, paired difference) of the question, in headline order."""
    question = _question(study)
    if question is None:
        return []
    ours, base = question
    return [
        (metric, difference)
        for metric in sort_for_headline(study.metrics)
        if (difference := paired_difference(study.values(*ours, metric), study.values(*base, metric))) is not None
    ]


def study_finding(study: Study) -> str:
    """Return a sentence that answers the question for the first two metrics."""
    question, differences = _question(study), _differences(study)
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
    ours, base = (_arm_name(*arm) for arm in question)
    if question[0][1] == question[1][1] == "plain":
        ours, base = ours.removesuffix(", plain"), base.removesuffix(", plain")
    seeds = f", over {n} paired seeds" if n > 1 else ""
    against = "the cold start" if base == "cold" else f"a {base}" if base.startswith("random") else base
    return f"Against {against}, {ours if ours.startswith('GOT') else 'a ' + ours} {' and '.join(parts)}{seeds}."


def _arm_name(warmup: str, regularizer: str) -> str:
    """Return an arm's title: `gotd`, `ggpo` → `GOT-D warm-up, GGPO`."""
    return f"{WARMUPS.get(warmup, warmup)}, {REGULARIZERS.get(regularizer, regularizer)}"


def _sorted_arms(study: Study) -> list[tuple[str, str]]:
    """Return (warm-up, regularizer) pairs in the order cold, random, gotd × plain, ggpo; others after."""

    def place(names: dict[str, str], name: str) -> tuple[int, str]:
        return [*names, name].index(name), name

    arms = dict.fromkeys((c["warmup"], c["regularizer"]) for c in study.cells)
    return sorted(arms, key=lambda arm: (place(WARMUPS, arm[0]), place(REGULARIZERS, arm[1])))


@dataclass(frozen=True)
class Contrast:
    """Seed-paired difference between two arms."""

    name: str
    group: str
    interval: Interval


def arm_contrasts(study: Study, metric: str) -> list[Contrast]:
    """Compare every arm with cold/plain, then GOT-D with random by regularizer, and GGPO with plain by warm-up. Pairs
    whose differences are all exactly zero (the same runs evaluated twice) are left out."""
    names = _sorted_arms(study)
    base = names[0] if ("cold", "plain") not in names else ("cold", "plain")
    parts = "what each part adds"
    plan = [(_arm_name(*arm), f"against {_arm_name(*base)}", arm, base) for arm in names if arm != base]
    plan += [(f"GOT-D − random, {title}", parts, ("gotd", r), ("random", r)) for r, title in REGULARIZERS.items()]
    plan += [(f"GGPO − plain, {title}", parts, (w, "ggpo"), (w, "plain")) for w, title in WARMUPS.items()]
    contrasts = []
    for name, group, *pair in plan:
        a, b = (study.values(*arm, metric) for arm in pair)
        interval = paired_difference(a, b)
        if interval is not None and any(a[s] != b[s] for s in set(a) & set(b)):
            contrasts.append(Contrast(name, group, interval))
    return contrasts


def _tiles(study: Study) -> list[KeyFigure]:
    question = _question(study)
    if question is None:
        return []
    names = " − ".join(_arm_name(*arm) for arm in question)
    tiles = []
    for metric, d in _differences(study)[:3]:
        note = f"{names}, {d.n} paired seeds" if d.n > 1 else f"{names}, one seed: no interval"
        if d.low is not None and not d.excludes_zero:
            note += "; the interval holds zero"
        tiles.append(KeyFigure(f"Δ {find_metric(metric).title}", *formats.estimate_figure(d, plus=True), note))
    return tiles


def _sections(study: Study) -> list[Section]:
    metrics = sort_for_headline(study.metrics)
    charts = [chart for metric in metrics[:3] for chart in _charts(study, metric)]
    rows = []
    for arm in _sorted_arms(study):
        columns = [list(study.values(*arm, metric).values()) for metric in metrics]
        means = [
            t_interval(values, bounds=find_metric(metric).bounds) if values else None
            for metric, values in zip(metrics, columns, strict=True)
        ]
        rows.append([_arm_name(*arm), *map(formats.with_interval, means), str(max(map(len, columns), default=0))])
    names = ["arm", *(find_metric(metric).title for metric in metrics), "seeds"]
    table = Table(names, rows, "Mean over seeds with its 95 % t-interval.", frozenset(range(1, len(names))))
    differences = []
    for metric in metrics:
        for c in arm_contrasts(study, metric):
            value, interval = formats.estimate_figure(c.interval, plus=True)
            verdict = "excludes zero" if c.interval.excludes_zero else "holds zero"
            reference = f" − {c.group.removeprefix('against ')}" if c.group.startswith("against") else ""
            differences.append(
                {
                    "metric": find_metric(metric).title,
                    "difference": f"{c.name}{reference}",
                    "mean": value,
                    "95 % interval": interval or "–",
                    "it": "no interval" if c.interval.low is None else verdict,
                    "pairs": str(c.interval.n),
                }
            )
    target, descriptions, tuned = (study.about.get(key) for key in ("target", "describe", "tuned"))
    title = f"Cold, random and GOT-D warm-up × plain and GGPO{f' on {target}' if target else ''}"
    descriptions = descriptions if isinstance(descriptions, dict) else {}
    lead = " ".join(f"{find_metric(name).title.capitalize()}: {text}" for name, text in descriptions.items())
    sections = [Section(title, [ChartGroup(charts), table, Notes(_notes(study, differences))], lead)]
    if differences:
        caption = "Seed-paired differences. Not corrected for the number of comparisons."
        paired = Table.of(differences, caption, words=("metric", "difference", "it"))
        sections.append(Section("All paired differences", [paired], folded=True))
    if isinstance(tuned, dict) and tuned:
        arms = {arm: settings for arm, settings in tuned.items() if isinstance(settings, dict)}
        keys = list(dict.fromkeys(key for settings in arms.values() for key in settings))
        cells = [[arm, *(formats.json_value(settings.get(key)) for key in keys)] for arm, settings in arms.items()]
        names, numeric = ["arm", *(key.replace("_", " ") for key in keys)], frozenset(range(1, len(keys) + 1))
        rates = Table(names, cells, "Equal trials for every arm.", numeric)
        sections.append(Section("Learning rates, tuned on dev with a seed of their own", [rates], folded=True))
    return sections


def _notes(study: Study, differences: list[dict[str, str]]) -> list[str]:
    notes = []
    clear = sum(row["it"] == "excludes zero" for row in differences)
    count = sum(row["it"] != "no interval" for row in differences)
    if count:
        notes.append(
            f"{clear} of {count} intervals exclude zero; "
            f"if nothing differed at all, about {max(round(count * 0.05), 1)} would by chance."
        )
    seeds = {c["seed"] for c in study.cells}
    if 1 < len(seeds) < 5:
        notes.append(
            f"With {len(seeds)} seeds a t-interval is wide, "
            f"{formats.number(t_quantile(0.975, len(seeds) - 1), 2)} standard errors either way: "
            "read this as a demonstration, not as evidence."
        )
    for metric, floor in study.floor.items():
        values = [v for arm in _sorted_arms(study) for v in study.values(*arm, metric).values()]
        if values and max(values) <= floor:
            notes.append(
                f"No run rises above the majority {metric} of {formats.number(floor)}: the task is uninformative here."
            )
    return notes


def _charts(study: Study, metric: str) -> list[Chart | None]:
    """Draw the arms and, next to them at the same height, their paired differences."""
    contrasts = [c for c in arm_contrasts(study, metric) if c.interval.low is not None]
    rows = len(contrasts) + len({c.group for c in contrasts})
    height = max(66 + 27 * rows, 66 + 30 * len(_sorted_arms(study)))
    return [_arm_chart(study, metric, height), _difference_chart(contrasts, metric, height)]


def _arm_chart(study: Study, metric: str, height: int) -> Chart | None:
    """Draw every arm's seeds, mean and interval; filled: plain, hollow: GGPO."""
    arms = {arm: values for arm in _sorted_arms(study) if (values := list(study.values(*arm, metric).values()))}
    if not arms:
        return None
    means = {arm: t_interval(values, bounds=find_metric(metric).bounds) for arm, values in arms.items()}
    decimals = formats.common_decimals([(m.value, m.low, m.high) for m in means.values()])
    rows = []
    for (warmup, regularizer), mean in means.items():
        name, text = _arm_name(warmup, regularizer), f"{mean.value:,.{decimals}f}"
        token, hollow = _ARM_COLOUR.get(warmup, "purple"), regularizer == "ggpo"
        singles = arms[warmup, regularizer]
        rows.append(IntervalRow(name, mean.value, mean.low, mean.high, text, token, hollow, singles))
    floor = study.floor.get(metric)
    seeds = sorted({len(values) for values in arms.values()})
    count = f"{seeds[0]} seeds" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds"
    better = "lower is better" if find_metric(metric).lower else "higher is better"
    title = find_metric(metric).title
    return interval_chart(
        f"study-{slugify(metric)}",
        rows,
        title=f"{formats.capitalise(title)} of every arm",
        caption=f"Mean over {count} with its 95 % t-interval; small dots are the seeds; hollow marks are GGPO; "
        f"{better}.",
        x=title,
        width=540,
        height=height,
        left=160,
        right=66,
        rule=floor,
        note=("dashed: majority baseline", "muted") if floor is not None else None,
    )


def _difference_chart(contrasts: list[Contrast], metric: str, height: int) -> Chart | None:
    """Draw seed-paired differences with intervals; those that exclude zero are coloured."""
    if not contrasts:
        return None
    lower = find_metric(metric).lower
    decimals = formats.common_decimals([(c.interval.value, c.interval.low, c.interval.high) for c in contrasts])
    rows: list[IntervalRow | str] = []
    for number, contrast in enumerate(contrasts):
        if number == 0 or contrast.group != contrasts[number - 1].group:
            rows.append(contrast.group)
        i = contrast.interval
        token = "muted" if not i.excludes_zero else "green" if (i.value < 0) == lower else "orange"
        text = formats.estimate(i.value, i.low, i.high, plus=True, decimals=decimals)[0]
        rows.append(IntervalRow(contrast.name, i.value, i.low, i.high, text, token))
    n = {c.interval.n for c in contrasts}
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
