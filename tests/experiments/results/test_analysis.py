"""What is read of a sweep's tables, against plain loops."""

import itertools
import math
import warnings

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flatshift.experiments.report.chapters.sweep import sweep_sections, sweep_tiles
from flatshift.experiments.results.analysis import SweepAnalysis
from flatshift.experiments.results.run import read_run
from flatshift.experiments.results.sweep import SweepData, add_derived_metrics
from flatshift.experiments.results.table import SweepTable, encode_column
from flatshift.experiments.statistics.intervals import t_interval
from tests.support import report_runs
from tests.support.sweep_tables import cells, mean_at, rows, words


@pytest.fixture
def scattered():
    """Rows in random order with gaps, failures, nulls, words and values that are not finite."""
    rng = np.random.default_rng(3)
    found = []
    for rank, kind, seed in itertools.product((4, 16, 1, None), ("plain", "ggpo"), range(3)):
        if rng.random() < 0.1:
            continue
        value = [float(abs(rng.normal())), None, math.inf, math.nan][rng.choice(4, p=[0.85, 0.05, 0.05, 0.05])]
        status = "failed" if rng.random() < 0.1 else "done"
        found.append({"adapter.rank": rank, "kind": kind, "seed": seed, "status": status, "test.loss": value})
    return [found[i] for i in rng.permutation(len(found))]


def test_a_level_that_is_not_a_number_comes_after_the_numbers():
    for order in itertools.permutations([8.0, math.nan, 1.0, None, 4.0]):
        values = [*order, math.nan]
        levels, codes = encode_column(pa.table({"adapter.alpha": values}), "adapter.alpha")
        assert levels[:4] == [None, 1, 4, 8] and math.isnan(levels[4]) and len(levels) == 5, order
        np.testing.assert_equal([levels[code] for code in codes], values)


def test_a_table_gives_what_loops_give(scattered):
    names = list(scattered[0])
    table = SweepTable(pa.table({n: [r[n] for r in scattered] for n in names}), ("adapter.rank", "kind"))
    good = [r for r in scattered if r["status"] == "done" and r["test.loss"] is not None]
    good = [r for r in good if math.isfinite(r["test.loss"])]
    assert table.levels("adapter.rank") == [None, 1, 4, 16] and table.values("adapter.rank") == [1, 4, 16]
    assert set(table.levels("kind")) == {"plain", "ggpo"} and not table.numeric("kind")
    for kind in ("plain", "ggpo"):
        expected = {}
        for rank in (1, 4, 16):
            values = [r["test.loss"] for r in good if r["adapter.rank"] == rank and r["kind"] == kind]
            assert mean_at(table, "test.loss", {"adapter.rank": rank, "kind": kind}) == (
                t_interval(values, bounds=(0, math.inf)) if values else None
            )
            if values:
                expected[rank] = t_interval(values, bounds=(0, math.inf))
        assert dict(table.curve("test.loss", "adapter.rank", {"kind": kind})) == expected
        found = table.matrix("test.loss", "adapter.rank", {"kind": kind})
        for (s, seed), (j, rank) in itertools.product(enumerate(found.seeds), enumerate(found.values)):
            here = [r for r in scattered if (r["adapter.rank"], r["kind"], r["seed"]) == (rank, kind, seed)]
            assert found.present[s, j] == bool(here)
            value = next((r["test.loss"] for r in here if r in good), math.nan)
            np.testing.assert_equal(found.y[s, j], value)
    grid = table.grid("test.loss", "adapter.rank", "kind", {})
    for (j, kind), (i, rank) in itertools.product(enumerate(table.values("kind")), enumerate((1, 4, 16))):
        values = [r["test.loss"] for r in good if r["adapter.rank"] == rank and r["kind"] == kind]
        np.testing.assert_allclose(grid[j, i], np.mean(values) if values else math.nan)
    assert dict((tuple(w.values()), p) for w, p in table.means("test.loss")) == {
        key: t_interval([r["test.loss"] for r in good if (r["adapter.rank"], r["kind"]) == key], bounds=(0, math.inf))
        for key in {(r["adapter.rank"], r["kind"]) for r in good}
    }


