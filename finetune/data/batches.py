"""Training batches as a pure function of the optimizer step.

The examples of epoch e are shuffled by a permutation keyed by derive(seed, "order", e); epochs follow each other
without a gap, so no example is dropped and a batch may span two epochs. A mixture (`flatshift.finetune.data.mixture`)
has such epochs for each source. `TrainingDataLoader.at(step)` depends only on the step: to resume exactly, call it with
the next step.

`pack_order` chooses the examples that share a packed row, in which each has positions 0, 1, 2, …;
`flatshift.finetune.evaluate.packing_check.check_packing_isolation` verifies on the current model that they do not
attend to each other.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, count, pairwise
from typing import Literal, Protocol

import numpy as np

from ..compute.micro_batch import MicroBatch
from ..compute.protocols import LossTask
from ..errors import UserError
from ..seeds import numpy_generator
from .collator import Collator
from .example import IGNORE, Example
from .masking import Masking
from .mixture import EpochSampler, Mixture, MixtureSampler

_OPEN_ROWS = 64
_GROUPED = 50
"""Micro-batches per window within which rows are grouped by length."""


def pack_order(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Pack samples into rows by best fit over a window of 64 open rows; return rows of sample indices.

    lengths: tokens of each sample, each ≤ `max_length`. Samples are taken in order; each goes to the open row that it
    fills best, or opens a new one; with 64 open rows the fullest is closed. Rows are returned as they are closed, so
    the order stays close to that of the samples.
    """
    done: list[list[int]] = []
    rows: dict[int, list[int]] = {}  # serial → samples, in the order in which rows were opened
    free: list[tuple[int, int]] = []  # (free tokens, serial) of the open rows, sorted
    serial = 0
    for sample, length in enumerate(lengths):
        position = bisect_left(free, (length, -1))
        if position < len(free):
            space, row = free.pop(position)
            rows[row].append(sample)
            space -= length
        else:
            if len(free) == _OPEN_ROWS:
                done.append(rows.pop(free.pop(0)[1]))
            row, space, serial = serial, max_length - length, serial + 1
            rows[row] = [sample]
        if space:
            insort(free, (space, row))
        else:
            done.append(rows.pop(row))
    done.extend(rows.values())
    return done


