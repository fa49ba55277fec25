"""The studies of `descent_studies`, and the way of their cells to the repository and back.

In a study's table a cell is named after its settings and the contents of its data: a sweep's own keys depend on where
the data lie.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks._cell_table import read_cells, write_cells
from benchmarks._harness import RESULTS, ROOT
from flatshift.experiments.recipe import from_override, load_recipe
from flatshift.experiments.recipe.schema import SweepConfig, recipe_key
from flatshift.experiments.recipe.tree import Branch
from flatshift.experiments.results.cells import FORMAT, MARKER, RESULT
from flatshift.experiments.results.sweep import STEP
from flatshift.experiments.studies.cell import Cell
from flatshift.experiments.studies.sweep.axes import Axes, axis_values
from flatshift.experiments.studies.sweep.sweep_plan import SweepBase
from flatshift.experiments.studies.sweep.table import write_table
from flatshift.finetune.atomic import write_json, write_text


@dataclass(frozen=True)
class Study:
    """A shipped recipe, the data it takes, and the curves that are judged."""

    name: str
    recipe: str
    data: str
    """The flag that gives its file."""
    axis: str
    test: str
    """The figure of the verdicts, whose curves are searched for a peak and set beside one another."""
    title: str

    @property
    def heading(self) -> str:
        """Of its part of the page."""
        return f"#### {self.title.capitalize()}"


STUDIES = (
    Study("rank", "double-descent-rank", "trec", "adapter.rank", "test.error", "error along rank"),
    Study("rows", "double-descent-rows", "trec", "data.train.limit", "test.error", "error along rows"),
    Study("steps", "double-descent-steps", "trec", STEP, "test.error", "error along steps"),
    Study("bump", "training-bump", "gsm8k", STEP, "train.loss", "training loss along steps"),
)


def planned(study: Study, file: Path) -> dict[str, str]:
    """Of each cell of the study: a name that depends on settings and contents alone → its key in a sweep.

    A sweep's keys depend on where its files lie, too.
    """
    return _names(_cells(study, file), file)


def _cells(study: Study, file: Path) -> list[Cell]:
    base, axes = block(study)
    result = SweepBase.of(study.recipe, overrides(file)).plan(axes, base.seeds, design=base.design, points=base.points)
    return list(result)


def block(study: Study) -> tuple[SweepConfig, Axes]:
    """The `sweep` block of the study's recipe, and its axes."""
    result = load_recipe(study.recipe, []).recipe.sweep
    assert result is not None
    return result, {key: axis_values(key, values) for key, values in result.grid.items()}


def _names(cells: Sequence[Cell], file: Path) -> dict[str, str]:
    content = hashlib.sha256(file.read_bytes()).hexdigest()
    results = {}
    for cell in cells:
        data = cell.resolved.recipe.data
        nowhere = replace(data, train=replace(data.train, files=()))
        results[recipe_key(replace(cell.resolved.recipe, data=nowhere), [content])] = cell.key
    return results


def overrides(file: Path) -> list[Branch]:
    return [from_override("data.train.files", str(file))]


def table_of(study: Study) -> Path:
    """File of a study's cells."""
    return RESULTS / "descent_studies" / f"{study.name}.parquet"


def pack(out: Path, table: Path, names: Mapping[str, str]) -> None:
    """Add the cells that have finished in the sweep `out` to `table`, each with its result and trace."""
    before = read_cells(table)
    cells = dict(before)
    for name, key in names.items():
        result, trace = out / "cells" / key / RESULT, out / "cells" / key / "trace.jsonl"
        if result.is_file():
            lines = trace.read_text(encoding="utf-8").splitlines() if trace.is_file() else []
            outcome = json.loads(result.read_text(encoding="utf-8"))
            outcome.pop("seal", None)  # of files that the table does not have
            cells[name] = {"result": outcome, "trace": [json.loads(line) for line in lines]}
    if cells != before:
        write_cells(table, cells)


def unpack(table: Path, out: Path, names: Mapping[str, str]) -> None:
    """Put the cells of `table` where the sweep `out` looks for them; a cell that is there stays as it is."""
    cells = read_cells(table)
    for name, key in names.items():
        directory = out / "cells" / key
        if name not in cells or (directory / RESULT).is_file():
            continue
        shutil.rmtree(directory, ignore_errors=True)
        trace = directory / "trace.jsonl"
        if cells[name]["trace"]:
            write_text(trace, "".join(json.dumps(line) + "\n" for line in cells[name]["trace"]))
        write_json(directory / RESULT, cells[name]["result"] | {"cell": key})


def rebuild(study: Study, file: Path, table: Path, out: Path) -> None:
    """Make in `out` the sweep that the cells of `table` are of, as far as they are there; nothing runs."""
    cells = _cells(study, file)
    unpack(table, out, _names(cells, file))
    asked, axes = block(study)
    grid = {key: [str(value) for value in values] for key, values in axes.items() if isinstance(values, list)}
    plan = {"recipe": study.recipe, "grid": grid, "design": asked.design, "seeds": asked.seeds, "cells": len(cells)}
    write_json(out / MARKER, {"format": FORMAT, **plan, "keys": [cell.key for cell in cells]})
    nowhere = load_recipe(study.recipe, overrides(Path(file.name))).to_yaml().replace(f"{ROOT}/", "")
    write_text(out / "recipe.resolved.yaml", nowhere)  # the page is published: it names no directory
    write_table(out, cells)
