"""Automatic choice of the method whose selection best predicts held-out target texts, by an n-gram proxy.

Part of the target is held out. Each method selects for the rest; a trigram model of its selection, mixed with one of
the whole pool, is evaluated on the held-out part. In the study behind this the proxy ranks methods as real warm-ups do,
while the recall of hidden domains does not. All selections are cut to as many tokens as the random draw's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from flatshift.selection.errors import SelectionError
from flatshift.selection.features.tokens import text_sums
from flatshift.selection.lazy import np
from flatshift.selection.methods.base import (
    Pool,
    Progress,
    Selector,
    Target,
    check_budget,
    check_number,
    keyed_uniform,
    require_field,
)
from flatshift.selection.methods.classifier import Classifier
from flatshift.selection.methods.cynical import Cynical
from flatshift.selection.methods.dsir import DSIR
from flatshift.selection.methods.gotd import GotD
from flatshift.selection.methods.knn import KNN
from flatshift.selection.methods.moore_lewis import MooreLewis
from flatshift.selection.methods.random import RandomSelector
from flatshift.selection.validation import SelectorContext, check_fields, from_settings

if TYPE_CHECKING:
    from flatshift.selection.features.tokens import TokenRows

_TRIED: dict[str, Any] = {
    "cynical": Cynical,
    "moore-lewis": MooreLewis,
    "classifier": Classifier,
    "dsir": DSIR,
    "gotd": GotD,
    "knn": KNN,
}
_DRAWS = 3
"""Random draws that a method is compared with."""
_SHARE = 0.5
"""Weight of the selection's model in its mixture with the pool's."""
_TRANSPORT = ("gotd", "knn")


@dataclass(frozen=True, kw_only=True)
class Auto:
    """Try several methods on a part of the target and take the one whose selection predicts the held-out part best, by
    trigrams of the backbone's tokens; a random draw if none is better."""

    kind: Literal["auto"] = "auto"
    title: ClassVar[str] = "The selector"
    needs: ClassVar[tuple[str, ...]] = ("tokens", "texts", "features")
    tried: tuple[Literal["cynical", "moore-lewis", "classifier", "dsir", "gotd", "knn"], ...] = (
        "cynical",
        "moore-lewis",
        "classifier",
        "dsir",
        "gotd",
        "knn",
    )
    """Methods to try, each with its default settings; a random draw is always included."""
    holdout: float = 0.25
    """Share of the target held out for the comparison; the winner then uses all of it."""
    pairs: float = 2e9
    """Product of pool rows and target rows up to which gotd and knn are tried."""

    def __post_init__(self) -> None:
        check_fields(self, "holdout", above=0, most=0.9)
        check_fields(self, "pairs", least=1)
        if not self.tried or len(set(self.tried)) < len(self.tried):
            raise ValueError("tried must name at least one method, each once")

    def build(self, around: SelectorContext) -> AutoSelector:
        # The tried selectors must not share one state directory.
        alone = replace(around, state=None)
        return from_settings(
            AutoSelector, self, around, tried={name: _TRIED[name]().build(alone) for name in self.tried}
        )


