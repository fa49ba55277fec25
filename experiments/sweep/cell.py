"""One cell of a sweep: what names it, how it runs, and the result that it leaves behind.

    cell = cell_of(load_recipe("warmup"), point={"adapter.rank": 4}, seed=0)
    run_cell(out / "cells" / cell.key, cell, threads=1)

A cell is keyed by the hash of its resolved recipe and of its input files. Its `result.json` is written last and whole:
a directory without one is unfinished and is made anew.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import shutil
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from experiments.recipe import Resolved, recipe_key
from experiments.run.console import Console
from experiments.sweep.source import flatshift_version, source_digest
from finetune.digests import digest, unsealed, write_sealed
from finetune.errors import Interrupted, UserError, is_out_of_memory, user_path
from finetune.run_directory import RunDirectory, disk_full_interrupts

if TYPE_CHECKING:
    from experiments.recipe.config import Recipe

RESULT = "result.json"
_FIX = f"delete the cell's {RESULT}, and the sweep runs the cell anew"
_DONE = Path("stages", "fine-tune", "done.json")


def without_cache(recipe: Recipe) -> Recipe:
    """A cell's recipe: `data.cache: auto` keeps no rows that its seed chose, which hardly another cell reads again."""
    data = recipe.data
    if data.cache != "auto" or not (data.label_noise or data.train.limit):
        return recipe
    return dataclasses.replace(recipe, data=dataclasses.replace(data, cache=None))


@dataclass(frozen=True)
class Cell:
    """One point of the grid under one seed."""

    key: str
    """Hash that names its directory."""
    point: dict[str, Any]
    """Dotted key → value, as tables name it."""
    seed: int
    resolved: Resolved
    laid: Mapping[str, Any] = field(default_factory=dict)
    """Dotted key → value as written, which makes the same cell again; empty where no grid made it."""

    @property
    def label(self) -> str:
        """For a person."""
        return f"{label_of(self.point)} seed={self.seed}".strip()


def label_of(point: Mapping[str, Any]) -> str:
    """`adapter.rank=4 train.steps=100`."""
    return " ".join(f"{key}={value}" for key, value in point.items())


@dataclass(frozen=True)
class Outcome:
    """How a cell ended."""

    status: Literal["done", "failed"]
    reason: str | None = None
    """Why it failed; None when done."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """Its eval.json: {split: {metric: {"value", …}}}; empty when failed."""
    seconds: float = 0.0
    """Wall time; of a stack, this cell's share."""
    diverged: bool = False
    """Whether it failed because its loss or a gradient was no finite number."""
    stacked: int | None = None
    """Cells that trained in one stack with it, itself counted; None: alone."""
    alone: str | None = None
    """Why it trained alone, where that showed only when its stack began."""


def cell_of(resolved: Resolved, *, point: dict[str, Any], seed: int, laid: Mapping[str, Any] | None = None) -> Cell:
    """The cell of a resolved recipe, keyed by all that its result depends on.

    That is every value but the sweep block itself, device and threads (of `train.precision: auto` what it comes to
    here), and the bytes of the input files, of a backbone
    that is a local directory (its tokenizer too), and of an adapter that it begins with.
    """
    from experiments.recipe.precision import settled
    from experiments.workflows.run_parts import recipe_inputs

    resolved = settled(resolved)
    digests = [_digest(path) for path in recipe_inputs(resolved.recipe)]
    digests += _backbone_digests(resolved.recipe.backbone)
    if (template := resolved.recipe.task.template_record()) is not None:
        digests.append(["template", template["sha256"]])
    adapter = resolved.recipe.adapter
    for setting, name in (("start", adapter.start), ("under", adapter.under)):
        if name is not None:
            digests.append([setting, _adapter_digest(name, f"adapter.{setting}")])
    return Cell(recipe_key(resolved.recipe, digests), point, seed, resolved, laid or {})


@functools.cache
def _backbone_digests(name: str) -> list[list[str]]:
    """[file, digest] of weights, configuration and tokenizer in a local directory; none for any other name."""
    from finetune import assets

    directory = user_path(name)
    if name.startswith("package:") or assets.backbone(name) is not None or not directory.is_dir():
        return []
    files = [*assets.beside_weights(directory), *sorted(directory.glob("*.safetensors"))]
    return [[path.name, digest(path)] for path in files]


@functools.cache
def _adapter_digest(name: str, where: str) -> str:
    from finetune.adapters.saved import SavedAdapter

    return SavedAdapter.find(name, where=where).digest()


