"""A run's adapter as a hub-ready folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from flatshift.command_line import parse


@dataclass(frozen=True)
class Flags:
    """Write a run's adapter as a hub-ready folder: PEFT files, tokenizer, and a model card made from the run."""

    run: Positional[Path]
    """Run directory."""
    out: Path | None = None
    """Folder to make; by default RUN_DIR/export."""
    add: tuple[str, ...] = ()
    """Other adapters of the same backbone to add: run or PEFT directories, as DIR or DIR=WEIGHT."""
    base_model: str | None = None
    """Hub name of the backbone, where the run had it as a local directory."""
    license: str | None = None
    """Licence of the adapter by its name on the hub (apache-2.0, …); without it the card asks for one."""


def run(argv: list[str]) -> int:
    """`flatshift export`."""
    flags: Flags = parse(Flags, "export", argv)
    from experiments.workflows.export import export as export_run

    out = flags.out or flags.run / "export"
    print(export_run(flags.run, out, base_model=flags.base_model, license=flags.license, add=flags.add))
    return 0
