"""Collation of encoded examples into micro-batches.

Rows are padded on the right to the longest one. Each sample of a packed row has its own positions 0, 1, 2, ….
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from ..compute.micro_batch import MicroBatch, PreferenceTargets
from ..compute.protocols import LossTask
from .columns import ColumnarExamples
from .example import IGNORE, Example
from .masking import unmask_tokens

TokenColumn = tuple[np.ndarray, np.ndarray, np.ndarray]
"""All tokens concatenated, and start and number of each example's tokens."""
LabelledTokens = tuple[np.ndarray, np.ndarray]


class Collator:
    """Collator that builds micro-batches from example indices, with views of the columns that store the examples."""

    def __init__(self, examples: Sequence[Example], task: LossTask) -> None:
        columns = ColumnarExamples.of(examples)
        self.causal, self.is_unpaired = task.traits.causal, task.is_unpaired
        self.ids = _get_token_column(columns, "input_ids")
        self.labels = _get_token_column(columns, "labels")
        self.row_labels = _get_row_labels(columns) if task.traits.is_sequence_level else None
        self.lengths = self.ids[2]
        self.segments, self.words = columns.ragged("segments"), columns.ragged("words")
        self.decoder_ids, self.rejected_ids = columns.ragged("decoder_ids"), columns.ragged("rejected_ids")
        self.rejected_labels = _get_token_column(columns, "rejected_labels")
        self.features = columns.features()
        self.desirable = columns.column("desirable")
        counts = columns.column("supervised")
        self.counts = np.empty(0, dtype=np.int32) if counts is None else counts
        if task.traits.is_answer_level:  # a pair counts as one, or as two if each answer has its own loss
            self.counts = np.full(len(self.lengths), 1 + (task.is_unpaired and self.rejected_ids is not None), np.int32)

    @property
    def all_lengths(self) -> list[np.ndarray]:
        """Tokens of each example on each of its sides."""
        return [column[2] for column in (self.ids, self.decoder_ids, self.rejected_ids) if column is not None]

    @property
    def work(self) -> np.ndarray:
        """Tokens of each example over all sides."""
        own, *others = self.all_lengths
        return sum(others, own)

    def unmasked(self, i: int) -> LabelledTokens:
        """Return the original tokens of example i and their word numbers, int64 (masked-lm)."""
        assert self.words is not None
        ids, labels = (_get_tokens(column, i).astype(np.int64) for column in (self.ids, self.labels))
        return unmask_tokens(ids, labels), _get_tokens(self.words, i).astype(np.int64)

    def collate_answers(
        self, examples: Sequence[int], others: Sequence[int], pad_id: int, multiple: int = 1
    ) -> MicroBatch:
        """Collate rows of one answer each (`PreferenceTargets`). others: for each example, the one whose answers
        replace its own in `PreferenceTargets.mismatched`."""
        rows = [row for i in examples for row in self._answers(i)]
        paired = self.rejected_ids is not None
        mismatched = None
        if self.is_unpaired:
            foreign = [
                _cross(own, other)
                for i, j in zip(examples, others, strict=True)
                for own, other in zip(self._answers(i), self._answers(j), strict=True)
            ]
            mismatched = _collate_rows(foreign, pad_id, multiple)
        if paired:
            signs = [1.0, -1.0] * len(examples)
        else:
            assert self.desirable is not None
            signs = [1.0 if self.desirable[i] else -1.0 for i in examples]
        lengths = [float((labels != IGNORE).sum()) for _, labels in rows]
        return replace(
            _collate_rows(rows, pad_id, multiple),
            supervised=int(self.counts[list(examples)].sum()),
            samples=len(examples),
            rows=tuple((i,) for i in examples for _ in range(1 + paired)),
            preference=PreferenceTargets(torch.tensor(signs), torch.tensor(lengths), paired, mismatched),
        )

    def _answers(self, i: int) -> list[LabelledTokens]:
        own = (_get_tokens(self.ids, i), _get_tokens(self.labels, i))
        if self.rejected_ids is None:
            return [own]
        return [own, (_get_tokens(self.rejected_ids, i), _get_tokens(self.rejected_labels, i))]

    def collate(
        self,
        rows: Sequence[tuple[int, ...]],
        pad_id: int,
        multiple: int = 1,
        masked: Sequence[LabelledTokens] | None = None,
    ) -> MicroBatch:
        """Collate the examples of these rows, padded to a multiple of `multiple` tokens. masked: ids and labels of each
        row that replace its own (masked-lm)."""
        width = max(int(self.lengths[list(row)].sum()) for row in rows)
        width = -(-width // multiple) * multiple
        shape = (len(rows), width)
        ids = np.full(shape, pad_id, dtype=np.int64)
        labels = np.full(shape, IGNORE, dtype=np.int64)
        mask = np.zeros(shape, dtype=np.int64)
        segments = np.zeros(shape, dtype=np.int64)
        positions = np.tile(np.arange(width), (len(rows), 1))
        packed = any(len(row) > 1 for row in rows)
        for r, row in enumerate(rows):
            start = 0
            for i in row:
                stop = start + int(self.lengths[i])
                ids[r, start:stop] = _get_tokens(self.ids, i)
                if self.row_labels is None and self.decoder_ids is None:
                    labels[r, start:stop] = _get_tokens(self.labels, i)
                if self.causal:
                    labels[r, start] = IGNORE
                if self.segments is not None:
                    segments[r, start:stop] = _get_tokens(self.segments, i)
                # restart positions at 0 for this sample
                positions[r, start:] -= positions[r, start]
                start = stop
            if masked is not None:
                ids[r, :start], labels[r, :start] = masked[r]
            mask[r, :start] = 1
            if packed and start < width:
                positions[r, start:] -= positions[r, start]  # padding becomes a separate sample without targets
        inputs = {"input_ids": torch.from_numpy(ids)}
        if packed:
            inputs["position_ids"] = torch.from_numpy(positions)
        else:
            inputs["attention_mask"] = torch.from_numpy(mask)
        if self.segments is not None:
            inputs["token_type_ids"] = torch.from_numpy(segments)
        flat = [i for row in rows for i in row]
        if self.features is not None:
            values, numbers = self.features
            inputs["features"] = torch.from_numpy(values[numbers[flat]])
        decoder_tokens = 0
        if self.decoder_ids is not None:
            width = int(self.decoder_ids[2][flat].max())
            decoder = _pad([_get_tokens(self.decoder_ids, i) for i in flat], width, pad_id)
            labels = _pad([_get_tokens(self.labels, i) for i in flat], width, IGNORE)
            inputs["decoder_input_ids"] = torch.from_numpy(decoder)
            decoder_tokens = decoder.size
        target = labels if self.row_labels is None else self.row_labels[flat]
        if target.dtype == np.uint8:
            target = target.astype(np.float32)
        count = self.counts[flat].sum() if masked is None else (labels != IGNORE).sum()
        lengths = self.lengths[flat].astype(np.int64)
        return MicroBatch(
            inputs, torch.from_numpy(target), int(count), len(flat), tuple(rows),
            None if self.row_labels is not None else torch.from_numpy(np.flatnonzero(labels != IGNORE)),
            padded=not mask.all(), real=(int(lengths.sum()) + decoder_tokens, int(np.square(lengths).sum())),
        )  # fmt: skip


def _cross(own: LabelledTokens, foreign: LabelledTokens) -> LabelledTokens:
    """Return the prompt of one row with the answer of another, at most as long as the longer row: the prompt is
    truncated from the left, but keeps its first token."""
    (ids, labels), (other_ids, other_labels) = own, foreign
    begin = int((other_labels != IGNORE).argmax())
    prompt = ids[: int((labels != IGNORE).argmax())]
    room = max(len(ids), len(other_ids)) - len(other_ids[begin:])
    if len(prompt) > room:
        prompt = np.concatenate([prompt[:1], prompt[len(prompt) - room + 1 :]])
    prompt_labels = np.full(len(prompt), IGNORE)
    return np.concatenate([prompt, other_ids[begin:]]), np.concatenate([prompt_labels, other_labels[begin:]])


def _collate_rows(rows: Sequence[LabelledTokens], pad_id: int, multiple: int) -> MicroBatch:
    lengths = np.array([len(ids) for ids, _ in rows])
    width = -(-int(lengths.max()) // multiple) * multiple
    labels = _pad([labels for _, labels in rows], width, IGNORE)
    labels[:, 0] = IGNORE
    mask = (np.arange(width) < lengths[:, None]).astype(np.int64)
    ids = torch.from_numpy(_pad([ids for ids, _ in rows], width, pad_id))
    return MicroBatch(
        {"input_ids": ids, "attention_mask": torch.from_numpy(mask)}, torch.from_numpy(labels), len(rows), len(rows),
        tuple((r,) for r in range(len(rows))), torch.from_numpy(np.flatnonzero(labels != IGNORE)),
        padded=not mask.all(), real=(int(lengths.sum()), int(np.square(lengths).sum())),
    )  # fmt: skip


def _pad(rows: Sequence[np.ndarray], width: int, value: int) -> np.ndarray:
    """Return rows padded on the right, (len(rows), width) int64."""
    padded = np.full((len(rows), width), value, dtype=np.int64)
    for r, row in enumerate(rows):
        padded[r, : len(row)] = row
    return padded


def _get_row_labels(columns: ColumnarExamples) -> np.ndarray | None:
    """Return labels of whole rows: (N,) int64 classes, (N, C) 0 and 1 (multi-label), or (N,) float32 targets in
    training units; None if labels are per token."""
    targets = columns.standardised_targets()
    if targets is not None:
        return targets.astype(np.float32)
    classes = columns.column("classes")
    return columns.column("class") if classes is None else classes


def _get_token_column(columns: ColumnarExamples, name: str) -> TokenColumn:
    column = columns.ragged(name)
    return column if column is not None else (np.empty(0, dtype=np.int32), *np.empty((2, 0), dtype=np.int64))


def _get_tokens(column: TokenColumn, i: int) -> np.ndarray:
    flat, starts, lengths = column
    return flat[int(starts[i]) : int(starts[i]) + int(lengths[i])]
