"""`flatshift runs`: list the results in a folder."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from tyro.conf import Positional

from flatshift.command_line import parse_flags, print_json


@dataclass(frozen=True)
class Flags:
    """List runs, selections, sweeps and studies in a folder, one a line, oldest first."""

    folder: Positional[Path] = Path("runs")
    """Folder to search, with all its subfolders."""
    json: bool = False
    """Print the list as JSON."""


def run(argv: list[str]) -> int:
    flags = parse_flags(Flags, "runs", argv)
    from flatshift.experiments.report.formats import align_columns, with_interval
    from flatshift.experiments.results.run import list_directories

    entries = list_directories(flags.folder)
    if flags.json:
        print_json([asdict(entry) for entry in entries])
        return 0
    if not entries:
        print(f"no run, selection, sweep or study is in {flags.folder}")
        return 0
    rows = []
    for entry in entries:
        steps = "" if entry.steps is None else f"{entry.steps:,}" + (f" / {entry.of:,}" if entry.of is not None else "")
        figure = f"{entry.metric} {with_interval(asdict(entry))}" if entry.metric else ""
        date = entry.date.replace("T", " ").removesuffix("Z")[:16]
        rows.append([entry.path, entry.kind, entry.status, steps, figure, date])
    print(align_columns(["directory", "kind", "status", "done", "figure", "made (UTC)"], rows, right={3}))
    return 0
