"""Sections and key figures of a study."""

from __future__ import annotations

from experiments.report import findings, formats, plots_study
from experiments.report.blocks import Block, Figures, Notes, Section, Table, Tile
from experiments.report.load import Study
from experiments.stats import t_interval, t_quantile


def study_tiles(study: Study) -> list[Tile]:
    question = findings.study_question(study)
    if question is None:
        return []
    ours, base = (plots_study.arm_name(*arm) for arm in question)
    tiles = []
    for metric, d in findings.study_differences(study)[:3]:
        value, interval = formats.estimate(d.value, d.low, d.high, plus=True)
        note = f"{ours} − {base}, {d.n} paired seeds" if d.n > 1 else f"{ours} − {base}, one seed: no interval"
        if d.low is not None and not d.excludes_zero:
            note += "; the interval holds zero"
        tiles.append(Tile(f"Δ {formats.metric_name(metric)}", value, interval, note))
    return tiles


def study_sections(study: Study) -> list[Section]:
    metrics = findings.headline_metrics(study.metrics)
    charts = [c for m in metrics[:3] for c in plots_study.study_charts(study, m)]
    rows = []
    for arm in plots_study.arms(study):
        row = [plots_study.arm_name(*arm)]
        count = 0
        for metric in metrics:
            values = list(study.values(*arm, metric).values())
            count = max(count, len(values))
            mean = t_interval(values, bounds=formats.bounds(metric)) if values else None
            row.append(findings.with_interval(mean.value, mean.low, mean.high) if mean else "–")
        rows.append([*row, str(count)])
    names = [formats.metric_name(m) for m in metrics]
    table = Table(
        ["arm", *names, "seeds"], rows, "Mean over seeds with its 95 % t-interval.", frozenset(range(1, len(names) + 2))
    )
    differences = []
    for metric in metrics:
        for c in plots_study.contrasts(study, metric):
            value, interval = formats.estimate(c.interval.value, c.interval.low, c.interval.high, plus=True)
            verdict = (
                "no interval"
                if c.interval.low is None
                else "excludes zero"
                if c.interval.excludes_zero
                else "holds zero"
            )
            against = c.group.removeprefix("against ") if c.group.startswith("against") else ""
            pair = f"{c.name} − {against}" if against else c.name
            differences.append([formats.metric_name(metric), pair, value, interval or "–", verdict, str(c.interval.n)])
    blocks: list[Block] = [Figures(charts), table]
    blocks.append(Notes(_study_notes(study, differences)))
    target = study.about.get("target")
    title = f"Cold, random and GOT-D warm-up × plain and GGPO{f' on {target}' if target else ''}"
    found = [Section(title, [b for b in blocks if not (isinstance(b, Notes) and not b.sentences)], _described(study))]
    if differences:
        paired = Table(
            ["metric", "difference", "mean", "95 % interval", "it", "pairs"],
            differences,
            "Seed-paired differences. Not corrected for the number of comparisons.",
            frozenset({2, 3, 5}),
        )
        found.append(Section("All paired differences", [paired], folded=True))
    tuned = study.about.get("tuned")
    if isinstance(tuned, dict) and tuned:
        keys = list(dict.fromkeys(k for v in tuned.values() if isinstance(v, dict) for k in v))
        cells = [[arm, *(formats.plain(v.get(k)) for k in keys)] for arm, v in tuned.items() if isinstance(v, dict)]
        found.append(
            Section(
                "Learning rates, tuned on dev with a seed of their own",
                [
                    Table(
                        ["arm", *(k.replace("_", " ") for k in keys)],
                        cells,
                        "Equal trials for every arm.",
                        frozenset(range(1, len(keys) + 1)),
                    )
                ],
                folded=True,
            )
        )
    return found


def _described(study: Study) -> str:
    """What each metric was measured on, where the study says so."""
    said = study.about.get("describe")
    return (
        " ".join(f"{formats.metric_name(k).capitalize()}: {v}" for k, v in said.items())
        if isinstance(said, dict)
        else ""
    )


def _study_notes(study: Study, differences: list[list[str]]) -> list[str]:
    notes = []
    clear = sum(row[4] == "excludes zero" for row in differences)
    asked = sum(row[4] != "no interval" for row in differences)
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
        values = [v for arm in plots_study.arms(study) for v in study.values(*arm, metric).values()]
        if values and max(values) <= floor:
            notes.append(
                f"No run rises above the majority {metric} of {formats.number(floor)}: the task is uninformative here."
            )
    return notes
