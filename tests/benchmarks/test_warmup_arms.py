"""The study of warm-ups by hand: every arm of a seed is evaluated on the same test rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import _warmup_arms
from benchmarks._warmup_arms import Arm, run_warmup_study
from flatshift.experiments.recipe import from_override


def test_without_a_warm_up_perplexity_is_of_the_seeds_own_test_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until 27 November 2026 it was of those of seed 0, beside which the other arms of a seed have other rows."""

    def perplexity(recipe: Any, adapter: object, *, splits: tuple[str, ...]) -> dict[str, Any]:
        return {"test": {"perplexity": {"value": 100.0 + recipe.train.seed}}}

    def run(out: Path, cells: Any, *others: object, **more: object) -> None:
        for cell in cells:
            stage = out / "cells" / cell.key / "stages" / "warm-up"
            stage.mkdir(parents=True)
            figures = {"test": {"perplexity": {"value": 80.0 + cell.seed}}}
            (stage / "eval.json").write_text(json.dumps(figures), encoding="utf-8")

    values = {name: {"value": 0.5} for name in ("majority_floor", "accuracy", "f1_macro")}
    monkeypatch.setattr(_warmup_arms, "evaluate_perplexity", perplexity)
    monkeypatch.setattr(_warmup_arms, "run_cells", run)
    monkeypatch.setattr(_warmup_arms, "read_cell_result", lambda out, cell: {"metrics": {"test": values}})
    few = [from_override("data.test.limit", 400)]
    arms = (Arm("cold"), Arm("random"))
    document = run_warmup_study("warmup", tmp_path, name="scicite", seeds=(0, 1, 2), arms=arms, overrides=few)
    found = {
        arm: [c["metrics"]["perplexity"] for c in document["cells"] if c["warmup"] == arm] for arm in ("cold", "random")
    }
    assert found == {"cold": [100, 101, 102], "random": [80, 81, 82]}
