"""Sections and key figures of a study and of a sweep."""

from __future__ import annotations

from experiments.report import findings, formats, plots_study
from experiments.report.blocks import Block, Figures, Notes, Section, Table, Tile
from experiments.report.load import Study
from experiments.report.sweepdata import INTERPOLATION, SweepData
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


def sweep_tiles(data: SweepData) -> list[Tile]:
    axis, _, _ = plots_study.sweep_axes(data)
    test, _ = data.error_columns()
    tiles = []
    lowest = data.best(test)
    if axis is not None and lowest is not None:
        where, best = lowest
        at = ", ".join(f"{k} = {v}" for k, v in where.items())
        split, _, metric = test.partition(".")
        shown, interval = formats.estimate(best.value, best.low, best.high)
        tiles.append(Tile(f"lowest {split} {formats.metric_name(metric)}", shown, interval, f"at {at}; {best.n} runs"))
        first = data.threshold(axis, {}) if len(data.axes) == 1 else None
        if data.has("train.error") and len(data.axes) == 1:
            shown = str(first) if first is not None else "not reached"
            tiles.append(
                Tile("interpolation threshold", shown, "", f"first {axis} with train error ≤ {INTERPOLATION:g}")
            )
    note = f"{data.seeds} seeds each" + (f", {len(data.failed)} failed" if data.failed else "")
    tiles.append(Tile("cells finished", f"{len(data.done)} / {len(data.rows)}", "", note))
    return tiles


def _threshold_notes(data: SweepData) -> list[str]:
    """Whether the axis can show an interpolation peak at all: it must begin above the threshold and end below."""
    axis, _, _ = plots_study.sweep_axes(data)
    if axis is None or len(data.axes) != 1 or not data.has("train.error"):
        return []
    curve = data.curve("train.error", axis, {})
    first = data.threshold(axis, {})
    if first is None:
        return [f"Train error stays above {INTERPOLATION:g}: nothing interpolates, so this axis shows no peak there."]
    if curve and first == curve[0][0]:
        return [
            f"Train error is at most {INTERPOLATION:g} from the smallest {axis} on: every value interpolates, so this "
            "axis cannot show an interpolation peak; take more rows, more label noise or fewer steps."
        ]
    return []


def sweep_sections(data: SweepData) -> list[Section]:
    blocks: list[Block] = []
    charts = plots_study.sweep_curves(data)
    heat = plots_study.heat_map(data)
    if charts or heat:
        blocks.append(Figures([*([heat] if heat else []), *charts]))
    columns = [c for c in dict.fromkeys([*data.error_columns(), "test.loss", "train.loss"]) if data.has(c)]
    if data.axes and columns:
        axes = [*data.axes]
        rows = []
        for where in data.settings():
            points = [data.at(c, where) for c in columns]
            cells = [findings.with_interval(p.value, p.low, p.high) if p else "–" for p in points]
            rows.append([*map(str, where.values()), *cells, str(max((p.n for p in points if p), default=0))])
        names = [*axes, *(c.replace(".", " ").replace("_", " ") for c in columns), "runs"]
        blocks.append(
            Table(names, rows, "Mean over seeds with its 95 % t-interval.", frozenset(range(len(axes), len(names))))
        )
    notes = []
    if data.fixed:
        notes.append("The same in every cell: " + ", ".join(f"{k} = {v}" for k, v in data.fixed.items()) + ".")
    notes += _threshold_notes(data)
    if len(charts) == 12:
        notes.append("Only the first 12 settings of the other axes are drawn; the table has all.")
    notes += [f"Cell {row.get('cell')} failed: {row.get('reason')}" for row in data.failed[:5]]
    if len(data.failed) > 5:
        notes.append(f"{len(data.failed) - 5} more cells failed; cells.parquet has their reasons.")
    if charts:
        notes.append(
            "Bands are pointwise: with many points some will look like a bump by chance. "
            "There is no formal peak test in this version."
        )
    if notes:
        blocks.append(Notes(notes))
    return [Section("Sweep", blocks)] if blocks else []
