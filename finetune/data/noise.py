"""Label noise: a known share of wrong labels, to see what a model does with them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from ..errors import UserError
from ..seeds import numpy_generator
from .rows import Row


def label_noise(labels: Sequence[int], *, rate: float, num_labels: int, seed: int) -> tuple[list[int], list[int]]:
    """Replace exactly ⌊rate·n + ½⌋ of the n labels by a different class, drawn uniformly.

    With the same seed, the labels flipped at a larger rate include those flipped at a smaller one, to the same class.

    Arguments:
        labels: classes in `range(num_labels)`.
    Returns:
        The new labels, and the sorted indices of those that were replaced.
    Raises:
        UserError: a rate outside [0, 1], or fewer than two classes to choose from.
    """
    if not 0.0 <= rate <= 1.0:
        raise UserError(f"data.label_noise: {rate} is not a share; give a number from 0 to 1")
    flips = math.floor(rate * len(labels) + 0.5)
    if flips and num_labels < 2:
        raise UserError(f"data.label_noise: {rate} needs another class to replace a label by, and there is only one")
    rng = numpy_generator(seed, "label-noise")
    flipped = rng.permutation(len(labels))[:flips]
    shift = rng.integers(1, max(num_labels, 2), size=len(labels))
    noisy = np.asarray(labels, dtype=np.int64).copy()
    noisy[flipped] = (noisy[flipped] + shift[flipped]) % num_labels
    return noisy.tolist(), sorted(flipped.tolist())


def noisy_rows(
    rows: Sequence[Row], *, rate: float, label_names: Sequence[str], seed: int
) -> tuple[list[Row], list[str]]:
    """The rows with `label_noise` in their `label` column (before encoding, so templates see it too).

    Returns:
        The new rows, and the ids of those whose label was replaced.
    Raises:
        UserError: as `label_noise`; or a label that is not among `label_names`.
    """
    from .encoding import label_index

    if not rate:
        return list(rows), []
    index = [label_index(row, label_names) for row in rows]
    noisy, flipped = label_noise(index, rate=rate, num_labels=len(label_names), seed=seed)
    new = list(rows)
    for i in flipped:
        new[i] = dataclasses.replace(rows[i], values={**rows[i].values, "label": label_names[noisy[i]]})
    return new, [rows[i].id for i in flipped]