class AutoSelector(Selector):
    """Fits the selector of `tried` (name → selector) that does best on held-out target texts, or draws at random.

    budget: rows to be selected, the size compared. A method wins if held-out texts are likelier after its selection
    than after each of three random draws, and by more than two standard errors (paired by text) than after the first.
    `inside_` is the winner, fitted on the whole target; `diagnostics_["table"]` has all values.
    """

    def __init__(
        self,
        *,
        tried: Mapping[str, Selector] | None = None,
        holdout: float = 0.25,
        pairs: float = 2e9,
        budget: int | None = None,
        seed: int = 0,
    ):
        self.tried = tried
        self.holdout = holdout
        self.pairs = pairs
        self.budget = budget
        self.seed = seed

    def fit(self, pool: Pool, target: Target, *, progress: Progress | None = None) -> Self:
        """Compare the methods and fit the winner; needs tokens on both sides.

        Also needs the inputs of each of `tried`; a method that fails is skipped, with its reason in the table.
        """
        from flatshift.selection.methods.ngrams import KneserNey

        check_number(self.holdout, "holdout", above=0.0, most=0.9)
        if self.budget is None:
            raise SelectionError("auto compares selections of one size; construct it with budget=")
        budget = check_budget(self.budget, len(pool))
        rows, _ = require_field(pool, target, "tokens", "auto")
        tried = dict(self.tried or {"moore-lewis": MooreLewis().build(SelectorContext(seed=self.seed))})
        kept, held = self._parts(target)
        reference = KneserNey.of(rows)
        aims = held.tokens
        draws = [RandomSelector(seed=self.seed + i).fit(pool, kept).select(budget) for i in range(_DRAWS)]
        most = int(rows.lengths[draws[0]].sum())
        control = [self._read(rows, draw, most, reference, aims) for draw in draws]
        base = float(np.average([_mean_nats(losses, aims) for losses in control]))
        table: list[dict[str, Any]] = [{"method": "random", "nats": base, "difference": 0.0, "error": None}]
        for name, selector in tried.items():
            began = time.process_time()
            line: dict[str, Any] = {"method": name, "nats": None, "difference": None, "error": None}
            table.append(line)
            if name in _TRANSPORT and len(pool) * len(target) > self.pairs:
                line["reason"] = f"{len(pool):,} x {len(target):,} pairs are more than {self.pairs:g}"
                continue
            try:
                order = selector.fit(pool, kept, progress=progress).select(len(pool))
            except SelectionError as error:
                line["reason"] = str(error)
                continue
            losses = self._read(rows, order, most, reference, aims)
            gaps = losses - control[0]
            lengths = aims.lengths
            line["nats"] = _mean_nats(losses, aims)
            line["difference"] = line["nats"] - base
            # Standard error of a ratio of sums over texts, paired: each text's surplus over the mean gap per token.
            rest = gaps - gaps.sum() / lengths.sum() * lengths
            line["error"] = float(np.sqrt((rest**2).sum() * len(rest) / max(len(rest) - 1, 1)) / lengths.sum())
            line["cpu_s"] = round(time.process_time() - began, 3)
            line["wins"] = line["nats"] < min(_mean_nats(one, aims) for one in control) and (
                float(gaps.sum() / lengths.sum()) < -2.0 * line["error"]
            )
        winners = [line for line in table if line.get("wins")]
        best = min(winners, key=lambda line: line["nats"])["method"] if winners else "random"
        self.inside_ = tried[best] if winners else RandomSelector(seed=self.seed)
        self.inside_.fit(pool, target, progress=progress)
        self.scores_ = self.inside_.scores_
        self.nearest_target_ = self.inside_.nearest_target_
        self.readings_ = self.inside_.readings_
        self.diagnostics_ = {"chosen": best, "held_out": len(held), "table": table, "inside": self.inside_.diagnostics_}
        return self

    def _parts(self, target: Target) -> tuple[Target, Target]:
        """Return the target without the held-out part, and that part. Raises SelectionError if it is too small."""
        count = round(self.holdout * len(target))
        if count < 2 or len(target) - count < 2:
            raise SelectionError(
                f"auto holds out {self.holdout:g} of the target, and of {len(target)} texts that leaves too few; "
                "give more target texts, or name a method"
            )
        order = np.argsort(keyed_uniform(target, self.seed, "auto held-out target"), kind="stable")
        kept, held = _take_rows(target, np.sort(order[count:])), _take_rows(target, np.sort(order[:count]))
        if not len(held.tokens.flat):
            raise SelectionError("the target texts that auto held out hold no token; give more target texts")
        return kept, held

    def _read(self, rows: TokenRows, order: np.ndarray, most: int, reference: Any, aims: TokenRows) -> np.ndarray:
        """Return (M,) nats of each held-out text under a model of the first `most` tokens of a selection."""
        from flatshift.selection.methods.ngrams import KneserNey, trigram_keys

        reached = np.cumsum(rows.lengths[order])
        chosen = order[: int(np.searchsorted(reached, most)) + 1]
        model = KneserNey.of(rows.take(chosen))
        flat, lengths = aims.part(0, len(aims))
        keys = trigram_keys(flat, lengths, aims.size)
        p = _SHARE * model.probability(keys) + (1.0 - _SHARE) * reference.probability(keys)
        return text_sums(-np.log(p), lengths)


def _mean_nats(losses: np.ndarray, aims: TokenRows) -> float:
    """Return the mean nats per token."""
    return float(losses.sum() / aims.lengths.sum())


def _take_rows(side: Pool, rows: np.ndarray) -> Pool:
    """Return some rows of a target, with all its fields."""
    numbers = rows.tolist()
    return Pool(
        ids=None if side.ids is None else [side.ids[i] for i in numbers],
        texts=None if side.texts is None else [side.texts[i] for i in numbers],
        features=None if side.features is None else np.asarray(side.features)[rows],
        domains=None if side.domains is None else [side.domains[i] for i in numbers],
        weights=None if side.weights is None else np.asarray(side.weights)[rows],
        tokens=None if side.tokens is None else side.tokens.take(numbers),
    )
