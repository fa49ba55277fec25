"""Micro-batches as a pure function of the optimizer step.

The samples of epoch e come in a permutation keyed by derive(seed, "order", e); epochs follow each other without a gap,
so nothing is dropped and a batch may straddle two epochs. A mixture (`finetune.data.mixture`) has such epochs for each
of its sources. `Batches.at(step)` needs nothing but the step: resuming exactly is calling it with the next one.

`pack_order` decides which samples share a packed row, in which each has positions 0, 1, 2, …; that none sees another is
measured on the model at hand (`finetune.evaluate.leaks.refuse_leaks`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..compute.capabilities import copied
from ..errors import UserError
from ..seeds import numpy_generator
from .columns import Examples
from .example import IGNORE, Example
from .masking import Masking, unmasked
from .mixture import Epochs, Mixed, Mixture

if TYPE_CHECKING:
    from ..tasks import Task

_OPEN_ROWS = 64
_GROUPED = 50
"""Micro-batches of a window whose rows are grouped by length."""


@dataclass(frozen=True)
class Sides:
    """What a loss of whole answers must know of the R rows of a micro-batch, each a prompt with one answer.

    Of pairs the rows are chosen, rejected, chosen, rejected, …
    """

    signs: Tensor
    """(R,) float32: 1 of an answer that is chosen or desirable, −1 of one that is rejected or undesirable."""
    lengths: Tensor
    """(R,) float32: supervised tokens."""
    paired: bool
    """Whether rows come in pairs of one prompt."""
    mismatched: MicroBatch | None = None
    """The same prompts, each with an answer to the prompt of another example of the update (KTO)."""
    reference: Tensor | None = None
    """(R,) float32: log p of each answer under the backbone alone; None: not computed yet, or nobody asks."""
    drift: Tensor | None = None
    """Scalar: how far the model is from the backbone, nats an answer, over the whole update (KTO's z0)."""

    def to(self, device: torch.device | str) -> Sides:
        """The same on another device."""
        tensors: dict[str, Any] = {
            name: copied(value, device) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        others = None if self.mismatched is None else self.mismatched.to(device)
        return replace(self, mismatched=others, **tensors)


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass takes."""

    inputs: dict[str, Tensor]
    """Model keyword arguments, (B, T) int64: `input_ids`, and `attention_mask` (right padding) or, in packed rows,
    `position_ids` instead; seq2seq has `decoder_input_ids` (B, its own T) too, whose padding needs no mask because it
    follows what a decoder may see; where rows bring vectors along, `features` (B, K, d) float32. The model must use no
    cache (`config.use_cache` false): packing relies on it."""
    labels: Tensor
    """(B, T) int64 aligned with `input_ids`, −100 where unsupervised (always at the first token of a causal sample), or
    with `decoder_input_ids`; or the classes, (B,) int64; or float32: 0 and 1 of C classes (B, C), or standardised
    targets (B,)."""
    supervised: int
    """Labels that the loss sums over: tokens, or examples for classification."""
    samples: int
    """Examples in it."""
    rows: tuple[tuple[int, ...], ...]
    """Indices of the examples in each row."""
    chosen: Tensor | None = None
    """(n,) int64: which of all B·T labels the loss sums over, ascending. The host knows it; a device that looked for
    them would make it wait. None: not looked for yet."""
    padded: bool | None = None
    """Whether a row (an encoder's, of seq2seq) is shorter than the others, which the host knows too; None: not looked
    for."""
    real: tuple[int, int] | None = None
    """Its tokens on all sides without padding, and its pairs of tokens that belong to one sample (of an encoder's);
    None: not counted yet."""
    sides: Sides | None = None
    """Of a loss of whole answers; None for every other."""

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same on another device."""
        inputs = {name: copied(tensor, device) for name, tensor in self.inputs.items()}
        chosen = None if self.chosen is None else copied(self.chosen, device)
        sides = None if self.sides is None else self.sides.to(device)
        return replace(self, inputs=inputs, labels=copied(self.labels, device), chosen=chosen, sides=sides)


class _Store:
    """What batches are made of, by example: views of the columns that hold the examples."""

    def __init__(self, examples: Sequence[Example], task: Task) -> None:
        columns = Examples.of(examples)
        self.wholes, self.causal = task.by_example, task.causal
        self.ids, self.starts, self.lengths = _part(columns, "input_ids")
        self.segments = columns.ragged("segments")
        self.words = columns.ragged("words")
        self.features = columns.features()
        self.answers = None if columns.ragged("decoder_ids") is None else _Answers(columns)
        self.rejected = None if columns.ragged("rejected_ids") is None else _Rejected(columns)
        self.desirable = columns.column("desirable")
        self.mismatches = task.mismatches
        counts = columns.column("supervised")
        self.counts = np.empty(0, dtype=np.int32) if counts is None else counts
        if task.by_answer:  # a pair is one item, or where each answer is judged by itself two
            self.counts = np.full(len(self.lengths), 1 + (task.mismatches and self.rejected is not None), np.int32)
        whole = _whole_labels(columns)
        if whole is not None:
            self.labels, self.label_starts = whole, self.starts
        else:
            self.labels, self.label_starts, _ = _part(columns, "labels")

    def unmasked(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """The own tokens of example i and the number of the word of each, int64 (masked-lm)."""
        length = int(self.lengths[i])
        assert self.words is not None
        read = _run(self.ids, self.starts[i], length).astype(np.int64)
        labels = _run(self.labels, self.label_starts[i], length).astype(np.int64)
        return unmasked(read, labels), _run(self.words[0], self.words[1][i], length).astype(np.int64)

    @property
    def work(self) -> np.ndarray:
        """Tokens of each example on all sides."""
        return sum((part.lengths for part in (self.answers, self.rejected) if part is not None), self.lengths)

    def answered(self, examples: Sequence[int], others: Sequence[int], pad_id: int, multiple: int = 1) -> MicroBatch:
        """Rows of one answer each (`Sides`).

        others: for each example the one whose answers stand for its own in `Sides.mismatched`.
        """
        rows = [row for i in examples for row in self._rows_of(i)]
        paired = self.rejected is not None
        made = self._padded(rows, pad_id, multiple)
        mismatched = None
        if self.mismatches:
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
            sides=Sides(torch.tensor(signs), torch.tensor(lengths), paired, mismatched),
        )

    def _rows_of(self, i: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Ids and labels of each answer of an example with its prompt before it."""
        length = int(self.lengths[i])
        first = (_run(self.ids, self.starts[i], length), _run(self.labels, self.label_starts[i], length))
        return [first] if self.rejected is None else [first, self.rejected.of(i)]

    @staticmethod
    def _crossed(
        own: tuple[np.ndarray, np.ndarray], other: tuple[np.ndarray, np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The prompt of one row with the answer of another, as long as the longer of both: the prompt loses its left,
        but for its first token."""
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
        """drawn: of each row the tokens to read and the labels, in place of its own (masked-lm)."""
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
                ids[r, start:stop] = _run(self.ids, self.starts[i], length)
                if not self.wholes and self.answers is None:
                    labels[r, start:stop] = _run(self.labels, self.label_starts[i], length)
                if self.causal:
                    labels[r, start] = IGNORE
                if self.segments is not None:
                    segments[r, start:stop] = _run(self.segments[0], self.segments[1][i], length)
                positions[r, start:] -= positions[r, start]
                start = stop
            if drawn is not None:
                ids[r, :start], labels[r, :start] = drawn[r]
            mask[r, :start] = 1
            if packed and start < width:
                positions[r, start:] -= positions[r, start]  # padding is a sample of its own that nobody supervises
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


def _whole_labels(columns: Examples) -> np.ndarray | None:
    """(N,) int64 classes, (N, C) 0 and 1 of several, or (N,) float32 targets as training sees them."""
    seen = columns.seen_targets()
    if seen is not None:
        return seen.astype(np.float32)
    several = columns.column("classes")
    return columns.column("class") if several is None else several


def _part(columns: Examples, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All tokens end to end, and where those of each example begin and how many they are."""
    found = columns.ragged(name)
    return found if found is not None else (np.empty(0, dtype=np.int32), *np.empty((2, 0), dtype=np.int64))


def _run(flat: np.ndarray, start: np.integer, length: int) -> np.ndarray:
    return flat[int(start) : int(start) + length]


class _Rejected:
    """The answers that are liked less, each behind its prompt, by example."""

    def __init__(self, columns: Examples) -> None:
        self._ids, self._starts, self.lengths = _part(columns, "rejected_ids")
        self._labels, self._label_starts, _ = _part(columns, "rejected_labels")

    def of(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and labels of example i."""
        length = int(self.lengths[i])
        return _run(self._ids, self._starts[i], length), _run(self._labels, self._label_starts[i], length)


class _Answers:
    """What decoders read and write, by example."""

    def __init__(self, columns: Examples) -> None:
        self.read, self.starts, self.lengths = _part(columns, "decoder_ids")
        self.written, self.label_starts, _ = _part(columns, "labels")

    def collate(self, rows: Sequence[int], pad_id: int) -> tuple[np.ndarray, np.ndarray]:
        """Decoder inputs and labels of these examples, (B, T) int64, padded on the right."""
        shape = (len(rows), int(self.lengths[rows].max()))
        ids, labels = np.full(shape, pad_id, dtype=np.int64), np.full(shape, IGNORE, dtype=np.int64)
        for r, i in enumerate(rows):
            length = int(self.lengths[i])
            ids[r, :length] = _run(self.read, self.starts[i], length)
            labels[r, :length] = _run(self.written, self.label_starts[i], length)
        return ids, labels


def pack_order(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Rows of sample positions, best fit over a window of 64 open rows.

    Samples are taken in order; each goes to the open row that it fills best, else opens a new row; with 64 open the
    fullest is closed. Rows come out as they are closed, so the order stays close to the samples' own.

    Arguments:
        lengths: tokens of each sample, each ≤ `max_length`.
    Returns:
        Every index of `lengths` exactly once, each row with at most `max_length` tokens.
    """
    done: list[list[int]] = []
    rows: dict[int, list[int]] = {}  # serial → samples; a dict keeps the order of opening
    free: list[tuple[int, int]] = []  # (free tokens, serial) of the open rows, sorted
    serial = 0
    for sample, length in enumerate(lengths):
        place = bisect_left(free, (length, -1))
        if place < len(free):
            left, row = free.pop(place)
            rows[row].append(sample)
            left -= length
        else:
            if len(free) == _OPEN_ROWS:
                done.append(rows.pop(free.pop(0)[1]))
            row, left, serial = serial, max_length - length, serial + 1
            rows[row] = [sample]
        if left:
            insort(free, (left, row))
        else:
            done.append(rows.pop(row))
    done.extend(rows.values())
    return done


@dataclass(frozen=True)
class RowRuns:
    """A run of rows: row k holds `samples[starts[k] : starts[k + 1]]`."""

    samples: np.ndarray
    """Indices of examples, row after row, int64."""
    epochs: np.ndarray
    """How often each came round before, int64."""
    starts: np.ndarray
    """(rows + 1,) int64."""

    @classmethod
    def of(cls, samples: np.ndarray, epochs: np.ndarray) -> RowRuns:
        """Rows of one sample each."""
        return cls(samples, epochs, np.arange(len(samples) + 1))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def packed(self, lengths: np.ndarray, max_length: int) -> RowRuns:
        """These rows of one sample each, several put into one by `pack_order`; `lengths` are of all examples."""
        packs = pack_order(lengths[self.samples].tolist(), max_length)
        turn = np.fromiter(chain.from_iterable(packs), dtype=np.int64, count=len(self.samples))
        return RowRuns(self.samples[turn], self.epochs[turn], np.cumsum([0, *map(len, packs)]))

    def grouped(self, lengths: np.ndarray, batch_size: int, rng: np.random.Generator) -> RowRuns:
        """These rows of one sample each: the longest `batch_size` together, the next longest together, … and those
        runs in an order drawn by `rng`. As many rows as a multiple of `batch_size`."""
        by_length = np.argsort(-lengths[self.samples].astype(np.int64), kind="stable").reshape(-1, batch_size)
        turn = by_length[rng.permutation(len(by_length))].ravel()
        return RowRuns.of(self.samples[turn], self.epochs[turn])

    def part(self, first: int, stop: int) -> RowRuns:
        """Rows first ≤ k < stop."""
        begin, end = int(self.starts[first]), int(self.starts[stop])
        return RowRuns(self.samples[begin:end], self.epochs[begin:end], self.starts[first : stop + 1] - begin)

    def split(self, values: np.ndarray) -> list[tuple[int, ...]]:
        """`samples` or `epochs`, row by row."""
        flat, starts = values.tolist(), self.starts.tolist()
        return [tuple(flat[low:high]) for low, high in pairwise(starts)]

    @classmethod
    def joined(cls, parts: Sequence[RowRuns]) -> RowRuns:
        """The rows of all parts, one behind another."""
        if not parts:
            return cls.of(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
        sizes = np.concatenate([np.diff(part.starts) for part in parts])
        return cls(
            np.concatenate([part.samples for part in parts]),
            np.concatenate([part.epochs for part in parts]),
            np.concatenate([[0], np.cumsum(sizes)]),
        )


class Batches:
    """The endless, seeded stream of training micro-batches."""

    def __init__(
        self,
        examples: Sequence[Example],
        *,
        task: Task,
        batch_size: int,
        accumulate: int = 1,
        seed: int,
        max_length: int,
        pad_id: int,
        share: tuple[int, int] = (0, 1),
        multiple: int = 1,
        mixture: Mixture | None = None,
        group: Literal["length"] | None = None,
        masking: Masking | None = None,
    ) -> None:
        """
        Arguments:
            batch_size: rows of a micro-batch over all data ranks; a packed row holds several samples.
            accumulate: micro-batches of an optimizer step.
            max_length: tokens of a packed row; no example is longer.
            share: (i, n): `at` makes the i-th of n equal runs of each micro-batch's rows, those of one data rank.
            multiple: pad rows to a multiple of so many tokens.
            mixture: sources that `examples` lie in one behind another; None: one, whose epochs follow each other.
            group: `length`: rows of like length share a micro-batch.
            masking: how the tokens of a row are hidden anew each time it comes up; for masked-lm.
        Raises:
            UserError: no examples, an example longer than `max_length` or without supervision, sizes below one, rows
                that do not divide among the data ranks, a mixture of nothing, groups of packed rows.
        """
        for flag, value in (("train.batch_size", batch_size), ("train.accumulate", accumulate)):
            if value < 1:
                raise UserError(f"{flag}: {value} is too small; give at least 1")
        if not examples:
            raise UserError("there are no training examples; give files under data.train")
        if batch_size % share[1]:
            nearest = max(batch_size // share[1], 1) * share[1]
            raise UserError(
                f"train.batch_size: {batch_size} rows do not divide among {share[1]} data ranks (mesh.replicate × "
                f"mesh.dp); take {nearest}"
            )
        self.batch_size, self.accumulate, self.seed = batch_size, accumulate, seed
        self.max_length, self.pad_id = max_length, pad_id
        self.share, self.multiple = share, multiple
        self.packed, self._by_answer = task.pack, task.by_answer
        if group is not None and self.packed:
            raise UserError(f"train.group: {group} has no use where task.pack is true, rows are full; leave it out")
        if task.hides_tokens != (masking is not None):
            raise ValueError("Batches needs `masking` for masked-lm, and for no other task")
        self._masking = masking
        self._store = _Store(examples, task)
        more = (self._store.answers, self._store.rejected)
        for lengths in [self._store.lengths, *(part.lengths for part in more if part is not None)]:
            longest = int(lengths.argmax())
            if lengths[longest] > max_length:
                raise UserError(
                    f"{examples[longest].where}: {lengths[longest]} tokens do not fit train.max_length "
                    f"{max_length}; encode with the same max_length"
                )
        empty = np.flatnonzero(self._store.counts == 0)
        if len(empty):
            raise UserError(f"{examples[int(empty[0])].where}: this sample has no supervised token")
        assert mixture is None or sum(mixture.sizes) == len(examples)
        self.samples: Epochs | Mixed
        self.samples = Epochs(len(self), seed) if mixture is None else Mixed(mixture, seed, self._store.work)
        """The stream of samples that rows are made of."""
        self._window = 0
        if group is not None:
            self._window = batch_size * max(1, min(_GROUPED, int(self.samples.around) // batch_size))
        self._rounds: dict[int, RowRuns] = {}
        self._starts = [0]  # packed rows before round e

    def __len__(self) -> int:
        """Number of examples."""
        return len(self._store.lengths)

    def epoch(self, e: int) -> list[tuple[int, ...]]:
        """The rows of epoch e, each the indices of its examples; of a mixture, of as many samples as there are
        examples."""
        return self._round(e).split(self._round(e).samples)

    def rows_at(self, step: int) -> list[list[tuple[int, ...]]]:
        """Example indices by micro-batch and row, for the 0-based optimizer step."""
        rows = self._step(step)
        return self._micros(rows.split(rows.samples))

    def epochs_at(self, step: int) -> list[list[tuple[int, ...]]]:
        """As `rows_at`: how often each example (its source, in a mixture) came round before."""
        rows = self._step(step)
        return self._micros(rows.split(rows.epochs))

    def _micros(self, rows: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
        return [rows[i : i + self.batch_size] for i in range(0, len(rows), self.batch_size)]

    def _step(self, step: int) -> RowRuns:
        first = step * self.accumulate * self.batch_size
        return self._rows(first, first + self.accumulate * self.batch_size)

    def at(self, step: int) -> list[MicroBatch]:
        """This rank's rows of the micro-batches of the 0-based optimizer step; the same whatever was asked before."""
        rows = self._step(step)
        if self._by_answer:
            return self._answered(rows.samples.tolist())
        return [
            self._store.collate(micro[self._mine], self.pad_id, self.multiple, self._drawn(rows, number, self._mine))
            for number, micro in enumerate(self._micros(rows.split(rows.samples)))
        ]

    def _answered(self, samples: list[int]) -> list[MicroBatch]:
        """The next example of the update lends each its answers, so that no mesh and no micro-batch says which."""
        pairs = list(zip(samples, [*samples[1:], samples[0]], strict=True))
        runs = [pairs[first : first + self.batch_size][self._mine] for first in range(0, len(pairs), self.batch_size)]
        return [
            self._store.answered([i for i, _ in run], [j for _, j in run], self.pad_id, self.multiple) for run in runs
        ]

    @property
    def _mine(self) -> slice:
        """This rank's rows of a micro-batch."""
        each = self.batch_size // self.share[1]
        return slice(self.share[0] * each, (self.share[0] + 1) * each)

    def _drawn(self, step: RowRuns, number: int, mine: slice) -> list[tuple[np.ndarray, np.ndarray]] | None:
        """What each row of `mine` of the step's micro-batch `number` reads and its labels, hidden anew; by the example
        and how often it came round before."""
        if self._masking is None:
            return None
        places = range(number * self.batch_size, (number + 1) * self.batch_size)[mine]
        drawn = []
        for i, epoch in zip(step.samples[places].tolist(), step.epochs[places].tolist(), strict=True):
            own, words = self._store.unmasked(i)
            drawn.append(self._masking.draw(own, words, numpy_generator(self.seed, "mask", i, epoch)))
        return drawn

    def supervised(self, step: int) -> int:
        """Supervised tokens (examples for classification) of the whole step: the divisor of its loss."""
        if self._masking is not None:
            rows = self._step(step)
            drawn = [self._drawn(rows, number, slice(None)) or [] for number in range(self.accumulate)]
            return int(sum((labels != IGNORE).sum() for micro in drawn for _, labels in micro))
        return int(sum(self._store.counts[i] for micro in self.rows_at(step) for row in micro for i in row))

    def epochs(self, steps: int) -> float:
        """How often `steps` updates go through the examples."""
        return self.drawn(steps) / len(self)

    def drawn(self, steps: int) -> int:
        """Samples of the first `steps` updates; of packed rows an estimate from the first epoch."""
        rows = steps * self.accumulate * self.batch_size
        return rows if not self.packed else round(rows * len(self) / len(self._round(0)))

    def labels(self, steps: int) -> int:
        """Supervised tokens (examples for classification) that the first `steps` updates take, each counted once
        however often it comes round; where an epoch does not end an estimate."""
        drawn = self.drawn(steps)
        mixed = isinstance(self.samples, Mixed)
        sizes = self._mixed.mixture.sizes if mixed else (len(self),)
        counts = self.samples.counts(drawn).tolist() if mixed else [drawn]
        held = [int(part.sum(dtype=np.int64)) for part in np.split(self._store.counts, np.cumsum(sizes)[:-1])]
        return round(sum(h * min(1.0, n / size) for h, n, size in zip(held, counts, sizes, strict=True)))

    def comes_again(self, steps: int, source: int) -> bool:
        """Whether `steps` updates take an example of a mixture's source a second time."""
        rows = steps * self.accumulate * self.batch_size
        size = self._mixed.mixture.sizes[source]
        if not self.packed:
            whole = (
                rows // self._window * self._window if self._window else rows
            )  # within a window the order is its own
            return bool(self.samples.counts(whole)[source] > size) or self._again(self._rows(whole, rows), source)
        for e in count():
            made = self._round(e)
            part = made.part(0, min(rows, len(made)))
            rows -= len(part)
            if not rows or self._again(part, source):
                return self._again(part, source)
        raise AssertionError

    def _again(self, rows: RowRuns, source: int) -> bool:
        sizes = self._mixed.mixture.sizes
        begin = sum(sizes[:source])
        inside = (rows.samples >= begin) & (rows.samples < begin + sizes[source])
        return bool((rows.epochs[inside] > 0).any())

    @property
    def _mixed(self) -> Mixed:
        assert isinstance(self.samples, Mixed)
        return self.samples

    def padding(self, steps: int) -> float:
        """Share of padding among the tokens that this rank computes in the first `steps` updates."""
        real = computed = 0
        answers, rejected = self._store.answers, self._store.rejected
        for step in range(steps):
            for micro in self.rows_at(step):
                mine = micro[self._mine]
                widths = [int(self._store.lengths[list(row)].sum()) for row in mine]
                widths += [] if rejected is None else [int(rejected.lengths[i]) for (i,) in mine]
                real += sum(widths)
                computed += len(widths) * -(-max(widths) // self.multiple) * self.multiple
                if answers is not None:
                    written = answers.lengths[[i for (i,) in mine]]
                    real += int(written.sum())
                    computed += len(mine) * int(written.max())
        return 1 - real / computed

    def _round(self, e: int) -> RowRuns:
        """The rows of the e-th `len(self)` samples."""
        if e not in self._rounds:
            made = RowRuns.of(*self.samples.draw(e * len(self), (e + 1) * len(self)))
            if self.packed:
                made = made.packed(self._store.lengths, self.max_length)
            self._rounds = {k: v for k, v in self._rounds.items() if k == e - 1}
            self._rounds[e] = made
        return self._rounds[e]

    def _rows(self, first: int, stop: int) -> RowRuns:
        """Rows first ≤ k < stop of the endless stream."""
        if self.packed:
            return self._packed(first, stop)
        if not self._window:
            return RowRuns.of(*self.samples.draw(first, stop))
        parts = []
        for w in range(first // self._window, -(-stop // self._window)):
            begin = w * self._window
            made = RowRuns.of(*self.samples.draw(begin, begin + self._window))
            made = made.grouped(self._store.work, self.batch_size, numpy_generator(self.seed, "groups", w))
            parts.append(made.part(max(first - begin, 0), min(stop - begin, self._window)))
        return RowRuns.joined(parts)

    def _packed(self, first: int, stop: int) -> RowRuns:
        while self._starts[-1] <= first:
            self._starts.append(self._starts[-1] + len(self._round(len(self._starts) - 1)))
        e = next(e for e in reversed(range(len(self._starts))) if self._starts[e] <= first)
        start, parts, missing = self._starts[e], [], stop - first
        while missing:
            made = self._round(e)
            begin = max(first - start, 0)
            parts.append(made.part(begin, min(begin + missing, len(made))))
            missing -= len(parts[-1])
            start += len(made)
            e += 1
        return RowRuns.joined(parts)


def iterate_eval(
    examples: Sequence[Example],
    *,
    task: Task,
    batch_size: int,
    pad_id: int,
    max_tokens: int | None = None,
    share: tuple[int, int] = (0, 1),
    multiple: int = 1,
) -> Iterator[MicroBatch]:
    """Every example once, longest first (least padding, and memory peaks at once), in rows of one sample.

    Arguments:
        max_tokens: fewer rows at a time where rows × length (of all sides) would be more than this.
        share: (i, n): only every n-th row of each batch, from the i-th on. As many batches come on every rank; one
            that has no row for this rank comes with its first row and `samples` 0.
        multiple: pad rows to a multiple of so many tokens.
    """
    store = _Store(examples, task)
    work = store.work
    order = np.argsort(-work, kind="stable")
    start = 0
    while start < len(order):
        rows = batch_size
        if max_tokens is not None:
            rows = max(1, min(rows, max_tokens // int(work[order[start]])))
        batch = order[start : start + rows]
        mine = batch[share[0] :: share[1]]
        some = [int(i) for i in (mine if len(mine) else batch[:1])]
        if task.by_answer:
            micro = store.answered(some, [(i + 1) % len(order) for i in some], pad_id, multiple)
        else:
            micro = store.collate([(i,) for i in some], pad_id, multiple)
        yield micro if len(mine) else replace(micro, samples=0, supervised=0)
        start += rows
