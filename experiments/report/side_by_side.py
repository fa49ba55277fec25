"""Side-by-side comparison of training runs: differing settings, metrics with differences, overlaid curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flatshift.experiments.report import formats
from flatshift.experiments.report.blocks import SIDE_BY_SIDE, Chapter, ChartGroup, Notes, Section, Table
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
    sections = [_settings_section(trained, names)]
    for split in ("test", "dev"):
        evaluated = [(run, name) for run, name in zip(trained, names, strict=True) if split in run.eval]
        if len(evaluated) > 1:
            table = _metric_table([run for run, _ in evaluated], [name for _, name in evaluated], split)
            sections.append(Section(f"Figures of {split}", [table]))
    sections.append(_curve_section(trained, names))
    return Chapter(SIDE_BY_SIDE, f"{len(trained)} runs", _finding(trained, names), [], [], sections, weight=1000)


def metric_lines(runs: Sequence[RunResults]) -> str:
    """Return the figures of the split that counts, as the page has them, for a terminal; empty without any."""
    names = _unique_names(runs)
    split = _shared_split(runs)
    table = None if split is None else _metric_table(runs, names, split)
    if table is None:
        return ""
    columns = [str(split), *table.columns[1:]]
    text = formats.align_columns(columns, table.rows, right=range(2, len(columns)))
    return "\n".join([text, table.caption, _finding(runs, names)])


def _unique_names(runs: Sequence[RunResults]) -> list[str]:
    """Return folder names, prefixed with as many parent folders as tell them apart, else numbered."""
    names, above = [run.name for run in runs], [run.path.resolve().parents for run in runs]
    for depth in range(max(map(len, above))):
        pairs = zip(names, [own[depth].name if depth < len(own) else "" for own in above], strict=True)
        names = [name if names.count(name) == 1 else f"{folder}/{name}".lstrip("/") for name, folder in pairs]
    return [name if names.count(name) == 1 else f"{name} ({place})" for place, name in enumerate(names, 1)]


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


def _metric_table(runs: Sequence[RunResults], names: Sequence[str], split: str) -> Table | None:
    """Build a row for each metric and run; runs after the first also show their difference from the first."""
    first, *others = [run.split_evaluation(split) for run in runs]
    differences = [metric_differences(evaluation, first) for evaluation in others]
    metrics = [
        metric
        for metric in first.metrics
        if not find_metric(metric).is_floor and any(metric in evaluation.metrics for evaluation in others)
    ]
    if not metrics:
        return None
    rows = []
    for metric in metrics:
        rows.append([find_metric(metric).title, names[0], formats.with_interval(first.metrics.get(metric)), ""])
        for name, evaluation, each in zip(names[1:], others, differences, strict=True):
            value, difference = formats.with_interval(evaluation.metrics.get(metric)), each.get(metric)
            text = formats.with_interval(difference, plus=True)
            marked = difference is not None and not difference.paired and text.endswith(")")
            rows.append(["", name, value, f"{text} †" if marked else text])
    caption = _caption([difference for each in differences for difference in each.values()])
    if any(evaluation.loss != first.loss for evaluation in others):
        caption += " Losses of different tasks or tokens are not subtracted."
    return Table(["metric", "run", "value", f"minus {names[0]}"], rows, caption, frozenset({2, 3}))


def _caption(differences: Sequence[Difference]) -> str:
    paired = {difference.n for difference in differences if difference.paired}
    caption = "Bootstrap intervals over rows, at each run's eval.confidence, differences at 95 %; none over seeds."
    if paired:
        rows = " or ".join(f"{n:,}" for n in sorted(paired))
        caption += f" A difference is that of the same {rows} rows, drawn together."
    if any(not difference.paired for difference in differences):
        caption += (
            " † Not paired: the rows differ, or what was said of each row was not kept; the interval takes both runs "
            "as evaluated on different rows, which is too wide where they are the same."
        )
    return caption


def _finding(runs: Sequence[RunResults], names: Sequence[str]) -> str:
    """Compare the best run by the headline metric with the first run, or with the second best if the first is best."""
    split = _shared_split(runs)
    metric = headline_metric(runs[0].eval[split]) if split is not None else None
    if split is None or metric is None or not all(metric in run.eval[split] for run in runs):
        return f"{len(runs)} runs side by side."
    evaluations = [run.split_evaluation(split) for run in runs]
    if not all(metric in metric_differences(evaluation, evaluations[0]) for evaluation in evaluations):
        return f"{len(runs)} runs side by side; their losses are of different tasks or tokens."
    lower = find_metric(metric).lower
    order = sorted(range(len(runs)), key=lambda i: runs[i].eval[split][metric]["value"] * (1 if lower else -1))
    best, other = order[0], 0 if order[0] else order[1]
    difference = metric_differences(evaluations[best], evaluations[other])[metric]
    endpoint = f"{split} {find_metric(metric).title}"
    if not difference.excludes_zero:
        values = [f"{names[i]} has {formats.with_interval(runs[i].eval[split][metric])}" for i in (best, other)]
        return f"No run is shown to be the best in {endpoint}: {', '.join(values)}, not clearly apart."
    low, high = difference.low, difference.high
    if difference.value < 0 and low is not None and high is not None:
        low, high = -high, -low
    text, interval = formats.estimate(abs(difference.value), low, high)
    basis = f"paired on {difference.n:,} rows" if difference.paired else "not paired"
    return f"{names[best]} beats {names[other]} in {endpoint} by {text} ({interval}, {basis})."


def _curve_section(runs: Sequence[RunResults], names: Sequence[str]) -> Section:
    stages = dict.fromkeys(stage for run in runs for stage in run.metrics.stages)
    charts = []
    for stage in stages:
        for loss in dict.fromkeys(run.loss_settings for run in runs):
            same = {n: run for n, run in zip(names, runs, strict=True) if run.loss_settings == loss}
            unit = next(run.loss_unit(stage) for run in same.values())
            for split in ("train", "dev"):
                curves = {name: run.metrics.series(stage, split, "loss") for name, run in same.items()}
                charts.append(overlaid_loss_chart(curves, stage=stage, split=split, unit=unit))
    return Section("Curves", [ChartGroup(charts)])
