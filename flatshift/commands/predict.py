"""`flatshift predict`: label rows with a finished run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from flatshift import outcome
from flatshift.command_line import parse_command, print_json, recipe_arguments
from flatshift.experiments.recipe import from_override, refuse_contradictions
from flatshift.finetune.data.files import check_local_files
from flatshift.finetune.errors import UserError


@dataclass(frozen=True)
class Flags:
    """Predict rows with a finished run: a label with probabilities, a number, an answer, or the surprisal of a text.

    Rows need no label. Files may be of any length; a command that was killed continues where it stopped.
    """

    run: Positional[Path]
    """Run directory."""
    data: tuple[str, ...] = ()
    """Files with rows: JSONL, CSV, Parquet, …, with the columns that the run was trained on; `--data.columns.NAME`
    names others."""
    out: Path | None = None
    """File to write: .jsonl, .csv, .tsv or .parquet (required)."""
    batch_size: int | None = None
    """Batch size in rows; by default the run's eval.batch_size."""
    max_new_tokens: int | None = None
    """Longest answer of a generative run, tokens; by default the run's task.max_new_tokens."""
    bad_rows: Literal["refuse", "skip"] | None = None
    """Handling of malformed rows; by default that of the run's recipe."""
    keep: tuple[str, ...] = ()
    """Columns of the rows to copy to the output (a ticket's number, the label that it has); as `given_NAME` where the
    output has one of that name."""
    raw: bool = False
    """Write cells of .csv and .tsv as they are; by default a text that a spreadsheet would run as a formula gets a
    leading '."""
    device: str | None = None
    """auto, cpu, cuda or cuda:N; by default the run's own."""
    json: bool = False
    """Print the file and its number of rows as JSON."""
    quiet: bool = False
    """Print only errors."""


def run(argv: list[str]) -> int:
    flags, overrides = parse_command(Flags, "predict", argv)
    if flags.out is None:
        raise UserError("--out is missing: name the file to write, for example --out predictions.csv")
    settings = {
        "device": ("train.device", flags.device),
        "max-new-tokens": ("task.max_new_tokens", flags.max_new_tokens),
        "bad-rows": ("data.bad_rows", flags.bad_rows),
        "batch-size": ("eval.batch_size", flags.batch_size),
    }
    overrides += [from_override(key, str(v), f"--{flag}") for flag, (key, v) in settings.items() if v is not None]
    refuse_contradictions(overrides)
    check_local_files(flags.data)
    if flags.raw and flags.out.suffix not in (".csv", ".tsv"):
        raise UserError(f"--raw is of .csv and .tsv, and {flags.out} has no cells that are quoted; leave it out")
    from flatshift.experiments.workflows.predict import predict_from_run

    quiet = flags.quiet or flags.json
    count, skipped = predict_from_run(
        flags.run, flags.data, flags.out, overrides=overrides, raw=flags.raw, keep=flags.keep, quiet=quiet
    )
    if flags.json:
        print_json({"file": str(flags.out), "rows": count, "skipped": skipped})
    elif not flags.quiet:
        print(f"{flags.out}: {count:,} rows")
        words = recipe_arguments(argv, Flags, without="train")
        words += [] if flags.bad_rows is None else ["--data.bad_rows", flags.bad_rows]
        outcome.print_prediction_outcome(flags.run, flags.data, overrides, words)
    return 0
