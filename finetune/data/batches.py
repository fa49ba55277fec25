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
    """Pack samples into rows by best fit over a window of 64 open rows.

    Samples are taken in order; each goes to the open row that it fills best, or opens a new one; with 64 open rows the
    fullest is closed. Rows are returned as they are closed, so the order stays close to that of the samples.

    Arguments:
        lengths: tokens of each sample, each ≤ `max_length`.
    Returns:
        Rows of sample indices: every index of `lengths` exactly once, each row with at most `max_length` tokens.
    """
    done: list[list[int]] = []
    rows: dict[int, list[int]] = {}  # serial → samples, in the order in which rows were opened
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
    """Consecutive training rows: row k holds `samples[starts[k] : starts[k + 1]]`."""

    samples: np.ndarray
    """Example indices, row by row, int64."""
    epochs: np.ndarray
    """Epoch (0-based) in which each example is drawn, int64."""
    starts: np.ndarray
    """(rows + 1,) int64."""

    @classmethod
    def of(cls, samples: np.ndarray, epochs: np.ndarray) -> RowRuns:
        """Return rows with one sample each."""
        return cls(samples, epochs, np.arange(len(samples) + 1))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def packed(self, lengths: np.ndarray, max_length: int) -> RowRuns:
        """Pack these single-sample rows into rows of several samples by `pack_order`; `lengths` covers all examples."""
        packs = pack_order(lengths[self.samples].tolist(), max_length)
        turn = np.fromiter(chain.from_iterable(packs), dtype=np.int64, count=len(self.samples))
        return RowRuns(self.samples[turn], self.epochs[turn], np.cumsum([0, *map(len, packs)]))

    def grouped(self, lengths: np.ndarray, batch_size: int, rng: np.random.Generator) -> RowRuns:
        """Group these single-sample rows by length: the longest `batch_size` together, then the next longest, …,
        with the groups shuffled by `rng`. The number of rows must be a multiple of `batch_size`."""
        by_length = np.argsort(-lengths[self.samples].astype(np.int64), kind="stable").reshape(-1, batch_size)
        turn = by_length[rng.permutation(len(by_length))].ravel()
        return RowRuns.of(self.samples[turn], self.epochs[turn])

    def part(self, first: int, stop: int) -> RowRuns:
        """Return rows first ≤ k < stop."""
        begin, end = int(self.starts[first]), int(self.starts[stop])
        return RowRuns(self.samples[begin:end], self.epochs[begin:end], self.starts[first : stop + 1] - begin)

    def split(self, values: np.ndarray) -> list[tuple[int, ...]]:
        """Split `samples` or `epochs` by row."""
        flat, starts = values.tolist(), self.starts.tolist()
        return [tuple(flat[low:high]) for low, high in pairwise(starts)]

    @classmethod
    def joined(cls, parts: Sequence[RowRuns]) -> RowRuns:
        """Concatenate the rows of all parts."""
        if not parts:
            return cls.of(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
        sizes = np.concatenate([np.diff(part.starts) for part in parts])
        return cls(
            np.concatenate([part.samples for part in parts]),
            np.concatenate([part.epochs for part in parts]),
            np.concatenate([[0], np.cumsum(sizes)]),
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
        Arguments:
            batch_size: rows of a micro-batch over all data ranks; a packed row holds several samples.
            accumulate: micro-batches per optimizer step.
            max_length: tokens of a packed row; no example is longer.
            share: (i, n): `at` returns the i-th of n equal parts of each micro-batch's rows, for one data rank.
            multiple: pad rows to a multiple of this many tokens.
            mixture: sources whose examples are concatenated in `examples`; None: a single source.
            group: `length`: rows of similar length share a micro-batch.
            masking: random masking of a row's tokens each time it is drawn; for masked-lm.
        Raises:
            UserError: no examples, an example longer than `max_length` or without target tokens, sizes below one, rows
                that cannot be divided among the data ranks, an empty mixture, grouping of packed rows.
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
        more = (self._collator.answers, self._collator.rejected)
        for lengths in [self._collator.lengths, *(part.lengths for part in more if part is not None)]:
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
        """Stream of samples from which rows are built."""
        self._window = 0
        if group is not None:
            self._window = batch_size * max(1, min(_GROUPED, int(self.samples.around) // batch_size))
        self._rounds: dict[int, RowRuns] = {}
        self._starts = [0]  # number of packed rows before epoch e

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self._collator.lengths)

    def epoch(self, e: int) -> list[tuple[int, ...]]:
        """Return the rows of epoch e as example indices; for a mixture, an epoch is as many samples as there are
        examples."""
        return self._round(e).split(self._round(e).samples)

    def rows_at(self, step: int) -> list[list[tuple[int, ...]]]:
        """Return example indices by micro-batch and row, for the 0-based optimizer step."""
        rows = self._step(step)
        return self._micros(rows.split(rows.samples))

    def epochs_at(self, step: int) -> list[list[tuple[int, ...]]]:
        """Return, in the layout of `rows_at`, the 0-based epoch of each example (in a mixture: of its source)."""
        rows = self._step(step)
        return self._micros(rows.split(rows.epochs))

    def _micros(self, rows: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
        return [rows[i : i + self.batch_size] for i in range(0, len(rows), self.batch_size)]

    def _step(self, step: int) -> RowRuns:
        first = step * self.accumulate * self.batch_size
        return self._rows(first, first + self.accumulate * self.batch_size)

    def at(self, step: int) -> list[MicroBatch]:
        """Return this rank's part of the micro-batches of the 0-based optimizer step, independent of earlier calls."""
        rows = self._step(step)
        if self._by_answer:
            return self._answered(rows.samples.tolist())
        return [
            self._collator.collate(micro[self._mine], self.pad_id, self.multiple, self._drawn(rows, number, self._mine))
            for number, micro in enumerate(self._micros(rows.split(rows.samples)))
        ]

    def _answered(self, samples: list[int]) -> list[MicroBatch]:
        """Collate answers; each example's mismatched answers are those of the next example of the step, independent
        of mesh and micro-batches."""
        pairs = list(zip(samples, [*samples[1:], samples[0]], strict=True))
        runs = [pairs[first : first + self.batch_size][self._mine] for first in range(0, len(pairs), self.batch_size)]
        return [
            self._collator.answered([i for i, _ in run], [j for _, j in run], self.pad_id, self.multiple)
            for run in runs
        ]

    @property
    def _mine(self) -> slice:
        """This rank's rows of a micro-batch."""
        each = self.batch_size // self.share[1]
        return slice(self.share[0] * each, (self.share[0] + 1) * each)

    def _drawn(self, step: RowRuns, number: int, mine: slice) -> list[tuple[np.ndarray, np.ndarray]] | None:
        """Return masked ids and labels of the rows `mine` of the step's micro-batch `number`, drawn by example and
        epoch; None without masking."""
        if self._masking is None:
            return None
        places = range(number * self.batch_size, (number + 1) * self.batch_size)[mine]
        drawn = []
        for i, epoch in zip(step.samples[places].tolist(), step.epochs[places].tolist(), strict=True):
            own, words = self._collator.unmasked(i)
            drawn.append(self._masking.draw(own, words, numpy_generator(self.seed, "mask", i, epoch)))
        return drawn

    def supervised(self, step: int) -> int:
        """Return the target tokens (examples for classification) of the whole step: the denominator of its loss."""
        if self._masking is not None:
            rows = self._step(step)
            drawn = [self._drawn(rows, number, slice(None)) or [] for number in range(self.accumulate)]
            return int(sum((labels != IGNORE).sum() for micro in drawn for _, labels in micro))
        return int(sum(self._collator.counts[i] for micro in self.rows_at(step) for row in micro for i in row))

    def epochs(self, steps: int) -> float:
        """Return the number of epochs that `steps` optimizer steps cover."""
        return self.drawn(steps) / len(self)

    def drawn(self, steps: int) -> int:
        """Return the number of samples in the first `steps` optimizer steps; for packed rows an estimate from the
        first epoch."""
        rows = steps * self.accumulate * self.batch_size
        return rows if not self.packed else round(rows * len(self) / len(self._round(0)))

    def labels(self, steps: int) -> int:
        """Return the distinct target tokens (examples for classification) of the first `steps` optimizer steps; an
        estimate if an epoch is incomplete."""
        drawn = self.drawn(steps)
        mixed = isinstance(self.samples, MixtureSampler)
        sizes = self._mixed.mixture.sizes if mixed else (len(self),)
        counts = self.samples.counts(drawn).tolist() if mixed else [drawn]
        held = [int(part.sum(dtype=np.int64)) for part in np.split(self._collator.counts, np.cumsum(sizes)[:-1])]
        return round(sum(h * min(1.0, n / size) for h, n, size in zip(held, counts, sizes, strict=True)))

    def repeats_source(self, steps: int, source: int) -> bool:
        """Return True if the first `steps` optimizer steps draw an example of a mixture's source a second time."""
        rows = steps * self.accumulate * self.batch_size
        size = self._mixed.mixture.sizes[source]
        if not self.packed:
            # Within a window rows are reordered by length, so the last, incomplete one is checked row by row.
            whole = rows // self._window * self._window if self._window else rows
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
    def _mixed(self) -> MixtureSampler:
        assert isinstance(self.samples, MixtureSampler)
        return self.samples

    def padding(self, steps: int) -> float:
        """Share of padding among the tokens that this rank computes in the first `steps` updates."""
        real, computed = self.tokens(steps)
        return 1 - real / computed

    def tokens(self, steps: int) -> tuple[int, int]:
        """Tokens that this rank computes in the first `steps` updates, without and with padding."""
        real = computed = 0
        answers, rejected = self._collator.answers, self._collator.rejected
        for step in range(steps):
            for micro in self.rows_at(step):
                mine = micro[self._mine]
                widths = [int(self._collator.lengths[list(row)].sum()) for row in mine]
                widths += [] if rejected is None else [int(rejected.lengths[i]) for (i,) in mine]
                real += sum(widths)
                computed += len(widths) * -(-max(widths) // self.multiple) * self.multiple
                if answers is not None:
                    written = answers.lengths[[i for (i,) in mine]]
                    real += int(written.sum())
                    computed += len(mine) * int(written.max())
        return real, computed

    def _round(self, e: int) -> RowRuns:
        """Return the rows of the e-th `len(self)` samples; the last two results are cached."""
        if e not in self._rounds:
            made = RowRuns.of(*self.samples.draw(e * len(self), (e + 1) * len(self)))
            if self.packed:
                made = made.packed(self._collator.lengths, self.max_length)
            self._rounds = {k: v for k, v in self._rounds.items() if k == e - 1}
            self._rounds[e] = made
        return self._rounds[e]

    def _rows(self, first: int, stop: int) -> RowRuns:
        """Return rows first ≤ k < stop of the endless stream."""
        if self.packed:
            return self._packed(first, stop)
        if not self._window:
            return RowRuns.of(*self.samples.draw(first, stop))
        parts = []
        for w in range(first // self._window, -(-stop // self._window)):
            begin = w * self._window
            made = RowRuns.of(*self.samples.draw(begin, begin + self._window))
            made = made.grouped(self._collator.work, self.batch_size, numpy_generator(self.seed, "groups", w))
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
