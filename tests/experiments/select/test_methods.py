"""Scores of an unfinished selection are restored for the same inputs only."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flatshift.experiments.select.methods import ScoreCheckpoint
from flatshift.selection import GotDContrastSelector, GotDSelector, Pool


def sides(x: np.ndarray, z: Any = None) -> Any:
    """As much of a selection's inputs as the checkpoint reads."""
    row = SimpleNamespace(values={"text": "target"})
    pool = SimpleNamespace(rows=SimpleNamespace(texts=["one", "two"]))
    return SimpleNamespace(pool=pool, target=SimpleNamespace(rows=[row]), x=x, y=None, z=z)


@pytest.mark.parametrize("changed", [0, 2_000, 19_999])
def test_a_change_in_any_row_of_the_users_features_starts_again(tmp_path, changed: int) -> None:
    x = np.zeros((20_000, 2), np.float32)
    fitted = SimpleNamespace(scores_=np.arange(3.0), diagnostics_={}, nearest_target_=None, readings_=None)
    ScoreCheckpoint(tmp_path, sides(x)).save(fitted)
    found = SimpleNamespace()
    assert ScoreCheckpoint(tmp_path, sides(x)).restore(found) and found.scores_.tolist() == [0.0, 1.0, 2.0]
    x[changed, 1] = 1.0
    assert not ScoreCheckpoint(tmp_path, sides(x)).restore(found)


def test_scores_are_kept_unless_the_solver_keeps_its_passes(tmp_path) -> None:
    x = np.random.default_rng(0).standard_normal((3, 9, 2))
    pool, target, negative = (Pool(features=part) for part in x)
    ScoreCheckpoint(tmp_path, sides(x[0])).save(GotDSelector().fit(pool, target))
    assert not list(tmp_path.iterdir())
    fitted = GotDContrastSelector().fit(pool, target, negative=negative)
    ScoreCheckpoint(tmp_path, sides(x[0], x[2])).save(fitted)
    found = GotDContrastSelector()
    assert ScoreCheckpoint(tmp_path, sides(x[0], x[2])).restore(found) and (found.scores_ == fitted.scores_).all()
    assert not ScoreCheckpoint(tmp_path, sides(x[0], x[1])).restore(found), "other negative examples"
