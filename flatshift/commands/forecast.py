"""`flatshift forecast`: predicted curves of a recipe before any training."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tyro.conf import Positional

from flatshift.api import draw_report
from flatshift.command_line import data_override, parse_command, print_result
from flatshift.experiments.recipe import load_recipe
from flatshift.experiments.recipe.schema import ExecutorOptions
from flatshift.finetune.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Flags(ExecutorOptions):
    """Predict test error along rows, rank, label noise and ridge from gradients at initialisation; nothing is
    trained."""

    recipe: Positional[str]
    """Recipe file or shipped recipe, for classify or regress."""
    data: tuple[str, ...] = ()
    """Files of training rows; short for --data.train.files. A tenth of your own rows is held out for dev and a tenth
    for test, unless --data.dev.files, --data.test.files or --data.holdout are given."""
    out: Path | None = None
    """Directory to create (required): cells.parquet, forecast.json and a page."""
    ranks: tuple[int, ...] = ()
    """Ranks to predict; by default the recipe's own."""
    noise: tuple[float, ...] = ()
    """Fractions of wrong training labels; by default the recipe's own."""
    draws: int = 5
    """Number of seeds, from train.seed on; each draws new rows, wrong labels and factors A."""
    more: int = 500
    """Number of further rows to which the learning curve is extrapolated."""
    json: bool = False
    """Print forecast.json when done."""


def run(argv: list[str]) -> int:
    flags, overrides = parse_command(Flags, "forecast", argv)
    overrides = data_override(flags.data, overrides)
    if flags.out is None:
        raise UserError("--out is missing: name the directory to make")
    from flatshift.experiments.report.chapters.sweep import forecast_sentences
    from flatshift.experiments.studies.executors.local import LocalExecutor
    from flatshift.experiments.studies.queue import open_executor, parse_executor
    from flatshift.experiments.studies.study import forecast_rows_by
    from flatshift.experiments.workflows.error_forecast import forecast_into, forecast_rows

    kind, _ = parse_executor(flags)
    with open_executor(flags, LocalExecutor(), jobs=None) as executor:
        forecast = forecast_into(
            load_recipe(flags.recipe, overrides), flags.out, ranks=flags.ranks, noises=flags.noise, draws=flags.draws,
            more=flags.more, quiet=flags.json, draw=draw_report,
            compute=forecast_rows if kind == "local" else partial(forecast_rows_by, executor),
        )  # fmt: skip
    lines = [*forecast_sentences(forecast), str(flags.out / "report.html")]
    print_result(forecast, "\n".join(lines), as_json=flags.json)
    return 0
