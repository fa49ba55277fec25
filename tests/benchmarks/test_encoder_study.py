"""The study of an encoder's warm-up: arms by equal trials that see no test rows, and the arm without labels by hand."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import numpy as np
import pytest

from benchmarks import encoder_study
from benchmarks._harness import Benchmark
from benchmarks.encoder_study import (
    RECIPE,
    SETTINGS,
    TRIALS,
    WARM,
    WITHOUT_LABELS,
    accuracy_without_labels,
    arms,
    cold_at_their_rate,
    over_targets,
    same_rate,
    splits,
    zero_shot,
)
from benchmarks.first_study import tune
from flatshift.experiments.recipe import from_override
from flatshift.experiments.run.console import Console
from flatshift.finetune.tasks import MaskedLM


def test_arms_get_equal_trials_which_see_no_test_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": "one", "label": "a"}) + "\n", encoding="utf-8")
    own = {f"data.{split}.files": (str(rows),) for split in ("train", "dev", "test")}
    own |= {"select.pool.files": (str(rows),), "backbone": "flatshift-encoder-3m"}
    study = arms(rows)
    tried: list = []
    monkeypatch.setattr("benchmarks.first_study.run_cells", lambda out, cells, *a, **k: tried.extend(cells))
    monkeypatch.setattr(
        "benchmarks.first_study.read_cell_result",
        lambda out, cell: {"metrics": {"dev": {"loss": {"value": cell.resolved.recipe.optimizer.lr}}}},
    )
    overrides = [from_override(key, value) for key, value in {**SETTINGS, **own}.items()]
    settings, tuned = tune(RECIPE, tmp_path, overrides, TRIALS, 1, Console(quiet=True), study)
    assert set(settings) == set(study) and {one["trials"] for one in tuned.values()} == {4}
    recipes = [cell.resolved.recipe for cell in tried]
    assert len(recipes) == 4 * len(study) and not any(recipe.data.test.files for recipe in recipes)
    methods = [recipe.selection.method.kind for recipe in recipes if recipe.selection is not None]
    once = dict.fromkeys(("random", "gotd", "dsir", "moore-lewis"), 4)
    assert {kind: methods.count(kind) for kind in methods} == {**once, "cynical": 8}
    shares = [recipe.warmup.own for recipe in recipes if recipe.warmup is not None]
    assert {share: shares.count(share) for share in shares} == {0: 20, 1: 4, 0.5: 4}
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
    cells = [{"warmup": a.warmup, "seed": s, "cell": f"{a.warmup}-seed-{s}"} for a in arms() for s in (0, 1)]
    bench = Benchmark("encoder_study")
    zero_shot(bench, "trec", {"cells": cells})
    zero_shot(bench, "agnews", {"zero_shot": accuracy_without_labels("agnews", {"cells": cells}, test)})
    cold, *warmed = bench.rows
    assert (
        cold["ours"] == 0.75
        and "0.750" in cold["reason"]
        and asked[0] is None
        and len(asked) == 1 + 2 * len(WITHOUT_LABELS)
    )
    assert [row["difference"]["mean"] for row in warmed] == [pytest.approx(((0.75 - 0.75) + (0.25 - 0.75)) / 2)] * len(
        WITHOUT_LABELS
    )


def test_splits_share_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until 27 November 2026 all three files held the test rows."""
    monkeypatch.setattr(encoder_study, "WORK", tmp_path / "work")
    for name, marks in (("agnews", ("train", "dev", "test")), ("trec", ("train", "test")), ("sst2", ("train", "dev"))):
        file = tmp_path / "tasks" / f"{encoder_study.TARGETS[name][0]}.jsonl.xz"
        file.parent.mkdir(exist_ok=True)
        rows = [{"text": f"{mark} {i}", "label": "a", "split": mark} for mark in marks for i in range(600)]
        with lzma.open(file, "wt", encoding="utf-8") as stream:
            stream.writelines(json.dumps(row) + "\n" for row in rows)
        texts = {
            split: [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
            for split, path in splits(name, tmp_path).items()
        }
        assert texts["test"] == [row["text"] for row in rows if row["split"] == marks[-1]]
        assert not set(texts["train"]) & set(texts["dev"]) and all(t.startswith("train") for t in texts["train"])
        assert len(texts["train"]) + len(texts["dev"]) == sum(row["split"] != marks[-1] for row in rows)


def test_an_interval_over_targets_holds_their_means(tmp_path: Path) -> None:
    documents = {
        target: {
            "floor": 0.3,
            "cells": [
                {"warmup": arm, "seed": seed, "metrics": {"accuracy": 0.5 + gain * (arm == "own") + 0.01 * seed}}
                for arm in ("cold", "own")
                for seed in (1, 0)
            ],
        }
        for target, gain in (("a", 0.1), ("b", 0.3), ("c", 0.2))
    }
    bench = Benchmark("encoder_study")
    over_targets(bench, documents, "accuracy", "own", "cold")
    (row,) = bench.rows
    half = 4.302653 * 0.1 / 3**0.5  # t(.975, 2) times the standard error of .1, .3, .2
    assert row["difference"]["mean"] == pytest.approx(0.2)
    assert row["difference"]["low"] == pytest.approx(0.2 - half) and row["difference"]["high"] == pytest.approx(
        0.2 + half
    )
    documents["c"]["floor"] = 0.5
    over_targets(bench, documents, "accuracy", "own", "cold")
    assert bench.rows[1]["ours"] == pytest.approx(0.705), "a and b: on c the cold arm is at its floor"
    over_targets(bench, {"a": documents["a"]}, "accuracy", "own", "cold")
    assert len(bench.rows) == 2, "one target has no interval"


def test_the_cold_arm_is_set_beside_the_warmed_ones_at_their_rate_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list = []
    monkeypatch.setattr(encoder_study, "run_cells", lambda out, cells, *a, **k: ran.extend(cells))
    monkeypatch.setattr(
        encoder_study,
        "read_cell_result",
        lambda out, cell: {"metrics": {"test": {"accuracy": {"value": cell.seed / 10}}}},
    )
    tuned = {f"{name}/plain": {"lr": 7e-4 if name == "own" else 1.5e-3} for name in WARM}
    cells = [{"warmup": name, "seed": s, "metrics": {"accuracy": 0.5}} for name in ("cold", *WARM) for s in (1, 2)]
    document = {"tuned": tuned, "seeds": [1, 2], "cells": cells}
    document["same_rate"] = cold_at_their_rate(Path("out"), [], document, Console(quiet=True))
    assert document["same_rate"] == {"lr": 1.5e-3, "accuracy": {"1": 0.1, "2": 0.2}}
    assert all(cell.resolved.recipe.warmup is None and cell.resolved.recipe.optimizer.lr == 1.5e-3 for cell in ran)
    bench = Benchmark("encoder_study")
    same_rate(bench, "trec", document)
    assert bench.rows[0]["difference"]["mean"] == pytest.approx(0.35)


def test_the_page_counts_a_target_that_is_above_its_floor_and_names_those_that_are_missing() -> None:
    def document(cold: float, own: float, floor: float) -> dict:
        levels = {"cold": cold, **dict.fromkeys(WARM, cold - 0.02), "own": own}
        cells = [
            {
                "warmup": arm,
                "seed": seed,
                "metrics": dict.fromkeys(("accuracy", "f1_macro"), level + 0.01 * seed)
                | {"pseudo_perplexity": 100.0 * level},
            }
            for arm, level in levels.items()
            for seed in (0, 1, 2)
        ]
        same = {"lr": 1e-3, "accuracy": {str(seed): cold + 0.01 * seed for seed in (0, 1, 2)}}
        tuned = {f"{arm}/plain": {"lr": 2e-3 if arm == "own" else 1e-3} for arm in levels}
        return {"floor": floor, "seeds": [0, 1, 2], "cells": cells, "same_rate": same, "tuned": tuned}

    text = encoder_study.guide(
        {"agnews": document(0.8, 0.7, 0.3), "trec": document(0.9, 0.94, 0.3), "sst2": document(0.5, 0.6, 0.5)}
    )
    own = next(line for line in text.splitlines() if line.startswith("| `own`"))
    cells = [cell.strip() for cell in own.strip("|").split("|")]
    assert cells[1] == "−3.0" and cells[4:7] == ["−10.0", "+4.0", "+10.0"], own  # sst2 is not in the mean
    half = 12.7062 * 7  # t(.975, 1) times the standard error of −10 and 4
    assert cells[2] == f"−{3 + half:.1f} to +{half - 3:.1f}"
    assert "sst2: at the majority floor" in text and "banking: not run yet; polarity: not run yet" in text
    assert "trec −2.0 (" in text  # without `own`, which has another rate
