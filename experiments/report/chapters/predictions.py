"""Predictions of a run: confusion matrix, table by class, right and wrong rows, answers next to references."""

from __future__ import annotations

import numpy as np

from flatshift.experiments.report import formats
from flatshift.experiments.report.blocks import Block, Card, Cards, ChapterPart, ConfusionMatrixBlock, Section, Table
from flatshift.experiments.results.predictions import Predictions
from flatshift.experiments.results.run import RunResults, best_split

_WRONG, _RIGHT, _SAMPLES, _HARD = 6, 3, 9, 6
_CLASSES = 24
"""Most classes in the matrix; the most frequent ones are kept."""
_OPEN = 12
"""Most classes in an unfolded table."""


def part(run: RunResults) -> ChapterPart | None:
    """Return the part for a run directory with predictions.parquet."""
    split = best_split({name: {} for name in run.predictions})
    if split is None:
        return None
    rows = run.predictions[split]
    sections = []
    if rows.of_classes:
        sections = [*_class_sections(rows, split), _example_section(rows, split)]
    elif any(row.get("answer") is not None for row in rows.shown):
        sections = [_answer_section(rows, split)]
    elif "loss.count" in rows:
        sections = [_extreme_loss_section(rows, split)]
    return ChapterPart(sections=[section for section in sections if section is not None])


def _class_sections(rows: Predictions, split: str) -> list[Section]:
    names, found = rows.classes, rows.confusion
    shown = names[:_CLASSES]
    lead = f"Rows of {split} by their class, and what was said of them."
    if len(names) > len(shown):
        lead += f" The {len(shown)} commonest of {len(names)} classes; other answers are left out."
    matrix = ConfusionMatrixBlock(shown, [[int(found[i, j]) for j in range(len(shown))] for i in range(len(shown))])
    blocks: list[Block] = [matrix]
    pairs = [(int(found[i, j]), names[i], names[j]) for i, j in zip(*np.nonzero(found), strict=True) if i != j]
    pairs.sort(key=lambda pair: (-pair[0], pair[1], pair[2]))
    if pairs:
        most = "; ".join(f"{said} for {true} ({n:,})" for n, true, said in pairs[:5])
        lead += f" Most often confused: {most}."
    total, said, hits = found.sum(1), found.sum(0), np.diag(found)
    table = [
        {
            "class": name,
            "rows": formats.number(int(total[i])),
            "said": formats.number(int(said[i])),
            "right": formats.number(int(hits[i])),
            "precision": formats.number(float(hits[i] / said[i])) if said[i] else "–",
            "recall": formats.number(float(hits[i] / total[i])) if total[i] else "–",
            "F1": formats.number(float(2 * hits[i] / (total[i] + said[i]))),
        }
        for i, name in enumerate(names)
    ]
    by_class = Section(f"By class, {split}", [Table.of(table, words=("class",))], folded=len(names) > _OPEN)
    return [Section("Confusion matrix", blocks, lead), by_class]


def _example_section(rows: Predictions, split: str) -> Section | None:
    order = sorted(rows.shown, key=lambda row: -(row.get("probability") or 0.0))
    wrong = [row for row in order if row["label"] != row["predicted"]]
    right = [row for row in order if row["label"] == row["predicted"]]
    chosen = [*((row, "✗") for row in wrong[:_WRONG]), *((row, "✓") for row in right[:_RIGHT])]
    if not chosen:
        return None
    cards = []
    for row, mark in chosen:
        facts = [("class", str(row["label"])), ("said", str(row["predicted"]) if mark == "✗" else "")]
        sure = row.get("probability")
        facts += [("probability", "" if sure is None else formats.percent(sure)), ("row", str(row["row"]))]
        cards.append(Card(mark, str(row["text"]), [(k, v) for k, v in facts if v]))
    misses = len(rows) - int(np.trace(rows.confusion))
    lead = (
        f"{misses:,} of {len(rows):,} rows of {split} are wrong; first those that the model was surest of, then right "
        "ones. predictions.parquet has every row."
    )
    return Section("Rows, wrong and right", [Cards(cards)], lead)


def _answer_section(rows: Predictions, split: str) -> Section | None:
    """Show generated answers next to the references, wrong ones first."""
    having = [row for row in rows.shown if row["answer"] is not None]
    wrong = [row for row in having if not row.get("exact_match")][: _SAMPLES - _RIGHT]
    right = [row for row in having if row.get("exact_match")][: _SAMPLES - len(wrong)]
    cards = [
        Card(
            mark,
            str(row["text"]),
            [("written", _truncate(row["answer"])), ("right", _truncate(row["reference"])), ("row", str(row["row"]))],
        )
        for mark, some in (("✗", wrong), ("✓", right))
        for row in some
    ]
    if not cards:
        return None
    lead = f"What the model wrote for rows of {split}, greedily, next to the row's own answer."
    return Section("Answers next to references", [Cards(cards)], lead)


def _truncate(text: object, most: int = 300) -> str:
    flat = " ".join(str(text).split()) or "(nothing)"
    return flat if len(flat) <= most else flat[: most - 1] + "…"


def _extreme_loss_section(rows: Predictions, split: str) -> Section | None:
    each = [(row["loss"] / row["loss.count"] if row["loss.count"] else 0.0, row) for row in rows.shown]
    order = sorted(each, key=lambda one: -one[0])
    if len(order) < 2:
        return None
    ends = [*order[: _HARD // 2], *order[-(_HARD // 2) :]] if len(order) >= _HARD else order
    cards = [
        Card(
            "↑" if place < len(ends) / 2 else "↓",
            str(row["text"]),
            [("nats per token", formats.number(nats)), ("row", str(row["row"]))],
        )
        for place, (nats, row) in enumerate(ends)
    ]
    return Section("Hardest and easiest rows", [Cards(cards)], f"By loss per target token, of {split}.")
