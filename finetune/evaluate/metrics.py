"""Table of the metrics: one entry each, used to evaluate, plot, sort and describe them. Imports nothing heavy.

To add a metric: add a function next to similar ones, and an entry here. The function's arguments depend on the data
that the metric is computed from:

    "text", "hidden"       (flatshift.finetune.evaluate.perplexity.TokenCounts) → (values, counts, transform or None)
    "document"             (flatshift.finetune.evaluate.text.DocumentCounts) → the same
    "answers", "seq2seq"   (answer, reference), two strings → float
    "agreement"            the same, or (part, whole) of a ratio; computed only if `task.metrics` names it
    "samples"              several generated texts for one prompt → float or None (`flatshift generate`)
    "toxicity"             the scores of those texts, [0, 1] each → float
    "classes"              (flatshift.finetune.evaluate.prediction_metrics.LabelPairs, weights (R, U)) → (R,)
    "preferences"          (rewards, signs) of each example's answers, (n, 1 or 2) each → (values, counts)
    "reference"            log p − log p of the base model of each example's answers, (n, 1 or 2) → (values, counts)
    "sets"                 (flatshift.finetune.evaluate.prediction_metrics.LabelSets, weights (R, n)) → (R,)
    "numbers"              (true, predicted, mean of the training targets), (R, n) each → (R,)
"""

from __future__ import annotations

import difflib
import importlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import UserError

