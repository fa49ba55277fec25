"""What the charts are computed from: the map, formats and the figure helper."""

import json
import math
import warnings
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from flatshift.experiments.report import formats
from flatshift.experiments.report.figure import PALETTE, RAMP, Canvas, colour, spread_apart
from flatshift.experiments.results.analysis import sample_evenly
from flatshift.experiments.select.outputs import project

SVG = "{http://www.w3.org/2000/svg}"


def test_project_is_the_balanced_principal_plane():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(500, 6)) * np.array([1, 1, 1, 1, 1, 0.1])
    Y = rng.normal(size=(40, 6)) * 0.1 + np.array([9, 0, 0, 0, 0, 0])
    table = project(X, Y, [3, 5, 7], seed=0, max_points=200)
    kinds = np.array(table.column("kind").to_pylist())
    assert [int((kinds == k).sum()) for k in ("pool", "selection", "target")] == [157, 3, 40]
    xy = np.column_stack([table.column("x").to_numpy(), table.column("y").to_numpy()])
    # The plane's first axis separates the target, however few its rows are.
    assert xy[kinds == "target", 0].min() > xy[kinds == "pool", 0].max()
    centre = (X.mean(0) + Y.mean(0)) / 2
    cov = ((X - centre).T @ (X - centre) / 500 + (Y - centre).T @ (Y - centre) / 40) / 2
    values = np.linalg.eigvalsh(cov)[::-1]
    explained = json.loads(table.schema.metadata[b"flatshift.explained"])
    np.testing.assert_allclose(explained, values[:2] / values.sum(), atol=1e-6)
    shown = np.linalg.norm(xy[kinds == "selection"], axis=1)
    assert (shown <= np.linalg.norm(X[[3, 5, 7]] - centre, axis=1) + 1e-5).all()


def test_project_masks_seeds_and_narrow_features():
    rng = np.random.default_rng(1)
    X, Y = rng.normal(size=(300, 3)), rng.normal(size=(20, 3))
    mask = np.zeros(300, dtype=bool)
    mask[[1, 2, 9]] = True
    first = project(X, Y, mask, seed=4, max_points=100)
    assert first.equals(project(X, Y, [9, 1, 2], seed=4, max_points=100))
    assert not first.equals(project(X, Y, mask, seed=5, max_points=100))
    assert first.num_rows == 100
    assert project(X[:, :1], Y[:, :1], [0], seed=0).num_rows == 320
    assert project(X, Y[:0], [0], seed=0).num_rows == 300
    with pytest.raises(ValueError, match="one d"):
        project(X, Y[:, :2], [0], seed=0)


@pytest.mark.parametrize("factor", [3e38, 1e300])
def test_project_draws_features_of_any_size(factor: float) -> None:
    rng = np.random.default_rng(1)
    X, Y = rng.normal(size=(300, 3)), rng.normal(size=(20, 3))
    X[7] *= factor / np.abs(X[7]).max()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table = project(X, Y, [0, 1], seed=0)
    assert np.isfinite(table.column("x").to_numpy()).all() and np.isfinite(table.column("y").to_numpy()).all()


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"),
        (1234.5, "1,234"),
        (0.04567, "0.0457"),
        (-2.5, "−2.50"),
        (3.1e-10, "3.1\u202f×\u202f10⁻¹⁰"),
        (2e12, "2.0\u202f×\u202f10¹²"),
        (math.nan, "NaN"),
        (-math.inf, "−∞"),
        (None, "–"),
        (20000, "20,000"),
    ],
)
def test_number(value, shown):
    assert formats.number(value) == shown


