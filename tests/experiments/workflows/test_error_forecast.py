"""Forecasts against what they stand for: a naive refit for each row left out, and real training of a linear model."""

from __future__ import annotations

import csv
import html
import json
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from flatshift.api import draw_report
from flatshift.cli import run
from flatshift.experiments.recipe import load_recipe
from flatshift.experiments.recipe.tree import from_override
from flatshift.experiments.report.chapters.sweep import forecast_sentences
from flatshift.experiments.results.run import list_directories
from flatshift.experiments.results.sweep import write_cells
from flatshift.experiments.statistics.kernel import extrapolate, fastest_setting, kernel_fits
from flatshift.experiments.workflows import run_parts
from flatshift.experiments.workflows.error_forecast import forecast_into
from flatshift.experiments.workflows.train import train
from flatshift.finetune.errors import UserError


@pytest.mark.parametrize("ridge", [0.0, 0.4])
@pytest.mark.parametrize(("width", "repeated"), [(8, False), (60, False), (60, True)])
def test_leave_one_out_and_predictions_are_those_of_naive_refits(ridge, width, repeated):
    generator = np.random.default_rng(1)
    x, new = generator.standard_normal((20, width)), generator.standard_normal((7, width))
    if repeated:
        x[7] = x[3]  # with labels of its own: these two depend on one another, the others on none
    y = generator.standard_normal((20, 2))

    def naive(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.linalg.pinv(a) @ b if not ridge else np.linalg.solve(a.T @ a + ridge * np.eye(width), a.T @ b)

    (fit,) = kernel_fits(x @ x.T, new @ x.T, y, [ridge])
    np.testing.assert_allclose(fit.train, x @ naive(x, y), atol=1e-8)
    np.testing.assert_allclose(fit.test, new @ naive(x, y), atol=1e-8)
    for i in range(20):
        some = np.arange(20) != i
        np.testing.assert_allclose(fit.left_out[i], x[i] @ naive(x[some], y[some]), atol=1e-7)
    s = np.linalg.svd(x, compute_uv=False)
    s = s[s > 1e-9 * s[0]]
    assert fit.effective == pytest.approx((s**2 / (s**2 + ridge)).sum())


def test_a_learning_curve_is_carried_on_by_its_power_law():
    rows = [25, 50, 100, 200, 400]
    generator = np.random.default_rng(2)
    curve = 0.2 + 2.0 * np.array(rows) ** -0.5
    wanted = 2.0 * (900**-0.5 - 400**-0.5)
    inside = 0
    for _ in range(200):
        found = extrapolate(rows, curve + 0.004 * generator.standard_normal((5, 5)), 500)
        inside += found.low <= wanted + 0.004 * np.diff(generator.standard_normal(2))[0] <= found.high
    assert extrapolate(rows, curve + np.zeros((5, 1)), 500).value == pytest.approx(wanted, rel=0.02)
    assert 0.65 < inside / 200 < 0.95


def predict(resolved, out):
    return forecast_into(resolved, out, draw=draw_report, ranks=(), noises=(), draws=2, more=50, quiet=True)


SMALL = {"data.train.limit": 24, "train.batch_size": 24, "data.test.limit": 60, "train.max_length": 24}


def overrides(**more):
    return [from_override(key.replace("__", "."), str(value)) for key, value in {**SMALL, **more}.items()]


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_a_forecast_of_a_linear_model_is_what_training_it_comes_to(tmp_path: Path, decay):
    """The closed form of the kernel and the trainer's own update are two ways to the same weights."""
    settings = overrides(adapter__rank=24, optimizer__weight_decay=decay)
    resolved = load_recipe("positive-control", settings)
    predict(resolved, tmp_path / "forecast")
    trained = train(resolved, tmp_path / "run", quiet=True)
    with (tmp_path / "forecast" / "points.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["seed"] == "0" and row["data.train.limit"] == "24"]
    (row,) = [row for row in rows if float(row["optimizer.weight_decay"]) == decay]
    assert float(row["test.error"]) == pytest.approx(1 - trained["test"]["accuracy"]["value"], abs=0.02)
    assert float(row["train.unexplained"]) == pytest.approx(trained["train"]["unexplained"]["value"], abs=1e-3)
    assert float(row["test.loss"]) == pytest.approx(trained["test"]["loss"]["value"], rel=0.02)
    page = html.unescape((tmp_path / "forecast" / "report.html").read_text(encoding="utf-8"))
    document = json.loads((tmp_path / "forecast" / "forecast.json").read_text())
    assert "Predicted, nothing was trained" in page and document["draws"] == 2
    assert ("trained to the end" in page) == ("of the kernel's mean eigenvalue)" in page) == (not decay)
    assert "loss (squared error per example)" in page and "nats" not in page
    if decay:  # its own, and the only one that was solved for
        assert "and the recipe's weight decay (0.5); leave-one-out" in page
        assert "Weight decay is the ridge, the recipe's own." in page
        assert (document["own_decay"], document["best_decay"], document["end"]) == (0.5, 0.5, None)
        sentences = " ".join(forecast_sentences(document | {"threshold_rank": 12.0, "ranks": [8, 24]}))
        assert "expect a peak" not in sentences and "at the recipe's weight decay, as far" in sentences
    else:
        assert document["own_decay"] is None and document["end"] > 0


@pytest.mark.parametrize(
    ("recipe", "change", "sentence"),
    [
        ("language-model", {}, "has no fixed set of outputs; take classify or regress"),
        ("classify", {"adapter__dora": "true"}, "is not linear in its factors"),
        ("classify", {"adapter__start": "somewhere"}, "init, start and under begin away from B = 0"),
        ("positive-control", {"data__train__limit": 6}, "6 training and 60 held-out rows; it needs 10"),
    ],
)
def test_what_is_not_linear_is_refused(tmp_path: Path, recipe, change, sentence):
    settings = (
        overrides(**change)
        if recipe == "positive-control"
        else [from_override(key.replace("__", "."), value) for key, value in change.items()]
    )
    with pytest.raises(UserError, match=sentence):
        predict(load_recipe(recipe, settings), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_forecast_that_another_command_has_just_made_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    @contextmanager
    def lock_when_the_other_is_done(path):
        path.mkdir()
        (path / "forecast.json").write_text("{}")
        yield

    monkeypatch.setattr(run_parts, "exclusive_lock", lock_when_the_other_is_done)
    with pytest.raises(UserError, match="is not empty"):
        predict(load_recipe("positive-control", overrides()), tmp_path / "out")
    assert (tmp_path / "out" / "forecast.json").is_file()


def test_of_ranks_that_draws_cannot_tell_apart_the_one_that_trains_soonest_is_named():
    speeds = np.array([2.0, 16.0, 4.0])
    alike = np.array([[0.30, 0.32, 0.31], [0.34, 0.33, 0.33], [0.32, 0.31, 0.33]])
    assert fastest_setting(alike, speeds) == 1
    worse = alike + np.array([0, 0.1, 0])  # in every draw
    assert fastest_setting(worse, speeds) == 2
    assert fastest_setting(alike[:1], speeds) == 0, "one draw tells of no scatter: the least error"


def test_shares_of_wrong_labels_side_by_side_are_fitted_as_each_by_itself():
    r = np.random.default_rng(3)
    features, other, labels = (r.standard_normal(shape) for shape in ((12, 5), (7, 5), (12, 3)))
    both = kernel_fits(features @ features.T, other @ features.T, np.hstack([labels, -labels]), (0.0, 0.1))
    alone = kernel_fits(features @ features.T, other @ features.T, -labels, (0.0, 0.1))
    for one, whole in zip(alone, both, strict=True):
        part = whole.columns(slice(3, 6))
        for name in ("train", "test", "left_out"):
            np.testing.assert_allclose(getattr(part, name), getattr(one, name), rtol=1e-9)


def test_a_forecast_is_listed_as_one_and_not_pushed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "curves"
    out.mkdir()
    write_cells(out, [{"cell": "forecast-0", "status": "done", "adapter.rank": 2, "seed": 0, "test.error": 0.5}])
    (out / "forecast.json").write_text("{}", encoding="utf-8")
    (out / "recipe.resolved.yaml").write_text(load_recipe("classify").to_yaml(), encoding="utf-8")
    (entry,) = list_directories(tmp_path)
    assert (entry.path, entry.kind, entry.status) == ("curves", "forecast", "finished")
    assert run(["push", str(out), "memory://place/curves"]) == 2
    assert "curves is a forecast, which has no done.json" in capsys.readouterr().err
