"""`flatshift demo`: the three journeys on shipped samples."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flatshift.api import draw_report
from flatshift.command_line import parse_flags


@dataclass(frozen=True)
class Flags:
    """Select, train, compare and sweep on the shipped samples; ends with a report and its path."""

    out: Path = Path("flatshift-demo")
    """Directory to create; must be empty if it exists."""


def run(argv: list[str]) -> int:
    flags = parse_flags(Flags, "demo", argv)
    from flatshift.experiments.studies.demo import demo

    print(demo(flags.out, draw=draw_report))
    return 0
