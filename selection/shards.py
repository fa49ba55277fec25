"""Shards of a pool: consecutive ranges of its rows, each mapped by a function that knows no other.

A method or step that can be divided calls the `ShardMap` that it was given, once for each pass over the pool, and joins
the results, which come in the order of the rows. Functions are module-level functions or `functools.partial` of them:
they travel to other processes and machines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np

Arrays = Mapping[str, "np.ndarray"]


@dataclass(frozen=True)
class Shard:
    """Rows [low, high) of a pool. texts: of these rows. inputs: arrays given to the map, the same for every shard.
    earlier: result of this shard in an earlier map. Both are mapped from disk."""

    texts: Sequence[str]
    low: int
    high: int
    inputs: Arrays
    earlier: Arrays


class ShardMap(Protocol):
    """Maps a function over the shards of one pool."""

    def __call__(
        self,
        stage: str,
        function: Callable[[Shard], Arrays],
        *,
        inputs: Arrays | None = None,
        earlier: Sequence[Arrays] | None = None,
        align: int = 1,
    ) -> Sequence[Arrays]:
        """Return the function's arrays for every shard in order, mapped from disk.

        stage: name in messages. earlier: return value of a former call with the same `align`. align: every border
        between two shards is a multiple of it.
        """
        ...
