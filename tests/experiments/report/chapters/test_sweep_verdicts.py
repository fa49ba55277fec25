"""What is said of a sweep: verdicts, complexities, what stands beside what, failures, and tables that are broken."""

import json

import pytest

from flatshift.experiments.report import formats
from flatshift.experiments.report.chapters.sweep import sweep_finding, sweep_sections, sweep_tiles
from flatshift.experiments.report.charts.curve import curve_chart, train_test_series
from flatshift.experiments.report.page import build_report
from flatshift.experiments.results.analysis import SweepAnalysis, compare_settings
from flatshift.experiments.results.run import read_run
from flatshift.experiments.statistics.peak import plan_looks
from tests.support import report_runs
from tests.support.sweep_tables import cells, rows, words


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweeps") / "laboratory"
    report_runs.laboratory(folder, rates=(0.002,), seeds=8, bump=0.2)
    return folder


def test_the_page_of_a_laboratory(laboratory, tmp_path):
    text = build_report([laboratory], out=tmp_path / "report.html").read_text(encoding="utf-8")
    for title in ("Model-wise: along rank r", "Epoch-wise: along optimizer steps", "Maps", "Effective parameters"):
        assert f"<h3>{title}</h3>" in text, title
    for title in ("Memorised labels", "Training dynamics"):
        assert f"<h3>{title}</h3>" in text, title
    for figure in ("Training loss along the steps", "Preconditioned sharpness over its stability threshold"):
        assert figure in text
    assert "curves.parquet next to this page" in text and "flatshift 0.3.0 abc123" in text


def test_a_planted_peak_is_found_shaded_and_put_into_words(laboratory):
    data = read_run(laboratory).sweep
    analysis = SweepAnalysis(data)
    judged = [j for j in analysis.curves if j.axis == "adapter.rank"]
    assert len(judged) == 2 and all(j.verdict.peak.rejected and 8 in j.location for j in judged)
    direction = next(d for d in analysis.directions if d.axis == "adapter.rank")
    lines = train_test_series(data, "error")
    where = direction.settings[0]
    shared = dict(name="x", title="t", unit="error (share wrong)")
    chart = curve_chart(data, "adapter.rank", where, lines, analysed=judged[0], **shared)
    assert 'id="location"' in chart.raw and "Shaded" in chart.caption and chart.verdict == judged[0].verdict.kind
    assert any("80 %" in sentence for sentence in chart.evidence)
    assert 'id="location"' not in curve_chart(data, "adapter.rank", where, lines, **shared).raw
    said = words(sweep_sections(data, analysis))
    asked = len(analysis.curves)
    assert asked > 2 and f"{asked} verdicts were asked" in said
    assert judged[0].verdict.kind in sweep_finding(data, analysis)


def test_a_curve_without_a_peak_gets_no_location(tmp_path):
    report_runs.laboratory(tmp_path / "s", rates=(0.002,), kinds=("plain",), seeds=8, bump=0.0)
    data = read_run(tmp_path / "s").sweep
    (judged,) = [j for j in SweepAnalysis(data).curves if j.axis == "adapter.rank"]
    assert not judged.verdict.peak.rejected and judged.location == ()
    assert judged.verdict.kind not in ("double descent", "instability", "mixed")


