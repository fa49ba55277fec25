"""Equal trials: every method, the baseline included, gets the same number of runs to find its settings.

The first trials are a grid of learning rates × the method's own knobs. Each further round is one more run: if the best
learning rate is on an edge of those tried (at the best knobs), one step beyond it; else between it and its better
neighbour. So an extended grid costs no method more trials than another. The best few of these, the finalists, run again
under further tuning seeds, equally many for every method.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flatshift.experiments.recipe.studies import Comparison, StudyMethod


@dataclass(frozen=True)
class Setting:
    """Settings of one trial."""

    lr: float
    knobs: tuple[tuple[str, Any], ...] = ()
    """(dotted key, value) of the method's own knobs."""

    def overrides(self) -> dict[str, Any]:
        """Return dotted key → value."""
        return {"optimizer.lr": self.lr, **dict(self.knobs)}


@dataclass(frozen=True)
class Score:
    """Validation score of a trial; −inf for a diverged one."""

    value: float
    """Higher is better: the metric, or minus it if lower is better."""
    loss: float
    """Breaks ties: lower is better."""


FAILED = Score(-math.inf, math.inf)


def first_trials(study: Comparison, method: StudyMethod) -> list[Setting]:
    """Return the grid: every knob setting with every learning rate."""
    axes = [[(key, value) for value in values] for key, values in method.knobs.items()]
    return [Setting(lr, knobs) for knobs in itertools.product(*axes) for lr in study.rates(method)]


def best_of(scores: Mapping[Setting, Score]) -> Setting | None:
    """Return the best trial: highest value, then lowest loss, then lowest learning rate; None if all diverged."""
    alive = {setting: score for setting, score in scores.items() if score.value > -math.inf}
    if not alive:
        return None
    return min(alive, key=lambda s: (-alive[s].value, alive[s].loss, s.lr))


def finalists(scores: Mapping[Setting, Score], count: int) -> list[Setting]:
    """Return the best `count` trials, best first; fewer if not enough converged."""
    left, found = dict(scores), list[Setting]()
    while len(found) < count and (best := best_of(left)) is not None:
        found.append(best)
        del left[best]
    return found


def together(scores: Sequence[Score]) -> Score:
    """Combine one setting's scores under several seeds: the mean of each, or FAILED if any run diverged."""
    if any(score.value == -math.inf for score in scores):
        return FAILED
    return Score(*(math.fsum(each) / len(scores) for each in zip(*((s.value, s.loss) for s in scores), strict=True)))


def on_edge(tried: Collection[Setting], best: Setting) -> bool:
    """Return True if the chosen learning rate is the lowest or highest of those tried with its knobs."""
    rates = _rates(tried, best.knobs)
    return best.lr in (rates[0], rates[-1])


def next_trial(scores: Mapping[Setting, Score]) -> Setting:
    """Return the setting of one more, new trial: beyond the edge, or between the best and a neighbour."""
    best = best_of(scores)
    if best is None:  # everything diverged: well below all that was tried
        knobs = next(iter(scores)).knobs
        rates = _rates(scores, knobs)
        return Setting(_round(rates[0] * rates[0] / rates[1]), knobs)
    rates = _rates(scores, best.knobs)
    place = rates.index(best.lr)
    if place == 0:
        return Setting(_round(rates[0] * rates[0] / rates[1]), best.knobs)
    if place == len(rates) - 1:
        return Setting(_round(rates[-1] * rates[-1] / rates[-2]), best.knobs)

    def rank(lr: float) -> tuple[float, float]:
        score = scores[Setting(lr, best.knobs)]
        return (-score.value, score.loss)

    neighbour = min((rates[place - 1], rates[place + 1]), key=rank)
    return Setting(_round(math.sqrt(best.lr * neighbour)), best.knobs)


def _rates(tried: Collection[Setting], knobs: Sequence[tuple[str, Any]]) -> list[float]:
    return sorted(setting.lr for setting in tried if setting.knobs == knobs)


def _round(rate: float) -> float:
    """Round to three digits, so that a rate is readable and identifies the same cell on every machine."""
    return float(f"{rate:.3g}")
