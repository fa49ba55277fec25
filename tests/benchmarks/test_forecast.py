"""What the benchmark of forecasts says of ranks, rows and noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import forecast
from benchmarks.forecast import AXES, RANKS, directions, key, rank_costs, settings


def document(errors: dict[str, list[float]]) -> dict[str, Any]:
    return {"error": errors, "speed": {name: 1.0 for name in errors}}


def test_ranks_that_are_forecast_alike_are_no_choice() -> None:
    """Until 27 November 2026 the page counted 20 of 35 ties as rightly signed differences."""
    said = document({key(where): [0.5, 0.5] for where in settings()})
    real = document({key(where): [0.5 - 0.01 * RANKS.index(int(where["adapter.rank"]))] * 3 for where in settings()})
    found = directions({"task": (said, real)}, "adapter.rank")
    places = len(settings()) // len(RANKS)
    assert found["pairs"] == found["same"] == places * len(RANKS) * (len(RANKS) - 1) / 2
    assert (found["differ"], found["right"], found["seed"]) == (0, 0, 1)
    costs = {name: points[0] for name, points in rank_costs({"task": (said, real)}).items()}
    assert abs(costs["predicted error"] - costs["coin"]) < 1e-9  # a tie is a coin
    assert abs(costs["coin"] - np.mean(np.arange(len(RANKS)))) < 1e-9
    assert abs(costs["largest"]) < 1e-9 and abs(costs[f"rank {RANKS[-1]}"]) < 1e-9


def test_results_of_fewer_ranks_are_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "CELLS", tmp_path / "cells.json")
    full = document({key(where): [0.5] for where in settings()})
    part = document({name: errors for name, errors in full["error"].items() if not name.startswith("1|")})
    assert forecast.whole("trained-x", lambda: part) == part and forecast.whole("trained-x", lambda: full) == full
    assert forecast.whole("trained-x", lambda: part) == full


def test_a_forecast_that_is_right_and_one_that_is_wrong_are_told_apart_from_what_anybody_would_say() -> None:
    for axis, values in AXES.items():
        real = document({key(where): [0.3 + 0.01 * values.index(where[axis])] * 3 for where in settings()})
        other = document({key(where): [0.9 - 0.01 * values.index(where[axis])] * 2 for where in settings()})
        right, wrong = directions({"task": (real, real)}, axis), directions({"task": (other, real)}, axis)
        assert right["right"] == right["differ"] == right["pairs"] and wrong["right"] == 0 == wrong["same"]
        assert right["larger"] == (right["pairs"] if axis == "data.label_noise" else 0)
        assert right["correlation"] > 0 or len(values) == 2
