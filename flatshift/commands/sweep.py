"""`flatshift sweep`: a resumable grid over recipe keys and seeds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from flatshift import outcome
from flatshift.api import draw_report
from flatshift.command_line import data_override, parse_command, print_json, remove_flags
from flatshift.experiments.recipe.schema import SweepOptions
from flatshift.finetune.data.files import check_local_files
from flatshift.finetune.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Flags(SweepOptions):
    """Run a recipe over a grid of dotted keys and seeds; finished cells are never run again."""

    recipe: Positional[str]
    """Recipe file or shipped recipe."""
    data: tuple[str, ...] = ()
    """Files of training rows; short for --data.train.files. A tenth of your own rows is held out for dev and a tenth
    for test, unless --data.dev.files, --data.test.files or --data.holdout are given."""
    out: Path | None = None
    """Sweep directory (required); an existing one is continued, with the same grid or another."""
    json: bool = False
    """Print the lowest setting and the verdicts as JSON when done."""


def run(argv: list[str]) -> int:
    flags, overrides = parse_command(Flags, "sweep", argv)
    overrides = data_override(flags.data, overrides)
    if flags.out is None:
        raise UserError("--out is missing: name the sweep directory to make or continue")
    check_local_files(flags.data)
    from flatshift.experiments.studies.sweep import sweep

    code = sweep(flags.recipe, overrides, flags.out, flags, quiet=flags.json, draw=draw_report)
    if flags.json:
        print_json(outcome.summarize_sweep(flags.out))
    else:
        outcome.print_sweep_outcome(flags.out, remove_flags(argv, ["seeds"], several="merge"))
    return code
