"""Gradient similarity (LESS, Xia et al. 2024, arXiv 2402.04333) on given gradient features."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar, Literal, Self

from flatshift.selection.errors import SelectionError
from flatshift.selection.lazy import np
from flatshift.selection.methods.base import Pool, Progress, Selector, Target, check_number, require_field
from flatshift.selection.validation import SelectorContext, check_chunk, check_no_overflow, from_settings


@dataclass(frozen=True, kw_only=True)
class Less:
    """Gradient similarity (LESS, arXiv 2402.04333): the mean similarity of a row's gradient with a target subset's,
    maximised over the subsets (the target's domains; one subset without domains). Features are gradients, one a row,
    computed by you: `--pool-features` and `--target-features`."""

    kind: Literal["less"] = "less"
    title: ClassVar[str] = "Gradient similarity"
    needs: ClassVar[tuple[str, ...]] = ("features", "gradients", "domains")
    similarity: Literal["cosine", "inner"] = "cosine"
    """`cosine`, as the paper; `inner` favours long gradients, which short texts have."""
    checkpoint_weights: tuple[float, ...] = (1.0,)
    """One weight (its learning rate) per checkpoint: the columns are that many concatenated blocks of equal width,
    compared block by block; scaled to sum 1."""

    def __post_init__(self) -> None:
        if not self.checkpoint_weights:
            raise ValueError("checkpoint_weights is empty; give one weight per checkpoint")
        if not all(0 < weight < inf for weight in self.checkpoint_weights):
            raise ValueError(f"checkpoint_weights must all be above 0, got {list(self.checkpoint_weights)}")

    def build(self, around: SelectorContext) -> LessSelector:
        return from_settings(LessSelector, self, around)


class LessSelector(Selector):
    """Scores by −max over target subsets of the mean over the subset of Σ_c w_c ⟨∇_c(row), ∇_c(target)⟩.

    The features of pool and target are gradients (projected or not: `selection.RandomProjection`), with one block of
    columns per checkpoint c of weight w_c. similarity "cosine" normalises every block of every row, "inner" none.
    Subsets are the target's domains (rows without one form another subset); a target without domains is one subset. The
    mean of products is the product with the mean, so the work is N·D·subsets and not N·D·M. A zero gradient has
    similarity 0. chunk: rows per tile. `subset_` (N,) names each row's best subset. Ignores weights.
    """

    def __init__(
        self,
        *,
        similarity: str = "cosine",
        checkpoint_weights: tuple[float, ...] = (1.0,),
        chunk: int | None = None,
    ):
        self.similarity = similarity
        self.checkpoint_weights = checkpoint_weights
        self.chunk = chunk

    def fit(self, pool: Pool, target: Target, *, progress: Progress | None = None) -> Self:
        """Compare gradients; needs features (gradients) on both sides."""
        if self.similarity not in ("cosine", "inner"):
            raise SelectionError(f'similarity must be "cosine" or "inner", not {self.similarity!r}')
        for weight in self.checkpoint_weights:
            check_number(weight, "a checkpoint weight", above=0.0)
        check_chunk(self.chunk)
        blocks = len(self.checkpoint_weights)
        if not blocks:
            raise SelectionError("checkpoint_weights is empty; give one weight per checkpoint")
        x, y = require_field(pool, target, "features", "less")
        width = _checked_width(x, y, blocks)
        names, aims = self._aims(y, target, width)
        weights = np.asarray(self.checkpoint_weights) / sum(self.checkpoint_weights)
        aims *= np.repeat(weights, width // blocks)
        n = x.shape[0]
        best = np.empty(n)
        subset = np.empty(n, dtype=np.int64)
        step = self.chunk or max(16, (32 << 20) // (8 * width))
        for low in range(0, n, step):
            rows = self._normalised(x[low : low + step], "pool", low)
            with np.errstate(over="ignore", invalid="ignore"):
                similar = rows @ aims.T
            check_no_overflow(similar, "inner products")
            subset[low : low + len(rows)] = similar.argmax(1)
            best[low : low + len(rows)] = similar.max(1)
            if progress:
                progress("comparing gradients", low + len(rows), n)
        self.scores_ = -best
        self.subset_ = np.array(names, dtype=object)[subset]
        self.nearest_target_ = None
        self.diagnostics_ = {"subsets": len(names), "checkpoints": blocks, "similarity": self.similarity}
        return self

    def _aims(self, y: Any, target: Target, width: int) -> tuple[list[str | None], np.ndarray]:
        """Return the subsets' names, and the mean gradient of each: (subsets, D)."""
        domains = [None] * len(y) if target.domains is None else list(target.domains)
        names = sorted(set(domains), key=lambda name: (name is None, name or ""))
        row_of = {name: i for i, name in enumerate(names)}
        member = np.array([row_of[name] for name in domains])
        sums = np.zeros((len(names), width))
        step = self.chunk or max(16, (32 << 20) // (8 * width))
        for low in range(0, len(member), step):
            np.add.at(sums, member[low : low + step], self._normalised(y[low : low + step], "target", low))
        return names, sums / np.bincount(member)[:, None]

    def _normalised(self, rows: Any, side: str, offset: int) -> np.ndarray:
        from flatshift.selection.transport.problem import check_finite_rows  # imports torch

        wide = np.asarray(rows, dtype=np.float64)
        check_finite_rows(wide, side, offset)
        if self.similarity == "inner":
            return wide
        cut = wide.reshape(len(wide), len(self.checkpoint_weights), -1)
        with np.errstate(over="ignore"):
            norms = np.linalg.norm(cut, axis=2, keepdims=True)
        check_no_overflow(norms)
        return np.asarray((cut / np.where(norms > 0, norms, 1.0)).reshape(wide.shape))


def _checked_width(x: Any, y: Any, blocks: int) -> int:
    if x.shape[1] != y.shape[1]:
        raise SelectionError(
            f"pool features have {x.shape[1]} columns and target features {y.shape[1]}; "
            "project both with the same projection and seed"
        )
    if x.shape[1] % blocks:
        raise SelectionError(
            f"{x.shape[1]} columns do not divide into {blocks} checkpoints; put blocks of equal width side by side"
        )
    return int(x.shape[1])
