"""`train.epochs` as a number of updates, once the training rows are counted; a run knows only `train.steps`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction

from experiments.data.sources import batches_ahead
from experiments.recipe.resolve import Resolved
from finetune.bounds import MOST_STEPS
from finetune.data.example import Example
from finetune.errors import UserError


def in_steps(resolved: Resolved, train: Sequence[Example], *, seed: int) -> Resolved:
    """`resolved` with `train.steps` in place of `train.epochs`, whose origin says epochs of how many rows; as it is
    where the recipe names no epochs.

    Updates are ⌈epochs · rows / (batch_size · accumulate)⌉: epochs follow each other without a gap, so each row comes
    up at least ⌊epochs⌋ times (of packed rows about so: those of the first epoch are counted, and each packs anew).

    Args:
        train: the encoded training examples.
        seed: of the stage, by which rows are packed.
    Raises:
        UserError: more updates than a stage may have.
    """
    recipe, epochs = resolved.recipe, resolved.recipe.train.epochs
    if epochs is None:
        return resolved
    packed = recipe.task.pack
    rows = len(batches_ahead(recipe, train, None, seed=seed).epoch(0)) if packed else len(train)
    each = recipe.train.batch_size * recipe.train.accumulate
    steps = math.ceil(Fraction(repr(epochs)) * rows / each)  # as written: 1.1 · 10 rows are 11
    said = f"train.epochs {epochs:g} of {rows:,} {'packed ' if packed else ''}rows"
    if steps > MOST_STEPS:
        raise UserError(f"{said} are {steps:,} updates, above the {MOST_STEPS:,} that a stage may have; give fewer")
    settled = dataclasses.replace(recipe.train, steps=steps, epochs=None)
    origins = {**resolved.origins, "train.steps": said, "train.epochs": "counted as train.steps"}
    return Resolved(dataclasses.replace(recipe, train=settled), resolved.name, origins)
