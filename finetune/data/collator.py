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


class Collator:
    """Collator that builds micro-batches from example indices, with views of the columns that store the examples."""

    def __init__(self, examples: Sequence[Example], task: LossTask) -> None:
        columns = ColumnarExamples.of(examples)
        self.wholes, self.causal = task.traits.is_sequence_level, task.traits.causal
        self.ids, self.starts, self.lengths = _get_token_column(columns, "input_ids")
        self.segments = columns.ragged("segments")
        self.words = columns.ragged("words")
        self.features = columns.features()
        self.answers = None if columns.ragged("decoder_ids") is None else _DecoderTargets(columns)
        self.rejected = None if columns.ragged("rejected_ids") is None else _RejectedAnswers(columns)
        self.desirable = columns.column("desirable")
        self.is_unpaired = task.is_unpaired
        counts = columns.column("supervised")
        self.counts = np.empty(0, dtype=np.int32) if counts is None else counts
        if task.traits.is_answer_level:  # a pair counts as one, or as two if each answer has its own loss
            self.counts = np.full(len(self.lengths), 1 + (task.is_unpaired and self.rejected is not None), np.int32)
        whole = _get_row_labels(columns)
        if whole is not None:
            self.labels, self.label_starts = whole, self.starts
        else:
            self.labels, self.label_starts, _ = _get_token_column(columns, "labels")

    def unmasked(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the original tokens of example i and their word numbers, int64 (masked-lm)."""
        length = int(self.lengths[i])
        assert self.words is not None
        read = _slice_tokens(self.ids, self.starts[i], length).astype(np.int64)
        labels = _slice_tokens(self.labels, self.label_starts[i], length).astype(np.int64)
        return unmask_tokens(read, labels), _slice_tokens(self.words[0], self.words[1][i], length).astype(np.int64)

    @property
    def work(self) -> np.ndarray:
        """Tokens of each example over all sides."""
        return sum((part.lengths for part in (self.answers, self.rejected) if part is not None), self.lengths)

    def answered(self, examples: Sequence[int], others: Sequence[int], pad_id: int, multiple: int = 1) -> MicroBatch:
        """Collate rows of one answer each (`PreferenceTargets`).

        others: for each example, the one whose answers replace its own in `PreferenceTargets.mismatched`.
        """
        rows = [row for i in examples for row in self._rows_of(i)]
        paired = self.rejected is not None
        made = self._padded(rows, pad_id, multiple)
        mismatched = None
        if self.is_unpaired:
            foreign = [
                self._crossed(own, other)
                for i, j in zip(examples, others, strict=True)
                for own, other in zip(self._rows_of(i), self._rows_of(j), strict=True)
            ]
            mismatched = self._padded(foreign, pad_id, multiple)
        if paired:
            signs = [1.0, -1.0] * len(examples)
        else:
            assert self.desirable is not None
            signs = [1.0 if self.desirable[i] else -1.0 for i in examples]
        lengths = [float((labels != IGNORE).sum()) for _, labels in rows]
        return replace(
            made,
            supervised=int(self.counts[list(examples)].sum()),
            samples=len(examples),
            rows=tuple((i,) for i in examples for _ in range(1 + paired)),
            preference=PreferenceTargets(torch.tensor(signs), torch.tensor(lengths), paired, mismatched),
        )

    def _rows_of(self, i: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return ids and labels of each answer of an example, including its prompt."""
        length = int(self.lengths[i])
        first = (
            _slice_tokens(self.ids, self.starts[i], length),
            _slice_tokens(self.labels, self.label_starts[i], length),
        )
        return [first] if self.rejected is None else [first, self.rejected.of(i)]

    @staticmethod
    def _crossed(
        own: tuple[np.ndarray, np.ndarray], other: tuple[np.ndarray, np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the prompt of one row with the answer of another, at most as long as the longer row: the prompt is
        truncated from the left, but keeps its first token."""
        (ids, labels), (foreign, foreign_labels) = own, other
        begin = int((foreign_labels != IGNORE).argmax())
        answer, marked = foreign[begin:], foreign_labels[begin:]
        prompt = ids[: int((labels != IGNORE).argmax())]
        room = max(len(ids), len(foreign)) - len(answer)
        if len(prompt) > room:
            prompt = np.concatenate([prompt[:1], prompt[len(prompt) - room + 1 :]])
        return np.concatenate([prompt, answer]), np.concatenate([np.full(len(prompt), IGNORE), marked])

    def _padded(self, rows: Sequence[tuple[np.ndarray, np.ndarray]], pad_id: int, multiple: int) -> MicroBatch:
        lengths = np.array([len(ids) for ids, _ in rows])
        width = -(-int(lengths.max()) // multiple) * multiple
        ids = np.full((len(rows), width), pad_id, dtype=np.int64)
        labels = np.full((len(rows), width), IGNORE, dtype=np.int64)
        mask = np.zeros((len(rows), width), dtype=np.int64)
        for r, (read, marked) in enumerate(rows):
            ids[r, : len(read)], labels[r, : len(read)], mask[r, : len(read)] = read, marked, 1
        labels[:, 0] = IGNORE
        inputs = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
        return MicroBatch(
            inputs, torch.from_numpy(labels), len(rows), len(rows), tuple((r,) for r in range(len(rows))),
            torch.from_numpy(np.flatnonzero(labels != IGNORE)), padded=not mask.all(),
            real=(int(lengths.sum()), int(np.square(lengths).sum())),
        )  # fmt: skip

    def collate(
        self,
        rows: Sequence[tuple[int, ...]],
        pad_id: int,
        multiple: int = 1,
        drawn: Sequence[tuple[np.ndarray, np.ndarray]] | None = None,
    ) -> MicroBatch:
        """Collate the examples of these rows, padded to a multiple of `multiple` tokens.

        drawn: ids and labels of each row that replace its own (masked-lm).
        """
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
                length = int(self.lengths[i])
                stop = start + length
                ids[r, start:stop] = _slice_tokens(self.ids, self.starts[i], length)
                if not self.wholes and self.answers is None:
                    labels[r, start:stop] = _slice_tokens(self.labels, self.label_starts[i], length)
                if self.causal:
                    labels[r, start] = IGNORE
                if self.segments is not None:
                    segments[r, start:stop] = _slice_tokens(self.segments[0], self.segments[1][i], length)
                # restart positions at 0 for this sample
                positions[r, start:] -= positions[r, start]
                start = stop
            if drawn is not None:
                ids[r, :start], labels[r, :start] = drawn[r]
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
            values, places = self.features
            inputs["features"] = torch.from_numpy(values[places[flat]])
        if self.answers is not None:
            decoder, labels = self.answers.collate(flat, pad_id)
            inputs["decoder_input_ids"] = torch.from_numpy(decoder)
        target = self.labels[flat] if self.wholes else labels
        if target.dtype == np.uint8:
            target = target.astype(np.float32)
        count = self.counts[flat].sum() if drawn is None else (labels != IGNORE).sum()
        chosen = None if self.wholes else torch.from_numpy(np.flatnonzero(labels != IGNORE))
        own = self.lengths[flat].astype(np.int64)
        written = inputs["decoder_input_ids"].numel() if self.answers is not None else 0
        return MicroBatch(
            inputs,
            torch.from_numpy(target),
            int(count),
            len(flat),
            tuple(rows),
            chosen,
            padded=not mask.all(),
            real=(int(own.sum()) + written, int(np.square(own).sum())),
        )


def _get_row_labels(columns: ColumnarExamples) -> np.ndarray | None:
    """Return labels of whole rows: (N,) int64 classes, (N, C) 0 and 1 (multi-label), or (N,) float32 targets in
    training units; None if labels are per token."""
    seen = columns.seen_targets()
    if seen is not None:
        return seen.astype(np.float32)
    several = columns.column("classes")
    return columns.column("class") if several is None else several


def _get_token_column(columns: ColumnarExamples, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return all tokens concatenated, and start and number of each example's tokens."""
    found = columns.ragged(name)
    return found if found is not None else (np.empty(0, dtype=np.int32), *np.empty((2, 0), dtype=np.int64))


def _slice_tokens(flat: np.ndarray, start: np.integer, length: int) -> np.ndarray:
    return flat[int(start) : int(start) + length]


class _RejectedAnswers:
    """Rejected answers with their prompts, by example."""

    def __init__(self, columns: ColumnarExamples) -> None:
        self._ids, self._starts, self.lengths = _get_token_column(columns, "rejected_ids")
        self._labels, self._label_starts, _ = _get_token_column(columns, "rejected_labels")

    def of(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and labels of example i."""
        length = int(self.lengths[i])
        return _slice_tokens(self._ids, self._starts[i], length), _slice_tokens(
            self._labels, self._label_starts[i], length
        )


class _DecoderTargets:
    """Decoder inputs and labels, by example."""

    def __init__(self, columns: ColumnarExamples) -> None:
        self.read, self.starts, self.lengths = _get_token_column(columns, "decoder_ids")
        self.written, self.label_starts, _ = _get_token_column(columns, "labels")

    def collate(self, rows: Sequence[int], pad_id: int) -> tuple[np.ndarray, np.ndarray]:
        """Return decoder inputs and labels of these examples, (B, T) int64, padded on the right."""
        shape = (len(rows), int(self.lengths[rows].max()))
        ids, labels = np.full(shape, pad_id, dtype=np.int64), np.full(shape, IGNORE, dtype=np.int64)
        for r, i in enumerate(rows):
            length = int(self.lengths[i])
            ids[r, :length] = _slice_tokens(self.read, self.starts[i], length)
            labels[r, :length] = _slice_tokens(self.written, self.label_starts[i], length)
        return ids, labels
