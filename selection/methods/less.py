"""Gradient similarity (LESS, Xia et al. 2024, arXiv 2402.04333) on given gradient features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from flatshift.selection.errors import SelectionError
from flatshift.selection.lazy import np
from flatshift.selection.methods.base import MethodSettings, Pool, Progress, Selector, Target
from flatshift.selection.validation import check_no_overflow, is_real


@dataclass(frozen=True, kw_only=True)
class Less(MethodSettings):
    """Gradient similarity (LESS, arXiv 2402.04333): the mean similarity of a row's gradient with a target subset's,
    maximised over the subsets (the target's domains; one subset without domains). Features are gradients, one a row,
    made by `--embedder gradients`, or yours: `--pool-features` and `--target-features`."""

    kind: Literal["less"] = "less"
    title: ClassVar[str] = "Gradient similarity"
    needs: ClassVar[tuple[str, ...]] = ("features", "gradients", "domains")
    similarity: Literal["cosine", "inner"] = "cosine"
    """`cosine`, as the paper; `inner` favours long gradients, which short texts have."""
    checkpoint_weights: tuple[float, ...] = (1.0,)
    """One weight (its learning rate) per checkpoint: the columns are that many concatenated blocks of equal width,
    compared block by block; scaled to sum 1."""

    def check(self) -> None:
        super().check()
        if not self.checkpoint_weights:
            raise SelectionError("checkpoint_weights is empty; give one weight per checkpoint")
        if not all(is_real(weight) and weight > 0 for weight in self.checkpoint_weights):
            raise SelectionError(f"checkpoint_weights must all be above 0, got {list(self.checkpoint_weights)}")


class LessSelector(Selector, Less):
    """Scores by −max over target subsets of the mean over the subset of Σ_c w_c ⟨∇_c(row), ∇_c(target)⟩.

    The features of pool and target are gradients (projected or not: `selection.RandomProjection`), with one block of
    columns per checkpoint c of weight w_c. similarity "cosine" normalises every block of every row, "inner" none.
    Subsets are the target's domains (rows without one form another subset); a target without domains is one subset. The
    mean of products is the product with the mean, so the work is N·D·subsets and not N·D·M. A zero gradient has
    similarity 0. chunk: rows per tile. `subset_` (N,) names each row's best subset. Ignores weights.
    """

    chunk: int | None = None

    def _fit(self, pool: Pool, target: Target, progress: Progress) -> None:
        blocks = len(self.checkpoint_weights)
        x, y = self._sides(pool, target)
        n, width = x.shape
        if y.shape[1] != width:
            raise SelectionError(
                f"pool features have {width} columns and target features {y.shape[1]}; "
                "project both with the same projection and seed"
            )
        if width % blocks:
            raise SelectionError(
                f"{width} columns do not divide into {blocks} checkpoints; put blocks of equal width side by side"
            )
        step = self.chunk or max(16, (32 << 20) // (8 * width))
        names, means = self._subset_means(y, target, step)
        weights = np.asarray(self.checkpoint_weights) / sum(self.checkpoint_weights)
        means *= np.repeat(weights, width // blocks)
        best = np.empty(n)
        subset = np.empty(n, dtype=np.int64)
        for low in range(0, n, step):
            rows = self._normalise(x[low : low + step], "pool", low)
            with np.errstate(over="ignore", invalid="ignore"):
                similarities = rows @ means.T
            check_no_overflow(similarities, "inner products")
            subset[low : low + len(rows)] = similarities.argmax(1)
            best[low : low + len(rows)] = similarities.max(1)
            progress("comparing gradients", low + len(rows), n)
        self.scores_ = -best
        self.subset_ = np.array(names, dtype=object)[subset]
        self.diagnostics_ = {"subsets": len(names), "checkpoints": blocks, "similarity": self.similarity}

    def _subset_means(self, y: Any, target: Target, step: int) -> tuple[list[str | None], np.ndarray]:
        """Return the subsets' names, and the mean gradient of each: (subsets, D)."""
        domains = [None] * len(y) if target.domains is None else list(target.domains)
        names = sorted(set(domains), key=lambda name: (name is None, name or ""))
        row_of = {name: i for i, name in enumerate(names)}
        member = np.array([row_of[name] for name in domains])
        sums = np.zeros((len(names), y.shape[1]))
        for low in range(0, len(member), step):
            np.add.at(sums, member[low : low + step], self._normalise(y[low : low + step], "target", low))
        return names, sums / np.bincount(member)[:, None]

    def _normalise(self, rows: Any, side: str, offset: int) -> np.ndarray:
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
