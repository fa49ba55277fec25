"""`flatshift report`: one page from result directories; training runs are compared."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from flatshift.command_line import parse_flags, print_result
from flatshift.finetune.errors import UserError
from flatshift.finetune.lock import exclusive_lock


@dataclass(frozen=True)
class Flags:
    """Make one offline HTML page from run, selection, sweep or study directories. Several training runs are compared:
    differing settings, metrics with paired intervals, overlaid curves."""

    runs: Positional[tuple[Path, ...]]
    """Directories."""
    out: Path | None = None
    """HTML file; by default report.html in the first directory."""
    json: bool = False
    """Print the page's path as JSON."""


def run(argv: list[str]) -> int:
    flags = parse_flags(Flags, "report", argv)
    if not flags.runs:
        raise UserError("report needs a DIRECTORY: a run, selection, sweep or study, or a folder of several")
    if flags.out is not None and flags.out.is_dir():
        raise UserError(f"--out {flags.out} is a directory; name an HTML file, for example {flags.out / 'report.html'}")
    if flags.out is not None and flags.out.suffix.lower() not in ("", ".html", ".htm"):
        raise UserError(f"--out {flags.out}: a report is an HTML page; name it {flags.out.with_suffix('.html')}")
    from flatshift.experiments.report.page import build_report
    from flatshift.experiments.report.side_by_side import metric_lines
    from flatshift.experiments.results.run import find_runs

    out = flags.out or flags.runs[0] / "report.html"
    with exclusive_lock(out):
        page = build_report(flags.runs, out=out)
    trained = [run for run in find_runs(flags.runs) if run.eval]
    if not flags.json and len(trained) > 1 and (lines := metric_lines(trained)):
        print(lines, file=sys.stderr)
    print_result({"page": str(page)}, str(page), as_json=flags.json)
    return 0
