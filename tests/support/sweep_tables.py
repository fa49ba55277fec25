"""Sweeps on disk, written down as tables: what the tests of their analysis read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from flatshift.experiments.results.cells import FORMAT
from flatshift.experiments.results.run import read_run
from flatshift.experiments.results.table import SweepTable, metric_interval
from flatshift.experiments.statistics.intervals import Interval


def cells(folder: Path, rows: list[dict[str, Any]], grid: dict[str, Any] | None, **plan: Any) -> Any:
    """The sweep of a folder with these rows as its cells.parquet, and a plan where there is a grid."""
    folder.mkdir(parents=True)
    names = list(dict.fromkeys(k for row in rows for k in row))
    pq.write_table(pa.table({k: [row.get(k) for row in rows] for k in names}), folder / "cells.parquet")
    if grid is not None:
        lengths = [len(values) for values in grid.values()]
        if "seeds" in plan and plan.get("design") != "random":
            points = max(lengths) if plan.get("design") == "paired" else math.prod(lengths)
            plan = {"cells": points * plan["seeds"], **plan}
        (folder / "sweep.json").write_text(json.dumps({"format": FORMAT, "recipe": "r", "grid": grid, **plan}))
    return read_run(folder).sweep


def mean_at(table: SweepTable, column: str, setting: dict[str, Any]) -> Interval | None:
    """The interval over the finished rows of a setting; None if there are none."""
    values = table.column(column)[table.rows(setting)]
    return metric_interval(column, values[np.isfinite(values)])


def rows(
    curve: dict[Any, float],
    seeds: int = 4,
    axis: str = "adapter.rank",
    spread: float = 0.001,
    split: str = "test",
) -> list[dict[str, Any]]:
    """Cells with the errors of `curve` along an axis, a little apart for each seed."""
    return [
        {"cell": f"{x}-{s}", axis: x, "seed": s, "status": "done", f"{split}.error": y + spread * (s - 1.5)}
        for x, y in curve.items()
        for s in range(seeds)
    ]


def words(sections: Any) -> str:
    """Every text of the sections' blocks, one after the other."""
    found: list[str] = []
    for section in sections:
        found += [section.title, section.lead]
        for block in section.blocks:
            if block.kind == "figures":
                found += [t for c in block.charts for t in (c.title, c.caption, c.verdict, *c.evidence)]
            elif block.kind == "table":
                found += [block.caption, *block.columns, *(cell for row in block.rows for cell in row)]
            elif block.kind == "notes":
                found += block.sentences
    return " | ".join(found)


def result(folder: Path, rank: int, *, seed: int = 0, accuracy: float = 0.75, trace: Any = ()) -> None:
    """A finished cell, whose trace.jsonl was cut off while its last line was written."""
    folder.mkdir(parents=True)
    metrics = {"test": {"accuracy": {"value": accuracy, "low": 0.7, "high": 0.8, "n": 4}}}
    about = {"status": "done", "reason": None, "seconds": 3.0, "flatshift": "0.3.0", "metrics": metrics}
    (folder / "result.json").write_text(json.dumps({"point": {"adapter.rank": rank}, "seed": seed, **about}))
    lines = [json.dumps({"stage": "fine-tune", "step": s, "train.loss": loss}) for s, loss in trace]
    (folder / "trace.jsonl").write_text("".join(line + "\n" for line in lines) + '{"stage": "fine-tu')
