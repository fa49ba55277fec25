"""A sweep's plan beside what there is of it: cells that are missing, late or of another plan; its design."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flatshift.experiments.report.chapters.sweep import sweep_finding, sweep_sections, sweep_tiles
from flatshift.experiments.results.analysis import SweepAnalysis
from flatshift.experiments.results.run import read_run
from flatshift.experiments.results.sweep import filter_planned_cells, filter_planned_rows
from tests.support.sweep_tables import cells, mean_at, result, rows, words


def test_results_stand_in_for_tables_that_are_not_there_yet(tmp_path):
    folder = tmp_path / "s"
    for i, rank in enumerate((1, 2)):
        result(folder / "cells" / f"c{i}", rank, trace=[(0, 2.0), (4, 1.5), (4, 1.0 + rank)])
    result(folder / "cells" / "other", 64)  # of an earlier grid
    grid = {"adapter.rank": ["1", "2", "4"]}
    plan = {"format": 2, "recipe": "r", "grid": grid, "seeds": 1, "cells": 3, "keys": ["c0", "c1", "c2"]}
    (folder / "sweep.json").write_text(json.dumps(plan))
    data = read_run(folder).sweep
    assert data.axes == ("adapter.rank",) and data.values("adapter.rank") == [1, 2]
    assert mean_at(data, "test.error", {"adapter.rank": 2}).value == 0.25  # 1 − accuracy
    assert mean_at(data.trace, "train.loss", {"adapter.rank": 2, "step": 4}).value == 3.0  # the last line of a step
    assert (data.planned, data.unfinished) == (3, 1)
    said = words(sweep_sections(data, SweepAnalysis(data)))
    assert "1 of 3 cells have no result yet" in said and "they take 3.0" in said
    assert sweep_tiles(data, SweepAnalysis(data))[-1].value == "2 / 3"


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
    keys = [f"{rank}-{seed}" for rank in (1, 2) for seed in (0, 1)]
    plan = {"format": 2, "recipe": "r", "grid": {"adapter.rank": ["1", "2.0"]}, "seeds": 2, "cells": 4, "keys": keys}
    (folder / "sweep.json").write_text(json.dumps(plan))
    data = read_run(folder).sweep
    assert data.values("adapter.rank") == [1, 2] and len(data) == 4 and data.unfinished == 0
    assert sorted(data.trace.table.column("cell").to_pylist()) == ["1-0", "1-0", "2-0", "2-0"]


def test_cells_are_the_plans_by_their_keys_alone():
    table = pa.table({"cell": ["a", "b"], "x": ["[0.9, 0.95]", "rank"]})
    for plan, left in (({}, ["a", "b"]), ({"keys": frozenset("b")}, ["b"]), ({"keys": frozenset()}, [])):
        assert filter_planned_cells(table, plan).column("cell").to_pylist() == left
        assert [row["cell"] for row in filter_planned_rows(table.to_pylist(), plan)] == left


def test_a_paired_design_has_one_axis_and_a_random_one_has_dots(tmp_path):
    table = [{**row, "adapter.alpha": 2 * row["adapter.rank"]} for row in rows({1: 0.5, 2: 0.4, 4: 0.3})]
    grid = {"adapter.alpha": ["2", "4", "8"], "adapter.rank": ["1", "2", "4"]}
    data = cells(tmp_path / "p", table, grid, design="paired", seeds=4)
    assert data.axes == ("adapter.rank",) and data.planned == 12
    analysis = SweepAnalysis(data)
    sections = sweep_sections(data, analysis)
    assert "adapter.alpha moves with adapter.rank (1: 2, 2: 4, 4: 8); what is seen may come from" in words(sections)
    (settings,) = [b for s in sections if s.title == "All settings" for b in s.blocks]
    assert settings.columns[:3] == ["adapter.rank", "adapter.alpha", "test error"] and settings.rows[1][:2] == [
        "2",
        "4",
    ]
    assert "rank = 4, alpha = 8" in sweep_finding(data, analysis)
    assert sweep_tiles(data, analysis)[0].note == "rank = 4, alpha = 8; 4 runs"
    free = cells(tmp_path / "r", table, grid, design="random", seeds=4)
    sections = sweep_sections(free, SweepAnalysis(free))
    charts = [c for s in sections for b in s.blocks if b.kind == "figures" for c in b.charts]
    assert len(charts) == 2 and all("Every dot is a cell" in c.caption for c in charts)


@pytest.mark.parametrize(
    ("waits", "said", "tile"),
    [
        (lambda rank, seed: seed > 2, "3 of 5 seeds are finished so far at all points", "3 seeds each"),
        (lambda rank, seed: rank == 4 and seed > 1, "2 of 5 seeds are finished so far at all points", "2 to 5 seeds"),
        (lambda rank, seed: rank == seed, "3 of 5 seeds are finished so far", "4 to 5 seeds"),
        (lambda rank, seed: (rank == 4) == (seed > 2), "no seed has a cell at every value yet", "2 to 3 seeds"),
    ],
)
def test_an_unfinished_sweep_with_enough_seeds_is_told_to_go_on(tmp_path, waits, said, tile):
    table = [row for row in rows({2: 0.5, 4: 0.4, 8: 0.3}, seeds=5) if not waits(row["adapter.rank"], row["seed"])]
    data = cells(tmp_path / "s", table, {"adapter.rank": ["2", "4", "8"]}, seeds=5)
    analysis = SweepAnalysis(data)
    found = words(sweep_sections(data, analysis))
    assert said in found and "continue with the same command" in found and "--seeds" not in found
    assert sweep_tiles(data, analysis)[-1].note == tile


def test_an_unfinished_sweep_with_too_few_seeds_is_told_how_many_it_takes(tmp_path):
    data = cells(tmp_path / "s", rows({2: 0.5, 4: 0.4, 8: 0.3})[:-1], {"adapter.rank": ["2", "4", "8"]}, seeds=4)
    found = words(sweep_sections(data, SweepAnalysis(data)))
    assert "got 3 of 3: sweep with --seeds 5" in found and "continue with the same" not in found


def test_a_grid_point_without_a_number_is_said_not_to_be_on_the_axis(tmp_path):
    table = rows({None: 0.2, 50: 0.5, 100: 0.4}, axis="data.train.limit")
    data = cells(tmp_path / "s", table, {"data.train.limit": ["null", "50", "100"]})
    assert "limit = none is not on the axis" in words(sweep_sections(data, SweepAnalysis(data)))
    whole = cells(tmp_path / "w", table[4:], {"data.train.limit": ["50", "100"]})
    assert "not on the axis" not in words(sweep_sections(whole, SweepAnalysis(whole)))


def _cells(out, grid, ends, *, overrides=(), seeds=2):
    """The sweep of `double-descent` over a grid under some seeds, whose cells ended as `ends(cell)` says."""
    from flatshift.experiments.recipe import load_recipe
    from flatshift.experiments.recipe.schema import SweepOptions
    from flatshift.experiments.studies.cell import finish_cell
    from flatshift.experiments.studies.sweep.axes import parse_grid
    from flatshift.experiments.studies.sweep.command import _parse_request
    from flatshift.experiments.studies.sweep.directory import claim_directory
    from flatshift.experiments.studies.sweep.sweep_plan import SweepBase

    asked = _parse_request(SweepBase.of("double-descent", overrides), SweepOptions(grid=tuple(grid), seeds=seeds))
    planned = list(SweepBase.of("double-descent", overrides).plan(parse_grid(grid), seeds))
    out.mkdir()
    claim_directory(out, asked.document(planned), load_recipe("double-descent", overrides))
    for cell in planned:
        finish_cell(out / "cells" / cell.key, cell, ends(cell))
    return planned


def _done(cell):
    from flatshift.experiments.studies.cell import CellResult

    return CellResult("done", metrics={"test": {"accuracy": {"value": 0.5}}, "train": {"loss": {"value": 1.0}}})


def test_cells_whose_values_are_resolved_otherwise_than_written_are_all_shown(tmp_path):
    from flatshift.experiments.recipe import from_override
    from flatshift.experiments.studies.sweep.table import write_table

    for name in "ab":
        lines = (json.dumps({"text": f"{name}{i}", "label": "xy"[i % 2]}) for i in range(8))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    files = [str(tmp_path / f"{name}.jsonl") for name in "ab"]
    laid = [from_override("data.test.files", files[0]), from_override("data.train.limit", 4)]
    for name, grid, overrides in (
        ("alpha", ["adapter.rank=2,8", "adapter.alpha=rank,16"], ()),
        ("files", [f"data.train.files={files[0]},{files[1]}"], laid),
    ):
        planned = _cells(tmp_path / name, grid, _done, overrides=overrides)
        assert len(read_run(tmp_path / name).sweep) == len(planned)  # from the cells alone
        write_table(tmp_path / name, planned)
        result(tmp_path / name / "cells" / "other", 64)  # of another plan
        data = read_run(tmp_path / name).sweep
        assert (data.done, data.unfinished) == (len(planned), 0)


def test_a_diverged_cell_keeps_its_lines_and_has_empty_ones_for_the_steps_it_did_not_reach(tmp_path):
    from flatshift.experiments.studies.cell import CellResult
    from flatshift.experiments.studies.sweep.table import write_table

    def ends(cell):
        if cell.point["adapter.rank"] == 8 and cell.seed == 1:
            return CellResult("diverged", "the loss is not a finite number")
        return _done(cell)

    out = tmp_path / "s"
    planned = _cells(out, ["adapter.rank=2,8"], ends)
    for cell in planned:
        steps = (0, 1, 2) if ends(cell).status == "diverged" else (0, 1, 2, 3, 4, 64, 100)
        lines = (json.dumps({"stage": "fine-tune", "step": s, "train.loss": 5.0 - s / 50}) for s in steps)
        (out / "cells" / cell.key / "trace.jsonl").write_text("".join(line + "\n" for line in lines))
    for written in (False, True):
        if written:
            write_table(out, planned)
        data = read_run(out).sweep
        found = data.trace.matrix("train.loss", "step", {"adapter.rank": 8})
        at = dict(zip(found.values, found.y[found.seeds.index(1)].tolist(), strict=True))
        assert at[2] == 4.96 and at[64] != at[64] and at[100] != at[100]
        row = found.lost[found.seeds.index(1)]
        assert row.sum() >= 4 and not found.lost[found.seeds.index(0)].any()
        assert data.trace.lost({"adapter.rank": 8}) == data.lost({"adapter.rank": 8}) == "diverged"
        (failure,) = data.failed
        assert failure.diverged and "1 of 2 seeds diverged at rank = 8." in words(
            sweep_sections(data, SweepAnalysis(data))
        )
    assert pq.read_table(out / "cells.parquet").column("test.error").null_count == 1


_GONE = "adapter.rank=4 seed=5"


def test_a_run_that_stopped_early_costs_its_seed_the_curve_along_the_steps_and_says_so(tmp_path):
    """Its last step, where no other run was measured, is no point of the curve."""
    from flatshift.experiments.results.analysis import analyse_curve
    from flatshift.experiments.studies.cell import CellResult
    from flatshift.experiments.studies.sweep.table import write_table
    from flatshift.finetune.train.trace.files import recorded_steps

    out = tmp_path / "s"
    diverged = CellResult("diverged", "the loss is not a finite number")
    planned = _cells(out, ["adapter.rank=2,4"], lambda c: diverged if c.label == _GONE else _done(c), seeds=7)
    due = recorded_steps(planned[0].resolved.recipe.record, 100)
    for cell in planned:
        steps = [s for s in due if s <= 20] + [20] if cell.seed == 3 else due[:4] if cell.label == _GONE else due
        lines = (json.dumps({"stage": "fine-tune", "step": s, "test.error": (cell.seed + 1) / (s + 2)}) for s in steps)
        (out / "cells" / cell.key / "trace.jsonl").write_text("".join(line + "\n" for line in lines))
        (out / "cells" / cell.key / "trace.json").write_text(json.dumps({"steps": list(due)}))
    assert 20 not in due
    for written in (False, True):
        if written:
            write_table(out, planned)
        data = read_run(out).sweep
        assert 20 not in data.trace.levels("step")
        for rank, seeds, said in (
            (2, 6, "1 of 7 seeds stopped early at step"),
            (4, 5, "2 of 7 seeds ended early at step"),
        ):
            judged = analyse_curve(data.trace, "step", {"adapter.rank": rank}, test="test.error")
            assert judged.verdict.peak.seeds == seeds and said in " ".join(judged.evidence)
        assert data.trace.matrix("test.error", "step", {"adapter.rank": 4}).diverged.any(1).tolist() == [
            seed == 5 for seed in range(7)
        ], "and not the one that stopped"
