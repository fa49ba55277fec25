"""`flatshift compare`: training methods against a baseline."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from flatshift import outcome
from flatshift.command_line import parse_command, print_result
from flatshift.experiments.recipe.schema import ExecutorOptions
from flatshift.finetune.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Flags(ExecutorOptions):
    """Compare training methods by a recipe's `comparison` block: equal trials, paired seeds, one primary endpoint."""

    recipe: Positional[str]
    """Recipe file or shipped recipe (flat-comparison)."""
    out: Path | None = None
    """Directory to create or continue (required); finished cells are never run again."""
    data: Path | None = None
    """Directory of the files that the block names."""
    methods: tuple[str, ...] = ()
    """Only these methods and the baseline."""
    tasks: tuple[str, ...] = ()
    """Only these tasks."""
    jobs: int | None = None
    """Cells that run at the same time, one thread each; by default 2, and as many as a cluster has room for."""
    json: bool = False
    """Print comparison.json when done."""


def run(argv: list[str]) -> int:
    flags, overrides = parse_command(Flags, "compare", argv)
    if flags.out is None:
        raise UserError("--out is missing: name the directory to make or continue")
    from flatshift.experiments.report.chapters.comparison import page, summary_lines
    from flatshift.experiments.studies.compare.run import compare

    document = compare(
        flags.recipe, flags.out, data=flags.data, overrides=overrides, methods=flags.methods, tasks=flags.tasks,
        jobs=flags.jobs, execution=flags, page=page,
    )  # fmt: skip
    print_result(document, "\n".join(summary_lines(document)), as_json=flags.json)
    if not flags.json:
        print(flags.out / "report.html")
        outcome.print_outcome("", [["flatshift", "report", str(flags.out)]])
    return 1 if any(run["status"] == "failed" for run in document["diverged"]) else 0
