"""What an adapter is told of the features that rows bring along (`adapter.projector`). Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..bounds import check_bounds


@dataclass(frozen=True, kw_only=True)
class Projector:
    """One trained linear map (with bias) from feature vectors that every row brings along to the backbone's width."""

    features: str = "features"
    """Column of the rows: a list of `width` numbers, or a list of such lists where there are several vectors."""
    width: int = 768
    """Numbers in one vector, as the encoder that made them has it (ViT-B, AST and TimeSformer: 768)."""
    vectors: int | None = None
    """Vectors of each row; null: one, or one for each block of `inject`."""
    inject: Literal["first"] | tuple[int, ...] = "first"
    """`first`: each vector is a place of its own at the front of the row, from the first block on. Blocks, from 0: all
    vectors share one place; at each of these blocks the next vector replaces what is there, and before the first of
    them no token sees the place (eP-ALM's own way, in the upper blocks)."""

    def __post_init__(self) -> None:
        check_bounds(self, width=(1, None), vectors=(1, None))
        if isinstance(self.inject, str):
            return
        if not self.inject or self.inject[0] < 0 or list(self.inject) != sorted(set(self.inject)):
            raise ValueError(f"inject must be blocks in rising order, as [8, 9, 10], or first; got {list(self.inject)}")
        if self.vectors not in (None, len(self.inject)):
            raise ValueError(
                f"vectors is {self.vectors} and inject names {len(self.inject)} blocks; leave it out, or name as many"
            )

    @property
    def count(self) -> int:
        """K: vectors of each row."""
        return (self.vectors or 1) if isinstance(self.inject, str) else len(self.inject)

    @property
    def places(self) -> int:
        """Positions that they take at the front of every row."""
        return self.count if isinstance(self.inject, str) else 1
