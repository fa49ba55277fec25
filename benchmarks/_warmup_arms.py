"""Study of warm-up and flatness: arms of a warm-up and a regularizer on paired seeds.

A seed fixes the labelled subset, the data order and the adapter's initialisation for all arms.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flatshift.experiments.recipe import Resolved, from_override, load_recipe
from flatshift.experiments.recipe.auto import resolve_auto
from flatshift.experiments.recipe.tree import Branch
from flatshift.experiments.run.console import Console
from flatshift.experiments.studies import Cell, make_cell, run_cells
from flatshift.experiments.studies.executors.local import LocalExecutor
from flatshift.experiments.workflows.build import evaluate_perplexity
from flatshift.finetune.atomic import write_json
from flatshift.finetune.errors import UserError
from flatshift.finetune.run_directory import write_provenance


@dataclass(frozen=True)
class Arm:
    """One combination of warm-up (a `select.method.kind`, `cold` for none, or a name of `settings`) and regularizer."""

    warmup: str
    regularizer: Literal["plain", "ggpo"] = "plain"
    settings: tuple[tuple[str, Any], ...] = ()
    """Recipe keys and their values, in place of the method that the name stands for."""

    def overrides(self) -> list[Branch]:
        """Return the changes of this arm to the common recipe."""
        changes = self.settings or (("select.method.kind", self.warmup),)
        if self.warmup == "cold":
            changes = (("warmup", "null"), ("select", "null"))
        return [from_override(key, value) for key, value in (("regularizer.kind", self.regularizer), *changes)]


ARMS = tuple(Arm(w, r) for w in ("cold", "random", "gotd") for r in ("plain", "ggpo"))  # type: ignore[arg-type]


def run_warmup_study(
    recipe: str,
    out: Path,
    *,
    name: str,
    seeds: Sequence[int],
    arms: Sequence[Arm] = ARMS,
    overrides: Sequence[Branch] = (),
    settings: Mapping[Arm, Sequence[Branch]] | None = None,
    tuned: Mapping[str, Any] | None = None,
    jobs: int = 1,
    console: Console | None = None,
) -> dict[str, Any]:
    """Run the arms over `seeds` into `out` (resumable: finished cells are kept) and write and return study.json.

    recipe: needs `select` and `warmup` blocks and a classification task. name: of the target. settings: of single arms;
    `tuned`: how they were chosen, for the document.
    """
    own = settings or {}
    cells = {
        (arm, seed): arm_cell(recipe, [*overrides, *arm.overrides(), *own.get(arm, ())], seed)
        for arm in arms
        for seed in seeds
    }
    run_cells(out, list(cells.values()), LocalExecutor(jobs), console or Console(), label=f"study {name}")
    base = {seed: _cold_figures(recipe, overrides, seed) for seed in seeds}
    perplexity, _ = _test_perplexity(base[seeds[0]])
    rows = []
    floor = None
    for (arm, seed), cell in cells.items():
        test = read_cell_result(out, cell)["metrics"]["test"]
        floor = test["majority_floor"]["value"]
        before_labels = out / "cells" / cell.key / "stages" / "warm-up" / "eval.json"
        figures = base[seed] if arm.warmup == "cold" else json.loads(before_labels.read_text(encoding="utf-8"))
        metrics = {
            perplexity: _test_perplexity(figures)[1],
            "accuracy": test["accuracy"]["value"],
            "f1_macro": test["f1_macro"]["value"],
        }
        names = {"warmup": arm.warmup, "regularizer": arm.regularizer, "seed": seed}
        rows.append({**names, "metrics": metrics, "cell": cell.key})
    document = {
        "describe": {perplexity: "of the target's test texts after the warm-up, before any label was seen."},
        "target": name,
        "recipe": recipe,
        "seeds": list(seeds),
        "floor": floor,
        "tuned": dict(tuned or {}),
        "cells": rows,
    }
    write_provenance(out)
    write_json(out / "study.json", document)
    return document


def _cold_figures(recipe: str, overrides: Sequence[Branch], seed: int) -> Mapping[str, Any]:
    """Return the base model's figures on the test rows that `data.test.limit` draws under `seed`, as the other arms of
    that seed have them."""
    resolved = resolve_auto(load_recipe(recipe, [*overrides, from_override("train.seed", seed)]))
    return evaluate_perplexity(resolved.recipe, None, splits=("test",))


def arm_cell(recipe: str, overrides: Sequence[Branch], seed: int) -> Cell:
    """Return the cell of one arm under one seed."""
    resolved: Resolved = load_recipe(recipe, [*overrides, from_override("train.seed", seed)])
    return make_cell(resolved, point={}, seed=seed)


def read_cell_result(out: Path, cell: Cell) -> Mapping[str, Any]:
    """Return the result of a cell. Raises UserError if it failed."""
    result = json.loads((out / "cells" / cell.key / "result.json").read_text(encoding="utf-8"))
    if result["status"] != "done":
        raise UserError(f"cell {cell.key} of the study failed: {result['reason']}")
    return result


def _test_perplexity(figures: Mapping[str, Any]) -> tuple[str, float]:
    """Return (metric name, perplexity of the test texts); for an encoder, which has none, the pseudo-perplexity."""
    name = next(name for name in ("perplexity", "pseudo_perplexity") if name in figures["test"])
    return name, float(figures["test"][name]["value"])
