"""What is drawn of a sweep: its axes and panels, ticks, maps and their contour, capacities, facets."""

import itertools
import json
import re

import numpy as np
import pyarrow as pa
import pytest

from flatshift.experiments.report import formats
from flatshift.experiments.report.chapters.sweep import sweep_sections
from flatshift.experiments.report.charts import heat_map
from flatshift.experiments.report.charts.curve import capacity_charts
from flatshift.experiments.report.charts.facets import LineSeries, axis_scale, facet_chart
from flatshift.experiments.results.analysis import SweepAnalysis, main_axis, plotted_axes
from flatshift.experiments.results.run import read_run
from flatshift.experiments.results.table import SweepTable
from flatshift.experiments.statistics.intervals import Interval
from flatshift.outcome import summarize_sweep
from tests.support import report_runs
from tests.support.sweep_tables import cells, mean_at, rows, words


def test_the_axis_of_curves_is_the_rank_and_panels_are_the_rest(tmp_path):
    table = [
        {**row, "data.train.limit": lim, "regularizer.kind": kind}
        for row in rows({1: 0.5, 2: 0.4})
        for lim in (5, 6, 7)
        for kind in ("plain", "ggpo")
    ]
    data = cells(tmp_path / "s", table, {"regularizer.kind": [], "data.train.limit": [], "adapter.rank": []})
    assert main_axis(data) == "adapter.rank" and plotted_axes(data) == ["adapter.rank", "data.train.limit"]
    ranks = SweepAnalysis(data).directions[0]
    assert len(ranks.drawn) == ranks.total == 6
    assert {tuple(sorted(w)) for w in ranks.drawn} == {("data.train.limit", "regularizer.kind")}


@pytest.mark.parametrize(("count", "judged"), [(39, 39), (60, 6)])
def test_of_many_settings_some_are_drawn_and_as_long_as_it_lasts_all_are_judged(tmp_path, count, judged):
    many = [{**row, "optimizer.lr": i * 1e-3} for row in rows({1: 0.5, 2: 0.4}) for i in range(1, count + 1)]
    data = cells(tmp_path / "m", many, {"optimizer.lr": [], "adapter.rank": []})
    ranks = SweepAnalysis(data).directions[0]
    assert (ranks.total, len(ranks.settings), len(ranks.drawn)) == (count, judged, 6)
    assert ranks.drawn[0]["optimizer.lr"] == 0.001 and ranks.drawn[-1]["optimizer.lr"] == count / 1000


def test_every_regularizer_is_drawn_at_the_same_rates(tmp_path):
    """Evenly chosen places of a product fall on a few of its words; a page once left out a whole arm."""
    kinds = ("plain", "ggpo", "mgpo")
    table = [
        {**row, "optimizer.lr": lr, "regularizer": kind}
        for row in rows({1: 0.5, 2: 0.4})
        for lr in (1e-3, 3e-3, 1e-2, 3e-2)
        for kind in kinds
    ]
    data = cells(tmp_path / "s", table, {"adapter.rank": [], "optimizer.lr": [], "regularizer": list(kinds)})
    analysis = SweepAnalysis(data)
    drawn = analysis.directions[0].drawn
    assert [(w["optimizer.lr"], w["regularizer"]) for w in drawn] == [(lr, k) for lr in (1e-3, 3e-2) for k in kinds]
    (notes,) = [b for b in sweep_sections(data, analysis)[1].blocks if b.kind == "notes"]
    assert "6 of 12 settings of the other axes are drawn" in " ".join(notes.sentences)


def test_words_stand_in_small_panels_in_the_order_of_the_grid():
    """Not in the order of a set, which changes from process to process: the same files give the same page."""
    words = ["plain", "ggpo", "mgpo", "sam", "bar"]
    points = [(word, Interval(0.1 * i, None, None, 1)) for i, word in enumerate(words)]
    chart = facet_chart(
        [("a", [LineSeries("test", "blue", points)])],
        "regularizer",
        columns=1,
        y="e",
        name="n",
        title="t",
        caption="c",
    )
    places = [chart.raw.index(f">{word}<") for word in words]
    assert places == sorted(places)


def test_settings_are_counted_also_where_their_product_is_beyond_all_integers():
    axes = [f"a.{i}" for i in range(10)]
    columns = {axis: list(range(200)) for axis in axes}
    table = SweepTable(pa.table({**columns, "seed": [0] * 200, "test.error": [0.5] * 199 + [None]}), axes)
    found = table.reach("test.error", "a.0")
    assert len(found) == 199 and found[3] == ({axis: 3 for axis in axes[1:]}, 1)
    few = SweepTable(table.table, axes[:2])
    assert few.reach("test.error", "a.0") == [({"a.1": i}, 1) for i in range(199)]
    assert SweepTable(table.table, axes[:1]).reach("test.error", "a.0") == [({}, 199)]


