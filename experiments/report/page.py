"""Report page of run directories, and the charts of one run as separate files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flatshift.experiments.report.blocks import Chapter, ChartGroup
from flatshift.experiments.report.chapters import build_chapter
from flatshift.experiments.report.figure import chart_style
from flatshift.experiments.report.html import render
from flatshift.experiments.report.side_by_side import side_by_side_chapter
from flatshift.experiments.results.run import find_runs
from flatshift.finetune.atomic import remove_leftovers, write_text
from flatshift.finetune.errors import UserError

_OURS, _HEAD = b'<meta name="generator" content="flatshift"', 4096


def build_report(paths: Sequence[str | Path], *, out: str | Path, plots: bool = False) -> Path:
    """Write one offline page about the runs in `paths` to `out` atomically and return `out`.

    paths: directories of `train`, `select`, `sweep` or `compare`, or folders that hold several of these. Only files of
    the run directory contract are read; missing ones are left out of the page. Several training runs are first compared
    side by side. The same files give the same bytes.

    plots: also write the charts of each run directory to its `plots/`, as SVG files.

    Raises UserError for a path that is not a run directory, for an unreadable or foreign file in it, and if `out`
    exists and is not a page of ours.
    """
    check_replaceable(Path(out))
    runs = find_runs([Path(p) for p in paths])
    with chart_style():
        comparison = side_by_side_chapter(runs)
        chapters = [build_chapter(run) for run in runs]
    if plots:
        for run, chapter in zip(runs, chapters, strict=True):
            _write_plots(run.path / "plots", chapter)
    present = chapters if comparison is None else [comparison, *chapters]
    write_text(out, render([replace(chapter, slug=f"run{number}") for number, chapter in enumerate(present, 1)]))
    return Path(out)


def check_replaceable(out: Path) -> None:
    """Raise UserError if `out` is a regular file but not a page of ours (writers never replace anything else)."""
    if not out.is_file() or out.is_symlink():
        return
    with out.open("rb") as stream:
        if _OURS not in stream.read(_HEAD):
            raise UserError(
                f"--out: {out} is no report of ours and is not replaced; name another file, or move it away"
            )


def _write_plots(directory: Path, chapter: Chapter) -> None:
    remove_leftovers(directory)
    groups = [block for section in chapter.sections for block in section.blocks if isinstance(block, ChartGroup)]
    counts: Counter[str] = Counter()
    for chart in [chart for group in groups for chart in group.charts if chart]:
        counts[chart.name] += 1
        name = chart.name if counts[chart.name] == 1 else f"{chart.name}-{counts[chart.name]}"
        write_text(directory / f"{name}.svg", chart.standalone)
