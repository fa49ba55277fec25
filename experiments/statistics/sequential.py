"""Seeds added until a verdict stands: looks named beforehand, each at its own share of the level.

A test that is repeated at 5 % as seeds come in is wrong far more often than in 5 % of cases. Here the level is spent
(Lan & DeMets 1983, the function of Pocock's kind): after the share t of all seeds α·ln(1 + (e − 1)t) may have been used
up, and each look tests at what the function grew by since the one before. By Boole's inequality the chance that any
look names something wrongly is then at most α, however the looks depend on one another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from experiments.statistics.peak import FEWEST_SEEDS
from finetune.errors import UserError

_GROWTH = 1.5


@dataclass(frozen=True)
class Look:
    """Seeds after which verdicts are made, and the level of each test there."""

    seeds: int
    level: float


def looks(budget: int, *, level: float = 0.05) -> tuple[Look, ...]:
    """Looks at 5 seeds, then at half as many again each time, up to `budget` seeds.

    Raises UserError for a budget below 5 seeds, which no test takes.
    """
    if budget < FEWEST_SEEDS:
        raise UserError(f"--until decided: --seeds {budget} is the most to add, and a verdict needs {FEWEST_SEEDS}")
    places = [FEWEST_SEEDS]
    while places[-1] < budget:
        places.append(min(budget, math.ceil(places[-1] * _GROWTH)))
    spent = [level * math.log1p((math.e - 1) * place / budget) for place in places]
    return tuple(Look(place, now - before) for place, now, before in zip(places, spent, [0.0, *spent], strict=False))