def test_words_as_axis_and_one_seed(tmp_path):
    table = rows({"plain": 0.5, "ggpo": 0.4}, seeds=1, axis="regularizer.kind")
    data = cells(tmp_path / "s", table, {"regularizer.kind": ["plain", "ggpo"]})
    sections = sweep_sections(data, SweepAnalysis(data))
    charts = [c for s in sections for b in s.blocks if b.kind == "figures" for c in b.charts]
    assert "One seed" in charts[0].caption and ">plain<" in charts[0].raw and not charts[0].verdict


@pytest.mark.parametrize(
    ("values", "width", "shown"),
    [
        ((1, 2, 4, 8), 400, (1, 2, 4, 8)),
        ((1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 128), 200, (1, 2, 4, 8, 16, 32, 64, 128)),
        ((1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 128), 80, (1, 4, 16, 64)),
        ((0.0, 0.1, 0.2), 300, (0.0, 0.1, 0.2)),
    ],
)
def test_ticks_are_round_values_that_fit(values, width, shown):
    place = axis_scale("adapter.rank", values)
    assert tuple(place.ticks(width)) == shown
    assert place.log == (values[0] > 0)
    if place.log:
        assert place.at[4] - place.at[2] == pytest.approx(place.at[2] - place.at[1])


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (16, "16"),
        (20000, "20,000"),
        (0.0005, "0.0005"),
        (2e-5, "0.00002"),
        (0.1 + 0.2, "0.3"),
        (None, "none"),
        (-1, "−1"),
    ],
)
def test_axis_values_are_plain_digits(value, shown):
    assert formats.axis_value(value) == shown


def grid_table(train):
    """A table over rank and step with this mean train error, two seeds."""
    found = []
    for (j, row), seed in itertools.product(enumerate(train), (0, 1)):
        for i, value in enumerate(row):
            found.append(
                {"adapter.rank": 2**j, "step": 4**i, "seed": seed, "train.error": value, "test.error": 0.5 + value / 9}
            )
    names = list(found[0])
    return SweepTable(pa.table({n: [r[n] for r in found] for n in names}), ("adapter.rank", "step"))


def test_maps_share_a_scale_and_draw_the_threshold_only_where_there_is_one():
    both = grid_table([[0.9, 0.5, 0.2], [0.8, 0.05, 0.0], [0.3, 0.0, 0.0]])
    charts = heat_map.heat_maps(both, "step", "adapter.rank", {}, ("test.error", "train.error"), name="m", epsilon=0.1)
    assert [c.name for c in charts] == ["m-test-error", "m-train-error"]
    assert all('id="epsilon' in c.raw and "train error = 0.1" in c.caption for c in charts)
    squared = SweepTable(both.table.append_column("train.unexplained", both.table["test.error"]), both.axes)
    (chart,) = heat_map.heat_maps(squared, "step", "adapter.rank", {}, ("train.error",), name="m", epsilon=0.52)
    assert 'id="epsilon' in chart.raw and "Line: train unexplained = 0.52" in chart.caption, (
        "of its labels, not classes"
    )
    above = grid_table([[0.9, 0.5, 0.2], [0.8, 0.15, 0.2], [0.3, 0.2, 0.2]])
    charts = heat_map.heat_maps(above, "step", "adapter.rank", {}, ("test.error",), name="m", epsilon=0.1)
    assert len(charts) == 1 and "epsilon" not in charts[0].raw and "train error =" not in charts[0].caption


def test_the_contour_runs_between_the_cells_on_either_side(monkeypatch):
    from matplotlib.figure import Figure

    ax = Figure().add_subplot()
    train = np.array([[0.3, 0.3, 0.0], [0.3, 0.0, 0.0]])
    assert heat_map._draw_contour(ax, train, 0.1)
    points = np.concatenate([path.vertices for path in ax.collections[0].get_paths()])
    # On the lower row between the second and third centre, at two thirds of the way down from 0.3 to 0.
    lower = points[np.isclose(points[:, 1], 0.0)]
    np.testing.assert_allclose(lower[:, 0], 1.5 + 2 / 3, atol=1e-9)
    upper = points[np.isclose(points[:, 1], 2.0)]
    np.testing.assert_allclose(upper[:, 0], 0.5 + 2 / 3, atol=1e-9)