def test_estimates_line_up():
    assert formats.estimate(54.321, 53.1, 55.6) == ("54.3", "53.1 to 55.6")
    assert formats.estimate(-0.0312, -0.05, -0.012, plus=True) == ("−0.031", "−0.050 to −0.012")
    large = formats.estimate(3_728_733_645.0, 409_459_944.0, 1.002e10)
    assert large == ("3.7\u202f×\u202f10⁹", "409,459,944 to 1.0\u202f×\u202f10¹⁰"), "a word of a foreign language"
    small = formats.estimate(3.2e-7, 1.1e-7, 5.3e-7)
    assert small == ("3.2\u202f×\u202f10⁻⁷", "1.1\u202f×\u202f10⁻⁷ to 5.3\u202f×\u202f10⁻⁷")
    assert formats.estimate(5e-4, 4.999e-4, 5.001e-4)[0] == "5.0000\u202f×\u202f10⁻⁴", (
        "as many digits as tell them apart"
    )
    assert formats.estimate(0.5, 0.4999999, 0.5000001)[0] == "0.500000" and formats.estimate(0.0, 0.0, 0.0)[0] == "0.00"
    assert formats.estimate(0.5, 0.5, 0.5)[1] == ""
    assert formats.estimate(88.2)[1] == "" and formats.estimate(math.nan, 0, 1) == ("NaN", "")
    assert formats.seconds(3725) == "1\u00a0h 02\u00a0min" and formats.percent(0.0667) == "6.7\u00a0%"


def test_spread_keeps_order_and_gap():
    placed = spread_apart([1.0, 1.1, 0.9, 5.0], 1.0)
    order = np.argsort([1.0, 1.1, 0.9, 5.0])
    assert (np.diff(np.array(placed)[order]) >= 1.0 - 1e-6).all()
    assert spread_apart([0.0, 10.0], 1.0) == [0.0, 10.0]


def test_every_light_colour_stands_for_one_token():
    assert len({light for light, _ in PALETTE.values()}) == len(PALETTE)


def luminance(text):
    channels = [int(text[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [0, 1])
@pytest.mark.parametrize("token", ["ink", "muted", "blue", "orange", "green", "purple", "amber", *RAMP])
def test_text_colours_have_contrast(theme, token):
    pair = sorted((luminance(PALETTE[token][theme]), luminance(PALETTE["surface"][theme])))
    ratio = (pair[1] + 0.05) / (pair[0] + 0.05)
    assert ratio >= 4.5, ratio  # WCAG AA for text


@pytest.mark.parametrize("theme", [0, 1])
def test_the_ramp_is_ordered_by_luminance_alone(theme):
    values = [luminance(PALETTE[token][theme]) for token in RAMP]
    assert values == sorted(values) and len(set(values)) == len(RAMP)
    assert sample_evenly(RAMP, 1)[0] in RAMP and sample_evenly(RAMP, 2) == [RAMP[0], RAMP[-1]]
    assert sample_evenly(RAMP, len(RAMP)) == list(RAMP)


@pytest.mark.parametrize("text", ["a\x0bb", "a\x00b", "a\x1fb", "a\ufffeb", "新闻 κόσμος"])
def test_texts_that_no_xml_and_no_font_holds_are_drawn(text):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Canvas(300, 200) as canvas:
            canvas.axes(y=text).set_xticks([0], [text])
            chart = canvas.chart("c", title=text, caption="\ud83d")
    shown = text if "κ" in text else "a\ufffdb"
    assert chart.inline("p").count(shown) == 3 and ET.fromstring(chart.standalone).findtext(f"{SVG}desc") == "\ufffd"


def test_texts_that_look_like_colours_or_mathematics_stay_texts():
    with Canvas(300, 200) as canvas:
        ax = canvas.axes(y=f"{colour('blue')} $x_", x="a < b & c")
        ax.plot([0, 1], [0, 1], color=colour("blue"))
        chart = canvas.chart("c", title="<t>", caption="d")
    inline = chart.inline("p")
    assert f"{colour('blue')} $x_" in inline and "stroke: var(--blue)" in inline
    assert "a &lt; b &amp; c" in inline and "&lt;t&gt;" in inline
    assert "<style" not in inline and "font-family" not in inline
