"""Label noise: a known share of wrong labels, to study their effect on a model.

- rows with a class: another class (`flip_row_labels`)
- rows with an answer in words: the answer of a row with a different one (`replace_answers`)
- rows with two answers: chosen and rejected are swapped (`flip_preferences`)
- plain texts, whose every token is a label: the row's tokens in random order (`shuffle_tokens`)

All of them draw ⌊rate·n + ½⌋ of n rows, and the rows drawn at a larger rate include those of a smaller one, with the
same wrong labels. The draw depends on n: to use only part of the rows, draw over all of them first, so that every part
has the same noise.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import numpy as np

from ..errors import UserError
from ..seeds import numpy_generator
from .example import IGNORE, Example
from .labels import label_index
from .rows import Row

_Each = TypeVar("_Each", Row, Example)


def _count_flips(rate: float, rows: int) -> int:
    if not 0.0 <= rate <= 1.0:
        raise UserError(f"data.label_noise: {rate} is not a share; give a number from 0 to 1")
    return math.floor(rate * rows + 0.5)


def flip_labels(labels: Sequence[int], *, rate: float, num_labels: int, seed: int) -> tuple[list[int], list[int]]:
    """Replace exactly ⌊rate·n + ½⌋ of the n labels by a different class, drawn uniformly; return the new labels, and
    the sorted indices of those that were replaced.

    labels: classes in `range(num_labels)`. With the same seed, the labels flipped at a larger rate include those
    flipped at a smaller one, to the same class. Raises UserError for a rate outside [0, 1], or fewer than two classes.
    """
    flips = _count_flips(rate, len(labels))
    if flips and num_labels < 2:
        raise UserError(f"data.label_noise: {rate} needs another class to replace a label by, and there is only one")
    rng = numpy_generator(seed, "label-noise")
    flipped = rng.permutation(len(labels))[:flips]
    # Draw a shift for every label, so that the wrong class does not depend on the rate.
    shift = rng.integers(1, max(num_labels, 2), size=len(labels))
    noisy = np.asarray(labels, dtype=np.int64).copy()
    noisy[flipped] = (noisy[flipped] + shift[flipped]) % num_labels
    return noisy.tolist(), sorted(flipped.tolist())


def _change_rows(
    rows: Sequence[_Each], flipped: Sequence[int], change: Callable[[int], _Each]
) -> tuple[list[_Each], list[str]]:
    """Return the rows with those at the indices `flipped` replaced, and the ids of these."""
    changed = list(rows)
    for i in flipped:
        changed[i] = change(i)
    return changed, [rows[i].id for i in flipped]


def flip_row_labels(
    rows: Sequence[Row], *, rate: float, label_names: Sequence[str], seed: int
) -> tuple[list[Row], list[str]]:
    """Apply `flip_labels` to the rows' `label` column (before encoding, so that templates see it too).

    Returns the new rows, and the ids of those whose label was replaced. Raises UserError as `flip_labels`, or for a
    label that is not in `label_names`.
    """
    if not rate:
        return list(rows), []
    index = [label_index(row, label_names) for row in rows]
    noisy, flipped = flip_labels(index, rate=rate, num_labels=len(label_names), seed=seed)

    def change(i: int) -> Row:
        return dataclasses.replace(rows[i], values={**rows[i].values, "label": label_names[noisy[i]]})

    return _change_rows(rows, flipped, change)


def replace_answers(
    rows: Sequence[Row], *, columns: Sequence[str], rate: float, seed: int
) -> tuple[list[Row], list[str]]:
    """Replace the answer of a share of the rows by that of another row with a different answer, drawn uniformly.

    columns: columns of the answer; all of them are taken from the same other row. Returns the new rows, and the ids of
    those whose answer was replaced. Raises UserError for a rate outside [0, 1], or no two different answers.
    """
    flips = _count_flips(rate, len(rows))
    if not flips:
        return list(rows), []
    answers = [tuple(str(row.values.get(name)) for name in columns) for row in rows]
    known = {answer: code for code, answer in enumerate(dict.fromkeys(answers))}
    if len(known) < 2:
        raise UserError(
            f"data.label_noise: {rate} needs rows with different answers to exchange, and all have the same"
        )
    group = np.array([known[answer] for answer in answers])
    sizes = np.bincount(group)
    by_group = np.argsort(group, kind="stable")
    after = np.cumsum(sizes)[group]  # start of the rows with another answer in `by_group`, cyclically
    rng = numpy_generator(seed, "label-noise")
    flipped = sorted(rng.permutation(len(rows))[:flips].tolist())
    # Draw a donor for every row, so that it does not depend on the rate.
    donor = by_group[(after + rng.integers(0, len(rows) - sizes[group])) % len(rows)]

    def change(i: int) -> Row:
        answer = {name: rows[donor[i]].values.get(name) for name in columns}
        return dataclasses.replace(rows[i], values={**rows[i].values, **answer})

    return _change_rows(rows, flipped, change)


def flip_preferences(
    rows: Sequence[Row], *, exchange: Callable[[Row], Row], rate: float, seed: int
) -> tuple[list[Row], list[str]]:
    """Give a share of the rows the opposite label, by `exchange`. Returns the new rows, and the ids of those whose
    label was replaced. Raises UserError for a rate outside [0, 1]."""
    order = numpy_generator(seed, "label-noise").permutation(len(rows))
    return _change_rows(rows, sorted(order[: _count_flips(rate, len(rows))].tolist()), lambda i: exchange(rows[i]))


def shuffle_tokens(
    examples: Sequence[Example], *, rate: float, fixed: Collection[int], seed: int, pool: Sequence[str] | None = None
) -> tuple[list[Example], list[str]]:
    """Shuffle the target tokens of a share of encoded texts: the same words, with nothing to learn except the row
    itself. A drawn text without two different tokens is unchanged.

    fixed: tokens that keep their position (special tokens). pool: ids of all rows, which include those of `examples`,
    over which to draw; None: `examples` only. Returns the new examples, and the ids of those that were shuffled. Raises
    UserError for a rate outside [0, 1], or too few rows with two different tokens.
    """
    flips = _count_flips(rate, len(examples))
    positions = [_find_movable_tokens(example, fixed) for example in examples]
    able = [len({examples[i].input_ids[k] for k in positions[i]}) > 1 for i in range(len(examples))]
    if flips > sum(able):
        raise UserError(
            f"data.label_noise: {rate} of {len(examples)} rows is {flips}, and only {sum(able)} have two different "
            f"tokens to put in another order; give at most {sum(able) / len(examples):.2g}"
        )
    names = [example.id for example in examples] if pool is None else pool
    order = numpy_generator(seed, "label-noise").permutation(len(names))
    numbers = {names[k]: k for k in order[: _count_flips(rate, len(names))].tolist()}
    flipped = [i for i, example in enumerate(examples) if able[i] and example.id in numbers]

    def change(i: int) -> Example:
        rng = numpy_generator(seed, "label-noise", numbers[examples[i].id])
        ids, labels = list(examples[i].input_ids), examples[i].labels
        assert isinstance(labels, list)
        tokens = before = [ids[position] for position in positions[i]]
        while tokens == before:
            tokens = [before[k] for k in rng.permutation(len(before))]
        labels = list(labels)
        for position, token in zip(positions[i], tokens, strict=True):
            ids[position] = labels[position] = token
        return dataclasses.replace(examples[i], input_ids=ids, labels=labels)

    return _change_rows(examples, flipped, change)


def _find_movable_tokens(example: Example, fixed: Collection[int]) -> list[int]:
    assert isinstance(example.labels, list)
    return [
        position
        for position, (token, label) in enumerate(zip(example.input_ids, example.labels, strict=True))
        if label != IGNORE and token not in fixed
    ]
