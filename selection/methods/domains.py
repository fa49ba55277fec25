"""Fixed shares of the budget for each domain, filled in the order of another method."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from flatshift.selection.errors import SelectionError
from flatshift.selection.lazy import np
from flatshift.selection.methods.base import Pool, Progress, Selector, Target, check_budget
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
        number_of = {name: i for i, name in enumerate(names)}
        member = np.array(
            [number_of.get(name, len(names)) if name is not None else len(names) for name in pool.domains]
        )
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
        self.quotas_ = {name: int(quota[i]) for name, i in number_of.items()}
        if quota[-1]:
            self.quotas_["(none)"] = int(quota[-1])
        ideal = shares * budget
        self.diagnostics_ = {
            "quotas": self.quotas_,
            "short": sorted(name for name, i in number_of.items() if size[i] < int(ideal[i])),
            "absent": absent,
            "inside": inner.diagnostics_,
        }

    def _shares(self, names: Sequence[str], target: Target) -> tuple[np.ndarray, list[str]]:
        """Return weights (len(names),) that sum to 1, and the target's domains that the pool lacks."""
        if self.shares:
            for name, weight in self.shares.items():
                check_number(f"the share of {name!r}", weight, minimum=0)
                if name not in names:
                    close = difflib.get_close_matches(name, names, n=1)
                    hint = (
                        f"did you mean {close[0]!r}?" if close else f"it has {', '.join(names) or 'no domain at all'}"
                    )
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
