"""Weight or choose the pool's domains as wholes, before its records are scored, as set in `select.relevance`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from flatshift.experiments.recipe.schema import Select
from flatshift.experiments.run.console import Console
from flatshift.experiments.select.embedding import Vectors
from flatshift.experiments.select.pool import PoolRecords, nonzero_rows
from flatshift.finetune.errors import UserError
from flatshift.finetune.seeds import derive_seed
from flatshift.selection.config import Relevance, ranking_method
from flatshift.selection.methods.domains import (
    choose_nearest_domains,
    domain_distances,
    sample_domains,
    weights_by_distance,
)


def check_relevance(spec: Select) -> None:
    """Raise UserError for domain weights that the method would ignore, and for settings without effect."""
    if spec.relevance is None:
        return
    use = spec.relevance.use
    unused, other = ("temperature", "weight") if use == "choose" else ("keep", "choose")
    if getattr(spec.relevance, unused) != getattr(Relevance(), unused):
        raise UserError(f"select.relevance.{unused} has no effect with use {use}; leave it out, or use {other}")
    if use == "weight" and spec.method.kind not in ("gotd", "gotd-contrast"):
        raise UserError(
            f"select.relevance.use: {spec.method.kind} does not look at the weights of domains; "
            "use choose, or one of the methods gotd, gotd-contrast"
        )


def apply_relevance(
    spec: Select, pool: PoolRecords, vectors: Vectors, seed: int, console: Console
) -> tuple[PoolRecords, np.ndarray | None, dict[str, Any] | None]:
    """Return the kept pool, its rows' weights (None: uniform), and the manifest entry (None: not requested).

    Raises UserError if no record has a domain, or if the embedder knows no token of either side.
    """
    settings = spec.relevance
    if settings is None:
        return pool, None, None
    view = pool.rows
    domains = view.domains()
    if domains is None:
        raise UserError(
            f"select.relevance: no record of the pool has the column {spec.domain_column!r}; name it in "
            "select.domain_column"
        )
    seed = derive_seed(seed, "relevance")
    rows = sample_domains(domains, settings.sample, ids=view.ids, seed=seed)
    samples = {name: vectors.pool(view.take(numbers), f"embed {name}") for name, numbers in rows.items()}
    target = vectors.target()
    if spec.own is None:
        # Without texts whose tokens are all unknown, and without domains that are left empty.
        known = {name: np.asarray(x)[nonzero_rows(x)] for name, x in samples.items()}
        samples, target = {name: x for name, x in known.items() if len(x)}, target[nonzero_rows(target)]
        if not samples or not len(target):
            side = "target" if not len(target) else "pool"
            raise UserError(
                f"select.relevance: the embedder knows no token of the {side}'s texts; choose another embedder"
            )
        if empty := [name for name in known if name not in samples]:
            console.say(
                f"domains of whose samples the embedder knows no token are as far as can be: {', '.join(empty)}"
            )
    # The cost of the ranking method, inside domains that of the inner one.
    cost = getattr(ranking_method(spec.method), "cost", "sqeuclidean")
    distances = domain_distances(samples, target, epsilon=settings.epsilon, seed=seed, cost=cost)
    listed = ", ".join(f"{name} {value:.4g}" for name, value in distances.items())
    sampled = {name: len(numbers) for name, numbers in rows.items()}
    record: dict[str, Any] = {"use": settings.use, "distances": distances, "sampled": sampled}
    if settings.use == "weight":
        weights, masses = weights_by_distance(distances, domains, temperature=settings.temperature)
        console.say(f"domains by distance to the target: {listed}; weighted")
        return pool, weights, record | {"masses": masses}
    chosen = choose_nearest_domains(distances, settings.keep)
    remaining = np.flatnonzero(np.fromiter((name in chosen for name in domains), bool, len(domains)))
    console.say(f"domains by distance to the target: {listed}; {', '.join(chosen)} stay, {len(remaining):,} records")
    record |= {"chosen": chosen, "records_before": len(view), "records_without_domain": domains.count(None)}
    return replace(pool, rows=view.take(remaining)), None, record
