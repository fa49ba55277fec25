"""TSDS: the target's mass on its nearest neighbours, with a penalty for crowding (Liu et al. 2024, arXiv
2410.11303)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from flatshift.selection.errors import SelectionError
from flatshift.selection.lazy import np
from flatshift.selection.methods.base import (
    Pool,
    Progress,
    Selector,
    Target,
    check_number,
    keyed_uniform,
    move_behind,
    require_field,
)
from flatshift.selection.validation import SelectorContext, check_fields, from_settings

if TYPE_CHECKING:
    from flatshift.selection.methods.neighbours import NearestRows

_FIRST = 64
"""Number of neighbours of each target in the first attempt."""
_PAIRS = 2e9
"""Pairs of rows up to which densities count all neighbours of all targets: some ten seconds of one core."""


@dataclass(frozen=True, kw_only=True)
class TSDS:
    """Transport of the target onto its nearest neighbours with a penalty for crowding (TSDS, arXiv 2410.11303): each
    target spreads its mass over neighbours, near-duplicates share one portion, and the selection is a seeded draw
    without repeats in proportion to the mass received. Rows without mass follow by distance. Made for L2-normalised
    features."""

    kind: Literal["tsds"] = "tsds"
    title: ClassVar[str] = "TSDS"
    needs: ClassVar[tuple[str, ...]] = ("features",)
    alpha: float = 0.5
    """Between 0 and 1: small spreads each target's mass over many neighbours, large keeps it on the nearest."""
    scale: float = 5.0
    """The constant C of the paper, in units of distance: the scale against which spreading is weighed."""
    sigma: float = 0.75
    """Rows closer than this count as near-duplicates of one another (kernel 1 − d²/σ²); 0: none do."""
    neighbours: int = 1000
    """Maximum number of neighbours of each target that may receive mass."""

    def __post_init__(self) -> None:
        check_fields(self, "alpha", above=0, most=1)
        check_fields(self, "scale", above=0)
        check_fields(self, "sigma", least=0)
        check_fields(self, "neighbours", least=1)

    def build(self, around: SelectorContext) -> TSDSSelector:
        return from_settings(TSDSSelector, self, around)


class TSDSSelector(Selector):
    """Scores by −(log p + Gumbel noise keyed by seed and id): the k smallest are a draw without repeats by p.

    Each of the M targets gives its mass 1/M to its nearest rows in turn, at most 1/(M s ρ_i) to a row of density ρ_i
    (near-duplicates count together: ρ_i = Σ max(0, 1 − d²/σ²) over the rows in question, itself included). s is the
    largest for which the mean transport cost of spreading stays below C(1 − α)/α, as in the authors' code, which this
    follows exactly except for three points: neighbours are exact instead of approximate, a density counts all rows
    within σ and not the 1,000 nearest, and rows are drawn without repeats and by seed. If counting over the neighbours
    of all targets would take more than `_PAIRS` pairs of rows, a row's density is the largest that the neighbours of
    one target give it (`diagnostics_["densities"]` is then "by target"): its near-duplicates are neighbours of the same
    target, and the work is M·K² instead of the square of their union. Rows that receive no mass follow, by squared
    distance to the nearest target.

    alpha, scale (C), sigma, neighbours: see `flatshift.selection.config.TSDS`. chunk: rows per tile. `probabilities_`
    (N,) is p. Distances are absolute: the defaults suit L2-normalised features. Ignores weights.
    """

    def __init__(
        self,
        *,
        alpha: float = 0.5,
        scale: float = 5.0,
        sigma: float = 0.75,
        neighbours: int = 1000,
        seed: int = 0,
        chunk: int | None = None,
    ):
        self.alpha = alpha
        self.scale = scale
        self.sigma = sigma
        self.neighbours = neighbours
        self.seed = seed
        self.chunk = chunk

    def fit(self, pool: Pool, target: Target, *, progress: Progress | None = None) -> Self:
        """Spread the target's mass and draw; needs features on both sides."""
        from flatshift.selection.methods.neighbours import nearest_rows  # imports torch

        check_number(self.alpha, "alpha", above=0.0, most=1.0)
        check_number(self.scale, "scale", above=0.0)
        check_number(self.sigma, "sigma", least=0.0)
        if isinstance(self.neighbours, bool) or not isinstance(self.neighbours, int) or self.neighbours < 1:
            raise SelectionError(f"neighbours must be a whole number of at least 1, not {self.neighbours!r}")
        x, y = require_field(pool, target, "features", "tsds")
        found = nearest_rows(x, y, self.neighbours, chunk=self.chunk, progress=progress)
        mass, spread, density, counted = self._spread(x, found, progress)
        p = np.zeros(len(pool))
        np.add.at(p, found.rows[:, : mass.shape[1]], mass)
        self.probabilities_ = p / p.sum()
        with np.errstate(divide="ignore"):
            noisy = -np.log(p) + np.log(-np.log(keyed_uniform(pool, self.seed, "tsds draw")))
        self.scores_ = move_behind(noisy, p == 0, found.row_squared)
        self.nearest_target_ = found.row_nearest
        self.diagnostics_ = {
            "support": int((p > 0).sum()),
            "spread": spread,
            "near_duplicates": float(density.mean() - 1.0),
            "densities": counted,
        }
        return self

    def _spread(
        self, x: Any, found: NearestRows, progress: Progress | None
    ) -> tuple[np.ndarray, float, np.ndarray, str]:
        """Return each target's mass on its nearest rows, the spread, the densities used, and how they were counted.

        Densities are most of the work and only matter as far as mass reaches, so the number of neighbours is doubled
        until every target is full before the last of them. The result is that of all neighbours at once.
        """
        from flatshift.selection.methods.neighbours import kernel_densities, raise_local_densities

        union, place = np.unique(found.rows, return_inverse=True)
        place = place.reshape(found.rows.shape)
        points = np.asarray(x[union], dtype=np.float64)
        density = np.zeros(len(union))
        most = found.rows.shape[1]
        reach = min(_FIRST, most)
        pairs, everywhere = 0, True
        while True:
            near = place[:, :reach]
            new = np.unique(near[density[near] == 0.0])
            pairs += len(new) * len(union)
            if everywhere and self.sigma > 0 and pairs > _PAIRS and pairs > place.size * reach:
                everywhere, density = False, np.zeros(len(union))
            if everywhere:
                density[new] = kernel_densities(points, new, self.sigma, chunk=self.chunk, progress=progress)
            else:
                raise_local_densities(points, place, reach, self.sigma, density, progress=progress)
            mass, spread, full = assign_mass(
                np.sqrt(found.squared[:, :reach]), density[near], alpha=self.alpha, scale=self.scale
            )
            if reach == most or full > spread:
                return mass, spread, density[density > 0.0], "everywhere" if everywhere else "by target"
            reach = min(2 * reach, most)


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
