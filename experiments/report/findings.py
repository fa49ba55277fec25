"""One plain sentence about each kind of run, by simple rules, never saying more than its intervals allow."""

from __future__ import annotations

from collections import Counter
from typing import Any

from experiments.report import formats
from experiments.report.load import Run, Selection, Study
from experiments.report.plots_study import arm_name
from experiments.report.sweepanalysis import Analysis, Direction, main_axis
from experiments.report.sweepdata import SweepData
from experiments.stats import Interval, paired_difference

HEADLINE_METRICS = (
    "perplexity", "bits_per_byte", "pseudo_perplexity", "accuracy", "exact_match", "f1_macro", "spearman", "rmse",
    "loss",
)  # fmt: skip
"""Metrics in the order in which a headline takes them."""


def headline_metrics(names: Any) -> list[str]:
    """Known metrics first, in the order of a headline; then the others as they come."""
    return [m for m in HEADLINE_METRICS if m in names] + [m for m in names if m not in HEADLINE_METRICS]


def best_split(tree: dict[str, Any]) -> str | None:
    """test where it was judged, else dev, else whatever there is."""
    return next((s for s in ("test", "dev", *tree) if s in tree), None)


def with_interval(value: float, low: float | None, high: float | None, *, plus: bool = False) -> str:
    """`0.71 (0.68 to 0.74)`."""
    shown, interval = formats.estimate(value, low, high, plus=plus)
    return f"{shown} ({interval})" if interval else shown


def study_question(study: Study) -> tuple[tuple[str, str], tuple[str, str]] | None:
    """The pair a study's headline is about: GOT-D against the random control, else against the cold start."""
    names = {(c["warmup"], c["regularizer"]) for c in study.cells}
    pairs = [
        (("gotd", "plain"), ("random", "plain")),
        (("gotd", "plain"), ("cold", "plain")),
        (("cold", "ggpo"), ("cold", "plain")),
    ]
    return next(((a, b) for a, b in pairs if a in names and b in names), None)


def study_differences(study: Study) -> list[tuple[str, Interval]]:
    """(metric, paired difference) of the question, in headline order."""
    question = study_question(study)
    if question is None:
        return []
    ours, base = question
    pairs = [
        (m, paired_difference(study.values(*ours, m), study.values(*base, m))) for m in headline_metrics(study.metrics)
    ]
    return [(m, d) for m, d in pairs if d is not None]


def study_finding(study: Study) -> str:
    """How the question came out, for the first two metrics."""
    question, differences = study_question(study), study_differences(study)
    if question is None or not differences:
        return f"{len(study.cells)} runs; no two arms share a seed, so nothing can be compared in pairs."
    parts = []
    for metric, d in differences[:2]:
        name = formats.metric_name(metric)
        if d.low is None:
            parts.append(f"{name} differs by {formats.signed(d.value)} on a single seed, which proves nothing")
        elif not d.excludes_zero:
            parts.append(f"shows no clear difference in {name} ({with_interval(d.value, d.low, d.high, plus=True)})")
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


def train_finding(run: Run) -> str:
    """The first metric of the split that counts, beside the majority floor where there is one."""
    split = best_split(run.eval)
    if split is None:
        steps = max((ln["step"] for ln in run.metrics.lines), default=0)
        return f"Not evaluated yet; {steps:,} updates logged." if steps else ""
    metrics = {m: c for m, c in run.eval[split].items() if m not in formats.FLOOR_NAMES}
    order = ["accuracy", "exact_match", *headline_metrics(metrics)]
    metric = next((m for m in order if m in metrics), None)
    if metric is None:
        return ""
    cell = metrics[metric]
    value = with_interval(cell["value"], cell.get("low"), cell.get("high"))
    sentence = f"{split.capitalize()} {formats.metric_name(metric)} is {value}"
    floor = run.eval[split].get("majority_floor", {}).get("value")
    if metric == "accuracy" and floor is not None:
        low, high = cell.get("low"), cell.get("high")
        if low is not None and low > floor:
            sentence += f", above the majority floor of {formats.number(floor)}"
        elif high is not None and high < floor:
            sentence += f", below the majority floor of {formats.number(floor)}"
        else:
            sentence += f", which is not clearly different from the majority floor of {formats.number(floor)}"
    return sentence + "."


def selection_finding(selection: Selection) -> str:
    """How many were chosen, and which domain gained most."""
    if selection.table is None:
        return ""
    total, taken = selection.table.num_rows, selection.taken
    if not total or not taken:
        return f"Nothing was chosen from {total:,} records."
    method = method_name(selection)
    sentence = f"{method} chose {taken:,} of {total:,} records ({formats.percent(taken / total)})"
    counts = selection.domains
    if len(counts) > 1:
        # Of the domains that make up at least a twentieth of the selection, the one that gained most.
        shares = {name: (pool / total, chosen / taken) for name, (pool, chosen) in counts.items()}
        large = [name for name, (_, after) in shares.items() if after >= 0.05]
        name = max(large, key=lambda n: (shares[n][1] / shares[n][0], n)) if large else None
        if name is not None and shares[name][1] > shares[name][0]:
            before, after = map(formats.percent, shares[name])
            sentence += f"; “{name}” grows from {before} of the pool to {after} of the selection"
    return sentence + "."


def method_name(selection: Selection) -> str:
    """`gotd` → `GOT-D`."""
    method = selection.about.get("method")
    kind = method.get("kind") if isinstance(method, dict) else method
    names = {"gotd": "GOT-D", "gotd-contrast": "GOT-D with negatives", "random": "A random draw", "knn": "kNN"}
    names |= {"dsir": "DSIR", "tsds": "TSDS", "less": "Gradient similarity", "perplexity": "Perplexity"}
    return {**names, "length": "Length", "domains": "Shares of domains"}.get(str(kind), "The selector")


def sweep_finding(data: SweepData, analysis: Analysis) -> str:
    """Where the mean test error is lowest, and the verdict along the first axis that was judged."""
    axis = main_axis(data)
    test, _ = data.error_columns()
    lowest = data.best(test)
    if axis is None or lowest is None:
        return f"{data.done:,} of {len(data):,} cells are finished; there is no curve to draw yet."
    where, best = lowest
    mean = with_interval(best.value, best.low, best.high)
    sentence = f"Mean {formats.figure_name(test)} is lowest at {formats.setting(data.whole(where))}: {mean}"
    judged = [d for d in analysis.directions if d.judged]
    if judged:
        return f"{sentence}; along {formats.axis_name(judged[0].axis)}: {_kinds(judged[0])}."
    refused = any(d.refused for d in analysis.directions)
    return sentence + ("; too few seeds or values for a verdict." if refused else ".")


def sweep_details(analysis: Analysis) -> str:
    """The verdicts along the other axes."""
    judged = [d for d in analysis.directions if d.judged][1:]
    said = "; ".join(f"along {formats.axis_name(d.axis)}: {_kinds(d)}" for d in judged)
    return f"{said[:1].upper()}{said[1:]}." if said else ""


def _kinds(direction: Direction) -> str:
    """`double descent` for one curve, `2 × double descent, 1 × undecided` for several."""
    kinds = Counter(j.verdict.kind for j in direction.judged)
    if len(direction.judged) == 1:
        return next(iter(kinds))
    return ", ".join(f"{n} × {kind}" for kind, n in sorted(kinds.items(), key=lambda item: (-item[1], item[0])))