def test_errors_over_capacity_are_joined_in_the_order_of_the_rank(tmp_path):
    table = rows({1: 0.5, 2: 0.4, 4: 0.3, 8: 0.35})
    used = {1: 100.0, 2: 900.0, 4: 400.0, 8: 250.0}  # capacity turns back beyond rank 2
    for row in table:
        row["effective_params"] = used[row["adapter.rank"]] * (1 + 0.01 * row["seed"])
    data = cells(tmp_path / "s", table, {"adapter.rank": [1, 2, 4, 8]})
    (fold, bought), said = capacity_charts(data, "adapter.rank", SweepAnalysis(data))
    assert not said, "all are drawn"
    assert "effective parameters" in fold.title and "along rank" in bought.title
    means = [mean_at(data, "effective_params", {"adapter.rank": r}).value for r in (1, 2, 4, 8)]
    from flatshift.experiments.report import figure

    drawn = []
    original = figure.Canvas.axes

    def axes(self, **margins):
        drawn.append(original(self, **margins))
        return drawn[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figure.Canvas, "axes", axes)
        capacity_charts(data, "adapter.rank", SweepAnalysis(data))
    line = max(drawn[0].lines, key=lambda ln: len(ln.get_xdata()))
    np.testing.assert_allclose(line.get_xdata(), means)
    level = [ln for ln in drawn[0].lines if len(set(ln.get_ydata())) == 1 and len(ln.get_xdata()) == 2]
    assert len(level) == 4  # a horizontal interval for each rank
    first = mean_at(data, "effective_params", {"adapter.rank": 1})
    np.testing.assert_allclose(level[0].get_xdata(), [first.low, first.high])


def test_facets_have_one_panel_per_setting_and_a_log_axis_where_it_is_needed():
    def line(top):
        return LineSeries("a", "blue", [(v, Interval(top / v, None, None, 1)) for v in (1, 2, 4, 100)])

    shared = dict(columns=2, y="loss (nats)", name="f", title="t", caption="c", rule=1.0)
    chart = facet_chart([(f"lr = {i}", [line(1.0 + i)]) for i in range(3)], "step", **shared)
    assert len(re.findall(r"M \S+ \S+", chart.raw.partition('id="rule"')[2].partition("</g>")[0])) == 3
    assert "(log scale)" in chart.raw and ">lr = 2<" in chart.raw
    flat = facet_chart(
        [("p", [LineSeries("a", "blue", [(1, Interval(1, None, None, 1)), (2, Interval(2, None, None, 1))])])],
        "step",
        **shared,
    )
    assert "loss (nats) (log" not in flat.raw
    assert facet_chart([("p", [LineSeries("a", "blue", [])])], "step", **shared) is None


def test_long_words_leave_a_map_its_room(tmp_path):
    layers = [f"q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, {last}_proj" for last in ("down", "gown")]
    short = formats.shorten_labels([*layers, "all"], 29)
    assert short == ["q_proj, k_proj…roj, down_proj", "q_proj, k_proj…roj, gown_proj", "all"]
    alike = [f"{'a' * 30}{middle}{'a' * 30}" for middle in "xy"]
    assert [text[:4] for text in formats.shorten_labels(alike, 29)] == ["1: a", "2: a"]
    table = [
        {**row, "adapter.targets": targets, "cell": f"{targets}-{row['cell']}"}
        for targets in layers
        for row in rows({1: 0.5, 2: 0.4, 4: 0.3})
    ]
    data = cells(tmp_path / "s", table, {"adapter.rank": [1, 2, 4], "adapter.targets": layers})
    charts = [
        c for s in sweep_sections(data, SweepAnalysis(data)) for b in s.blocks if b.kind == "figures" for c in b.charts
    ]
    assert any("down_proj</text>" in c.raw for c in charts if c.name.startswith("sweep-map"))


def test_losses_have_the_unit_of_the_task(tmp_path):
    """As a run's page: a squared loss is in no nats, on the page, in the evidence and along the steps."""
    report_runs.laboratory(tmp_path / "s", rates=(0.002,), kinds=("plain",), seeds=5)
    for task, unit in (("classify, loss: squared", "squared error per example"), ("classify", "nats per example")):
        (tmp_path / "s" / "recipe.resolved.yaml").write_text(f"task: {{kind: {task}}}\n", encoding="utf-8")
        data = read_run(tmp_path / "s").sweep
        sections = sweep_sections(data, SweepAnalysis(data))
        charts = [c for s in sections for b in s.blocks if b.kind == "figures" for c in b.charts]
        drawn = {c.name: c.raw for c in charts}
        assert (
            f"loss ({unit})" in drawn["sweep-rank-loss-0"]
            and f"training loss ({unit})" in drawn["sweep-steps-train-loss"]
        )
    table = rows({1: 0.5, 2: 0.4, 4: 0.3}, seeds=5, spread=0.01)
    for row in table:
        row["test.loss"] = row.pop("test.error")
    assert cells(tmp_path / "r", table, {"adapter.rank": [1, 2, 4]}) is not None
    (tmp_path / "r" / "recipe.resolved.yaml").write_text("task: {kind: regress}\n", encoding="utf-8")
    said = words(sweep_sections(data := read_run(tmp_path / "r").sweep, SweepAnalysis(data)))
    assert "to 0.305 squared error per example at rank 4" in said and "nats" not in said
    assert "nats" not in json.dumps(summarize_sweep(tmp_path / "r"))