def test_effective_model_complexity_from_a_curve_and_from_a_search(tmp_path):
    train = {100: 0.0, 200: 0.05, 400: 0.15, 800: 0.4}
    table = [
        {**row, "adapter.rank": rank, "train.error": min(row["train.error"] * scale + 0.001 * row["seed"], 1.0)}
        for rank, scale in ((4, 1.0), (64, 0.01))
        for row in rows(train, axis="data.train.limit", split="train", spread=0.0)
    ]
    grid = {"data.train.limit": [*map(str, train)], "adapter.rank": ["4", "64"]}
    cells(tmp_path / "s", table, grid)
    point = {"point": {"adapter.rank": 4}, "emc": 1234.5, "low": None, "high": 1500.2, "side": "inside"}
    tried = [{"rows": n, "train_error": [0.1], "cells": ["x"]} for n in (1000, 2000)]
    search = {"format": 1, "key": "data.train.limit", "points": [{**point, "tried": tried}]}
    (tmp_path / "s" / "emc.json").write_text(json.dumps(search))
    data = read_run(tmp_path / "s").sweep
    sections = sweep_sections(data, SweepAnalysis(data))
    tables = [b for s in sections for b in s.blocks if b.kind == "table" and "complexity" in b.columns[1]]
    searched, curve = tables
    assert list(searched.rows) == [["rank = 4", "1,234 (below 1,000 to 1,500)", "1,000, 2,000"]]
    # Mean train error 0.0515 at 200 and 0.1515 at 400: crosses 0.1 at 48.5 % of the way on a log axis.
    expected = 200 * 2 ** ((0.1 - 0.0515) / 0.1)
    assert curve.rows[0][0] == "rank = 4" and curve.rows[0][1].startswith(f"{round(expected)} (")
    assert curve.rows[1][:2] == ["rank = 64", "at least 800"]


def test_a_search_with_its_own_epsilon_is_shown_with_that_one(tmp_path):
    table = rows({8: 0.3, 12: 0.6}, axis="data.train.limit", split="train", seeds=2)
    point = {"point": {}, "emc": None, "low": None, "high": None, "side": "beyond"}
    tried = [{"rows": n, "train_error": [0.1], "cells": ["x"]} for n in (8, 12)]
    emc = json.dumps({"format": 1, "key": "data.train.limit", "epsilon": 0.9, "points": [{**point, "tried": tried}]})
    search = {"key": "data.train.limit", "low": 8, "high": 12, "epsilon": 0.9}
    for name, plan in (("of the plan", {"bisection": search}), ("of emc.json", {})):
        cells(tmp_path / name, table, {"data.train.limit": ["8", "12"]}, **plan)
        (tmp_path / name / "emc.json").write_text(emc)
        data = read_run(tmp_path / name).sweep
        said = words(sections := sweep_sections(data, SweepAnalysis(data)))
        tables = [b for s in sections for b in s.blocks if b.kind == "table" and "complexity" in b.columns[1]]
        assert [t.rows[0][1] for t in tables] == ["at least 12", "at least 12"]
        assert all("error of 0.9" in t.caption for t in tables)
        assert "at most 0.9 from the smallest" in said and "nothing interpolates" not in said
        assert "crosses 0.1" not in said and "error of 0.1" not in said


def test_a_regularizer_is_set_beside_the_plain_arm_on_the_same_seeds(tmp_path):
    """A peak of 0.2 at rank 8 that ggpo has lost; seed s moves both arms by nearly the same amount."""
    plain = {1: 0.3, 4: 0.3, 8: 0.5, 16: 0.2}
    arms = {"plain": plain, "ggpo": {**plain, 8: 0.3}}
    table = [
        {**row, "regularizer": kind, "test.error": row["test.error"] + 0.001 * ((row["seed"] * shift + i) % 3)}
        for (kind, curve), shift in zip(arms.items(), (7, 5), strict=True)
        for i, row in enumerate(rows(curve, seeds=5, spread=0.02))
    ]
    data = cells(tmp_path / "s", table, {"adapter.rank": [*map(str, plain)], "regularizer": [*arms]})
    sections = sweep_sections(data, SweepAnalysis(data))
    (found,) = [b for s in sections for b in s.blocks if b.kind == "table" and b.columns[1] == "vs."]
    ((setting, base, mean, p, at, height, peak_p),) = found.rows
    assert (setting, base, at) == ("regularizer = ggpo", "plain", "8")
    assert mean.startswith("−0.05") and height.startswith("−0.19") and float(p) < 0.001 and float(peak_p) < 0.001
    assert "regularizer = ggpo vs. plain: It removes the peak at rank 8" in words(sections)


