"""Domains: fixed shares of the budget for each, filled in the order of another method; and their relevance, the
transport distance from a sample of each to the target (GOT-D paper, C.2).

rows = sample_domains(domains, 10_000, ids=ids, seed=0)         # before anything is embedded
distances = domain_distances({name: embed(texts[rows[name]]) …}, y)   # name → OT_ε, nearest first
near = choose_nearest_domains(distances, 2)                           # or weights_by_distance(distances, …)
"""

from __future__ import annotations

import difflib
import hashlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from flatshift.selection.errors import SelectionError
from flatshift.selection.lazy import np
from flatshift.selection.methods.base import Pool, Progress, Selector, Target, check_budget, mean_cost
from flatshift.selection.methods.controls import RandomSelector
from flatshift.selection.validation import check_number, to_weights


class DomainsSelector(Selector):
    """Quotas by largest remainder, filled with the best rows of each domain by the scores of `inside`.

    budget: sum of the quotas. shares: domain → weight, or None for the target's own mix (with its weights, if it has
    any). inside: a selector, fitted on the whole pool; None draws at random by `seed`. A domain with fewer rows than
    its quota gives all it has, and the rest of the quota goes to the others by their shares; with explicit shares a
    domain that the pool lacks is an error. Rows are ranked so that every prefix mixes domains as the whole does: the
    j-th row of a domain with quota q scores (j − ½)/q, rows beyond the quota follow from 1 on by their position in
    their domain. No row is taken twice, whatever `inside` repeats. `quotas_` maps domain → rows. Needs domains on the
    pool, on the target too without `shares`, and the inputs of `inside`, whose `fit` gets the further ones.
    """

    budget: int | None = None
    shares: Mapping[str, float] | None = None
    inside: Selector | None = None
    seed: int = 0

    def _fit(self, pool: Pool, target: Target, progress: Progress, **inputs: Any) -> None:
        if self.budget is None:
            raise SelectionError("domains splits one budget; construct it with budget=")
        budget = check_budget(self.budget, len(pool))
        if pool.domains is None:
            raise SelectionError("domains needs the pool's domains; name the column that holds them")
        if getattr(self.inside, "rounds", 1) != 1:
            raise SelectionError("inside a domain, gotd cannot run in rounds; set its rounds to 1")
        names = sorted({name for name in pool.domains if name is not None})
        number_of: dict[str | None, int] = {name: i for i, name in enumerate(names)}
        member = np.array([number_of.get(name, len(names)) for name in pool.domains])
        size = np.bincount(member, minlength=len(names) + 1)
        shares, absent = self._shares(names, target)
        inner = self.inside if self.inside is not None else RandomSelector(seed=self.seed)
        inner.fit(pool, target, progress=progress, **inputs)
        quota = allocate_quotas(np.append(shares, 0.0), size, budget)

        order = np.lexsort((inner.scores_, member))
        rank = np.empty(len(order), dtype=np.int64)
        starts = np.cumsum(size) - size
        rank[order] = np.arange(len(order)) - starts[member[order]]
        row_quota = quota[member]
        within = rank < row_quota
        # Domains of equal quota would tie at every step: names decide, not the order of rows.
        nudge = 1e-9 * (member + 1) / (len(names) + 1)
        beyond = 1.0 + (rank - row_quota + 1.0) / np.maximum(size[member], 1)
        self.scores_ = np.where(within, (rank + 0.5) / np.maximum(row_quota, 1), beyond)
        self.scores_ += np.where(within, nudge * (1.0 - self.scores_), nudge)
        self.nearest_target_ = inner.nearest_target_
        self.quotas_ = dict(zip(names, quota.tolist(), strict=False))
        if quota[-1]:
            self.quotas_["(none)"] = int(quota[-1])
        short = [name for name, count, ideal in zip(names, size, shares * budget, strict=False) if count < int(ideal)]
        if fewer := [*short, *absent]:
            named = ", ".join(fewer[:5]) + ", …" * (len(fewer) > 5)
            warnings.warn(f"the pool has too few rows for the shares of {named}; others get the rest", stacklevel=3)
        # A domain's cut: the last row within its quota, and the first beyond.
        cut = (quota > 0) & (quota < size)
        last, first = (inner.scores_[order[np.where(cut, starts + quota - i, 0)]] for i in (1, 0))
        alike = (cut & (first == last))[member] & (inner.scores_ == last[member])
        self.diagnostics_ = {
            "quotas": self.quotas_,
            "ties": int(alike.sum()),
            "short": short,
            "absent": absent,
            "inside": inner.diagnostics_,
        }

    def ties(self, k: int) -> int:
        """Count as `Selector.ties`; at `budget` by the scores of `inside`, at the cut of each domain."""
        ties = super().ties(k)
        return int(self.diagnostics_["ties"]) if k == self.budget else ties

    def _shares(self, names: Sequence[str], target: Target) -> tuple[np.ndarray, list[str]]:
        """Return weights (len(names),) that sum to 1, and the target's domains that the pool lacks."""
        if self.shares:
            for name, weight in self.shares.items():
                check_number(f"the share of {name!r}", weight, minimum=0)
                if name not in names:
                    close = difflib.get_close_matches(name, names, n=1)
                    hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(names) or 'no domain'}"
                    raise SelectionError(f"shares: the pool has no domain {name!r}; {hint}")
            shares = dict(self.shares)
        elif target.domains is None:
            raise SelectionError("domains needs shares, or a target with domains to take them from; give either")
        else:
            shares = dict.fromkeys((name for name in target.domains if name is not None), 0.0)
            weights = np.ones(len(target)) if target.weights is None else to_weights(target.weights, "target")
            for domain, weight in zip(target.domains, weights, strict=True):
                if domain is not None:
                    shares[domain] += float(weight)
        values = np.array([shares.get(name, 0.0) for name in names])
        if not values.sum() > 0:
            raise SelectionError(
                "no domain of the pool has a positive share; give shares that name "
                f"{', '.join(names[:5]) or 'a domain of the pool'}"
            )
        return values / values.sum(), sorted(set(shares) - set(names))


def allocate_quotas(shares: np.ndarray, sizes: np.ndarray, budget: int) -> np.ndarray:
    """Return integers that add up to `budget` ≤ Σ sizes, none above its size: largest remainders, ties to the earlier.

    The excess of full domains is redistributed among those with room, by their shares; if no domain with a share has
    room left, by the room of the others.
    """
    quotas = np.zeros(len(shares), dtype=np.int64)
    while (remaining := budget - int(quotas.sum())) > 0:
        room = sizes - quotas
        weight = np.where(room > 0, shares, 0.0)
        if not weight.sum() > 0:
            weight = room.astype(np.float64)
        exact = remaining * weight / weight.sum()
        whole = np.floor(exact).astype(np.int64)
        whole[np.argsort(-(exact - whole), kind="stable")[: remaining - int(whole.sum())]] += 1
        quotas += np.minimum(whole, room)
    return quotas


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
    from flatshift.selection.transport.solver import sinkhorn_potentials

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
        solved = sinkhorn_potentials(x, target, epsilon=relative, tolerance=tolerance, seed=seed, cost=cost)
        distances[name] = solved.dual_value
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
