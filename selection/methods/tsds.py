"""TSDS: the target's mass on its nearest neighbours, with a penalty for crowding (Liu et al. 2024, arXiv
2410.11303)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from flatshift.selection.lazy import np
from flatshift.selection.methods.base import MethodSettings, Pool, Progress, Selector, Target, move_behind
from flatshift.selection.validation import bounded

if TYPE_CHECKING:
    from flatshift.selection.methods.neighbours import NearestRows

_FIRST = 64  # number of neighbours of each target in the first attempt
_PAIRS = 2e9  # pairs of rows up to which densities count all neighbours of all targets: some ten seconds of one core


@dataclass(frozen=True, kw_only=True)
class TSDS(MethodSettings):
    """Transport of the target onto its nearest neighbours with a penalty for crowding (TSDS, arXiv 2410.11303): each
    target spreads its mass over neighbours, near-duplicates share one portion, and the selection is a seeded draw
    without repeats in proportion to the mass received. Rows without mass follow by distance. Made for L2-normalised
    features."""

    kind: Literal["tsds"] = "tsds"
    title: ClassVar[str] = "TSDS"
    needs: ClassVar[tuple[str, ...]] = ("features",)
    alpha: float = bounded(0.5, above=0, maximum=1)
    """Between 0 and 1: small spreads each target's mass over many neighbours, large keeps it on the nearest."""
    scale: float = bounded(5.0, above=0)
    """The constant C of the paper, in units of distance: the scale against which spreading is weighed."""
    sigma: float = bounded(0.75, minimum=0)
    """Rows closer than this count as near-duplicates of one another (kernel 1 − d²/σ²); 0: none do."""
    neighbours: int = bounded(1000, minimum=1)
    """Maximum number of neighbours of each target that may receive mass."""


class TSDSSelector(Selector, TSDS):
    """Scores by −(log p + Gumbel noise keyed by seed and id): the k smallest are a draw without repeats by p.

    Each of the M targets gives its mass 1/M to its nearest rows in turn, at most 1/(M s ρ_i) to a row of density ρ_i
    (near-duplicates count together: ρ_i = Σ max(0, 1 − d²/σ²) over the rows in question, itself included). s is the
    largest for which the mean transport cost of spreading stays below C(1 − α)/α, C the `scale`, as in the authors'
    code; but neighbours are exact, a density counts all rows within σ and not the 1,000 nearest, and rows are drawn
    without repeats and by seed. If counting over the neighbours of all targets would take more than `_PAIRS` pairs of
    rows, a row's density is the largest that the neighbours of one target give it (`diagnostics_["densities"]` is then
    "by target"): the work is M·K² instead of the square of their union. Rows that receive no mass follow, by squared
    distance to the nearest target. chunk: rows per tile. `probabilities_` (N,) is p. Distances are absolute: the
    defaults suit L2-normalised features. Needs features on both sides; ignores weights.
    """

    seed: int = 0
    chunk: int | None = None

    def _fit(self, pool: Pool, target: Target, progress: Progress) -> None:
        from flatshift.selection.methods.neighbours import nearest_rows  # imports torch

        x, y = self._sides(pool, target)
        nearest = nearest_rows(x, y, self.neighbours, chunk=self.chunk, progress=progress)
        mass, spread, density, extent = self._spread(x, nearest, progress)
        p = np.zeros(len(pool))
        np.add.at(p, nearest.rows[:, : mass.shape[1]], mass)
        self.probabilities_ = p / p.sum()
        with np.errstate(divide="ignore"):
            noisy = -np.log(p) + np.log(-np.log(pool.draw(self.seed, "tsds draw")))
        self.scores_ = move_behind(noisy, p == 0, nearest.row_squared)
        self.nearest_target_ = nearest.row_nearest
        self.diagnostics_ = {
            "support": int((p > 0).sum()),
            "spread": spread,
            "near_duplicates": float(density.mean() - 1.0),
            "densities": extent,
        }

    def _spread(self, x: Any, nearest: NearestRows, progress: Progress) -> tuple[np.ndarray, float, np.ndarray, str]:
        """Return each target's mass on its nearest rows, the spread, the densities used, and how they were counted.
        Densities are most of the work and only matter as far as mass reaches, so the number of neighbours is doubled
        until every target is full before the last of them. The result is that of all neighbours at once."""
        from flatshift.selection.methods.neighbours import kernel_densities, raise_local_densities

        union, index = np.unique(nearest.rows, return_inverse=True)
        index = index.reshape(nearest.rows.shape)
        points = np.asarray(x[union], dtype=np.float64)
        density = np.zeros(len(union))
        count = nearest.rows.shape[1]
        reach = min(_FIRST, count)
        pairs, everywhere = 0, True
        while True:
            near = index[:, :reach]
            new = np.unique(near[density[near] == 0.0])
            pairs += len(new) * len(union)
            if everywhere and self.sigma > 0 and pairs > _PAIRS and pairs > index.size * reach:
                everywhere, density = False, np.zeros(len(union))
            if everywhere:
                density[new] = kernel_densities(points, new, self.sigma, chunk=self.chunk, progress=progress)
            else:
                raise_local_densities(points, index, reach, self.sigma, density, progress=progress)
            mass, spread, full = assign_mass(
                np.sqrt(nearest.squared[:, :reach]), density[near], alpha=self.alpha, scale=self.scale
            )
            if reach == count or full > spread:
                return mass, spread, density[density > 0.0], "everywhere" if everywhere else "by target"
            reach = min(2 * reach, count)


def assign_mass(
    distance: np.ndarray, density: np.ndarray, *, alpha: float, scale: float
) -> tuple[np.ndarray, float, float]:
    """Return the mass (M, K) that each target gives to its K nearest rows (total 1), the spread s, and the spread up to
    which K rows give the same result as more.

    distance (M, K) ascending along a row; density (M, K) of those rows. Spreading further costs target j, when its
    first k rows are full at s = Σ_{i≤k} 1/ρ_i, d_{k+1} s − Σ_{i≤k} d_i/ρ_i; s is the first of all these points, over
    all targets in ascending order, at which α/C times the sum of costs reaches (1 − α) M, else the last.
    """
    m, k = distance.shape
    if k == 1:
        return np.full((m, 1), 1.0 / m), 1.0, 0.0
    portions = 1.0 / density
    full = np.cumsum(portions, axis=1)
    cost = distance[:, 1:] * full[:, :-1] - np.cumsum(distance * portions, axis=1)[:, :-1]
    rise = np.diff(cost, axis=1, prepend=0.0)
    events = np.argsort(full[:, :-1], axis=None, kind="stable")
    reached = np.flatnonzero(alpha / scale * np.cumsum(rise.ravel()[events]) >= (1.0 - alpha) * m)
    spread = float(full[:, :-1].ravel()[events[reached[0] if len(reached) else -1]])
    filled = np.minimum(full / spread, 1.0)
    mass = np.diff(filled, axis=1, prepend=0.0)
    mass[:, -1] += 1.0 - filled[:, -1]  # a target whose rows are all full puts the rest on its last
    return mass / m, spread, float(full[:, -2].min())
