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
    """Settings of one trial; knobs: (dotted key, value) of the method's own."""

    lr: float
    knobs: tuple[tuple[str, Any], ...] = ()

    def overrides(self) -> dict[str, Any]:
        """Return dotted key → value."""
        return {"optimizer.lr": self.lr, **dict(self.knobs)}


@dataclass(frozen=True)
class TrialScore:
    """Validation score of a trial: the metric, or minus it if lower is better; ties are broken by the lower loss."""

    value: float
    loss: float


FAILED = TrialScore(-math.inf, math.inf)


def first_trials(study: Comparison, method: StudyMethod) -> list[TrialSetting]:
    """Return the grid: every knob setting with every learning rate."""
    axes = [[(key, value) for value in values] for key, values in method.knobs.items()]
    return [TrialSetting(lr, knobs) for knobs in itertools.product(*axes) for lr in study.rates(method)]


def best_trial(scores: Mapping[TrialSetting, TrialScore]) -> TrialSetting | None:
    """Return the best trial: highest value, then lowest loss, then lowest learning rate; None if all diverged."""
    finished = [setting for setting, score in scores.items() if score.value > -math.inf]
    return min(finished, key=lambda s: (-scores[s].value, scores[s].loss, s.lr), default=None)


def select_finalists(scores: Mapping[TrialSetting, TrialScore], count: int) -> list[TrialSetting]:
    """Return the best `count` trials, best first; fewer if not enough converged."""
    remaining, finalists = dict(scores), list[TrialSetting]()
    while len(finalists) < count and (best := best_trial(remaining)) is not None:
        finalists.append(best)
        del remaining[best]
    return finalists


def mean_score(scores: Sequence[TrialScore]) -> TrialScore:
    """Combine one setting's scores under several seeds: the mean of each, or FAILED if any run diverged."""
    if any(score.value == -math.inf for score in scores):
        return FAILED
    value, loss = (math.fsum(getattr(score, name) for score in scores) / len(scores) for name in ("value", "loss"))
    return TrialScore(value, loss)


def is_on_edge(tried: Collection[TrialSetting], best: TrialSetting) -> bool:
    """Return True if the chosen learning rate is the lowest or highest of those tried with its knobs."""
    rates = _tried_rates(tried, best.knobs)
    return best.lr in (rates[0], rates[-1])


def next_trial(scores: Mapping[TrialSetting, TrialScore]) -> TrialSetting:
    """Return the setting of one more, new trial: beyond the edge, or between the best and a neighbour."""
    best = best_trial(scores)
    knobs = next(iter(scores)).knobs if best is None else best.knobs
    rates = _tried_rates(scores, knobs)
    if best is None or best.lr == rates[0]:  # below all that was tried; so too if everything diverged
        rate = rates[0] * rates[0] / rates[1]
    elif best.lr == rates[-1]:
        rate = rates[-1] * rates[-1] / rates[-2]
    else:
        index = rates.index(best.lr)
        near = {rate: scores[TrialSetting(rate, knobs)] for rate in (rates[index - 1], rates[index + 1])}
        rate = math.sqrt(best.lr * min(near, key=lambda rate: (-near[rate].value, near[rate].loss)))
    # Three digits, or as many as a new rate needs: it is readable and identifies the same cell on every machine.
    rounded = (float(f"{rate:.{digits}g}") for digits in range(3, 18))
    return TrialSetting(next((new for new in rounded if new not in rates), rate), knobs)


def _tried_rates(tried: Collection[TrialSetting], knobs: Sequence[tuple[str, Any]]) -> list[float]:
    return sorted(setting.lr for setting in tried if setting.knobs == knobs)