@dataclass(frozen=True)
class RowRuns:
    """Consecutive training rows: row k holds `samples[starts[k] : starts[k + 1]]`, each drawn in its 0-based epoch; all
    int64."""

    samples: np.ndarray
    epochs: np.ndarray
    starts: np.ndarray

    @classmethod
    def of(cls, samples: np.ndarray, epochs: np.ndarray) -> RowRuns:
        return cls(samples, epochs, np.arange(len(samples) + 1))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def packed(self, lengths: np.ndarray, max_length: int) -> RowRuns:
        """Pack single-sample rows by `pack_order`; `lengths` covers all examples."""
        packs = pack_order(lengths[self.samples].tolist(), max_length)
        order = np.fromiter(chain.from_iterable(packs), dtype=np.int64, count=len(self.samples))
        return RowRuns(self.samples[order], self.epochs[order], np.cumsum([0, *map(len, packs)]))

    def grouped(self, lengths: np.ndarray, batch_size: int, rng: np.random.Generator) -> RowRuns:
        """Group single-sample rows, a multiple of `batch_size`, by length: the longest `batch_size` together, then the
        next longest, …, with the groups shuffled by `rng`."""
        by_length = np.argsort(-lengths[self.samples].astype(np.int64), kind="stable").reshape(-1, batch_size)
        order = by_length[rng.permutation(len(by_length))].ravel()
        return RowRuns.of(self.samples[order], self.epochs[order])

    def slice_rows(self, first: int, stop: int) -> RowRuns:
        begin, end = int(self.starts[first]), int(self.starts[stop])
        return RowRuns(self.samples[begin:end], self.epochs[begin:end], self.starts[first : stop + 1] - begin)

    def split_by_row(self, values: np.ndarray) -> list[tuple[int, ...]]:
        """Split `samples` or `epochs` by row."""
        flat, starts = values.tolist(), self.starts.tolist()
        return [tuple(flat[low:high]) for low, high in pairwise(starts)]

    @classmethod
    def join(cls, runs: Sequence[RowRuns]) -> RowRuns:
        if not runs:
            return cls.of(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
        return cls(
            np.concatenate([run.samples for run in runs]),
            np.concatenate([run.epochs for run in runs]),
            np.concatenate([[0], np.cumsum(np.concatenate([np.diff(run.starts) for run in runs]))]),
        )


class TrainingTask(LossTask, Protocol):
    """Members of a task that its training batches use."""

    @property
    def pack(self) -> bool: ...


class TrainingDataLoader:
    """Endless, seeded stream of training micro-batches."""

    def __init__(
        self,
        examples: Sequence[Example],
        *,
        task: TrainingTask,
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
        batch_size: rows of a micro-batch over all data ranks; a packed row holds several samples.
        accumulate: micro-batches per optimizer step.
        max_length: tokens of a packed row; no example is longer.
        share: (i, n): `at` returns the i-th of n equal parts of each micro-batch's rows, for one data rank.
        multiple: pad rows to a multiple of this many tokens.
        mixture: sources whose examples are concatenated in `examples`; None: a single source.
        group: `length`: rows of similar length share a micro-batch.
        masking: random masking of a row's tokens each time it is drawn; for masked-lm.

        Raises UserError: no examples, an example longer than `max_length` or without target tokens, sizes below one,
        rows that cannot be divided among the data ranks, an empty mixture, grouping of packed rows.
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
        self.packed, self._by_answer = task.pack, task.traits.is_answer_level
        if group is not None and self.packed:
            raise UserError(f"train.group: {group} has no use where task.pack is true, rows are full; leave it out")
        if task.traits.masks_tokens != (masking is not None):
            raise ValueError("Batches needs `masking` for masked-lm, and for no other task")
        self._masking = masking
        self._collator = Collator(examples, task)
        for lengths in self._collator.all_lengths:
            longest = int(lengths.argmax())
            if lengths[longest] > max_length:
                raise UserError(
                    f"{examples[longest].where}: {lengths[longest]} tokens do not fit train.max_length "
                    f"{max_length}; encode with the same max_length"
                )
        empty = np.flatnonzero(self._collator.counts == 0)
        if len(empty):
            raise UserError(f"{examples[int(empty[0])].where}: this sample has no target token")
        assert mixture is None or sum(mixture.sizes) == len(examples)
        self.samples: EpochSampler | MixtureSampler
        self.samples = (
            EpochSampler(len(self), seed) if mixture is None else MixtureSampler(mixture, seed, self._collator.work)
        )
        self._window = 0
        if group is not None:
            self._window = batch_size * max(1, min(_GROUPED, int(self.samples.epoch_size) // batch_size))
        self._epoch_rows: dict[int, RowRuns] = {}
        self._starts = [0]  # number of packed rows before epoch e

    def __len__(self) -> int:
        return len(self._collator.lengths)

    def epoch(self, e: int) -> list[tuple[int, ...]]:
        """Return the rows of epoch e as example indices; in a mixture an epoch is as many samples as there are
        examples."""
        rows = self._rows_of_epoch(e)
        return rows.split_by_row(rows.samples)

    def rows_at(self, step: int) -> list[list[tuple[int, ...]]]:
        """Return example indices by micro-batch and row, for the 0-based optimizer step."""
        rows = self._step_rows(step)
        return self._split_micro_batches(rows.split_by_row(rows.samples))

    def _split_micro_batches(self, rows: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
        return [rows[i : i + self.batch_size] for i in range(0, len(rows), self.batch_size)]

    def at(self, step: int) -> list[MicroBatch]:
        """Return this rank's part of the micro-batches of the 0-based optimizer step, independent of earlier calls."""
        rows = self._step_rows(step)
        if self._by_answer:
            return self._collate_answers(rows.samples.tolist())
        own = self._own_rows
        return [
            self._collator.collate(micro[own], self.pad_id, self.multiple, self._draw_masks(rows, number, own))
            for number, micro in enumerate(self._split_micro_batches(rows.split_by_row(rows.samples)))
        ]

    def _collate_answers(self, samples: list[int]) -> list[MicroBatch]:
        """Collate answers; each example's mismatched answers are those of the next example of the step, independent
        of mesh and micro-batches."""
        others = [*samples[1:], samples[0]]
        micro_batches = []
        for first in range(0, len(samples), self.batch_size):
            own = range(first, first + self.batch_size)[self._own_rows]
            sides = samples[own.start : own.stop], others[own.start : own.stop]
            micro_batches.append(self._collator.collate_answers(*sides, self.pad_id, self.multiple))
        return micro_batches

    @property
    def _own_rows(self) -> slice:
        size = self.batch_size // self.share[1]
        return slice(self.share[0] * size, (self.share[0] + 1) * size)

    def _draw_masks(self, step: RowRuns, number: int, own: slice) -> list[tuple[np.ndarray, np.ndarray]] | None:
        """Return masked ids and labels of the rows `own` of the step's micro-batch `number`, keyed by example and
        epoch; None without masking."""
        if self._masking is None:
            return None
        positions = range(number * self.batch_size, (number + 1) * self.batch_size)[own]
        masked = []
        for i, epoch in zip(step.samples[positions].tolist(), step.epochs[positions].tolist(), strict=True):
            ids, words = self._collator.unmasked(i)
            masked.append(self._masking.draw(ids, words, numpy_generator(self.seed, "mask", i, epoch)))
        return masked

    def supervised(self, step: int) -> int:
        """Return the target tokens (examples for classification) of the whole step, the denominator of its loss."""
        if self._masking is not None:
            rows = self._step_rows(step)
            masked = [self._draw_masks(rows, number, slice(None)) or [] for number in range(self.accumulate)]
            return int(sum((labels != IGNORE).sum() for micro in masked for _, labels in micro))
        return int(sum(self._collator.counts[i] for micro in self.rows_at(step) for row in micro for i in row))

    def epochs(self, steps: int) -> float:
        """Return the number of epochs that `steps` optimizer steps cover."""
        return self.samples_in(steps) / len(self)

    def samples_in(self, steps: int) -> int:
        """Return the number of samples in the first `steps` optimizer steps; for packed rows an estimate from the
        first epoch."""
        rows = steps * self.accumulate * self.batch_size
        return rows if not self.packed else round(rows * len(self) / len(self._rows_of_epoch(0)))

    def labels(self, steps: int) -> int:
        """Return the distinct target tokens (examples for classification) of the first `steps` optimizer steps; an
        estimate if an epoch is incomplete."""
        samples = self.samples_in(steps)
        sizes = self.samples.mixture.sizes if isinstance(self.samples, MixtureSampler) else (len(self),)
        counts = self.samples.counts(samples).tolist()
        targets = [int(part.sum(dtype=np.int64)) for part in np.split(self._collator.counts, np.cumsum(sizes)[:-1])]
        return round(sum(t * min(1.0, n / size) for t, n, size in zip(targets, counts, sizes, strict=True)))

    def repeats_source(self, steps: int, source: int) -> bool:
        """Return True if the first `steps` optimizer steps draw an example of a mixture's source a second time."""
        rows = steps * self.accumulate * self.batch_size
        assert isinstance(self.samples, MixtureSampler)
        sizes = self.samples.mixture.sizes
        begin = sum(sizes[:source])

        def repeats(run: RowRuns) -> bool:
            in_source = (run.samples >= begin) & (run.samples < begin + sizes[source])
            return bool((run.epochs[in_source] > 0).any())

        if not self.packed:
            # Within a window rows are reordered by length, so the last, incomplete one is checked row by row.
            complete = rows // self._window * self._window if self._window else rows
            return bool(self.samples.counts(complete)[source] > sizes[source]) or repeats(
                self._stream_rows(complete, rows)
            )
        for e in count():
            epoch = self._rows_of_epoch(e)
            run = epoch.slice_rows(0, min(rows, len(epoch)))
            rows -= len(run)
            if not rows or repeats(run):
                return repeats(run)
        raise AssertionError

    def padding(self, steps: int) -> float:
        """Return the share of padding among the tokens that this rank computes in the first `steps` updates."""
        real, computed = self.tokens(steps)
        return 1 - real / computed

    def tokens(self, steps: int) -> tuple[int, int]:
        """Return the tokens that this rank computes in the first `steps` updates, without and with padding."""
        real = computed = 0
        answers, rejected = self._collator.decoder_ids, self._collator.rejected_ids
        for step in range(steps):
            for micro in self.rows_at(step):
                own = micro[self._own_rows]
                widths = [int(self._collator.lengths[list(row)].sum()) for row in own]
                widths += [] if rejected is None else [int(rejected[2][i]) for (i,) in own]
                real += sum(widths)
                computed += len(widths) * -(-max(widths) // self.multiple) * self.multiple
                if answers is not None:
                    lengths = answers[2][[i for (i,) in own]]
                    real += int(lengths.sum())
                    computed += len(own) * int(lengths.max())
        return real, computed

    def _rows_of_epoch(self, e: int) -> RowRuns:
        """Return the rows of the e-th `len(self)` samples; the last two results are cached."""
        if e not in self._epoch_rows:
            rows = RowRuns.of(*self.samples.draw(e * len(self), (e + 1) * len(self)))
            if self.packed:
                rows = rows.packed(self._collator.lengths, self.max_length)
            self._epoch_rows = {k: v for k, v in self._epoch_rows.items() if k == e - 1}
            self._epoch_rows[e] = rows
        return self._epoch_rows[e]

    def _step_rows(self, step: int) -> RowRuns:
        size = self.accumulate * self.batch_size
        return self._stream_rows(step * size, (step + 1) * size)

    def _stream_rows(self, first: int, stop: int) -> RowRuns:
        if self.packed:
            return self._packed_rows(first, stop)
        if not self._window:
            return RowRuns.of(*self.samples.draw(first, stop))
        runs = []
        for w in range(first // self._window, -(-stop // self._window)):
            begin = w * self._window
            rows = RowRuns.of(*self.samples.draw(begin, begin + self._window))
            rows = rows.grouped(self._collator.work, self.batch_size, numpy_generator(self.seed, "groups", w))
            runs.append(rows.slice_rows(max(first - begin, 0), min(stop - begin, self._window)))
        return RowRuns.join(runs)

    def _packed_rows(self, first: int, stop: int) -> RowRuns:
        while self._starts[-1] <= first:
            self._starts.append(self._starts[-1] + len(self._rows_of_epoch(len(self._starts) - 1)))
        e = next(e for e in reversed(range(len(self._starts))) if self._starts[e] <= first)
        start, runs, missing = self._starts[e], [], stop - first
        while missing:
            epoch = self._rows_of_epoch(e)
            begin = max(first - start, 0)
            runs.append(epoch.slice_rows(begin, min(begin + missing, len(epoch))))
            missing -= len(runs[-1])
            start += len(epoch)
            e += 1
        return RowRuns.join(runs)
