"""A study of selectors: plan, run, judge, write. Running it again goes on where it stopped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.studies.selection_quality.analysis import analyse
from benchmarks.studies.selection_quality.page import page
from benchmarks.studies.selection_quality.plan import Plan
from benchmarks.studies.selection_quality.runner import run_study
from flatshift.experiments.recipe.tree import Branch
from flatshift.experiments.run.console import Console
from flatshift.experiments.studies.study import run_study_cells

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
) -> dict[str, Any]:
    """Run the study of `recipe` into `out` and return what quality.json holds.

    Args:
        recipe: file with a `quality` block.
        data: directory of pool and targets.
        selectors, targets, budgets: only these (the baseline always); empty: all.
        jobs: worker processes, one thread each.

    Raises:
        UserError: bad input, before any cell runs. Interrupted: stopped; the same call goes on.
    """

    def measure(plan: Plan, console: Console) -> dict[str, Any]:
        return analyse(plan, run_study(plan, out, jobs=jobs, console=console))

    def plan() -> Plan:
        return Plan(recipe, overrides, data=data, out=out, selectors=selectors, targets=targets, budgets=budgets)

    command = f"python -m benchmarks.studies.selection_quality {recipe}"
    return run_study_cells(command, out, DOCUMENT, plan=plan, measure=measure, page=page, jobs=jobs, quiet=quiet)
