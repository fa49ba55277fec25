"""Does the warm-up help, and does flatness? Cold, random and GOT-D warm-up × plain and GGPO, on paired seeds.

A seed fixes the labelled subset, the data order and the adapter's initialisation for all six arms. With `trials`,
every arm's learning rates are tuned with the same number of runs, on dev, with a seed that is never used again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from experiments.recipe import Resolved, from_override, load_recipe
from experiments.recipe.precision import settled
from experiments.recipe.tree import Branch
from experiments.run.console import Console
from experiments.studies import Cell, cell_of, run_cells
from experiments.workflows.warmup_perplexity import text_perplexity
from finetune.atomic import write_json
from finetune.errors import UserError
from finetune.run_directory import write_provenance

WarmUp = Literal["cold", "random", "gotd"]
_TUNING_SEED = 1_000_003


@dataclass(frozen=True)
class Arm:
    """One way to get to the fine-tuned adapter."""

    warmup: WarmUp
    regularizer: Literal["plain", "ggpo"]

    def overrides(self) -> list[Branch]:
        """What this arm changes in the common recipe."""
        laid = [from_override("regularizer.kind", self.regularizer)]
        if self.warmup == "cold":
            return [*laid, from_override("warmup", "null"), from_override("select", "null")]
        return [*laid, from_override("select.method.kind", self.warmup)]


ARMS = tuple(Arm(w, r) for w in ("cold", "random", "gotd") for r in ("plain", "ggpo"))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Trials:
    """Learning rates tried for every arm: equally many runs each (a cold arm, with no warm-up, gets finer steps)."""

    warmup_lr: tuple[float, ...]
    lr: tuple[float, ...]
    cold_lr: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.cold_lr) != len(self.warmup_lr) * len(self.lr):
            raise UserError("trials must be equal: give as many cold_lr as warmup_lr × lr")

    def of(self, arm: Arm) -> list[tuple[float | None, float]]:
        """(warm-up lr, lr) pairs of an arm."""
        if arm.warmup == "cold":
            return [(None, lr) for lr in self.cold_lr]
        return [(w, lr) for w in self.warmup_lr for lr in self.lr]


def study(
    recipe: str,
    out: Path,
    *,
    name: str,
    seeds: Sequence[int],
    overrides: Sequence[Branch] = (),
    trials: Trials | None = None,
    jobs: int = 1,
    console: Console | None = None,
) -> dict[str, Any]:
    """Run all arms over `seeds` into `out` (resumable: finished cells are kept) and write and return study.json.

    recipe: needs `select` and `warmup` blocks and a classification task. name: what the target is called.
    """
    console = console or Console()
    settings = {arm: _rates(None, None) for arm in ARMS}
    tuned: dict[str, Any] = {}
    if trials is not None:
        settings, tuned = _tune(recipe, out, overrides, trials, jobs, console)
    cells = {
        (arm, seed): _cell(recipe, [*overrides, *arm.overrides(), *settings[arm]], seed)
        for arm in ARMS
        for seed in seeds
    }
    run_cells(out, list(cells.values()), jobs, console, label=f"study {name}")
    cold = _surprise(text_perplexity(settled(load_recipe(recipe, overrides)).recipe, None, only=("test",)))
    rows = []
    floor = None
    for (arm, seed), cell in cells.items():
        result = _result(out, cell)
        metrics = result["metrics"]
        floor = metrics["test"]["majority_floor"]["value"]
        rows.append(
            {
                "warmup": arm.warmup,
                "regularizer": arm.regularizer,
                "seed": seed,
                "metrics": {
                    "perplexity": cold if arm.warmup == "cold" else _warm_perplexity(out, cell),
                    "accuracy": metrics["test"]["accuracy"]["value"],
                    "f1_macro": metrics["test"]["f1_macro"]["value"],
                },
                "cell": cell.key,
            }
        )
    describe = {"perplexity": "of the target's test texts after the warm-up, before any label was seen."}
    document = {
        "describe": describe,
        "target": name,
        "recipe": recipe,
        "seeds": list(seeds),
        "floor": floor,
        "tuned": tuned,
        "cells": rows,
    }
    write_provenance(out)
    write_json(out / "study.json", document)
    return document


def _rates(warmup_lr: float | None, lr: float | None) -> list[Branch]:
    laid = []
    if warmup_lr is not None:
        laid.append(from_override("warmup.lr", warmup_lr))
    if lr is not None:
        laid.append(from_override("optimizer.lr", lr))
    return laid


def _cell(recipe: str, overrides: Sequence[Branch], seed: int) -> Cell:
    resolved: Resolved = load_recipe(recipe, [*overrides, from_override("train.seed", seed)])
    return cell_of(resolved, point={}, seed=seed)


def _result(out: Path, cell: Cell) -> Mapping[str, Any]:
    result = json.loads((out / "cells" / cell.key / "result.json").read_text(encoding="utf-8"))
    if result["status"] != "done":
        raise UserError(f"cell {cell.key} of the study failed: {result['reason']}")
    return result


def _warm_perplexity(out: Path, cell: Cell) -> float:
    """Perplexity of the target's test texts after the warm-up, before any label was seen."""
    path = out / "cells" / cell.key / "stages" / "warm-up" / "eval.json"
    return _surprise(json.loads(path.read_text(encoding="utf-8")))


def _surprise(figures: Mapping[str, Any]) -> float:
    """Perplexity of the test texts; of an encoder, which has none, the pseudo-perplexity."""
    test = figures["test"]
    return float(test.get("perplexity", test.get("pseudo_perplexity"))["value"])


def _tune(
    recipe: str, out: Path, overrides: Sequence[Branch], trials: Trials, jobs: int, console: Console
) -> tuple[dict[Arm, list[Branch]], dict[str, Any]]:
    """The best (warm-up lr, lr) of each arm by dev loss, all arms with equally many runs."""
    cells = {
        (arm, pair): _cell(recipe, [*overrides, *arm.overrides(), *_rates(*pair)], _TUNING_SEED)
        for arm in ARMS
        for pair in trials.of(arm)
    }
    run_cells(out, list(cells.values()), jobs, console, label="tune")
    settings, tuned = {}, {}
    for arm in ARMS:
        losses = {pair: _result(out, cells[arm, pair])["metrics"]["dev"]["loss"]["value"] for pair in trials.of(arm)}
        best = min(losses, key=losses.__getitem__)
        settings[arm] = _rates(*best)
        lrs = [lr for _, lr in losses]
        tuned[f"{arm.warmup}/{arm.regularizer}"] = {
            "warmup_lr": best[0],
            "lr": best[1],
            "dev_loss": losses[best],
            "trials": len(losses),
            "lr_on_edge": best[1] in (min(lrs), max(lrs)),
        }
    return settings, tuned
