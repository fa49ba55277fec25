"""Report page of run directories, and the charts of one run as separate files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flatshift.experiments.report.blocks import ChartGroup
from flatshift.experiments.report.chapters import build_chapter
from flatshift.experiments.report.figure import chart_style
from flatshift.experiments.report.html import render
from flatshift.experiments.report.side_by_side import side_by_side_chapter
from flatshift.experiments.results.run import find_runs
from flatshift.finetune.atomic import remove_leftovers, write_text
from flatshift.finetune.errors import UserError

_OURS, _HEAD = b'<meta name="generator" content="flatshift"', 4096


def build_report(paths: Sequence[str | Path], *, out: str | Path) -> Path:
    """Write one offline page about the runs in `paths` to `out` atomically and return `out`.

    paths: run directories of `train`, `select` or `sweep`, studies, or folders that hold several of these. Only files
    of the run directory contract are read; missing ones are left out of the page. Several training runs are first
    compared side by side. The same files give the same bytes. Raises UserError for a path that is not a run directory,
    for an unreadable or foreign file in it, and if `out` exists and is not a page of ours.
    """
    check_replaceable(Path(out))
    write_text(out, report_html(paths))
    return Path(out)


def report_html(paths: Sequence[str | Path]) -> str:
    """Return the page of `build_report` as text. Raises UserError like `build_report`."""
    runs = find_runs([Path(p) for p in paths])
    with chart_style():
        chapters = [side_by_side_chapter(runs), *(build_chapter(run) for run in runs)]
    present = [chapter for chapter in chapters if chapter is not None]
    return render([replace(chapter, slug=f"run{number}") for number, chapter in enumerate(present, 1)])


def check_replaceable(out: Path) -> None:
    """Raise UserError if `out` is a regular file but not a page of ours (writers never replace anything else)."""
    if not out.is_file() or out.is_symlink():
        return
    with out.open("rb") as stream:
        if _OURS not in stream.read(_HEAD):
            raise UserError(
                f"--out: {out} is no report of ours and is not replaced; name another file, or move it away"
            )


def write_plots(run: str | Path) -> list[Path]:
    """Write the charts of one run directory as files `plots/*.svg` and return their paths. Raises UserError like
    `build_report`."""
    paths = []
    for results in find_runs([Path(run)]):
        remove_leftovers(results.path / "plots")
        with chart_style():
            sections = build_chapter(results).sections
        groups = [block for section in sections for block in section.blocks if isinstance(block, ChartGroup)]
        counts: Counter[str] = Counter()
        for chart in [chart for group in groups for chart in group.charts]:
            counts[chart.name] += 1
            name = chart.name if counts[chart.name] == 1 else f"{chart.name}-{counts[chart.name]}"
            paths.append(results.path / "plots" / f"{name}.svg")
            write_text(paths[-1], chart.standalone)
    return paths
