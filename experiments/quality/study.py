"""`flatshift compare` with a `quality` block: plan, run, judge, write. Running it again goes on where it stopped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.console import Console
from experiments.quality.analysis import analyse
from experiments.quality.page import page
from experiments.quality.plan import Plan
from experiments.quality.runner import run_study
from experiments.recipe.tree import Branch
from finetune.atomic import write_json, write_text
from finetune.errors import Interrupted, UserError

DOCUMENT = "quality.json"


def study_quality(
    recipe: str,
    out: Path,
    *,
    data: Path | None = None,
    overrides: Sequence[Branch] = (),
    selectors: Sequence[str] = (),
    targets: Sequence[str] = (),
    budgets: Sequence[int] = (),
    jobs: int = 2,
    quiet: bool = False,
    on_cell: Callable[[Path], None] = lambda path: None,
) -> dict[str, Any]:
    """Run the study of `recipe` into `out` and return what quality.json holds.

    Args:
        recipe: file or shipped name with a `quality` block.
        data: directory of pool and targets.
        selectors, targets, budgets: only these (the baseline always); empty: all.
        jobs: worker processes, one thread each.
        on_cell: told the file of each cell that this call finished.

    Raises:
        UserError: bad input, before any cell runs. Interrupted: stopped; the same call goes on.
    """
    if jobs < 1:
        raise UserError(f"--jobs must be at least 1, got {jobs}")
    plan = Plan(recipe, overrides, data=data, selectors=selectors, targets=targets, budgets=budgets)
    console = Console(quiet=quiet)
    try:
        outcome = run_study(plan, out, jobs=jobs, console=console, on_cell=on_cell)
    except KeyboardInterrupt as error:
        raise Interrupted("finished cells are kept; the same command goes on from there") from error
    document = {**analyse(plan, outcome), "command": f"flatshift compare {recipe} --data DIR --out OUT"}
    write_json(out / DOCUMENT, document)
    write_text(out / "report.html", page(document))
    return document


def summary(document: dict[str, Any]) -> list[str]:
    """The answers in lines for a terminal."""
    return document["answers"] or ["no endpoint: no two arms ran at one budget"]
