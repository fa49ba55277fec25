"""Findings of curves predicted before training; the curves themselves are drawn like those of a sweep."""

from __future__ import annotations

from flatshift.experiments.report.blocks import ChapterPart, Notes, Section
from flatshift.experiments.results.forecast import FORECAST, forecast_sentences
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