def test_tests_at_the_level_of_a_look_are_printed_with_it(tmp_path):
    """The last of five looks up to 20 seeds tests at 0.33 %: verdicts, heights, and arms beside each other."""
    curve = {1: 0.5, 4: 0.42, 16: 0.34, 64: 0.3}
    table = [
        {**row, "regularizer": kind, "test.error": row["test.error"] + 0.001 * ((row["seed"] * shift + i) % 7)}
        for kind, shift in (("plain", 7), ("ggpo", 5))
        for i, row in enumerate(rows(curve, seeds=8, spread=0.001))
    ]
    plan = {"level": plan_looks(20)[-1].level}
    data = cells(tmp_path / "s", table, {"adapter.rank": [*map(str, curve)], "regularizer": ["plain", "ggpo"]}, **plan)
    said = words(sweep_sections(data, SweepAnalysis(data)))
    for text in ("at the 0.33% level", "one-sided 99.67% limit", "a peak test at 0.33%", "with 99.67 % intervals"):
        assert text in said, text
    assert "0% level" not in said.replace("0.33% level", "") and "100% limit" not in said
    where = {"regularizer": "ggpo"}, {"regularizer": "plain"}
    wide, narrow = (
        compare_settings(data, "adapter.rank", *where, test="test.error", level=level)[1]
        for level in (data.level, 0.05)
    )
    assert {test.level for test in wide.tests} == {data.level} and wide.mean.low < narrow.mean.low
    (beside,) = [
        b for s in sweep_sections(data, SweepAnalysis(data)) for b in s.blocks if "vs." in getattr(b, "columns", ())
    ]
    assert beside.rows[0][2] == formats.with_interval(wide.mean, plus=True)


def test_what_is_no_axis_of_capacity_has_no_threshold_to_compare(tmp_path):
    table = [
        {**row, "regularizer": kind, "train.error": 0.05 + row["data.label_noise"]}
        for kind in ("plain", "ggpo")
        for row in rows({0.0: 0.3, 0.1: 0.4, 0.2: 0.45}, axis="data.label_noise", seeds=5, spread=0.01)
    ]
    data = cells(tmp_path / "s", table, {"data.label_noise": [], "regularizer": ["plain", "ggpo"]})
    said = words(sweep_sections(data, SweepAnalysis(data)))
    assert (
        "regularizer = ggpo vs. plain" in said
        and "hreshold cannot" not in said
        and "interpolation threshold:" not in said
    )


def test_a_squared_loss_has_the_threshold_of_its_labels(tmp_path):
    table = rows({1: 0.5, 2: 0.4, 4: 0.3, 8: 0.2}, seeds=5, spread=0.01)
    for row in table:
        row |= {"train.error": 0.01, "train.unexplained": 0.8 / row["adapter.rank"] ** 1.5}
    data = cells(tmp_path / "s", table, {"adapter.rank": [1, 2, 4, 8]})
    sections = sweep_sections(data, SweepAnalysis(data))
    charts = [c for s in sections for b in s.blocks if b.kind == "figures" for c in b.charts]
    said = words(sections) + "".join(tile.note for tile in sweep_tiles(data, SweepAnalysis(data)))
    assert "train unexplained = 0.1" in charts[0].raw and "train error = 0.1" not in charts[0].raw
    named = "the unexplained share of the training labels crosses 0.1"
    assert said.count(f"mean {named[4:]}") == 2 and f"at which {named}" in said
    for row in table:
        row["train.unexplained"] = 0.9
    data = cells(tmp_path / "none", table, {"adapter.rank": [1, 2, 4, 8]})
    said = words(sweep_sections(data, SweepAnalysis(data)))
    assert "Unexplained share of the training labels stays above 0.1" in said and "rain error stays" not in said


def test_failed_seeds_are_no_seeds_of_a_complexity(tmp_path):
    table = rows({100: 0.0, 200: 0.05, 400: 0.4}, axis="data.train.limit", split="train", seeds=5)
    for row in table[-2:]:
        row |= {"status": "failed", "train.error": None}
    data = cells(tmp_path / "s", table, {"data.train.limit": [100, 200, 400]})
    found = [b for s in sweep_sections(data, SweepAnalysis(data)) for b in s.blocks if b.kind == "table"]
    (complexity,) = [b for b in found if "complexity" in b.columns[1]]
    assert complexity.rows[0][2] == "3"


