"""The table of metrics: what is in it can be computed, and it is read without torch."""

import subprocess
import sys

import pytest

from flatshift.finetune.evaluate.metrics import (
    _MODULES,
    METRICS,
    find_metric,
    metric_functions,
    sort_for_headline,
    tile_metrics,
)

FAMILIES = tuple(_MODULES)


@pytest.mark.parametrize("source", FAMILIES)
def test_every_function_is_there(source):
    assert all(callable(function) for function in metric_functions(source).values()) and metric_functions(source)


def test_every_entry_is_complete():
    for name, metric in METRICS.items():
        assert set(metric.sources) <= set(FAMILIES), name
        assert metric.floor is None or METRICS[metric.floor].is_floor, name
        assert metric.is_floor or metric.bounds, name


def test_turns_are_used_once():
    for turn in ("headline", "tile"):
        taken = [getattr(metric, turn) for metric in METRICS.values() if getattr(metric, turn)]
        assert sorted(taken) == list(range(1, len(taken) + 1))


def test_a_figure_that_is_no_metric_has_a_name_and_comes_last():
    assert find_metric("made_up").title == "made up" and find_metric("made_up").bounds is None
    assert sort_for_headline(["made_up", "loss", "perplexity"]) == ["perplexity", "loss", "made_up"]
    assert tile_metrics(["made_up", "loss", "accuracy"]) == ["accuracy", "loss"]


def test_the_table_is_read_without_torch():
    code = "import sys, flatshift.finetune.evaluate.metrics; print({'numpy', 'torch'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
