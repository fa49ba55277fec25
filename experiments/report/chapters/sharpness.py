"""Section on the sharpness of the run's minimum."""

from __future__ import annotations

from typing import Any

from flatshift.experiments.report import formats
from flatshift.experiments.report.blocks import Block, ChapterPart, ChartGroup, Notes, Section, Table
from flatshift.experiments.report.charts.sharpness import SPACES, contour_chart, line_chart, rise_chart
from flatshift.experiments.results.run import RunResults
from flatshift.finetune.digests import adapter_digest
from flatshift.regularizers.config import measure_name


def part(run: RunResults) -> ChapterPart | None:
    """Return the measures of both spaces side by side and the charts, if the run was measured."""
    found = run.sharpness
    if not found:
        return None
    unit = run.loss_unit("fine-tune")
    measures, about = found["measures"], found["about"]
    charts = [chart for chart in [rise_chart(measures, loss_unit=unit)] if chart]
    for kind in ("line", "plane"):
        for space, slices in found["slices"].items():
            if kind in slices:
                draw = line_chart if kind == "line" else contour_chart
                made = draw(space, slices[kind], loss_unit=unit)
                charts += [made] if made else []
    blocks: list[Block] = [_measure_table(found, unit)]
    if charts:
        blocks.append(ChartGroup(charts))
    if notes := _notes(run, found):
        blocks.append(Notes(notes))
    lead = (
        f"Around the trained weights, on {about['rows']:,} fixed rows of {about['split']}, where the loss is "
        f"{formats.number(float(found['loss']))} {unit}. Comparable between runs that were measured on the same rows "
        "with the same seed and settings."
    )
    return ChapterPart(sections=[Section("Sharpness", blocks, lead)])


def _measure_table(found: dict[str, Any], unit: str) -> Table:
    measures = found["measures"]
    rows = []
    for name in dict.fromkeys(name for cells in measures.values() for name in cells):
        rows.append([measure_name(name), *(formats.with_interval(measures[space].get(name)) for space in measures)])
    for name, label in (("dimensions", "weights in the space"), ("weight_norm", "norm of the weights")):
        values = [found["about"]["spaces"][space][name] for space in measures]
        rows.append([label, *(formats.number(int(v) if name == "dimensions" else v) for v in values)])
    return Table(
        ["measure", *(SPACES[space][0] for space in measures)],
        rows,
        f"Rises in {unit}; eigenvalues and trace in the same per squared weight. Intervals of λ are ± the residual, "
        "others are over random draws; highest rises are found by gradient steps and are lower bounds.",
        frozenset(range(1, len(measures) + 1)),
    )


def _notes(run: RunResults, found: dict[str, Any]) -> list[str]:
    notes = []
    for space, about in found["about"]["spaces"].items():
        error = about.get("difference_error")
        if error is not None and error > 0.05:
            notes.append(
                f"Eigenvalues and trace of the {SPACES[space][0]} are rough: products at two step "
                f"lengths differ by {formats.percent(error)}."
            )
    digest = found["about"].get("adapter_sha256")
    if digest and digest != adapter_digest(run.path):
        notes.append("Measured before the adapter was trained further; run `flatshift eval RUN_DIR --sharpness` again.")
    return notes