def test_sweep_means_threshold_and_failures(tmp_path):
    table = rows({1: 0.5, 4: 0.3, 16: 0.4})
    for row in table:
        row["train.error"] = {1: 0.3, 4: 0.1, 16: 0.0}[row["adapter.rank"]]
        row["train.steps"] = 60
    failed = {"cell": "x", "adapter.rank": 4, "seed": 9, "status": "failed", "reason": "no", "train.steps": 60}
    data = cells(tmp_path / "s", [*table, failed], {"adapter.rank": [1, 4, 16], "train.steps": [60]})
    assert data.axes == ("adapter.rank",) and data.fixed == {"train.steps": 60}
    assert mean_at(data, "test.error", {"adapter.rank": 4}).n == 4 and data.done == 12
    assert SweepAnalysis(data).crossing("adapter.rank", {}).value == pytest.approx(4)
    assert [(f.cell, f.reason, f.seed) for f in data.failed] == [("x", "no", 9)]
    assert data.error_columns() == ("test.error", "train.error")
    where, best = data.best("test.error")
    assert where == {"adapter.rank": 4} and best.value == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("train", "found"),
    [
        ({1: 0.0, 2: 0.05, 4: 0.25, 8: 0.5}, "2.38"),  # rows of data: a quarter of the way from 2 to 4 on a log axis
        ({1: 0.5, 2: 0.3, 4: 0.1, 8: 0.0}, "4.00"),  # ranks
        ({1: 0.05, 2: 0.2, 4: 0.3, 8: 0.05}, "6.17"),  # the fit that falls: 0.183 up to 4, then 0.05
        ({1: 0.5, 2: 0.3, 4: 0.2, 8: 0.11}, "no point fitted"),
        ({1: 0.03, 2: 0.03, 4: 0.03, 8: 0.03}, "all points fitted"),
        ({1: 0.5, 2: 0.0}, "3 values are judged"),
    ],
)
def test_the_threshold_is_the_crossing_of_the_verdict_wherever_it_is_shown(tmp_path, train, found):
    table = [{**row, "test.error": 0.5} for row in rows(train, axis="data.train.limit", split="train", spread=0.0)]
    data = cells(tmp_path / "s", table, {"data.train.limit": []})
    analysis = SweepAnalysis(data)
    said = words(sweep_sections(data, analysis))
    (tile,) = [t for t in sweep_tiles(data, analysis) if t.label == "interpolation threshold"]
    dashed = f"Dashed: data.train.limit = {tile.value}, where the mean training error crosses 0.1"
    if found == "3 values are judged":  # the crossing of two is drawn all the same
        assert dashed in said and not analysis.curves
        return
    assert tile.value == found and f" | {found} | " in said
    assert (dashed in said) == found[0].isdigit() and ("Dashed" in said) == found[0].isdigit()


@pytest.mark.parametrize(
    ("axis", "levels"),
    [
        ("regularizer", ("plain", "ggpo", "rwp")),
        ("adapter.alpha", ("rank", None, "8")),
        ("data.label_noise", (0, 1, 2)),
    ],
)
def test_what_is_no_axis_of_capacity_has_no_threshold(tmp_path, axis, levels):
    table = [{**row, "train.error": 0.05} for row in rows(dict.fromkeys(levels, 0.3), axis=axis)]
    data = cells(tmp_path / "s", table, {axis: []})
    analysis = SweepAnalysis(data)
    said = words(sweep_sections(data, analysis))
    assert "interpol" not in said and "Dashed" not in said
    assert [t.label for t in sweep_tiles(data, analysis)] == ["lowest test error", "cells finished"]


@pytest.mark.parametrize("shares", [(0.25, 0.35, None), ()])
def test_errors_of_classes_are_shown_beside_the_commonest_class(tmp_path, shares):
    table = rows({1: 0.3, 2: 0.2}, spread=0.02)
    for row, share in zip(table, shares, strict=False):
        row["test.majority_floor"] = share
    data = cells(tmp_path / "s", table, {"adapter.rank": [1, 2]})
    found = [tile for tile in sweep_tiles(data, SweepAnalysis(data)) if tile.label == "majority baseline"]
    assert [tile.value for tile in found] == (["0.700"] if shares else [])


def test_no_interval_of_a_loss_reaches_below_zero(tmp_path):
    table = [{**row, "test.loss": 0.001 * 9 ** row["seed"]} for row in rows({1: 0.01, 2: 0.0}, spread=0.02)]
    data = cells(tmp_path / "s", table, {"adapter.rank": [1, 2]})
    assert [mean_at(data, f"test.{name}", {"adapter.rank": 1}).low for name in ("loss", "error")] == [0.0, 0.0]


def test_axes_without_a_plan_are_the_columns_that_are_no_figures(tmp_path):
    table = [
        {**row, "train.steps": 10 * row["adapter.rank"], "train.loss": 1.0 * row["seed"], "grad.a": 1.0 * row["seed"]}
        for row in rows({1: 0.5, 2: 0.4})
    ]
    assert cells(tmp_path / "s", table, None).axes == ("adapter.rank", "train.steps")


def test_the_steps_that_a_failed_cell_did_not_reach_are_left_out_without_a_warning():
    columns = {"cell": ["a", "a", "b"], "step": [0, 4, 4], "status": [None, None, "failed"]}
    trace = SweepTable(pa.table({**columns, "grad.a": [5.0, 2.0, None], "grad.b": [0.0, 0.0, None]}), ("step",))
    data = SweepData(pa.table({"cell": ["a", "b"], "status": ["done", "failed"]}), (), trace=trace)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        add_derived_metrics(data)
    np.testing.assert_array_equal(data.column("grad.norm"), [2.0, math.nan])


