"""From a method's settings to its selector."""

from __future__ import annotations

from typing import TYPE_CHECKING

from selection.config import DSIR, KNN, TSDS, Domains, GotD, GotDContrast, Length, Less, Method, Perplexity, Random
from selection.errors import SelectionError
from selection.methods.base import Selector, finite_number

if TYPE_CHECKING:
    from selection.methods.perplexity import Measure


def build_selector(
    method: Method,
    *,
    seed: int,
    budget: int | None = None,
    measure: Measure | None = None,
    device: str = "cpu",
    state: str | None = None,
) -> Selector:
    """The selector that `method` describes; `seed` for those that draw.

    budget: for those that shape their selection for one size (gotd in rounds, domains), and for the overlap that gotd
    measures. measure: texts → mean −log p per token, for perplexity. device: of the transport solver. state: directory
    in which a long solve of gotd, in one round, leaves what it needs to go on after a kill. Raises SelectionError for
    another type.
    """
    if isinstance(method, GotD):
        from selection.methods.gotd import GotDSelector

        return GotDSelector(
            epsilon=method.epsilon,
            tolerance=method.tolerance,
            rounds=method.rounds,
            mixture=method.mixture,
            holdout=method.holdout,
            budget=budget,
            debiased=method.debiased,
            self_sample=method.self_sample,
            seed=seed,
            cost=method.cost,
            memory_bytes=_bytes(method.memory_gib),
            device=device,
            state=state if method.rounds == 1 else None,
        )
    if isinstance(method, GotDContrast):
        from selection.methods.contrast import GotDContrastSelector

        return GotDContrastSelector(
            epsilon=method.epsilon,
            tolerance=method.tolerance,
            attract=method.attract,
            repel=method.repel,
            seed=seed,
            cost=method.cost,
            memory_bytes=_bytes(method.memory_gib),
            device=device,
        )
    if isinstance(method, Random):
        from selection.methods.random import RandomSelector

        return RandomSelector(seed=seed)
    if isinstance(method, KNN):
        from selection.methods.knn import KNNSelector

        return KNNSelector()
    if isinstance(method, DSIR):
        from selection.methods.dsir import DSIRSelector

        return DSIRSelector(
            buckets=method.buckets,
            resample=method.resample,
            hashing=method.hashing,
            smoothing=method.smoothing,
            floor=method.floor,
            seed=seed,
        )
    if isinstance(method, TSDS):
        from selection.methods.tsds import TSDSSelector

        return TSDSSelector(
            alpha=method.alpha, scale=method.scale, sigma=method.sigma, neighbours=method.neighbours, seed=seed
        )
    if isinstance(method, Less):
        from selection.methods.less import LessSelector

        return LessSelector(similarity=method.similarity, checkpoint_weights=method.checkpoint_weights)
    if isinstance(method, Perplexity):
        from selection.methods.perplexity import PerplexitySelector

        return PerplexitySelector(keep=method.keep, measure=measure)
    if isinstance(method, Length):
        from selection.methods.length import LengthSelector

        return LengthSelector(prefer=method.prefer, unit=method.unit, seed=seed)
    if isinstance(method, Domains):
        from selection.methods.domains import DomainsSelector

        inside = build_selector(method.inside, seed=seed, measure=measure, device=device, state=state)
        return DomainsSelector(budget=budget, shares=method.shares or None, inside=inside, seed=seed)
    raise SelectionError(f"no selector for {type(method).__name__}; use one of the methods of selection.config")


def _bytes(gib: float) -> int:
    finite_number(gib, "memory_gib", above=0.0)
    return int(gib * 2**30)
