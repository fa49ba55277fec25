"""The first n of a seeded shuffle: subsets that contain each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from ..errors import UserError
from ..seeds import numpy_generator

T = TypeVar("T")


def limit_rows(rows: Sequence[T], limit: int | None, *, seed: int) -> list[T]:
    """The rows that come first in a shuffle keyed by `seed`, in their original order.

    With the same rows and seed, a larger limit contains every smaller one. `limit=None` keeps all.

    Raises:
        UserError: a limit below one, or above the number of rows.
    """
    if limit is None:
        return list(rows)
    if limit < 1:
        raise UserError(f"limit: {limit} rows cannot be used; give at least 1, or null for all")
    if limit > len(rows):
        raise UserError(f"limit: {limit} is above the {len(rows)} rows there are; ask for at most {len(rows)}")
    order = numpy_generator(seed, "limit").permutation(len(rows))
    return [rows[i] for i in sorted(order[:limit].tolist())]