def test_too_few_seeds_are_said(tmp_path):
    report_runs.sweep(tmp_path / "s", seeds=2)
    data = read_run(tmp_path / "s").sweep
    analysis = SweepAnalysis(data)
    (judged,) = analysis.curves
    assert judged.verdict.kind == "undecided" and data.trace is None
    said = sweep_finding(data, analysis)
    assert (
        "needs 5 seeds, but rank = " in said and "is lower than rank = " in said and "seed" in said.rpartition(",")[2]
    )
    said = words(sweep_sections(data, analysis))
    assert "sweep with --seeds 6" in said and "seeds failed at" in said and "Training dynamics" not in said
    chart = next(c for s in sweep_sections(data, analysis) for b in s.blocks if b.kind == "figures" for c in b.charts)
    assert chart.verdict == "undecided"  # the curve is shown all the same


def test_failures_versions_and_long_tables(tmp_path):
    table = [
        {**row, "cell": f"{i}-{row['cell']}", "optimizer.lr": i * 1e-4, "flatshift": "0.2.0" if i < 5 else "0.3.0"}
        for i in range(1, 121)
        for row in rows({1: 0.5, 2: 0.4}, seeds=1)
    ]
    for row in table[:60]:
        row |= {"status": "failed", "reason": f"<b>out of rows {row['cell']}</b>", "test.error": None}
    data = cells(tmp_path / "s", table, {"adapter.rank": [], "optimizer.lr": []})
    sections = sweep_sections(data, SweepAnalysis(data))
    said = words(sections)
    assert "60 cells failed; the first 50 are listed" in said and "57 more cells failed" in said
    assert "different code: 0.3.0 (232 cells), 0.2.0 (8 cells)" in said
    assert "The first 200 of 240 settings" in said
    text = build_report([tmp_path / "s"], out=tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<b>out of rows" not in text and "&lt;b&gt;out of rows" in text


def test_an_axis_that_cannot_show_a_peak_is_named(tmp_path):
    table = rows({1: 0.5, 2: 0.4, 4: 0.3})
    for row in table:
        row["train.error"] = 0.05
    data = cells(tmp_path / "s", table, {"adapter.rank": [1, 2, 4]})
    said = words(sweep_sections(data, SweepAnalysis(data)))
    assert "this axis cannot show an interpolation peak" in said and "all points fitted" in said
    both = [{**row, "optimizer.lr": 0.1} for row in table]
    both += [{**row, "optimizer.lr": 0.2, "train.error": 0.5} for row in table]
    data = cells(tmp_path / "b", both, {"adapter.rank": [1, 2, 4], "optimizer.lr": [0.1, 0.2]})
    said = words(sweep_sections(data, SweepAnalysis(data)))
    assert "fewer steps (lr = 0.1)" in said and "no peak there (lr = 0.2)" in said and "no point fitted" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not valid JSON; delete it and run the sweep again"),
        ("[1]", "not a JSON object .* delete it and run the sweep again"),
        ('{"format": 2}', "has no `grid`; run the sweep again"),
        ('{"format": 99, "grid": {}}', "has format 99, and this flatshift .* knows 2;"),
        ('{"format": "two", "grid": {}}', "has format two"),
    ],
)
def test_a_plan_that_cannot_be_read_is_told_what_helps(tmp_path, text, said):
    from flatshift.finetune.errors import UserError

    cells(tmp_path / "s", rows({1: 0.5, 2: 0.4}), None)
    (tmp_path / "s" / "sweep.json").write_text(text)
    with pytest.raises(UserError, match=said):
        _ = read_run(tmp_path / "s").sweep


@pytest.mark.parametrize("name", ["cells.parquet", "curves.parquet", "sweep.json", "emc.json"])
def test_a_broken_table_is_named(tmp_path, name):
    from flatshift.finetune.errors import UserError

    report_runs.laboratory(tmp_path / "s", ranks=(1, 2), rates=(0.002,), kinds=("plain",), seeds=1)
    (tmp_path / "s" / name).write_text("no table")
    with pytest.raises(UserError, match=name):
        build_report([tmp_path / "s"], out=tmp_path / "out.html")
