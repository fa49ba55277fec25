"""The study of an encoder's warm-up: arms by equal trials that see no test rows, and the arm without labels by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import encoder_study
from benchmarks._harness import Benchmark
from benchmarks.encoder_study import ARMS, RECIPE, SETTINGS, TRIALS, zero_shot
from benchmarks.first_study import tune
from flatshift.experiments.recipe import from_override
from flatshift.experiments.run.console import Console
from flatshift.finetune.tasks import MaskedLM


def test_arms_get_equal_trials_which_see_no_test_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": "one", "label": "a"}) + "\n", encoding="utf-8")
    own = {f"data.{split}.files": (str(rows),) for split in ("train", "dev", "test")}
    own |= {"select.pool.files": (str(rows),), "backbone": "flatshift-encoder-3m"}
    tried: list = []
    monkeypatch.setattr("benchmarks.first_study.run_cells", lambda out, cells, *a, **k: tried.extend(cells))
    monkeypatch.setattr(
        "benchmarks.first_study.read_cell_result",
        lambda out, cell: {"metrics": {"dev": {"loss": {"value": cell.resolved.recipe.optimizer.lr}}}},
    )
    overrides = [from_override(key, value) for key, value in {**SETTINGS, **own}.items()]
    settings, tuned = tune(RECIPE, tmp_path, overrides, TRIALS, 1, Console(quiet=True), ARMS)
    assert set(settings) == set(ARMS) and {one["trials"] for one in tuned.values()} == {4}
    recipes = [cell.resolved.recipe for cell in tried]
    assert len(recipes) == 4 * len(ARMS) and not any(recipe.data.test.files for recipe in recipes)
    methods = [recipe.select.method.kind for recipe in recipes if recipe.select is not None]
    assert {kind: methods.count(kind) for kind in methods} == {"random": 4, "gotd": 4, "moore-lewis": 4}
    assert all((recipe.warmup is None) == (recipe.select is None) for recipe in recipes)
    warmed = [recipe.warmup for recipe in recipes if recipe.warmup is not None]
    assert all(isinstance(one.task, MaskedLM) for one in warmed)
    assert {one.steps * one.batch_size for one in warmed} == {SETTINGS["select.budget"]}, "each passage is read once"


def test_without_labels_a_text_goes_to_the_nearest_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {"ball game": (1.0, 0.0), "goal": (0.9, 0.1), "shares": (0.1, 0.9), "Money": (0.0, 1.0)}
    names = {"ball_game": "ball game", "Money": "Money"}
    test = tmp_path / "test.jsonl"
    rows = [("goal", "ball_game"), ("shares", "Money"), ("goal", "Money"), ("shares", "Money")]
    test.write_text("".join(json.dumps({"text": t, "label": n}) + "\n" for t, n in rows), encoding="utf-8")
    asked: list[Path | None] = []

    def embedder(adapter: Path | None):
        asked.append(adapter)
        turned = -1 if adapter is not None and "seed-1" in str(adapter) else 1  # one warm-up turns all around
        return lambda texts: turned ** (texts[0] not in names.values()) * np.array([places[text] for text in texts])

    monkeypatch.setattr(encoder_study, "embedder", embedder)
    monkeypatch.setattr(encoder_study, "warmed_up", lambda out, cell: out / cell)
    cells = [{"warmup": a.warmup, "seed": s, "cell": f"{a.warmup}-seed-{s}"} for a in ARMS for s in (0, 1)]
    bench = Benchmark("encoder_study")
    zero_shot(bench, "agnews", {"cells": cells}, test)
    cold, *warmed = bench.rows
    assert cold["ours"] == 0.75 and "0.750" in cold["reason"] and asked[0] is None and len(asked) == 7
    assert [row["difference"]["mean"] for row in warmed] == [pytest.approx(((0.75 - 0.75) + (0.25 - 0.75)) / 2)] * 3
