"""Shared parts of studies that plan their own cells: recipe and files, directory, and batches of cells.

A finished cell is never run again, and a kill at any moment loses only the cells in flight; intermediate decisions are
computed from the files, so a restart repeats them. Failed cells are tried again by the next start.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from flatshift.experiments.recipe import Resolved
from flatshift.experiments.recipe.auto import resolve_auto_tree
from flatshift.experiments.recipe.build import suggest_nearest
from flatshift.experiments.recipe.resolve import apply_overrides, recipe_tree, resolve_tree
from flatshift.experiments.recipe.schema import Recipe
from flatshift.experiments.recipe.tree import Branch
from flatshift.experiments.results.cells import STUDY, read_result
from flatshift.experiments.run.console import Console
from flatshift.experiments.studies.cell import Cell, CellResult, capture_result, finish_cell
from flatshift.experiments.studies.directory import WORKERS, write_done
from flatshift.experiments.studies.executors import Executor, RunCell, run_logged
from flatshift.experiments.studies.queue import run_cells
from flatshift.finetune.atomic import has_only_leftovers, make_directory, remove_leftovers, write_json, write_text
from flatshift.finetune.data.files import expand_files
from flatshift.finetune.data.formats import HUB, SAMPLE
from flatshift.finetune.digests import DONE
from flatshift.finetune.errors import Interrupted, UserError, is_remote, user_path
from flatshift.finetune.lock import INSIDE, exclusive_lock
from flatshift.finetune.run_directory import COMMAND, ENVIRONMENT, write_provenance

if TYPE_CHECKING:
    from flatshift.experiments.workflows.error_forecast import ForecastAxes

Document = dict[str, Any]


class StudyPlan(Protocol):
    """Plan of a kind of study."""

    @property
    def resolved(self) -> Resolved:
        """Recipe of the study."""


P = TypeVar("P", bound=StudyPlan)


def study_recipe(
    reference: str,
    overrides: Sequence[Branch],
    *,
    block: str,
    example: str,
    out: Path | None = None,
    recipe_class: type[Recipe] = Recipe,
) -> tuple[Resolved, Branch]:
    """Return the recipe of a study with its precision resolved, and the tree for its cells, without the study's block.

    block: the recipe's key that makes it a study. example: how to get a recipe to start from, for the error message.
    out: the study's directory; values resolved there earlier are kept. Raises UserError for a recipe without the block,
    or one that cannot be built.
    """
    tree = apply_overrides(recipe_tree(reference), overrides)
    name = Path(reference).stem
    tree = resolve_auto_tree(tree, name=name, previous=None if out is None else out / STUDY, recipe_type=recipe_class)
    resolved = resolve_tree(tree, (), name=name, recipe_type=recipe_class)
    assert isinstance(tree, Branch)
    if getattr(resolved.recipe, block) is None:
        raise UserError(f"recipe {resolved.name!r} has no `{block}` block; start from {example}")
    return resolved, dataclasses.replace(tree, children={k: v for k, v in tree.children.items() if k != block})


def locate_file(name: str, data: Path | None, key: str) -> str:
    """Return the file for `name`: relative to `data` (None: the working directory), a path, or `sample:NAME`. key: of
    the recipe, for the error message. Raises UserError if there is no such file."""
    remote = name.startswith(HUB) or is_remote(name)
    path = name
    if not (remote or name.startswith(SAMPLE)):
        path = str(((data or Path()) / user_path(name)).absolute())
    try:
        files = expand_files([path])
    except UserError as error:
        hint = "; name the directory of the study's files with --data" if data is None else ""
        raise UserError(f"{key}: {error}{hint}") from None
    if len(files) != 1:
        raise UserError(f"{key}: {name} is {len(files)} files, and a task has one; name one, or join them")
    return path if remote else str(files[0])


def filter_by_flag(flag: str, names: Sequence[Any], known: Iterable[Any]) -> list[Any]:
    """Filter `known` by the values of a flag (all if it has none). Raises UserError with the nearest match."""
    known = list(known)
    for name in names:
        if name not in known:
            raise UserError(f"{flag}: the study has no {name!r}{suggest_nearest(str(name), map(str, known))}")
    return [name for name in known if not names or name in names]


def claim_study(out: Path, recipe_yaml: str, kind: str) -> None:
    """Create the directory, or check that it is a study's; the caller holds its lock (`flatshift.finetune.lock`).

    Several recipes may use a directory one after another, because cells have unique names. kind: of the study, for the
    error message. Raises UserError if `out` holds something else.
    """
    marker = out / STUDY
    free = not out.exists() or (out.is_dir() and has_only_leftovers(out, allowed=("cells", INSIDE, WORKERS)))
    if not (marker.is_file() or free):
        raise UserError(f"{out} is not empty and is not a {kind}'s directory; name another --out")
    remove_leftovers(out)
    (out / DONE).unlink(missing_ok=True)  # it describes a finished study
    write_text(marker, recipe_yaml)  # first: after a kill from here on the same command recognises the directory
    make_directory(out / "cells")
    remove_leftovers(out / "cells")
    write_provenance(out)


def run_study_cells(
    command: str,
    out: Path,
    name: str,
    *,
    plan: Callable[[], P],
    measure: Callable[[P, Console], Document],
    page: Callable[[Document], str] | None,
    jobs: int,
    quiet: bool,
    inputs: Sequence[str] = (),
) -> Document:
    """Plan, run and analyse a study; write the result to `out`/`name`, its page, if it has one, and done.json.

    command: shown on the page as its origin. inputs: further files of `out` that the study depends on. Raises UserError
    for bad input, before any cell runs, and if another command is using `out`; Interrupted when stopped: the same call
    resumes.
    """
    if jobs < 1:
        raise UserError(f"--jobs must be at least 1, got {jobs}")
    with exclusive_lock(out):
        planned, console = plan(), Console(quiet=quiet)
        train = planned.resolved.recipe.train
        console.say(f"precision: {train.precision} ({planned.resolved.origins.get('train.precision', 'default')})")
        try:
            results = measure(planned, console)
        except KeyboardInterrupt as error:
            raise Interrupted("finished cells are kept; the same command continues from there") from error
        document = {**results, "command": f"{command} --data DIR --out OUT"}
        write_json(out / name, document)
        if page is not None:
            write_text(out / "report.html", page(document))
        write_done(out, (name, STUDY, COMMAND, ENVIRONMENT, *inputs))
        return document


class CellBatches:
    """Cells of one study, run batch by batch by `executor`. run: how a cell is run."""

    def __init__(
        self, out: Path, executor: Executor, *, console: Console, label: str, run: RunCell = run_logged
    ) -> None:
        self.out, self.executor, self.console, self.label = out, executor, console, label
        self._run = run
        self._tried: set[str] = set()

    def result(self, cell: Cell) -> dict[str, Any]:
        """Return the result of a cell that has run."""
        result = read_result(self.out / "cells" / cell.key)
        assert result is not None, f"cell {cell.key} has no result"
        return result

    def done(self, cell: Cell) -> bool:
        """Return True if a cell need not run."""
        result = read_result(self.out / "cells" / cell.key)
        # A failed cell is tried again once per command.
        return result is not None and (result["status"] != "failed" or cell.key in self._tried)

    def run(self, cells: Sequence[Cell], title: str, *, again: Callable[[Cell], bool] = lambda cell: False) -> None:
        """Run those of `cells` that need it. title: short description. again: cells that must run in any case."""
        unique = {cell.key: cell for cell in cells}
        todo = [cell for cell in unique.values() if again(cell) or not self.done(cell)]
        self._tried |= unique.keys()
        if not todo:
            return
        run_cells(
            self.out, list(unique.values()), self.executor, self.console, label=f"{self.label}, {title}",
            rerun={cell.key for cell in todo}, run=self._run,
        )  # fmt: skip


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
    train = cell.resolved.recipe.train
    train = dataclasses.replace(train, threads=train.threads or threads)
    recipe = dataclasses.replace(cell.resolved.recipe, train=train)

    def measure() -> CellResult:
        from flatshift.experiments.workflows.error_forecast import draw_rows

        rows = draw_rows(recipe, axes, cell.point["draw"])
        finite = [{name: None if value != value else value for name, value in row.items()} for row in rows]  # no NaN
        return CellResult("done", figures={"rows": finite})

    result, fit = capture_result(measure, directory)
    finish_cell(directory, cell, result)
    return fit
