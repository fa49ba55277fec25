"""A sweep's plan beside what there is of it: cells that are missing, late or of another plan; its design."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from experiments.report.load import read_run
from experiments.report.sections_sweep import sweep_sections, sweep_tiles
from experiments.report.sweepanalysis import Analysis
from tests.sweep_tables import cells, result, rows, words


def test_results_stand_in_for_tables_that_are_not_there_yet(tmp_path):
    folder = tmp_path / "s"
    for i, rank in enumerate((1, 2)):
        result(folder / "cells" / f"c{i}", rank, trace=[(0, 2.0), (4, 1.5), (4, 1.0 + rank)])
    result(folder / "cells" / "other", 64)  # of an earlier grid
    grid = {"adapter.rank": ["1", "2", "4"]}
    (folder / "sweep.json").write_text(json.dumps({"recipe": "r", "grid": grid, "seeds": 1, "design": "grid"}))
    data = read_run(folder).sweep
    assert data.axes == ("adapter.rank",) and data.values("adapter.rank") == [1, 2]
    assert data.at("test.error", {"adapter.rank": 2}).value == 0.25  # 1 − accuracy
    assert data.trace.at("train.loss", {"adapter.rank": 2, "step": 4}).value == 3.0  # the last line of a step
    assert (data.planned, data.unfinished) == (3, 1)
    said = words(sweep_sections(data, Analysis(data)))
    assert "1 of 3 cells have no result yet" in said and "they take 3.0" in said
    assert sweep_tiles(data)[-1].value == "2 / 3"


def test_cells_that_finished_after_the_table_are_added(tmp_path):
    folder = tmp_path / "s"
    table = [{**row, "seed": 0} for row in rows({1: 0.5, 2: 0.4}, seeds=1)]
    assert len(cells(folder, table, {"adapter.rank": ["1", "2", "4"]}, seeds=1)) == 2
    result(folder / "cells" / "late", 4)
    data = read_run(folder).sweep
    assert data.values("adapter.rank") == [1, 2, 4] and data.unfinished == 0


def test_tables_of_an_earlier_plan_are_cut_to_the_plan(tmp_path):
    folder = tmp_path / "s"
    curves = [
        {"cell": f"{rank}-0", "adapter.rank": rank, "seed": 0, "step": step, "train.loss": float(rank)}
        for rank in (1, 2, 8)
        for step in (0, 4)
    ]
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(curves), folder / "curves.parquet")
    pq.write_table(pa.Table.from_pylist(rows({1: 0.5, 2: 0.4, 8: 0.1}, seeds=3)), folder / "cells.parquet")
    plan = {"recipe": "r", "grid": {"adapter.rank": ["1", "2.0"]}, "seeds": 2}
    (folder / "sweep.json").write_text(json.dumps(plan))
    data = read_run(folder).sweep
    assert data.values("adapter.rank") == [1, 2] and len(data) == 4 and data.unfinished == 0
    assert sorted(data.trace.table.column("cell").to_pylist()) == ["1-0", "1-0", "2-0", "2-0"]


@pytest.mark.parametrize(
    ("value", "written", "planned"),
    [
        ([0.9, 0.95], [[0.9, 0.95], [0.9, 0.999]], True),
        ("0.9, 0.95", [[0.9, 0.95]], True),
        ("0.9, 0.95", ["[0.9, 0.95]"], True),
        ("ggpo", ["{kind: ggpo}"], True),
        ({"kind": "ggpo"}, ["ggpo"], True),
        ("ggpo", ["plain"], False),
        (3e-4, ["0.0003"], True),
        (4e-4, ["0.0003"], False),
    ],
)
def test_a_planned_value_is_found_however_it_is_written(value, written, planned):
    from experiments.report.sweepplan import is_planned, only_planned

    plan = {"grid": {"x": written}, "seeds": 1}
    assert is_planned({"x": value, "seed": 0}, plan) == planned
    assert only_planned(pa.table({"x": [value], "seed": [0]}), plan).num_rows == planned


def test_a_paired_design_has_one_axis_and_a_random_one_has_dots(tmp_path):
    table = [{**row, "adapter.alpha": 2 * row["adapter.rank"]} for row in rows({1: 0.5, 2: 0.4, 4: 0.3})]
    grid = {"adapter.alpha": ["2", "4", "8"], "adapter.rank": ["1", "2", "4"]}
    data = cells(tmp_path / "p", table, grid, design="paired", seeds=4)
    assert data.axes == ("adapter.rank",) and data.planned == 12
    free = cells(tmp_path / "r", table, grid, design="random", seeds=4)
    sections = sweep_sections(free, Analysis(free))
    charts = [c for s in sections for b in s.blocks if b.kind == "figures" for c in b.charts]
    assert len(charts) == 2 and all("Every dot is a cell" in c.caption for c in charts)
