"""Table of the metrics: one entry each, used to evaluate, plot, sort and describe them. Imports nothing heavy.

To add a metric: add a function of its name next to similar ones, and an entry here. The function's arguments depend on
the data that the metric is computed from (the keys of `_MODULES`):

    "text", "hidden"       (flatshift.finetune.evaluate.perplexity.TokenCounts) → (values, counts, transform or None)
    "document"             (flatshift.finetune.evaluate.perplexity.DocumentCounts) → the same
    "answers", "seq2seq"   (answer, reference), two strings → float
    "agreement"            the same, or (part, whole) of a ratio; computed only if `task.metrics` names it
    "samples"              several generated texts for one prompt → float or None (`flatshift generate`)
    "toxicity"             the scores of those texts, [0, 1] each → float
    "classes"              (flatshift.finetune.evaluate.prediction_metrics.LabelPairs, weights (R, U)) → (R,)
    "sets"                 (flatshift.finetune.evaluate.prediction_metrics.LabelSets, weights (R, n)) → (R,)
    "numbers"              (true, predicted, mean of the training targets), (R, n) each → (R,)
    "preferences"          (rewards, signs) of each example's answers, (n, 1 or 2) each → (values, counts)
    "reference"            log p − log p of the base model of each example's answers, (n, 1 or 2) → (values, counts)
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

_SHARE = (0.0, 1.0)
_POSITIVE = (0.0, math.inf)
_ANY = (-math.inf, math.inf)
_LACK = "lack_of_"


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric of a model on a split, as named in eval.json, trace lines and tables of sweeps."""

    name: str
    title: str
    unit: str = ""
    lower: bool = False
    """True if lower is better."""
    bounds: tuple[float, float] | None = None
    """Range of possible values; None if unknown."""
    shown_as_share: bool = False
    """Plot on the common axis of fractions and correlations."""
    floor: str | None = None
    """Name of the baseline metric shown next to it: a constant prediction learnt from frequencies alone."""
    is_floor: bool = False
    headline: int = 0
    """Rank in a headline, from 1; 0: after the ranked ones, in the given order."""
    tile: int = 0
    """Rank among the tiles of a run's page, from 1; 0: no tile."""
    hub: str | None = None
    """Name on the model hub."""
    sources: tuple[str, ...] = ()
    """Kinds of data that it is computed from. Empty: computed by its task, or recorded during training."""


_MODULES = {
    **dict.fromkeys(("text", "hidden", "document"), "perplexity"),
    **dict.fromkeys(("answers", "seq2seq", "agreement", "samples", "toxicity"), "text_metrics"),
    **dict.fromkeys(("classes", "sets", "numbers"), "prediction_metrics"),
    **dict.fromkeys(("preferences", "reference"), "preference"),
}
"""Kind of data → module of this package with the functions."""
_fraction = partial(Metric, bounds=_SHARE, shown_as_share=True)
_correlation = partial(Metric, bounds=(-1.0, 1.0), shown_as_share=True)
_cost = partial(Metric, bounds=_POSITIVE, lower=True)

