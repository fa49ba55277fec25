"""The page of a sweep that still runs, and the sentence on one more of each axis."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from flatshift.cli import run
from flatshift.experiments.report.chapters.sweep import next_value_effects, sweep_finding
from flatshift.experiments.results.analysis import SweepAnalysis
from flatshift.experiments.results.sweep import read_sweep
from tests.support.sweep_tables import cells


def sweep_at(directory: Path, *, done: int = 12) -> Path:
    """Ranks 1, 4, 16 and 64 under three seeds, of which so many cells have finished: lowest at rank 4."""
    level = {1: 0.5, 4: 0.3, 16: 0.4, 64: 0.45}
    cells = [(rank, seed) for rank in level for seed in range(3)]
    rows = [
        {
            "cell": f"c{place}",
            "status": "done",
            "adapter.rank": rank,
            "seed": seed,
            "test.error": level[rank] + 0.01 * seed,
            "train.error": 0.3 if rank < 16 else 0.0,
        }
        for place, (rank, seed) in enumerate(cells[:done])
    ]
    directory.mkdir()
    pq.write_table(pa.Table.from_pylist(rows), directory / "cells.parquet")
    grid = {"adapter.rank": [str(rank) for rank in level]}
    plan = {"format": 2, "recipe": "r", "grid": grid, "design": "grid", "seeds": 3, "cells": 12}
    (directory / "sweep.json").write_text(json.dumps(plan), encoding="utf-8")
    return directory


def test_a_sweep_at_work_has_its_page(tmp_path: Path) -> None:
    directory = sweep_at(tmp_path / "part", done=9)
    assert run(["report", str(directory)]) == 0
    page = (directory / "report.html").read_text(encoding="utf-8")
    assert "test error" in page and "3 of 12 cells have no result yet" in page
    data = read_sweep(sweep_at(tmp_path / "half", done=6))
    assert data is not None
    assert "ends at 4, as far as cells are finished" in next_value_effects(data, SweepAnalysis(data))
    assert sweep_finding(data, SweepAnalysis(data)).startswith("With 6 of 12 cells finished, mean test error is lowest")


def test_null_on_an_axis_of_numbers_has_its_page(tmp_path: Path) -> None:
    levels = {None: 0.1, 1: 0.3, 100: 0.2}
    rows = [
        {"cell": f"{clip}-{seed}", "optimizer.clip": clip, "seed": seed, "status": "done", "test.error": error}
        for clip, error in levels.items()
        for seed in range(3)
    ]
    assert cells(tmp_path / "s", rows, {"optimizer.clip": ["null", "1", "100"]}, seeds=3) is not None
    assert run(["report", str(tmp_path / "s")]) == 0
    assert "optimizer.clip" in (tmp_path / "s" / "report.html").read_text(encoding="utf-8")


def test_one_more_of_an_axis_is_the_paired_change(tmp_path: Path) -> None:
    data = read_sweep(sweep_at(tmp_path / "s"))
    assert data is not None
    said = next_value_effects(data, SweepAnalysis(data))
    assert "rank r 4 → 16 changes it by 0.1" in said and "that is before the point where training rows" in said