def test_figures_of_a_trace_and_their_largest_per_cell(tmp_path):
    report_runs.laboratory(tmp_path / "s", ranks=(1, 4), rates=(0.002,), kinds=("plain",), seeds=2)
    data = read_run(tmp_path / "s").sweep
    lines = pq.read_table(tmp_path / "s" / "curves.parquet").to_pylist()
    for i, row in enumerate(pq.read_table(tmp_path / "s" / "cells.parquet").to_pylist()):
        own = [ln for ln in lines if ln["cell"] == row["cell"]]
        late = [math.hypot(ln["grad.a"], ln["grad.b"]) for ln in own if ln["step"] >= 50]
        assert data.column("grad.norm")[i] == pytest.approx(max(late), rel=1e-12)
        sharp = [ln["sharpness.preconditioned"] * ln["lr"] / 38 for ln in own if ln["sharpness.preconditioned"]]
        assert data.column("sharpness.ratio")[i] == pytest.approx(max(sharp), rel=1e-12)


def test_a_sweep_is_judged_by_the_metric_that_its_plan_names(tmp_path):
    shares = {1: 0.2, 4: 0.6, 16: 0.5}
    found = [{**row, "test.f1_macro": shares[row["adapter.rank"]]} for row in rows({1: 0.1, 4: 0.3, 16: 0.2})]
    data = cells(tmp_path / "higher", found, {"adapter.rank": [1, 4, 16]}, metric="f1_macro")
    column = data.error_columns()[0]
    where, best = data.best(column)
    assert where == {"adapter.rank": 4} and best.value == pytest.approx(0.4), "the highest F1, not the lowest error"
    analysis = SweepAnalysis(data)
    assert all(direction.test == column for direction in analysis.directions)
    (tile, *_) = sweep_tiles(data, analysis)
    assert tile.label == "lowest test 1 − macro F1"
    assert "Test 1 − macro F1 along" in words(sweep_sections(data, analysis))
    found = [
        {**row, "test.reward_margin": 3 + row["test.f1_macro"] + 0.01 * row["seed"], "train.exact_match": 0.1}
        for row in found
    ]
    margin = cells(tmp_path / "margin", found, {"adapter.rank": [1, 4, 16]}, metric="reward_margin")
    best = margin.best(margin.error_columns()[0])[1]
    assert best.low < best.value < best.high < 0, "1 − a margin has no lowest value"
    said = words(sweep_sections(margin, SweepAnalysis(margin)))
    assert "Test 1 − reward margin along" in said and "−2.615 (−2.636 to −2.594)" in said
    found = [{**row, "test.rmse": shares[row["adapter.rank"]]} for row in found]
    lower = cells(tmp_path / "lower", found, {"adapter.rank": [1, 4, 16]}, metric="rmse")
    assert lower.error_columns()[0] == "test.rmse" and lower.best("test.rmse")[0] == {"adapter.rank": 1}
    plain = cells(tmp_path / "plain", found, {"adapter.rank": [1, 4, 16]})
    named = cells(tmp_path / "accuracy", found, {"adapter.rank": [1, 4, 16]}, metric="accuracy")
    assert plain.error_columns() == named.error_columns() == ("test.error", "train.error")


def test_errors_of_dev_rows_alone_come_before_their_loss(tmp_path):
    found = [{**row, "dev.loss": 0.5} for row in rows({1: 0.1, 4: 0.3}, split="dev")]
    data = cells(tmp_path / "s", found, {"adapter.rank": [1, 4]})
    assert data.error_columns() == ("dev.error", "train.error")


def test_a_figure_that_a_finished_run_has_not_is_no_divergence(tmp_path):
    """Spearman's of constant predictions is not defined; the run is finished all the same."""
    found = rows({1: 0.5, 2: 0.4, 4: 0.3, 8: 0.2}, seeds=7, spread=0.01)
    for row in found:
        row["test.lack_of_spearman"] = None if row["cell"] == "1-2" else row.pop("test.error")
    data = cells(tmp_path / "s", found, {"adapter.rank": [1, 2, 4, 8]}, metric="spearman")
    said = words(sweep_sections(data, SweepAnalysis(data)))
    assert "1 of 7 seeds had no value at rank 1." in said and "diverged" not in said
    found[8] |= {"status": "diverged", "test.lack_of_spearman": None}
    data = cells(tmp_path / "both", found, {"adapter.rank": [1, 2, 4, 8]}, metric="spearman")
    assert "2 of 7 seeds had no value at rank 1 to 2." in words(sweep_sections(data, SweepAnalysis(data)))
    found[2] |= {"status": "diverged"}
    data = cells(tmp_path / "lost", found, {"adapter.rank": [1, 2, 4, 8]}, metric="spearman")
    assert "2 of 7 seeds diverged at rank 1 to 2." in words(sweep_sections(data, SweepAnalysis(data)))


def test_titles_keep_the_names_of_metrics(tmp_path):
    found = [
        {**row, "test.f1_macro": 0.5, "optimizer.lr": lr, "effective_params": 10.0 * row["adapter.rank"]}
        for row in rows({1: 0.1, 4: 0.3})
        for lr in (0.1, 0.2)
    ]
    data = cells(tmp_path / "s", found, {"adapter.rank": [1, 4], "optimizer.lr": [0.1, 0.2]}, metric="f1_macro")
    said = words(sweep_sections(data, SweepAnalysis(data)))
    assert (
        "| Test 1 − macro F1 over rank r and learning rate" in said
        and "| 1 − macro F1 over effective parameters" in said
    )
