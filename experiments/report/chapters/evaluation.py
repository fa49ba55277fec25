"""Page of models evaluated side by side: metrics, differences, and the map of groups with forgotten ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flatshift.experiments.report import formats
from flatshift.experiments.report.blocks import Block, ChapterPart, ChartGroup, KeyFigure, Notes, Section, Table
from flatshift.experiments.report.charts.intervals import IntervalRow, interval_chart
from flatshift.experiments.report.figure import WIDE, Chart
from flatshift.experiments.report.html import render_document
from flatshift.experiments.results.run import RunResults
from flatshift.finetune.evaluate.metrics import find_metric, sort_for_headline

Document = Mapping[str, Any]


def part(run: RunResults) -> ChapterPart | None:
    """Return the part for a directory of `flatshift eval --out`."""
    return _part(run.evaluation) if run.evaluation else None


def page(document: Document) -> str:
    """Return the whole page as HTML; the template escapes everything from files and settings."""
    name = ", ".join(subject["name"] for subject in document["subjects"])
    return render_document(_part(document), document, name=name, slug="evaluation")


def _part(document: Document) -> ChapterPart:
    grouped = document.get("group_by")
    sections = [Section(f"Figures on {split}", _metric_blocks(document, split)) for split in document["rows"]]
    if document.get("few_shot"):
        sections.append(_few_shot_section(document["few_shot"]))
    if grouped:
        for split in document["rows"]:
            sections += _group_sections(grouped, split)
    sections.append(Section("What to know", [Notes(document["notes"])]))
    facts = [
        ("evaluated on", ", ".join(document["data"] or ["the dev and test rows of the first run"])),
        ("rows", ", ".join(f"{n:,} {split}" for split, n in document["rows"].items())),
        ("task", ", ".join(sorted({subject["task"] for subject in document["subjects"]}))),
        ("precision", ", ".join(sorted({subject["precision"] for subject in document["subjects"]}))),
    ]
    return ChapterPart("evaluation", _findings(document), _tiles(document), sections, facts)


def _headline_metric(metrics: Mapping[str, Any]) -> str | None:
    return next((name for name in ("bits_per_byte", *sort_for_headline(metrics)) if name in metrics), None)


def _findings(document: Document) -> list[str]:
    """Return a sentence on each difference: better, worse or not clear."""
    sentences = []
    for name, splits in document["differences"].items():
        for split, metrics in splits.items():
            metric = _headline_metric(metrics)
            if metric is None:
                continue
            cell = metrics[metric]
            verdict = "no clear difference"
            if _is_clear(cell):
                verdict = "better" if (cell["value"] < 0) == find_metric(metric).lower else "worse"
            change = formats.with_interval(cell, plus=True)
            sentences.append(f"{name}: {verdict} in {find_metric(metric).title} on {split}, {change}.")
    return sentences


def _is_clear(cell: Mapping[str, Any]) -> bool:
    return cell["low"] is not None and not cell["low"] <= 0 <= cell["high"]


def _tiles(document: Document) -> list[KeyFigure]:
    split = next(iter(document["rows"]))
    tiles = []
    for name, splits in document["figures"].items():
        metric = _headline_metric(splits[split])
        if metric is not None:
            value, interval = formats.estimate_figure(splits[split][metric])
            tiles.append(KeyFigure(f"{find_metric(metric).title}, {split}", value, interval, name))
    return tiles[:6]


def _metric_blocks(document: Document, split: str) -> list[Block]:
    trees = {**document["figures"], **document["differences"]}
    metrics = list(dict.fromkeys(name for splits in trees.values() for name in splits.get(split, {})))
    rows = []
    for name, splits in trees.items():
        plus = name in document["differences"]
        cells = [formats.with_interval(splits.get(split, {}).get(metric), plus=plus) for metric in metrics]
        rows.append([name, *cells])
    caption = (
        "Intervals at the confidence of the recipe, by bootstrap over rows or documents. A difference asks both models "
        "of the same draws of the same rows."
    )
    columns = ["evaluated", *(find_metric(metric).title for metric in metrics)]
    return [Table(columns, rows, caption, frozenset(range(1, len(columns))))]


def _few_shot_section(few_shot: Document) -> Section:
    """Describe the prompt, and how accuracy changes with the score and the draw of worked examples."""
    results = [(name, *item) for name, splits in few_shot["subjects"].items() for item in splits.items()]
    scores = list(dict.fromkeys(score for _, _, result in results for score in result["by_score"]))
    lost = {"shots_dropped": "examples left out", "shots_missing": "examples missing", "rows_cut": "rows cut"}
    rows = []
    for name, split, result in results:
        seeds = ", ".join(formats.number(value) for value in result["by_seed"])
        cells = [formats.number(result["by_score"].get(score)) for score in scores]
        rows.append([name, split, *cells, seeds, *(f"{result.get(key, 0):,}" for key in lost)])
    head = ["evaluated", "split", *(f"accuracy by {score}" for score in scores), "by seed", *lost.values()]
    blocks: list[Block] = [Table(head, rows, numeric=frozenset(range(2, len(head))))]
    tests = [
        [name, split, f"{test['only_ours']:,}", f"{test['only_theirs']:,}", formats.number(test["p"])]
        for name, splits in few_shot["mcnemar"].items()
        for split, test in splits.items()
    ]
    if tests:
        head = [f"McNemar, seed {few_shot['seeds'][0]}", "split", "right: only the first", "only the second", "p"]
        blocks.append(Table(head, tests, numeric=frozenset([2, 3, 4])))
    blocks.append(Notes([f"Prompt {few_shot['prompt']}: {few_shot['text']}"]))
    lead = (
        f"{few_shot['shots']} worked examples before each row; figures above rank by {few_shot['score']}. The other "
        "scores are for information: choosing the best of them after looking takes rows of its own."
    )
    return Section("How it was asked", blocks, lead)


def _group_sections(grouped: Document, split: str) -> list[Section]:
    sections = []
    families, counts = grouped["families"], grouped.get("rows_by_split", {}).get(split, grouped["rows"])
    ordered = [(family, group) for family, members in families.items() for group in members] or [
        ("", group) for group in grouped["rows"]
    ]
    for name, splits in grouped["differences"].items():
        if any(splits[split].values()):
            sections.append(_change_section(grouped, name, split, ordered))
    first = next(iter(grouped["figures"].values()))[split]
    metrics = list(dict.fromkeys(metric for group in first.values() for metric in group))
    for subject, splits in grouped["figures"].items():
        rows = []
        for family, group in ordered:
            cells = [formats.with_interval(splits[split][group].get(metric)) for metric in metrics]
            words = [family, _group_label(grouped, group)] if families else [_group_label(grouped, group)]
            rows.append([*words, f"{counts[group]:,}", *cells])
        macro = grouped["macro"][subject].get(split, {})
        cells = [formats.with_interval(macro.get(metric)) for metric in metrics]
        rows.append([*([""] if families else []), "mean of all", "", *cells])
        head = ["family"] * bool(families) + [grouped["column"], "rows", *(find_metric(m).title for m in metrics)]
        numeric = frozenset(range(2 if families else 1, len(head)))
        title = f"{subject} by {grouped['column']}, {split}"
        sections.append(Section(title, [Table(head, rows, numeric=numeric)], folded=bool(sections)))
    return sections


def _group_label(grouped: Document, group: str) -> str:
    name = grouped["names"].get(group)
    return f"{group} {name}" if name else group


def _change_section(grouped: Document, name: str, split: str, ordered: Sequence[tuple[str, str]]) -> Section:
    """Chart the change in each group by family; groups not trained on are marked, as they may be forgotten."""
    groups = grouped["differences"][name][split]
    name_of_metric = next(m for m in map(_headline_metric, groups.values()) if m is not None)
    metric = find_metric(name_of_metric)
    chart = _change_chart(grouped, name, split, ordered, name_of_metric)
    macro = grouped["macro_differences"][name][split]
    rows = [[kind, formats.with_interval(metrics.get(name_of_metric), plus=True)] for kind, metrics in macro.items()]
    table = Table(["mean over", f"change in {metric.title}"], rows, numeric=frozenset([1]))
    blocks: list[Block] = [ChartGroup([chart]), table]
    if grouped["trained"]:
        worse = [
            _group_label(grouped, group)
            for _, group in ordered
            if group not in grouped["trained"]
            and (cell := groups[group].get(name_of_metric)) is not None
            and cell["low"] is not None
            and (cell["low"] > 0 if metric.lower else cell["high"] < 0)
        ]
        note = (
            f"Forgotten: of {len(ordered) - len(grouped['trained'])} groups that were not trained on, {len(worse)} are "
            f"clearly worse: {', '.join(worse) or 'none'}."
        )
        blocks.append(Notes([note]))
    lead = f"{formats.capitalise(metric.title)} of the one less that of the other over the same rows"
    lead += "; below 0 is better." if metric.lower else "; above 0 is better."
    return Section(f"{name}: the map by {grouped['column']}, {split}", blocks, lead)


def _change_chart(grouped: Document, name: str, split: str, ordered: Sequence[tuple[str, str]], metric: str) -> Chart:
    groups, rows, heading = grouped["differences"][name][split], list[IntervalRow | str](), ""
    lower = find_metric(metric).lower
    for family, group in ordered:
        if family != heading:
            rows.append(family)
            heading = family
        cell = groups[group].get(metric)
        if cell is None or cell["value"] is None:
            continue
        token = ("blue" if (cell["value"] < 0) == lower else "orange") if _is_clear(cell) else "muted"
        hollow = bool(grouped["trained"]) and group not in grouped["trained"]
        label, text = _group_label(grouped, group), formats.signed_number(cell["value"])
        rows.append(IntervalRow(label, cell["value"], cell["low"], cell["high"], text, token, hollow))
    return interval_chart(
        f"map-{split}",
        rows,
        title=f"Change in {find_metric(metric).title} by {grouped['column']}",
        caption="Blue: clearly better, orange: clearly worse, grey: not clear."
        + (" Hollow: not trained on." if grouped["trained"] else ""),
        x=f"{name}: {find_metric(metric).unit or find_metric(metric).title}",
        width=WIDE,
        height=70 + 22 * len(rows),
        left=170,
        right=90,
        zero=True,
    )
