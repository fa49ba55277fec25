"""The verbs of the Python API: what the commands of the same names do, with the page that they draw at the end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from experiments.recipe import Resolved
    from experiments.recipe.tree import Branch


def draw(directory: Path, *parts: Path) -> Path:
    """Draw `plots/` and `report.html` of a finished directory, or one page of its `parts`; returns the page."""
    from experiments.report import build_report, write_plots

    if not parts:
        write_plots(directory)
    return build_report(list(parts) or [directory], out=directory / "report.html")


def train(resolved: Resolved, out: Path | None = None, *, quiet: bool = False) -> dict[str, Any]:
    """Run a recipe into a new run directory and return its eval.json.

    out: directory to make, by default `runs/DATE-TIME-NAME`.
    Raises UserError for bad input before anything is trained, Interrupted when stopped with resumable state.
    """
    from experiments.workflows.train import train

    return train(resolved, out, quiet=quiet, draw=draw)


def resume(path: Path, overrides: Sequence[Branch] = (), *, quiet: bool = False) -> dict[str, Any]:
    """Continue a run directory exactly where it stopped; a finished one returns at once.

    Raises UserError if `path` is no run directory or in use, an input file or the backbone changed, or an override is
    not allowed.
    """
    from experiments.workflows.train import resume

    return resume(path, overrides, quiet=quiet, draw=draw)


def select(resolved: Resolved, out: Path, *, quiet: bool = False) -> dict[str, Any]:
    """Run a recipe's `select` block into the new directory `out` (whole or not at all) and return its manifest.

    Raises UserError for an `out` that holds anything else or is in use, missing settings, bad rows, or a budget above
    the pool.
    """
    from experiments.select.select import select

    return select(resolved, out, quiet=quiet, draw=draw)


def sweep(recipe: str, overrides: Sequence[Branch], out: Path, **rest: Any) -> int:
    """Run the cells of a sweep that have no result yet; returns 0, or 1 if any cell diverged or failed.

    recipe: file or shipped name. overrides: laid over it. rest: see `experiments.studies.sweep.command.sweep`.
    Raises UserError before any cell runs; Interrupted when stopped or when the disk is full.
    """
    from experiments.studies.sweep import sweep

    return sweep(recipe, overrides, out, draw=draw, **rest)


def compare(recipe: str, out: Path, **rest: Any) -> dict[str, Any]:
    """Run a comparison of training methods and return what comparison.json holds.

    recipe: file or shipped name. rest: see `experiments.studies.compare.command.compare`.
    Raises UserError before any cell runs; Interrupted when stopped: the same call goes on.
    """
    from experiments.report.chapters.comparison import page
    from experiments.studies.compare.command import compare

    return compare(recipe, out, page=page, **rest)
