"""Relevance of whole domains: the transport distance from a sample of each to the target (GOT-D paper, C.2).

rows = sample_domains(domains, 10_000, ids=ids, seed=0)         # before anything is embedded
distances = domain_distances({name: embed(texts[rows[name]]) …}, y)   # name → OT_ε, nearest first
near = choose_nearest_domains(distances, 2)                           # or weights_by_distance(distances, …)
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flatshift.selection.errors import SelectionError
from flatshift.selection.methods.base import mean_cost
from flatshift.selection.transport import sinkhorn_potentials


def sample_domains(
    domains: Sequence[str | None], count: int, *, ids: Sequence[str], seed: int
) -> dict[str, np.ndarray]:
    """Return up to `count` rows of each domain, ascending: those whose (seed, id) hash to the smallest numbers.

    So a sample does not depend on the order of rows, nor on other domains. Rows without a domain are in none.
    Raises SelectionError if no row has a domain.
    """
    key = hashlib.sha256(f"domain sample\x1f{seed}".encode()).digest()
    samples: dict[str, list[tuple[int, int]]] = {}
    for row, (name, identity) in enumerate(zip(domains, ids, strict=True)):
        if name is None:
            continue
        raw = hashlib.blake2b(identity.encode("utf-8", "surrogatepass"), digest_size=8, key=key).digest()
        sample = samples.setdefault(name, [])
        sample.append((int.from_bytes(raw, "big"), row))
        if len(sample) >= 2 * count + 1024:  # memory: a few samples, not the pool
            sample.sort()
            del sample[count:]
    if not samples:
        raise SelectionError(
            "domain relevance needs domains, and no row of the pool has one; name the column they are in"
        )
    return {
        name: np.sort(np.array([row for _, row in sorted(sample)[:count]], dtype=np.int64))
        for name, sample in sorted(samples.items())
    }


def domain_distances(
    samples: Mapping[str, Any],
    target: Any,
    *,
    epsilon: float = 0.05,
    tolerance: float = 1e-3,
    seed: int = 0,
    cost: str = "sqeuclidean",
) -> dict[str, float]:
    """Return OT_ε(sample of a domain, target) by domain, smallest first.

    samples: domain → (n, d) features. target: (M, d). epsilon: multiple of the mean cost over all samples, so that all
    domains share one ε, in units of cost, and the distances can be compared. cost: as in `sinkhorn_potentials`.
    Raises SelectionError.
    """
    if not samples:
        raise SelectionError("domain relevance needs at least one domain")
    with np.errstate(divide="ignore", invalid="ignore"):  # the solver reports a row that has no cosine
        costs = {name: mean_cost(np.asarray(x), target, cost=cost) for name, x in samples.items()}
    overall = float(np.mean(list(costs.values())))
    distances: dict[str, float] = {}
    for name, x in samples.items():
        if costs[name] <= 1e-12 * max(overall, 1e-300):  # the domain coincides with the target
            distances[name] = 0.0
            continue
        # If a cost is not finite, the solver reports the faulty row.
        relative = epsilon * overall / costs[name] if np.isfinite(overall) else epsilon
        distances[name] = sinkhorn_potentials(
            x, target, epsilon=relative, tolerance=tolerance, seed=seed, cost=cost
        ).dual_value
    return dict(sorted(distances.items(), key=lambda item: (item[1], item[0])))


def choose_nearest_domains(distances: Mapping[str, float], count: int) -> list[str]:
    """Return the `count` nearest domains, nearest first; all if there are fewer."""
    return sorted(distances, key=lambda name: (distances[name], name))[:count]


def weights_by_distance(
    distances: Mapping[str, float], domains: Sequence[str | None], *, temperature: float = 1.0
) -> tuple[np.ndarray, dict[str, float]]:
    """Return row weights (N,) that sum to 1, and each domain's mass.

    The mass is exp(−(D − min) / (temperature·(mean − min))), spread evenly over the domain's rows. Rows without a
    domain get 0. Equal distances give equal masses.
    """
    names = list(distances)
    values = np.array([distances[name] for name in names])
    spread = float(values.mean() - values.min())
    mass = np.exp(-(values - values.min()) / (temperature * spread)) if spread > 0 else np.ones(len(names))
    mass /= mass.sum()
    number = {name: i for i, name in enumerate(names)}
    member = np.fromiter((number.get(name, -1) if name is not None else -1 for name in domains), np.int64, len(domains))
    sizes = np.bincount(member[member >= 0], minlength=len(names))
    share = np.append(mass / np.maximum(sizes, 1), 0.0)  # −1 indexes this last entry
    weights = share[member]
    return weights / weights.sum(), {name: float(mass[i]) for i, name in enumerate(names)}
