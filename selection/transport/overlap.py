"""Whether the selection has settled: overlap@k measured between two answers, or estimated from the next correction."""

from __future__ import annotations

import torch
from torch import Tensor

from selection.transport.ranks import Team


def measured(first: Tensor, second: Tensor, k: int, team: Team) -> float:
    """|TopK(first) ∩ TopK(second)| / k over all rows of the team; rows that tie at a threshold count as taken."""
    limits = team.smallest(first, k), team.smallest(second, k)
    both = float(((first <= limits[0]) & (second <= limits[1])).sum())
    return min(1.0, team.total(both) / k)


def estimated(f: Tensor, sample: Tensor, moved: Tensor, k: int, team: Team) -> float:
    """overlap@k of f with what f would become: 1 − h·E|δ|/(2q) (gotd.md §5.7).

    f (N,): the pool's potential. sample, moved (n,): the potential on a subsample, as it is and after the next
    correction. h: density of f at the threshold τ of the k smallest, from the ranks k/2 and 3k/2; δ: change of rows
    near τ less their mean change; q = k/N.
    """
    total = int(team.total(len(f)))
    if k >= total or len(sample) < 2:
        return 1.0
    low, high = max(1, k // 2), min(total, k + k // 2)
    tau = team.smallest(f, k)
    span = team.smallest(f, high) - team.smallest(f, low)
    if not span > 0.0:
        return 1.0
    density = (high - low) / total / span
    near = torch.argsort((sample - tau).abs(), stable=True)[: max(min(200, len(sample)), len(sample) * k // total)]
    change = (moved - sample)[near]
    spread = float((change - change.mean()).abs().mean())
    return max(0.0, 1.0 - density * spread * total / (2.0 * k))