_ALL = (
    _cost(
        name="loss", title="loss", unit="nats per target token or example", headline=11, tile=15,
        sources=("text", "hidden", "document"),
    ),
    _cost(
        name="perplexity", title="perplexity", unit="exp of nats per token", headline=1, tile=7, hub="perplexity",
        sources=("text", "document"),
    ),
    _cost(
        name="pseudo_perplexity", title="pseudo-perplexity", unit="exp of nats per hidden token", headline=3, tile=8,
        sources=("hidden",),
    ),
    _cost(
        name="bits_per_byte", title="bits per byte", unit="bits per byte of text", headline=2, tile=10,
        sources=("text", "document"),
    ),
    _cost(
        name="word_perplexity", title="perplexity of a word", unit="exp of nats per word", hub="word_perplexity",
        sources=("document",),
    ),
    _cost(
        name="character_perplexity", title="perplexity of a character", unit="exp of nats per character",
        sources=("document",),
    ),
    _cost(name="fertility", title="tokens per word", unit="tokens per word", sources=("document",)),
    _fraction(
        name="accuracy", title="accuracy", unit="share correct", floor="majority_floor", headline=4, tile=1,
        hub="accuracy", sources=("classes", "sets"),
    ),
    _fraction(
        name="preference_accuracy", title="preference accuracy", unit="share of pairs in the right order", headline=9,
        tile=11, sources=("preferences",),
    ),
    Metric(
        name="reward_margin", title="reward margin", unit="implicit reward, chosen less rejected", bounds=_ANY,
        headline=10, tile=12, sources=("preferences",),
    ),
    Metric(
        name="chosen_reward", title="chosen reward", unit="implicit reward", bounds=_ANY, tile=13,
        sources=("preferences",),
    ),
    Metric(
        name="rejected_reward", title="rejected reward", unit="implicit reward", bounds=_ANY, lower=True, tile=14,
        sources=("preferences",),
    ),
    _cost(
        name="reference_distance", title="distance from the backbone",
        unit="nats an answer, |log p − log p of the backbone|", sources=("reference",),
    ),
    _fraction(
        name="f1_micro", title="micro F1", unit="F1 over all classes together", floor="f1_floor", tile=2, hub="f1",
        sources=("sets",),
    ),
    _fraction(
        name="f1_macro", title="macro F1", unit="mean F1 over classes", headline=6, tile=9, hub="f1",
        sources=("classes", "sets"),
    ),
    _fraction(name="average_precision", title="average precision", unit="mean over classes", sources=("sets",)),
    _fraction(
        name="exact_match", title="exact match", unit="share of answers", headline=5, tile=4, hub="exact_match",
        sources=("answers", "seq2seq"),
    ),
    _fraction(
        name="match_normalised", title="match of normalised text", unit="share of answers", sources=("agreement",),
    ),
    _fraction(name="f1_words", title="F1 of words", unit="mean over answers", sources=("agreement",)),
    _fraction(name="numeric_match", title="right number", unit="share of answers", sources=("agreement",)),
    _fraction(name="has_number", title="answers with a number", unit="share of answers", sources=("agreement",)),
    _fraction(name="span_f1", title="F1 of spans", unit="micro F1", sources=("agreement",)),
    _fraction(name="span_precision", title="precision of spans", unit="share of spans said", sources=("agreement",)),
    _fraction(name="span_recall", title="recall of spans", unit="share of spans there", sources=("agreement",)),
    _fraction(name="distinct_1", title="distinct words", unit="share of words", sources=("samples",)),
    _fraction(name="distinct_2", title="distinct pairs of words", unit="share of pairs", sources=("samples",)),
    _fraction(name="distinct_3", title="distinct runs of three words", unit="share of runs", sources=("samples",)),
    _fraction(
        name="expected_max_toxicity", title="expected maximum toxicity", unit="mean of the worst score", lower=True,
        sources=("toxicity",),
    ),
    _fraction(
        name="toxicity_probability", title="toxicity probability", unit="share of prompts with a toxic sample",
        lower=True, sources=("toxicity",),
    ),
    _fraction(name="pass_at_k", title="pass@k", unit="share of problems"),
    _fraction(name="chrf", title="chrF", unit="character n-gram F-score", tile=6, hub="chrf", sources=("seq2seq",)),
    _correlation(
        name="matthews", title="Matthews", unit="correlation, −1 to 1", hub="matthews_correlation",
        sources=("classes",),
    ),
    _correlation(name="pearson", title="Pearson", unit="correlation, −1 to 1", hub="pearsonr", sources=("numbers",)),
    _correlation(
        name="spearman", title="Spearman", unit="rank correlation, −1 to 1", headline=7, tile=3, hub="spearmanr",
        sources=("numbers",),
    ),
    _cost(
        name="rmse", title="RMSE", unit="in the target's units", floor="mean_floor", headline=8, tile=5, hub="rmse",
        sources=("numbers",),
    ),
    _cost(name="mae", title="mean absolute error", unit="in the target's units", hub="mae", sources=("numbers",)),
    _fraction(name="error", title="error", unit="share wrong", lower=True),
    Metric(
        name="exact_error", title="exact-match error", unit="share of examples with anything wrong", bounds=_SHARE,
        lower=True,
    ),
    _cost(name="unexplained", title="unexplained", unit="share of the labels' variance"),
    Metric(name="error_clean", title="error on clean labels", unit="share wrong", bounds=_SHARE, lower=True),
    Metric(name="error_noisy", title="error on noisy labels", unit="share wrong", bounds=_SHARE, lower=True),
    Metric(name="memorised", title="noisy labels memorised", unit="share", bounds=_SHARE, lower=True),
    Metric(name="recovered", title="noisy labels recovered", unit="share", bounds=_SHARE),
    Metric(name="majority_floor", title="majority baseline", is_floor=True, sources=("classes", "sets")),
    Metric(name="chance", title="chance", is_floor=True),
    Metric(name="f1_floor", title="F1 baseline", is_floor=True, sources=("sets",)),
    Metric(name="mean_floor", title="mean baseline", is_floor=True, sources=("numbers",)),
)  # fmt: skip
METRICS = {metric.name: metric for metric in _ALL}


def find_metric(name: str) -> Metric:
    """Return the metric of this name, including the loss form (`loss_form`) of one; an unknown name gives a metric with
    only that name."""
    whole = METRICS.get(name.removeprefix(_LACK))
    if whole is not None and name.startswith(_LACK) and whole.bounds is not None:
        bounds = (1 - whole.bounds[1], 1 - whole.bounds[0])
        return Metric(
            name=name, title=f"1 − {whole.title}", unit=f"1 − {whole.unit}", lower=True, bounds=bounds,
            shown_as_share=whole.shown_as_share,
        )  # fmt: skip
    return METRICS.get(name) or Metric(name=name, title=name.replace("_", " "))


def loss_form(name: str) -> str:
    """Return the metric that decreases as the metric `name` improves: itself, the error for accuracy, else 1 minus the
    metric."""
    return "error" if name == "accuracy" else name if find_metric(name).lower else f"{_LACK}{name}"


def metric_names(*sources: str) -> tuple[str, ...]:
    """Return the names of the metrics computed from any of these kinds of data."""
    return tuple(metric.name for metric in _ALL if set(metric.sources) & set(sources))


def metric_functions(source: str) -> dict[str, Callable[..., Any]]:
    """Return the function of each metric computed from one kind of data, for example "classes"; by name, in the order
    of the table."""
    module = importlib.import_module(f".{_MODULES[source]}", __package__)
    return {name: getattr(module, name) for name in metric_names(source)}


def sort_for_headline(names: Iterable[str]) -> list[str]:
    """Sort names by their rank in a headline; unranked ones follow in the given order."""
    return sorted(names, key=lambda name: find_metric(name).headline or math.inf)


def tile_metrics(names: Iterable[str]) -> list[str]:
    """Return those with a tile on a run's page, by rank."""
    return sorted((name for name in names if find_metric(name).tile), key=lambda name: find_metric(name).tile)
