"""Automatic choice of the method whose selection best predicts held-out target texts, by an n-gram proxy.

Part of the target is held out. Each method selects for the rest; a trigram model of its selection, mixed with one of
the whole pool, is evaluated on the held-out part. In the study behind this the proxy ranks methods as real warm-ups do,
while the recall of hidden domains does not. All selections are cut to as many tokens as the random draw's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from flatshift.selection.errors import SelectionError
from flatshift.selection.features.tokens import TokenRows, text_sums
from flatshift.selection.lazy import np
from flatshift.selection.methods.base import (
    MethodSettings,
    Pool,
    Progress,
    Selector,
    Target,
    check_budget,
    require_field,
)
from flatshift.selection.methods.classifier import Classifier
from flatshift.selection.methods.controls import RandomSelector
from flatshift.selection.methods.cynical import Cynical
from flatshift.selection.methods.dsir import DSIR
from flatshift.selection.methods.gotd import GotD
from flatshift.selection.methods.knn import KNN
from flatshift.selection.methods.moore_lewis import MooreLewis
from flatshift.selection.validation import bounded, check_number

Tried = Literal["cynical", "moore-lewis", "classifier", "dsir", "gotd", "knn"]
_TRIED: dict[str, MethodSettings] = {
    method.kind: method for method in (Cynical(), MooreLewis(), Classifier(), DSIR(), GotD(), KNN())
}
_DRAWS = 3  # random draws that a method is compared with
_SHARE = 0.5  # weight of the selection's model in its mixture with the pool's
_TRANSPORT = ("gotd", "knn")


@dataclass(frozen=True, kw_only=True)
class Auto(MethodSettings):
    """Try several methods on a part of the target and take the one whose selection predicts the held-out part best, by
    trigrams of the backbone's tokens; a random draw if none is better."""

    kind: Literal["auto"] = "auto"
    title: ClassVar[str] = "The selector"
    needs: ClassVar[tuple[str, ...]] = ("tokens", "texts", "features")
    tried: tuple[Tried, ...] = ("cynical", "moore-lewis", "classifier", "dsir", "gotd", "knn")
    """Methods to try, each with its default settings; a random draw is always included."""
    holdout: float = bounded(0.25, above=0, maximum=0.9)
    """Share of the target held out for the comparison; the winner then uses all of it."""
    pairs: float = bounded(2e9, minimum=1)
    """Product of pool rows and target rows up to which gotd and knn are tried."""

    def check(self) -> None:
        super().check()
        if not self.tried or len(set(self.tried)) < len(self.tried):
            raise SelectionError("tried must name at least one method, each once")

    def build(self, **arguments: Any) -> Selector:
        # The tried selectors must not share one state directory.
        options = arguments | {"state": None}
        return super().build(**arguments, tried={name: _TRIED[name].build(**options) for name in self.tried})


