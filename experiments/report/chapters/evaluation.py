"""Page of models evaluated side by side: metrics, differences, and the map of groups with forgotten ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flatshift.experiments.report import formats
from flatshift.experiments.report.blocks import (
    Block,
    Chapter,
    ChapterPart,
    ChartGroup,
    KeyFigure,
    Notes,
    Section,
    Table,
)
from flatshift.experiments.report.charts.intervals import IntervalRow, interval_chart
from flatshift.experiments.report.figure import WIDE, Chart
from flatshift.experiments.report.html import render
from flatshift.experiments.results.run import RunResults
from flatshift.finetune.evaluate.metrics import find_metric, sort_for_headline

Document = Mapping[str, Any]


def part(run: RunResults) -> ChapterPart | None:
    """Return the part for a directory of `flatshift eval --out`."""
    return _part(run.evaluation) if run.evaluation else None


def page(document: Document) -> str:
    """Return the whole page as HTML; the template escapes everything from files and settings."""
    made = _part(document)
    chapter = Chapter(
        name=", ".join(subject["name"] for subject in document["subjects"]),
        kind=made.kind,
        finding=made.findings[0] if made.findings else "",
        details=made.findings[1:],
        facts=made.facts,
        tiles=made.tiles,
        sections=made.sections,
        slug="evaluation",
        command=str(document.get("command", "")),
    )
    return render([chapter])


def _part(document: Document) -> ChapterPart:
    grouped = document.get("group_by")
    sections = [Section(f"Figures on {split}", _metric_blocks(document, split)) for split in document["rows"]]
    if document.get("few_shot"):
        sections.append(_few_shot_section(document["few_shot"]))
    if grouped:
        for split in document["rows"]:
            sections += _group_sections(document, grouped, split)
    if document["notes"]:
        sections.append(Section("What to know", [Notes(document["notes"])]))
    facts = [
        ("rows", ", ".join(f"{n:,} {split}" for split, n in document["rows"].items())),
        ("task", ", ".join(sorted({subject["task"] for subject in document["subjects"]}))),
        ("precision", ", ".join(sorted({subject["precision"] for subject in document["subjects"]}))),
    ]
    return ChapterPart("evaluation", _findings(document), _tiles(document), sections, facts)


def _headline_metric(metrics: Mapping[str, Any]) -> str | None:
    return next((name for name in ("bits_per_byte", *sort_for_headline(metrics)) if name in metrics), None)


def _findings(document: Document) -> list[str]:
    """Return a sentence on each difference: better, worse or not clear."""
    said = []
    for name, splits in document["differences"].items():
        for split, metrics in splits.items():
            metric = _headline_metric(metrics)
            if metric is None:
                continue
            found = metrics[metric]
            low, high = found["low"], found["high"]
            title = find_metric(metric).title
            shown = formats.with_interval(found, plus=True)
            if low is None or low <= 0 <= high:
                said.append(f"{name}: no clear difference in {title} on {split}, {shown}.")
            else:
                better = (found["value"] < 0) == find_metric(metric).lower
                said.append(f"{name}: {'better' if better else 'worse'} in {title} on {split}, {shown}.")
    return said


def _tiles(document: Document) -> list[KeyFigure]:
    split = next(iter(document["rows"]))
    tiles = []
    for name, splits in document["figures"].items():
        metric = _headline_metric(splits[split])
        if metric is not None:
            value, interval = formats.estimate(*(splits[split][metric][k] for k in ("value", "low", "high")))
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


def _few_shot_section(asked: Document) -> Section:
    """Describe the prompt, and how accuracy changes with the score and the draw of worked examples."""
    scores = list(
        dict.fromkeys(s for parts in asked["subjects"].values() for found in parts.values() for s in found["by_score"])
    )
    rows = []
    for name, parts in asked["subjects"].items():
        for split, found in parts.items():
            seeds = ", ".join(formats.number(value) for value in found["by_seed"])
            cells = [formats.number(found["by_score"].get(score)) for score in scores]
            rows.append([name, split, *cells, seeds, f"{found['shots_dropped']:,}"])
    head = ["evaluated", "split", *(f"accuracy by {score}" for score in scores), "by seed", "examples left out"]
    blocks: list[Block] = [Table(head, rows, numeric=frozenset(range(2, len(head))))]
    tests = [
        [name, split, f"{test['only_ours']:,}", f"{test['only_theirs']:,}", formats.number(test["p"])]
        for name, parts in asked["mcnemar"].items()
        for split, test in parts.items()
    ]
    if tests:
        head = ["McNemar", "split", "right: only the first", "only the second", "p"]
        blocks.append(Table(head, tests, numeric=frozenset([2, 3, 4])))
    blocks.append(Notes([f"Prompt {asked['prompt']}: {asked['text']}"]))
    lead = (
        f"{asked['shots']} worked examples before each row; figures above rank by {asked['score']}. The other scores "
        "are for information: choosing the best of them after looking takes rows of its own."
    )
    return Section("How it was asked", blocks, lead)


def _group_sections(document: Document, grouped: Document, split: str) -> list[Section]:
    sections = []
    families = grouped["families"]
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
            rows.append([*words, f"{grouped['rows'][group]:,}", *cells])
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
    found = grouped["differences"][name][split]
    metric = next(m for m in map(_headline_metric, found.values()) if m is not None)
    about = find_metric(metric)
    chart = _change_chart(grouped, name, split, ordered, metric)
    macro = grouped["macro_differences"][name][split]
    rows = [[kind, formats.with_interval(metrics.get(metric), plus=True)] for kind, metrics in macro.items()]
    blocks: list[Block] = [
        ChartGroup([chart]),
        Table(["mean over", f"change in {about.title}"], rows, numeric=frozenset([1])),
    ]
    if grouped["trained"]:
        lost = [
            group
            for _, group in ordered
            if group not in grouped["trained"]
            and (cell := found[group].get(metric)) is not None
            and cell["low"] is not None
            and (cell["low"] > 0 if about.lower else cell["high"] < 0)
        ]
        others = len(ordered) - len(grouped["trained"])
        told = ", ".join(_group_label(grouped, group) for group in lost) or "none"
        blocks.append(
            Notes([f"Forgotten: of {others} groups that were not trained on, {len(lost)} are clearly worse: {told}."])
        )
    lead = f"{about.title.capitalize()} of the one less that of the other over the same rows" + (
        "; below 0 is better." if about.lower else "; above 0 is better."
    )
    return Section(f"{name}: the map by {grouped['column']}, {split}", blocks, lead)


def _change_chart(grouped: Document, name: str, split: str, ordered: Sequence[tuple[str, str]], metric: str) -> Chart:
    found, rows, family = grouped["differences"][name][split], list[IntervalRow | str](), ""
    lower = find_metric(metric).lower
    for of, group in ordered:
        if of != family:
            rows.append(of)
            family = of
        cell = found[group].get(metric)
        if cell is None or cell["value"] is None:
            continue
        clear = cell["low"] is not None and not cell["low"] <= 0 <= cell["high"]
        token = ("blue" if (cell["value"] < 0) == lower else "orange") if clear else "muted"
        hollow = bool(grouped["trained"]) and group not in grouped["trained"]
        said = formats.signed_number(cell["value"])
        rows.append(
            IntervalRow(_group_label(grouped, group), cell["value"], cell["low"], cell["high"], said, token, hollow)
        )
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
