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

from flatshift.experiments.recipe.schema import Comparison, StudyMethod


@dataclass(frozen=True)
class TrialSetting:
    """Settings of one trial."""

    lr: float
    knobs: tuple[tuple[str, Any], ...] = ()
    """(dotted key, value) of the method's own knobs."""

    def overrides(self) -> dict[str, Any]:
        """Return dotted key → value."""
        return {"optimizer.lr": self.lr, **dict(self.knobs)}


@dataclass(frozen=True)
class TrialScore:
    """Validation score of a trial; −inf for a diverged one."""

    value: float
    """Higher is better: the metric, or minus it if lower is better."""
    loss: float
    """Breaks ties: lower is better."""


FAILED = TrialScore(-math.inf, math.inf)


def first_trials(study: Comparison, method: StudyMethod) -> list[TrialSetting]:
    """Return the grid: every knob setting with every learning rate."""
    axes = [[(key, value) for value in values] for key, values in method.knobs.items()]
    return [TrialSetting(lr, knobs) for knobs in itertools.product(*axes) for lr in study.rates(method)]


def best_trial(scores: Mapping[TrialSetting, TrialScore]) -> TrialSetting | None:
    """Return the best trial: highest value, then lowest loss, then lowest learning rate; None if all diverged."""
    alive = {setting: score for setting, score in scores.items() if score.value > -math.inf}
    if not alive:
        return None
    return min(alive, key=lambda s: (-alive[s].value, alive[s].loss, s.lr))


def select_finalists(scores: Mapping[TrialSetting, TrialScore], count: int) -> list[TrialSetting]:
    """Return the best `count` trials, best first; fewer if not enough converged."""
    left, found = dict(scores), list[TrialSetting]()
    while len(found) < count and (best := best_trial(left)) is not None:
        found.append(best)
        del left[best]
    return found


def mean_score(scores: Sequence[TrialScore]) -> TrialScore:
    """Combine one setting's scores under several seeds: the mean of each, or FAILED if any run diverged."""
    if any(score.value == -math.inf for score in scores):
        return FAILED
    return TrialScore(
        *(math.fsum(each) / len(scores) for each in zip(*((s.value, s.loss) for s in scores), strict=True))
    )


def is_on_edge(tried: Collection[TrialSetting], best: TrialSetting) -> bool:
    """Return True if the chosen learning rate is the lowest or highest of those tried with its knobs."""
    rates = _tried_rates(tried, best.knobs)
    return best.lr in (rates[0], rates[-1])


def next_trial(scores: Mapping[TrialSetting, TrialScore]) -> TrialSetting:
    """Return the setting of one more, new trial: beyond the edge, or between the best and a neighbour."""
    best = best_trial(scores)
    if best is None:  # everything diverged: well below all that was tried
        knobs = next(iter(scores)).knobs
        rates = _tried_rates(scores, knobs)
        return TrialSetting(_round_rate(rates[0] * rates[0] / rates[1]), knobs)
    rates = _tried_rates(scores, best.knobs)
    place = rates.index(best.lr)
    if place == 0:
        return TrialSetting(_round_rate(rates[0] * rates[0] / rates[1]), best.knobs)
    if place == len(rates) - 1:
        return TrialSetting(_round_rate(rates[-1] * rates[-1] / rates[-2]), best.knobs)

    def rank(lr: float) -> tuple[float, float]:
        score = scores[TrialSetting(lr, best.knobs)]
        return (-score.value, score.loss)

    neighbour = min((rates[place - 1], rates[place + 1]), key=rank)
    return TrialSetting(_round_rate(math.sqrt(best.lr * neighbour)), best.knobs)


def _tried_rates(tried: Collection[TrialSetting], knobs: Sequence[tuple[str, Any]]) -> list[float]:
    return sorted(setting.lr for setting in tried if setting.knobs == knobs)


def _round_rate(rate: float) -> float:
    """Round to three digits, so that a rate is readable and identifies the same cell on every machine."""
    return float(f"{rate:.3g}")
