"""The last sections of a sweep: all its settings, the cells that failed, the code that made them and its tables."""

from __future__ import annotations

from experiments.report import findings, formats
from experiments.report.blocks import Block, Notes, Section, Table
from experiments.report.sweepdata import SweepData

_ROWS = 200
"""Settings that a table of the page lists; points.csv has every cell."""
_FAILURES = 50


def sweep_tables(data: SweepData) -> list[Section]:
    """All settings, failed cells, and what made them."""
    sections = []
    columns = dict.fromkeys([*data.error_columns(), f"{data.judged('loss')}.loss", "train.loss"])
    shown = [c for c in columns if data.has(c)]
    if data.axes and shown:
        means = {c: {tuple(w.values()): p for w, p in data.means(c)} for c in shown}
        settings = data.settings()
        rows = []
        for where in settings[:_ROWS]:
            points = [means[c].get(tuple(where.values())) for c in shown]
            cells = [findings.with_interval(p.value, p.low, p.high) if p else "–" for p in points]
            runs = str(max((p.n for p in points if p), default=0))
            rows.append([*map(formats.axis_value, data.whole(where).values()), *cells, runs])
        keys = [*data.axes, *(one.axis for one in data.together)]
        names = [*keys, *(formats.figure_name(c) for c in shown), "runs"]
        caption = "Mean over seeds with its 95 % t-interval."
        if len(settings) > _ROWS:
            caption += f" The first {_ROWS} of {len(settings):,} settings; cells.parquet has all cells."
        numeric = frozenset(range(len(keys), len(names)))
        sections.append(Section("All settings", [Table(names, rows, caption, numeric)], folded=len(rows) > 24))
    if data.failed:
        lines = [[f.cell, formats.setting(f.setting), str(f.seed), f.reason] for f in data.failed[:_FAILURES]]
        caption = f"{len(data.failed):,} cells failed" + (
            f"; the first {_FAILURES} are listed, cells.parquet has all." if len(data.failed) > _FAILURES else "."
        )
        sections.append(
            Section("Failed cells", [Table(["cell", "setting", "seed", "reason"], lines, caption)], folded=True)
        )
    about = [["flatshift " + version, f"{count:,}"] for version, count in data.versions]
    contents = {
        "cells.parquet": "one row per cell",
        "points.csv": "the same, for spreadsheets",
        "curves.parquet": "one row per cell and recorded step",
    }
    blocks: list[Block] = []
    if about:
        blocks.append(Table(["made by", "cells"], about, numeric=frozenset({1})))
    if data.files:
        blocks.append(Notes([f"{name} beside this page: {contents[name]}." for name in data.files]))
    if blocks:
        sections.append(Section("Code and tables", blocks, folded=True))
    return sections
