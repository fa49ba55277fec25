"""Predictions of a run: confusion matrix, table by class, right and wrong rows, answers next to references."""

from __future__ import annotations

import numpy as np

from flatshift.experiments.report import formats
from flatshift.experiments.report.blocks import Card, Cards, ChapterPart, ConfusionMatrixBlock, Section, Table
from flatshift.experiments.results.predictions import Predictions
from flatshift.experiments.results.run import RunResults, best_split

_WRONG, _RIGHT, _SAMPLES, _HARD = 6, 3, 9, 6
_MATRIX_CLASSES, _UNFOLDED_CLASSES = 24, 12
"""Most classes in the matrix, and in an unfolded table; the most frequent ones are kept."""


def part(run: RunResults) -> ChapterPart | None:
    """Return the part for a run directory with predictions.parquet."""
    split = best_split({name: {} for name in run.predictions})
    if split is None:
        return None
    rows = run.predictions[split]
    sections = []
    if rows.of_classes:
        sections = [*_class_sections(rows, split), _example_section(rows, split)]
    if any(row.get("answer") is not None for row in rows.shown):
        sections.append(_answer_section(rows, split))
    if not rows.of_classes and "loss.count" in rows and "exact_match" not in rows:
        sections.append(_extreme_loss_section(rows, split))
    return ChapterPart(sections=sections)


def _class_sections(rows: Predictions, split: str) -> list[Section]:
    names, counts = rows.classes, rows.confusion
    frequent = names[:_MATRIX_CLASSES]
    lead = f"Rows of {split} by their class, and what was said of them."
    if len(names) > len(frequent):
        lead += f" The {len(frequent)} commonest of {len(names)} classes; other answers are left out."
    matrix = ConfusionMatrixBlock(frequent, counts[: len(frequent), : len(frequent)].astype(int).tolist())
    pairs = [(-int(counts[i, j]), names[i], names[j]) for i, j in zip(*np.nonzero(counts), strict=True) if i != j]
    if pairs:
        confused = "; ".join(f"{answer} for {true} ({-n:,})" for n, true, answer in sorted(pairs)[:5])
        lead += f" Most often confused: {confused}."
    total, predicted, hits = counts.sum(1), counts.sum(0), np.diag(counts)
    table = [
        {
            "class": name,
            "rows": formats.number(int(total[i])),
            "said": formats.number(int(predicted[i])),
            "right": formats.number(int(hits[i])),
            "precision": formats.number(float(hits[i] / predicted[i])) if predicted[i] else "–",
            "recall": formats.number(float(hits[i] / total[i])) if total[i] else "–",
            "F1": formats.number(float(2 * hits[i] / (total[i] + predicted[i]))),
        }
        for i, name in enumerate(names)
    ]
    by_class = Table.of(table, words=("class",))
    return [
        Section("Confusion matrix", [matrix], lead),
        Section(f"By class, {split}", [by_class], folded=len(names) > _UNFOLDED_CLASSES),
    ]


def _example_section(rows: Predictions, split: str) -> Section:
    order = sorted(rows.shown, key=lambda row: -(row.get("probability") or 0.0))
    wrong = [row for row in order if row["label"] != row["predicted"]]
    right = [row for row in order if row["label"] == row["predicted"]]
    chosen = [*((row, "✗") for row in wrong[:_WRONG]), *((row, "✓") for row in right[:_RIGHT])]
    cards = []
    for row, mark in chosen:
        facts = [("class", str(row["label"])), ("said", str(row["predicted"]) if mark == "✗" else "")]
        probability = row.get("probability")
        facts += [("probability", "" if probability is None else formats.percent(probability))]
        facts += [("row", str(row["row"]))]
        cards.append(Card(mark, str(row["text"]), [(k, v) for k, v in facts if v]))
    misses = len(rows) - int(np.trace(rows.confusion))
    lead = (
        f"{misses:,} of {len(rows):,} rows of {split} are wrong; first those that the model was surest of, then right "
        "ones. predictions.parquet has every row."
    )
    return Section("Rows, wrong and right", [Cards(cards)], lead)


def _answer_section(rows: Predictions, split: str) -> Section:
    """Show generated answers next to the references, wrong ones first; of a sample no answer is called wrong."""
    answered, scored = [row for row in rows.shown if row["answer"] is not None], "exact_match" in rows
    wrong = [row for row in answered if scored and not row["exact_match"]][: _SAMPLES - _RIGHT]
    right = [row for row in answered if not scored or row["exact_match"]][: _SAMPLES - len(wrong)]
    cards, own = [], "right" if scored else "in its row"
    for mark, row in [*(("✗", row) for row in wrong), *(("✓" if scored else "", row) for row in right)]:
        texts = [("written", _truncate(row["answer"])), (own, _truncate(row["reference"]))]
        cards.append(Card(mark, str(row["text"]), [*texts, ("row", str(row["row"]))]))
    lead = f"What the model wrote for rows of {split}, greedily, next to the row's own answer."
    return Section("Answers next to references", [Cards(cards)], lead)


def _truncate(text: object, limit: int = 300) -> str:
    flat = " ".join(str(text).split()) or "(nothing)"
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


def _extreme_loss_section(rows: Predictions, split: str) -> Section:
    losses = [(row["loss"] / row["loss.count"] if row["loss.count"] else 0.0, row) for row in rows.shown]
    order = sorted(losses, key=lambda pair: -pair[0])
    ends = [*order[: _HARD // 2], *order[-(_HARD // 2) :]] if len(order) >= _HARD else order
    cards = []
    for index, (nats, row) in enumerate(ends):
        facts = [("nats per token", formats.number(nats)), ("row", str(row["row"]))]
        cards.append(Card("↑" if index < len(ends) / 2 else "↓", str(row["text"]), facts))
    return Section(
        "Hardest and easiest rows", [Cards(cards if len(order) > 1 else [])], f"By loss per target token, of {split}."
    )
