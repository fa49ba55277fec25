"""From a method's settings to its selector."""

from __future__ import annotations

from selection.config import DSIR, KNN, GotD, Method, Random
from selection.errors import SelectionError
from selection.methods.base import Selector


def build_selector(method: Method, *, seed: int) -> Selector:
    """The selector that `method` describes; `seed` for those that draw. Raises SelectionError for another type."""
    if isinstance(method, GotD):
        from selection.methods.gotd import GotDSelector

        return GotDSelector(epsilon=method.epsilon, tolerance=method.tolerance, seed=seed)
    if isinstance(method, Random):
        from selection.methods.random import RandomSelector

        return RandomSelector(seed=seed)
    if isinstance(method, KNN):
        from selection.methods.knn import KNNSelector

        return KNNSelector()
    if isinstance(method, DSIR):
        from selection.methods.dsir import DSIRSelector

        return DSIRSelector(buckets=method.buckets, resample=method.resample, seed=seed)
    raise SelectionError(f"no selector for {type(method).__name__}; use GotD, Random, KNN or DSIR")
