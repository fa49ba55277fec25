"""`flatshift compare`: plan, run, judge, write. Running it again goes on where it stopped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.recipe.tree import Branch
from experiments.run.console import Console
from experiments.studies.compare.analysis import analyse
from experiments.studies.compare.plan import Plan
from experiments.studies.compare.run import run_study
from experiments.studies.study import carry_out

DOCUMENT = "comparison.json"


def compare(
    recipe: str,
    out: Path,
    *,
    data: Path | None = None,
    overrides: Sequence[Branch] = (),
    methods: Sequence[str] = (),
    tasks: Sequence[str] = (),
    jobs: int = 2,
    quiet: bool = False,
    on_cell: Callable[[Path], None] = lambda path: None,
    page: Callable[[dict[str, Any]], str] | None = None,
) -> dict[str, Any]:
    """Run the comparison of `recipe` into `out` and return what comparison.json holds.

    Args:
        recipe: file or shipped name with a `comparison` block.
        data: directory of the tasks' files.
        methods, tasks: only these (the baseline always); empty: all.
        jobs: worker processes, one thread each.
        on_cell: told the file of each cell that this call finished.
        page: draws report.html of the document.

    Raises:
        UserError: bad input, before any cell runs. Interrupted: stopped; the same call goes on.
    """

    def measure(plan: Plan, console: Console) -> dict[str, Any]:
        return analyse(plan, run_study(plan, out, jobs=jobs, console=console, on_cell=on_cell))

    def plan() -> Plan:
        return Plan(recipe, overrides, data=data, out=out, methods=methods, tasks=tasks)

    return carry_out(
        f"flatshift compare {recipe}", out, DOCUMENT, plan=plan, measure=measure, page=page, jobs=jobs, quiet=quiet
    )
