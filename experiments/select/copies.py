"""Replace selected records that repeat the text of an earlier one by the next in rank."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from flatshift.experiments.select.pool import PoolAndTarget
from flatshift.selection.hygiene.duplicates import normalise
from flatshift.selection.methods.base import Selector
from flatshift.selection.methods.domains import DomainsSelector

_BLOCK = 4096


class Copies(NamedTuple):
    """Counts of repeated records that were replaced, and of those kept because the pool has no other text."""

    passed: int = 0
    left: int = 0


def without_copies(selector: Selector, sides: PoolAndTarget, chosen: np.ndarray) -> tuple[np.ndarray, Copies]:
    """Replace rows of `chosen` that repeat the text of an earlier one (ignoring case, spaces and Unicode form).

    The replacement is the next in rank, of the same domain if the budget is shared out among domains. Reads no more of
    the pool than necessary. Repeats stay, at the end, if the pool has no other text.
    """
    rows = sides.pool.rows
    shared = sides.domains[0] if isinstance(selector, DomainsSelector) else None

    def domain(row: int) -> str | None:
        return None if shared is None else shared[row]

    seen: set[str] = set()
    kept: list[int] = []
    again: list[int] = []
    for row, written in zip(chosen.tolist(), rows.take(chosen).texts, strict=True):
        text = normalise(written)
        (again if text in seen else kept).append(row)
        seen.add(text)
    if not again:
        return chosen, Copies()
    wanted = Counter(map(domain, again))
    order = selector.select(len(selector.scores_))[len(chosen) :]
    for low in range(0, len(order), _BLOCK):
        if not wanted.total():
            break
        block = order[low : low + _BLOCK]
        for row, written in zip(block.tolist(), rows.take(block).texts, strict=True):
            if wanted[domain(row)] and (text := normalise(written)) not in seen:
                seen.add(text)
                kept.append(row)
                wanted[domain(row)] -= 1
    left = []
    for row in again:
        if wanted[domain(row)]:
            left.append(row)
            wanted[domain(row)] -= 1
    return np.array([*kept, *left], dtype=chosen.dtype), Copies(len(again) - len(left), len(left))
