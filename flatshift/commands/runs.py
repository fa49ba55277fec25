"""`flatshift runs`: list the results in a folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from flatshift.command_line import parse_flags


@dataclass(frozen=True)
class Flags:
    """List runs, selections, sweeps and studies in a folder, one a line, oldest first."""

    folder: Positional[Path] = Path("runs")
    """Folder to search, with all its subfolders."""
    json: bool = False
    """Print the list as JSON."""


def run(argv: list[str]) -> int:
    """Run `flatshift runs`."""
    flags: Flags = parse_flags(Flags, "runs", argv)
    from flatshift.experiments.report.formats import align_columns, with_interval
    from flatshift.experiments.results.listing import list_directories

    found = list_directories(flags.folder)
    if flags.json:
        print(json.dumps([one.record() for one in found], indent=2, ensure_ascii=False))
        return 0
    if not found:
        print(f"no run, selection, sweep or study is in {flags.folder}")
        return 0
    rows = []
    for one in found:
        steps = "" if one.steps is None else f"{one.steps:,}" + (f" / {one.of:,}" if one.of is not None else "")
        figure = f"{one.metric} {with_interval(one.record())}" if one.metric else ""
        rows.append([one.path, one.kind, one.status, steps, figure, one.date.replace("T", " ").removesuffix("Z")[:16]])
    print(align_columns(["directory", "kind", "status", "done", "figure", "made (UTC)"], rows, right={3}))
    return 0
