"""Draws of a forecast as the cells of a study, so that a cluster can compute them."""

from __future__ import annotations

import dataclasses
import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from flatshift.experiments.recipe import Resolved
from flatshift.experiments.run.console import Console
from flatshift.experiments.studies.cell import Cell, CellResult, capture_result, finish_cell
from flatshift.experiments.studies.executors.base import Executor
from flatshift.experiments.studies.queue import run_cells
from flatshift.experiments.workflows.error_forecast import ForecastAxes, draw_rows
from flatshift.finetune.errors import UserError


def forecast_rows_by(
    executor: Executor, resolved: Resolved, axes: ForecastAxes, console: Console, out: Path
) -> list[dict[str, Any]]:
    """Return the rows of every draw, each computed as a cell by `executor`. out: unfinished directory of the forecast.
    Raises UserError for a draw that failed."""
    study = out / "draws"
    seed = resolved.recipe.train.seed
    cells = [Cell(f"draw-{number}", {"draw": number}, seed + number, resolved) for number in range(axes.draws)]
    run_cells(study, cells, executor, console, label="forecast", run=partial(run_draw, axes))
    rows: list[dict[str, Any]] = []
    for cell in cells:
        result = executor.collect(cell)
        assert result is not None
        if result["status"] != "done":
            raise UserError(f"forecast: draw {cell.point['draw']} {result['status']}: {result['reason']}")
        # JSON has no NaN, and no figure of a row is missing.
        rows += [{k: math.nan if v is None else v for k, v in row.items()} for row in result["figures"]["rows"]]
    shutil.rmtree(study)
    return rows


def run_draw(axes: ForecastAxes, out: Path, cell: Cell, threads: int | None) -> bool:
    """Compute one draw in its directory of `out` and write its result.json last."""
    directory = out / "cells" / cell.key
    recipe = cell.resolved.recipe
    recipe = dataclasses.replace(
        recipe, train=dataclasses.replace(recipe.train, threads=recipe.train.threads or threads)
    )

    def measure() -> CellResult:
        rows = draw_rows(recipe, axes, cell.point["draw"])
        return CellResult("done", figures={"rows": [_without_nan(row) for row in rows]})

    result, fit = capture_result(measure, directory)
    finish_cell(directory, cell, result)
    return fit


def _without_nan(row: dict[str, Any]) -> dict[str, Any]:
    return {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in row.items()}
