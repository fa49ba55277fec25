"""Findings of curves predicted before training; the curves themselves are drawn like those of a sweep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flatshift.experiments.report.blocks import ChapterPart, Notes, Section
from flatshift.experiments.results.cells import FORECAST
from flatshift.experiments.results.run import RunResults, read_object


def part(run: RunResults) -> ChapterPart | None:
    """Return the sentences of forecast.json, if the directory has one."""
    found = read_object(run.path / FORECAST)
    if not found:
        return None
    said = forecast_sentences(found)
    note = (
        "Everything below that looks measured is computed: the model is linearised where it starts and solved in "
        "closed form; each seed on this page is a draw of rows and of starting values, not a training run. Weight "
        "decay is the ridge, in units of the kernel's mean eigenvalue."
    )
    return ChapterPart(kind="forecast", findings=said, sections=[Section("What this is", [Notes([note])])])


def forecast_sentences(forecast: Mapping[str, Any]) -> list[str]:
    """Return the forecast as sentences."""
    metric, n = forecast["metric"], forecast["rows"][-1]

    def format_value(value: float) -> str:
        return f"{100 * value:.1f} %" if metric == "error" else f"{value:.3g}"

    best, end, left_out = (format_value(forecast[name]) for name in ("best", "end", "left_out"))
    sentences = [
        f"Predicted, nothing was trained: test {metric} {best} with {n:,} rows at rank {forecast['rank']} and the best "
        f"ridge ({forecast['best_decay']:g} of the kernel's mean eigenvalue), {end} trained to the end; leave-one-out "
        f"on the training rows says {left_out}."
    ]
    more = forecast["more"]
    if more is not None and more["low"] is not None:
        points, unit = (100, " points") if metric == "error" else (1, "")
        sentences.append(
            f"{forecast['more_rows']:,} more labels: {points * more['value']:+.2g}{unit} (80 % interval "
            f"{points * more['low']:+.2g} to {points * more['high']:+.2g}, over {forecast['draws']} draws)."
        )
    sentences.append(f"The fit uses {forecast['effective']:.0f} effective parameters at that ridge.")
    if forecast["threshold_rank"] is not None:
        sentences.append(
            f"Training labels can just be fitted at rank {forecast['threshold_rank']:.3g}: expect a peak there."
        )
    elif forecast["threshold_note"]:
        sentences.append(f"No peak can show along rank: {forecast['threshold_note']}.")
    if len(forecast["ranks"]) > 1:
        sentences.append(
            f"Take rank {forecast['best_rank']}: of those with the lowest predicted {metric} at the best ridge, as far "
            "as the draws can tell, the one that trains soonest."
        )
    sentences.append(
        "It holds as far as training stays near its start: compare it with one run of the recipe before relying on it."
    )
    return sentences