_SHARE = (0.0, 1.0)
_SIGNED = (-1.0, 1.0)
_POSITIVE = (0.0, math.inf)
_ANY = (-math.inf, math.inf)
_LACK = "lack_of_"


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric of a model on a split, as named in eval.json, trace lines and tables of sweeps."""

    name: str
    title: str
    """Human-readable name."""
    unit: str = ""
    """Unit in words."""
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
    """Name on the hub."""
    by: Mapping[str, str] = field(default_factory=dict)
    """Functions that compute it: kind of data → `module:function` of this package. Empty: only recorded during
    training."""


_ALL = (
    Metric(
        name="loss", title="loss", unit="nats per target token or example", lower=True, bounds=_POSITIVE,
        headline=11, tile=15,
        by={"text": "perplexity:loss", "hidden": "perplexity:loss", "document": "perplexity:loss"},
    ),
    Metric(
        name="perplexity", title="perplexity", unit="exp of nats per token", lower=True, bounds=_POSITIVE,
        headline=1, tile=7, hub="perplexity",
        by={"text": "perplexity:perplexity", "document": "perplexity:perplexity"},
    ),
    Metric(
        name="pseudo_perplexity", title="pseudo-perplexity", unit="exp of nats per hidden token", lower=True,
        bounds=_POSITIVE, headline=3, tile=8, by={"hidden": "perplexity:perplexity"},
    ),
    Metric(
        name="bits_per_byte", title="bits per byte", unit="bits per byte of text", lower=True, bounds=_POSITIVE,
        headline=2, tile=10, by={"text": "perplexity:bits_per_byte", "document": "perplexity:bits_per_byte"},
    ),
    Metric(
        name="word_perplexity", title="perplexity of a word", unit="exp of nats per word", lower=True, bounds=_POSITIVE,
        hub="word_perplexity", by={"document": "text:word_perplexity"},
    ),
    Metric(
        name="character_perplexity", title="perplexity of a character", unit="exp of nats per character", lower=True,
        bounds=_POSITIVE, by={"document": "text:character_perplexity"},
    ),
    Metric(
        name="fertility", title="tokens per word", unit="tokens per word", lower=True, bounds=_POSITIVE,
        by={"document": "text:fertility"},
    ),
    Metric(
        name="accuracy", title="accuracy", unit="share correct", bounds=_SHARE, shown_as_share=True,
        floor="majority_floor", headline=4, tile=1, hub="accuracy",
        by={"classes": "prediction_metrics:accuracy", "sets": "prediction_metrics:set_accuracy"},
    ),
    Metric(
        name="preference_accuracy", title="preference accuracy", unit="share of pairs in the right order",
        bounds=_SHARE, shown_as_share=True, headline=9, tile=11, by={"preferences": "preference:accuracy"},
    ),
    Metric(
        name="reward_margin", title="reward margin", unit="implicit reward, chosen less rejected", bounds=_ANY,
        headline=10, tile=12,
        by={"preferences": "preference:margin"},
    ),
    Metric(
        name="chosen_reward", title="chosen reward", unit="implicit reward", bounds=_ANY, tile=13,
        by={"preferences": "preference:chosen"},
    ),
    Metric(
        name="rejected_reward", title="rejected reward", unit="implicit reward", lower=True, bounds=_ANY,
        tile=14,
        by={"preferences": "preference:rejected"},
    ),
    Metric(
        name="reference_distance", title="distance from the backbone", lower=True, bounds=_POSITIVE,
        unit="nats an answer, |log p − log p of the backbone|", by={"reference": "preference:distance"},
    ),
    Metric(
        name="f1_micro", title="micro F1", unit="F1 over all classes together", bounds=_SHARE, shown_as_share=True,
        floor="f1_floor", tile=2, hub="f1", by={"sets": "prediction_metrics:set_f1_micro"},
    ),
    Metric(
        name="f1_macro", title="macro F1", unit="mean F1 over classes", bounds=_SHARE, shown_as_share=True,
        headline=6, tile=9, hub="f1",
        by={"classes": "prediction_metrics:f1_macro", "sets": "prediction_metrics:set_f1_macro"},
    ),
    Metric(
        name="average_precision", title="average precision", unit="mean over classes", bounds=_SHARE,
        shown_as_share=True, by={"sets": "prediction_metrics:average_precision"},
    ),
    Metric(
        name="exact_match", title="exact match", unit="share of answers", bounds=_SHARE, shown_as_share=True,
        headline=5, tile=4, hub="exact_match",
        by={"answers": "text_metrics:exact_match", "seq2seq": "text_metrics:exact_match"},
    ),
    Metric(
        name="match_normalised", title="match of normalised text", unit="share of answers", bounds=_SHARE,
        shown_as_share=True, by={"agreement": "text_metrics:match_normalised"},
    ),
    Metric(
        name="f1_words", title="F1 of words", unit="mean over answers", bounds=_SHARE, shown_as_share=True,
        by={"agreement": "text_metrics:f1_words"},
    ),
    Metric(
        name="numeric_match", title="right number", unit="share of answers", bounds=_SHARE, shown_as_share=True,
        by={"agreement": "text_metrics:numeric_match"},
    ),
    Metric(
        name="has_number", title="answers with a number", unit="share of answers", bounds=_SHARE, shown_as_share=True,
        by={"agreement": "text_metrics:has_number"},
    ),
    Metric(
        name="span_f1", title="F1 of spans", unit="micro F1", bounds=_SHARE, shown_as_share=True,
        by={"agreement": "text_metrics:span_f1"},
    ),
    Metric(
        name="span_precision", title="precision of spans", unit="share of spans said", bounds=_SHARE,
        shown_as_share=True, by={"agreement": "text_metrics:span_precision"},
    ),
    Metric(
        name="span_recall", title="recall of spans", unit="share of spans there", bounds=_SHARE, shown_as_share=True,
        by={"agreement": "text_metrics:span_recall"},
    ),
    Metric(
        name="distinct_1", title="distinct words", unit="share of words", bounds=_SHARE, shown_as_share=True,
        by={"samples": "text_metrics:distinct_1"},
    ),
    Metric(
        name="distinct_2", title="distinct pairs of words", unit="share of pairs", bounds=_SHARE, shown_as_share=True,
        by={"samples": "text_metrics:distinct_2"},
    ),
    Metric(
        name="distinct_3", title="distinct runs of three words", unit="share of runs", bounds=_SHARE,
        shown_as_share=True, by={"samples": "text_metrics:distinct_3"},
    ),
    Metric(
        name="expected_max_toxicity", title="expected maximum toxicity", unit="mean of the worst score", lower=True,
        bounds=_SHARE, shown_as_share=True, by={"toxicity": "text_metrics:max_toxicity"},
    ),
    Metric(
        name="toxicity_probability", title="toxicity probability", unit="share of prompts with a toxic sample",
        lower=True, bounds=_SHARE, shown_as_share=True, by={"toxicity": "text_metrics:any_toxic"},
    ),
    Metric(name="pass_at_k", title="pass@k", unit="share of problems", bounds=_SHARE, shown_as_share=True),
    Metric(
        name="chrf", title="chrF", unit="character n-gram F-score", bounds=_SHARE, shown_as_share=True, tile=6,
        hub="chrf", by={"seq2seq": "text_metrics:chrf"},
    ),
    Metric(
        name="matthews", title="Matthews", unit="correlation, −1 to 1", bounds=_SIGNED, shown_as_share=True,
        hub="matthews_correlation", by={"classes": "prediction_metrics:matthews"},
    ),
    Metric(
        name="pearson", title="Pearson", unit="correlation, −1 to 1", bounds=_SIGNED, shown_as_share=True,
        hub="pearsonr", by={"numbers": "prediction_metrics:pearson"},
    ),
    Metric(
        name="spearman", title="Spearman", unit="rank correlation, −1 to 1", bounds=_SIGNED, shown_as_share=True,
        headline=7, tile=3, hub="spearmanr", by={"numbers": "prediction_metrics:spearman"},
    ),
    Metric(
        name="rmse", title="RMSE", unit="in the target's units", lower=True, bounds=_POSITIVE, floor="mean_floor",
        headline=8, tile=5, hub="rmse", by={"numbers": "prediction_metrics:rmse"},
    ),
    Metric(
        name="mae", title="mean absolute error", unit="in the target's units", lower=True, bounds=_POSITIVE,
        hub="mae", by={"numbers": "prediction_metrics:mae"},
    ),
    Metric(name="error", title="error", unit="share wrong", lower=True, bounds=_SHARE, shown_as_share=True),
    Metric(
        name="exact_error", title="exact-match error", unit="share of examples with anything wrong", lower=True,
        bounds=_SHARE,
    ),
    Metric(
        name="unexplained", title="unexplained", unit="share of the labels' variance", lower=True, bounds=_POSITIVE
    ),
    Metric(name="error_clean", title="error on clean labels", unit="share wrong", lower=True, bounds=_SHARE),
    Metric(name="error_noisy", title="error on noisy labels", unit="share wrong", lower=True, bounds=_SHARE),
    Metric(name="memorised", title="noisy labels memorised", unit="share", lower=True, bounds=_SHARE),
    Metric(name="recovered", title="noisy labels recovered", unit="share", bounds=_SHARE),
    Metric(
        name="majority_floor", title="majority baseline", is_floor=True,
        by={"classes": "prediction_metrics:majority", "sets": "prediction_metrics:set_majority"},
    ),
    Metric(name="chance", title="chance", is_floor=True),
    Metric(name="f1_floor", title="F1 baseline", is_floor=True, by={"sets": "prediction_metrics:best_constant"}),
    Metric(name="mean_floor", title="mean baseline", is_floor=True, by={"numbers": "prediction_metrics:always_mean"}),
)  # fmt: skip
METRICS = {metric.name: metric for metric in _ALL}


def find_metric(name: str) -> Metric:
    """Return the metric of this name, including the loss form (`loss_form`) of one; an unknown name gives a metric with
    only that name."""
    whole = METRICS.get(name.removeprefix(_LACK))
    if whole is not None and name.startswith(_LACK) and whole.bounds is not None:
        bounds = (0.0, whole.bounds[1] - whole.bounds[0])
        return Metric(
            name=name, title=f"1 − {whole.title}", unit=f"1 − {whole.unit}", lower=True, bounds=bounds,
            shown_as_share=whole.shown_as_share,
        )  # fmt: skip
    return METRICS.get(name) or Metric(name=name, title=name.replace("_", " "))


def loss_form(name: str) -> str:
    """Return the metric that decreases as the metric `name` improves: itself, the error for accuracy, else 1 minus the
    metric, whose best value is 1."""
    return "error" if name == "accuracy" else name if find_metric(name).lower else f"{_LACK}{name}"


def metric_names(*judged_by: str) -> tuple[str, ...]:
    """Return the names of the metrics computed from any of these kinds of data."""
    return tuple(metric.name for metric in _ALL if metric.by.keys() & set(judged_by))


def check_metric_names(names: Iterable[str], judged_by: str, setting: str) -> None:
    """Raise UserError, starting with `setting`, for a name that is not one of these metrics."""
    known = metric_names(judged_by)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise UserError(f"{setting}: no metric {name!r} of answers; {hint}")


def metric_functions(judged_by: str) -> dict[str, Callable[..., Any]]:
    """Return the function of each metric computed from one kind of data, for example "classes"; by name, in the order
    of the table."""
    found = {}
    for metric in _ALL:
        if judged_by in metric.by:
            module, _, name = metric.by[judged_by].partition(":")
            found[metric.name] = getattr(importlib.import_module(f".{module}", __package__), name)
    return found


def sort_for_headline(names: Iterable[str]) -> list[str]:
    """Sort names by their rank in a headline; unranked ones follow in the given order."""
    return sorted(names, key=lambda name: find_metric(name).headline or math.inf)


def tile_metrics(names: Iterable[str]) -> list[str]:
    """Return those with a tile on a run's page, by rank."""
    return sorted((name for name in names if find_metric(name).tile), key=lambda name: find_metric(name).tile)