@functools.cache
def _digest(path: str) -> list[str]:
    from finetune.data import describe

    return [entry["sha256"] for entry in describe([path])]


def run_cell(directory: Path, cell: Cell, threads: int | None, *, alone: str | None = None) -> bool:
    """Train and judge one cell in `directory` and write its result.json last; a failure is a result with its reason.

    threads: of this process, where the recipe does not say. alone: see `Outcome`.
    Returns whether this process is fit for another cell: not after an error that nobody foresaw (a device that failed
    goes on failing). Raises Interrupted for a full disk or a signal, and leaves no result then.
    """
    from experiments.cells.refusing import refuse_tracked
    from experiments.data.splits import prepare
    from experiments.workflows.context import opened
    from experiments.workflows.run_parts import remove_weights
    from experiments.workflows.train import execute

    recipe = without_cache(cell.resolved.recipe)
    if threads is not None and recipe.train.threads is None:
        recipe = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, threads=threads))

    def measure() -> dict[str, Any]:
        refuse_tracked(recipe)
        prepared = prepare(recipe)
        run = RunDirectory.create(directory, recipe_yaml=cell.resolved.to_yaml())
        with opened(recipe, run, Console(quiet=True, log=run.log), cell=True) as context:
            metrics = execute(context, prepared)
        remove_weights(directory)
        return metrics

    with disk_full_interrupts(f"running cell {cell.key}"):
        if directory.exists():
            shutil.rmtree(directory)
        outcome, fit = outcome_of(measure, directory)
        finish_cell(directory, cell, dataclasses.replace(outcome, alone=alone))
    return fit


def outcome_of(measure: Callable[[], dict[str, Any]], directory: Path) -> tuple[Outcome, bool]:
    """Call `measure` for a cell's metrics; (what came of it, whether this process is fit for another cell).

    An error that nobody foresaw goes into the cell's log.txt with its trace. Interrupted and a full disk pass through.
    """
    started = time.monotonic()
    fit = True
    try:
        with disk_full_interrupts(f"writing {directory}"):
            metrics = measure()
        outcome = Outcome("done", metrics=metrics, seconds=time.monotonic() - started)
    except Interrupted:
        raise
    except ValueError as error:
        from finetune.train.loop import Diverged

        seconds = time.monotonic() - started
        outcome = Outcome("failed", str(error), seconds=seconds, diverged=isinstance(error, Diverged))
    except Exception as error:
        fit = False
        reason = f"{'out of memory' if is_out_of_memory(error) else type(error).__name__}: {error}"
        outcome = Outcome("failed", reason, seconds=time.monotonic() - started)
        directory.mkdir(parents=True, exist_ok=True)
        RunDirectory(directory).log(traceback.format_exc())
    gc.collect()  # a PEFT model refers to itself: without this, each cell's weights outlive it
    return outcome, fit


def finish_cell(directory: Path, cell: Cell, outcome: Outcome) -> None:
    """Write a cell's result.json, making `directory` if need be; from then on the cell is never run again."""
    directory.mkdir(parents=True, exist_ok=True)
    write_sealed(
        directory / RESULT,
        {
            "cell": cell.key,
            "point": cell.point,
            "seed": cell.seed,
            **dataclasses.asdict(outcome),
            "seconds": round(outcome.seconds, 2),
            "best_step": _best_step(directory),
            "flatshift": flatshift_version(),
            "code": source_digest(),
        },
        beside=_records_of(directory),
    )


def _records_of(directory: Path) -> list[Path]:
    """The files of a cell's directory that its figures come from, but for its result."""
    found = [file for end in ("*.json*", "*.yaml") for file in directory.glob(end) if file.name != RESULT]
    return [file for file in found if file.is_file() and not file.name.startswith(".")]


def _best_step(directory: Path) -> int | None:
    """The step whose adapter was judged: the best on dev; None without a dev set, or if training did not end."""
    try:
        done = json.loads((directory / _DONE).read_bytes())
    except FileNotFoundError:
        return None
    return done.get("best_step")


def read_result(directory: Path) -> dict[str, Any] | None:
    """A cell's result; None if it has none yet. Raises UserError if the file is no result, or it or a record of the
    cell is not what the cell left."""
    path = directory / RESULT
    try:
        found = json.loads(path.read_bytes())
        if not {"status", "reason", "metrics", "seconds"} <= found.keys():
            raise ValueError("keys are missing")
    except FileNotFoundError:
        return None
    except (ValueError, AttributeError) as error:
        raise UserError(f"{path}: not a cell's result ({error}); {_FIX}") from None
    return unsealed(path, found, fix=_FIX)
