"""Side-by-side comparison of training runs: differing settings, metrics with differences, overlaid curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flatshift.experiments.report import formats
from flatshift.experiments.report.blocks import SIDE_BY_SIDE, Block, Chapter, ChartGroup, Notes, Section, Table
from flatshift.experiments.report.charts.training import overlaid_loss_chart
from flatshift.experiments.results.predictions import Difference, metric_differences
from flatshift.experiments.results.run import RunResults, best_split, headline_metric
from flatshift.finetune.evaluate.metrics import find_metric

_NOT_SETTINGS = ("extends", "sweep", "comparison", "tracker")
_LONGEST = 60


def side_by_side_chapter(runs: Sequence[RunResults]) -> Chapter | None:
    """Return the chapter on all training runs among `runs`; None for fewer than two. The first one is the reference."""
    trained = [run for run in runs if (run.eval or run.metrics.lines) and run.recipe]
    if len(trained) < 2:
        return None
    names = _unique_names(trained)
    sections = [_settings_section(trained, names), *_metric_sections(trained, names), *_curve_sections(trained, names)]
    return Chapter(
        name=SIDE_BY_SIDE,
        kind=f"{len(trained)} runs",
        finding=_finding(trained, names),
        facts=[],
        tiles=[],
        sections=[section for section in sections if section is not None],
        weight=1000,
    )


def metric_lines(runs: Sequence[RunResults]) -> str:
    """The figures of the split that counts, as the page has them, for a terminal; empty without any."""
    names = _unique_names(runs)
    split = _shared_split(runs)
    table = None if split is None else _metric_table(runs, names, split)
    if table is None:
        return ""
    columns = [str(split), *table.columns[1:]]
    shown = formats.align_columns(columns, [list(row) for row in table.rows], right=range(2, len(columns)))
    return "\n".join([shown, table.caption, _finding(runs, names)])


def _unique_names(runs: Sequence[RunResults]) -> list[str]:
    """Return folder names, prefixed with the parent folder if two are equal."""
    short = [run.name for run in runs]
    return [
        name if short.count(name) == 1 else f"{run.path.resolve().parent.name}/{name}"
        for name, run in zip(short, runs, strict=True)
    ]


def _shared_split(runs: Sequence[RunResults]) -> str | None:
    """Return test if all runs have it, else dev, else any split they share."""
    shared = [split for split in runs[0].eval if all(split in run.eval for run in runs)]
    return best_split({split: {} for split in shared})


def _settings_section(runs: Sequence[RunResults], names: Sequence[str]) -> Section:
    flat = [_flatten(run.recipe) for run in runs]
    keys = [key for key in dict.fromkeys(k for tree in flat for k in tree) if not key.startswith(_NOT_SETTINGS)]
    differ = [key for key in keys if len({_format_setting(tree.get(key)) for tree in flat}) > 1]
    backbones = [run.manifest.get("backbone", {}).get("fingerprint", "") for run in runs]
    rows = [
        {"key": key, **{n: _format_setting(t.get(key)) for n, t in zip(names, flat, strict=True)}} for key in differ
    ]
    if len(set(backbones)) > 1 and "backbone" not in differ:
        rows.append({"key": "backbone's weights", **{n: str(b)[:12] for n, b in zip(names, backbones, strict=True)}})
    if not rows:
        return Section("Settings that differ", [Notes(["None: the runs have the same recipe."])])
    same = len(keys) - len(differ)
    return Section("Settings that differ", [Table.of(rows, f"{same} more settings agree.", words=("key", *names))])


def _flatten(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {k: v for key, child in value.items() for k, v in _flatten(child, f"{path}.{key}".lstrip(".")).items()}
    return {path: value}


def _format_setting(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else formats.axis_value(value)
    return text if len(text) <= _LONGEST else f"…{text[1 - _LONGEST :]}"


def _metric_sections(runs: Sequence[RunResults], names: Sequence[str]) -> list[Section]:
    found = []
    for split in (s for s in ("test", "dev") if sum(s in run.eval for run in runs) > 1):
        having = [(run, name) for run, name in zip(runs, names, strict=True) if split in run.eval]
        table = _metric_table([run for run, _ in having], [name for _, name in having], split)
        if table is not None:
            found.append(Section(f"Figures of {split}", [table]))
    return found


def _metric_table(runs: Sequence[RunResults], names: Sequence[str], split: str) -> Table | None:
    """Build a row for each metric and run; runs after the first also show their difference from the first."""
    judged = [run.judged(split) for run in runs]
    more = [{}, *(metric_differences(one, judged[0]) for one in judged[1:])]
    metrics = [m for m in judged[0].metrics if any(m in found for found in more)]
    if not metrics:
        return None
    rows = [
        [
            find_metric(metric).title if not place else "",
            name,
            formats.with_interval(one.metrics.get(metric)),
            _format_difference(found.get(metric)) if place else "",
        ]
        for metric in metrics
        for place, (name, one, found) in enumerate(zip(names, judged, more, strict=True))
    ]
    every = [one for found in more for one in found.values()]
    return Table(["metric", "run", "value", f"minus {names[0]}"], rows, _caption(every), frozenset({2, 3}))


def _format_difference(found: Difference | None) -> str:
    if found is None:
        return "–"
    shown, interval = formats.estimate(found.value, found.low, found.high, plus=True)
    mark = "" if found.paired or not interval else " †"
    return f"{shown} ({interval}){mark}" if interval else shown


def _caption(found: Sequence[Difference]) -> str:
    paired = {one.n for one in found if one.paired}
    said = "95 % bootstrap intervals over rows; they say nothing about other seeds."
    if paired:
        rows = " or ".join(f"{n:,}" for n in sorted(paired))
        said += f" A difference is that of the same {rows} rows, drawn together."
    if any(not one.paired for one in found):
        said += (
            " † Not paired: the rows differ, or what was said of each row was not kept; the interval takes both runs "
            "as evaluated on different rows, which is too wide where they are the same."
        )
    return said


def _finding(runs: Sequence[RunResults], names: Sequence[str]) -> str:
    """Compare the best run by the headline metric with the first run, or with the second best if the first is best."""
    split = _shared_split(runs)
    metric = headline_metric(runs[0].eval[split]) if split is not None else None
    if split is None or metric is None or not all(metric in run.eval[split] for run in runs):
        return f"{len(runs)} runs side by side."
    lower = find_metric(metric).lower
    order = sorted(range(len(runs)), key=lambda i: runs[i].eval[split][metric]["value"] * (1 if lower else -1))
    best, other = order[0], 0 if order[0] else order[1]
    found = metric_differences(runs[best].judged(split), runs[other].judged(split))[metric]
    shown, interval = formats.estimate(abs(found.value), *_absolute_interval(found))
    what = f"{split} {find_metric(metric).title}"
    if not found.clear:
        first, second = (f"{names[i]} has {formats.with_interval(runs[i].eval[split][metric])}" for i in (best, other))
        return f"No run is shown to be the best in {what}: {first}, {second}, not clearly apart."
    how = f", paired on {found.n:,} rows" if found.paired else ", not paired"
    return f"{names[best]} beats {names[other]} in {what} by {shown} ({interval}{how})."


def _absolute_interval(found: Difference) -> tuple[float | None, float | None]:
    if found.low is None or found.high is None:
        return None, None
    return (found.low, found.high) if found.value >= 0 else (-found.high, -found.low)


def _curve_sections(runs: Sequence[RunResults], names: Sequence[str]) -> list[Section]:
    stages = dict.fromkeys(stage for run in runs for stage in run.metrics.stages)
    charts = []
    for stage in stages:
        for split in ("train", "dev"):
            units = {run.loss_unit(stage) for run in runs}
            curves = {n: run.metrics.series(stage, split, "loss") for n, run in zip(names, runs, strict=True)}
            chart = overlaid_loss_chart(curves, stage=stage, split=split, unit=" or ".join(sorted(units)))
            charts += [chart] if chart is not None else []
    blocks: list[Block] = [ChartGroup(charts)]
    return [Section("Curves", blocks)] if charts else []