class AutoSelector(Selector):
    """Fits the selector of `tried` (name → selector) that does best on held-out target texts, or draws at random.

    budget: rows to be selected, the size compared. A method wins if held-out texts are likelier after its selection
    than after each of three random draws, and by more than two standard errors (paired by text) than after the first.
    `inside_` is the winner, fitted on the whole target; `diagnostics_["table"]` has all values. Needs tokens on both
    sides, and the inputs of each of `tried`; a method that fails is skipped, with its reason in the table.
    """

    tried: Mapping[str, Selector] | None = None
    holdout: float = 0.25
    pairs: float = 2e9
    budget: int | None = None
    seed: int = 0

    def _fit(self, pool: Pool, target: Target, progress: Progress) -> None:
        check_number("holdout", self.holdout, above=0, maximum=0.9)
        if self.budget is None:
            raise SelectionError("auto compares selections of one size; construct it with budget=")
        budget = check_budget(self.budget, len(pool))
        rows, _ = require_field(pool, target, "tokens", "auto")
        tried = dict(self.tried or {"moore-lewis": MooreLewis().build(seed=self.seed)})
        training, held_out = self._split(target)
        comparison = _Comparison(rows, held_out.tokens)
        draws = [RandomSelector(seed=self.seed + i).fit(pool, training).select(budget) for i in range(_DRAWS)]
        tokens = int(rows.lengths[draws[0]].sum())
        control = [comparison.losses(draw, tokens) for draw in draws]
        base = float(np.average([comparison.mean(losses) for losses in control]))
        table: list[dict[str, Any]] = [{"method": "random", "nats": base, "difference": 0.0, "error": None}]
        for name, selector in tried.items():
            began = time.process_time()
            line: dict[str, Any] = {"method": name, "nats": None, "difference": None, "error": None}
            table.append(line)
            if name in _TRANSPORT and len(pool) * len(target) > self.pairs:
                line["reason"] = f"{len(pool):,} x {len(target):,} pairs are more than {self.pairs:g}"
                continue
            try:
                order = selector.fit(pool, training, progress=progress).select(len(pool))
            except SelectionError as error:
                line["reason"] = str(error)
                continue
            losses = comparison.losses(order, tokens)
            gap, error_of_gap = comparison.gap(losses, control[0])
            line["nats"] = comparison.mean(losses)
            line["difference"] = line["nats"] - base
            line["error"] = error_of_gap
            line["cpu_s"] = round(time.process_time() - began, 3)
            line["wins"] = line["nats"] < min(map(comparison.mean, control)) and gap < -2.0 * error_of_gap
        winners = [line for line in table if line.get("wins")]
        best = min(winners, key=lambda line: line["nats"])["method"] if winners else "random"
        winner = self.inside_ = tried[best] if winners else RandomSelector(seed=self.seed)
        winner.fit(pool, target, progress=progress)
        self.scores_, self.nearest_target_ = winner.scores_, winner.nearest_target_
        self.readings_ = winner.readings_
        self.diagnostics_ = {"chosen": best, "held_out": len(held_out), "table": table, "inside": winner.diagnostics_}

    def _split(self, target: Target) -> tuple[Target, Target]:
        """Return the target without the held-out texts, and those. Raises SelectionError if it is too small."""
        count = round(self.holdout * len(target))
        if count < 2 or len(target) - count < 2:
            raise SelectionError(
                f"auto holds out {self.holdout:g} of the target, and of {len(target)} texts that leaves too few; "
                "give more target texts, or name a method"
            )
        order = np.argsort(target.draw(self.seed, "auto held-out target"), kind="stable")
        training, held_out = (_take_rows(target, np.sort(rows)) for rows in (order[count:], order[:count]))
        if not len(held_out.tokens.flat):
            raise SelectionError("the target texts that auto held out hold no token; give more target texts")
        return training, held_out


# Not by inheritance: the selector's `tried` are selectors, those of the settings names.
Auto.selector = AutoSelector


class _Comparison:
    """Losses of held-out texts under a model of a selection's first tokens, mixed with one of the pool's `rows`."""

    def __init__(self, rows: TokenRows, held_out: TokenRows):
        from flatshift.selection.methods.ngrams import KneserNey, trigram_keys

        self._rows, self._lengths = rows, held_out.lengths
        flat, lengths = held_out.part(0, len(held_out))
        self._keys = trigram_keys(flat, lengths, held_out.size)
        self._pool_probability = KneserNey.of(rows).probability(self._keys)

    def losses(self, order: np.ndarray, tokens: int) -> np.ndarray:
        """Return (M,) nats of each held-out text after the first `tokens` tokens of a selection."""
        from flatshift.selection.methods.ngrams import KneserNey

        chosen = order[: int(np.searchsorted(np.cumsum(self._rows.lengths[order]), tokens)) + 1]
        probability = KneserNey.of(self._rows.take(chosen)).probability(self._keys)
        return text_sums(-np.log(_SHARE * probability + (1.0 - _SHARE) * self._pool_probability), self._lengths)

    def mean(self, losses: np.ndarray) -> float:
        """Return the mean nats per token."""
        return float(losses.sum() / self._lengths.sum())

    def gap(self, losses: np.ndarray, control: np.ndarray) -> tuple[float, float]:
        """Return the mean gap to the control per token, and its standard error: that of a ratio of sums over texts,
        paired, from each text's surplus over the mean gap."""
        gaps, tokens = losses - control, self._lengths.sum()
        surplus = gaps - gaps.sum() / tokens * self._lengths
        error = float(np.sqrt((surplus**2).sum() * len(surplus) / max(len(surplus) - 1, 1)) / tokens)
        return float(gaps.sum() / tokens), error


def _take_rows(side: Pool, rows: np.ndarray) -> Pool:
    """Return some rows of a target, with all its fields."""
    numbers = rows.tolist()

    def take(name: str, value: Any) -> Any:
        if name == "tokens":
            return value.take(numbers)
        return np.asarray(value)[rows] if name in ("features", "weights") else [value[i] for i in numbers]

    fields = {name: value for name, value in vars(side).items() if value is not None and name != "losses"}
    return Pool(**{name: take(name, value) for name, value in fields.items()})
