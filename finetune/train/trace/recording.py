"""Settings of a stage's trace, and the rows that are evaluated for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...config import TraceRecording
from ...data.example import Example
from ...data.rows import limit_rows
from ...seeds import derive_seed
from .examples import LabelNoise


@dataclass(frozen=True)
class Recording:
    """Settings of a stage's trace, and the rows that are evaluated for it."""

    record: TraceRecording
    splits: Mapping[str, Sequence[Example]]
    """Rows of `train`, `dev` and `test`, if not empty."""
    flipped: LabelNoise | None = None
    """Rows of `train` with a wrong label; None without label noise."""
    curved: Sequence[Example] = ()
    """Training rows whose mean loss is used for curvature."""

    @classmethod
    def choose(
        cls,
        record: TraceRecording,
        *,
        train: Sequence[Example],
        dev: Sequence[Example],
        test: Sequence[Example],
        seed: int,
        flipped: Sequence[str] | None = None,
        true_labels: Mapping[str, int] | None = None,
    ) -> Recording:
        """Choose the rows that `record` requires.

        Args:
            seed: of the choice of training rows (`train.seed`); that of held-out rows is the same for every run.
            flipped: ids of the training rows with a wrong label; None without label noise.
            true_labels: original class of each of them by id, if rows have classes.
        """
        rows = _subsample(train, record.train_rows, seed=derive_seed(seed, "record", "train"))
        splits = {"train": rows}
        for name, examples in (("dev", dev), ("test", test)):
            splits[name] = _subsample(examples, record.heldout_rows, seed=derive_seed(0, "record", name))
        noise = None
        if flipped is not None:
            wrong, true = set(flipped), true_labels or {}
            classes = [true.get(row.id, row.labels) for row in rows]
            noise = LabelNoise(
                np.array([row.id in wrong for row in rows], dtype=bool),
                np.array(classes, dtype=np.int64) if all(isinstance(each, int) for each in classes) else None,
            )
        curved = (
            _subsample(rows, record.sharpness_rows, seed=derive_seed(seed, "record", "sharpness"))
            if record.sharpness
            else []
        )
        return cls(record, {name: part for name, part in splits.items() if part}, noise, curved)


def _subsample(examples: Sequence[Example], count: int | None, *, seed: int) -> list[Example]:
    return limit_rows(examples, count if count is not None and count < len(examples) else None, seed=seed)
