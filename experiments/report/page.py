"""Report page of run directories, and the charts of one run as separate files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flatshift.experiments.report.blocks import Chapter
from flatshift.experiments.report.chapters import chapter, charts_of
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
    compared side by side. The same files give the same bytes.

    Raises UserError for a path that is not a run directory, for an unreadable or foreign file in it, and if `out`
    exists and is not a page of ours.
    """
    check_replaceable(Path(out))
    write_text(out, report_html(paths))
    return Path(out)


def report_html(paths: Sequence[str | Path]) -> str:
    """Return the page of `build_report` as text. Raises UserError like `build_report`."""
    runs = find_runs([Path(p) for p in paths])
    with chart_style():
        beside = side_by_side_chapter(runs)
        chapters = _with_slugs([*([beside] if beside is not None else []), *(chapter(run) for run in runs)])
    return render(chapters)


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
    """Write the charts of one run directory as files `plots/*.svg` and return their paths.

    Raises UserError like `build_report`.
    """
    written = []
    for found in find_runs([Path(run)]):
        remove_leftovers(found.path / "plots")
        seen: dict[str, int] = {}
        with chart_style():
            charts = charts_of(chapter(found))
        for chart in charts:
            seen[chart.name] = seen.get(chart.name, 0) + 1
            name = chart.name if seen[chart.name] == 1 else f"{chart.name}-{seen[chart.name]}"
            path = found.path / "plots" / f"{name}.svg"
            write_text(path, chart.standalone)
            written.append(path)
    return written


def _with_slugs(chapters: list[Chapter]) -> list[Chapter]:
    """Return the chapters, each with a unique anchor."""
    return [replace(c, slug=f"run{i}") for i, c in enumerate(chapters, 1)]
