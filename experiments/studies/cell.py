"""One cell of a study: its key, its run, and its result.

A cell is a recipe and a key: the hash of everything its result depends on. It trains as `flatshift train` does. Its
`result.json` is written last and atomically: a directory without one is unfinished and is run again.
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
from typing import TYPE_CHECKING, Any

from flatshift.experiments.recipe import Resolved, list_input_files, recipe_key
from flatshift.experiments.recipe.auto import resolve_auto
from flatshift.experiments.recipe.rules import CELL_RULES, check_rules
from flatshift.experiments.recipe.schema import TRAINING_ROWS, Recipe
from flatshift.experiments.results.cells import RESULT, Status, flatshift_version, source_digest
from flatshift.experiments.run.console import Console
from flatshift.finetune import assets
from flatshift.finetune.data import files
from flatshift.finetune.digests import file_sha256, write_sealed
from flatshift.finetune.errors import Interrupted, is_out_of_memory, is_remote, user_path
from flatshift.finetune.run_directory import RunDirectory, disk_full_interrupts
from flatshift.selection.features.matrix import PrecomputedFeatures

if TYPE_CHECKING:
    from flatshift.experiments.workflows.context import FineTuneProbe

_DONE = Path("stages", "fine-tune", "done.json")


@dataclass(frozen=True)
class Cell:
    """One run of a study.

    key: hash that names its directory. point: settings varied by the study, dotted key → value as named in tables.
    written: dotted key → value as written, which rebuild the same cell; empty if it is not from a grid. probe: factory
    of a probe that measures more than a run's own metrics; picklable.
    """

    key: str
    point: dict[str, Any]
    seed: int
    resolved: Resolved
    written: Mapping[str, Any] = field(default_factory=dict)
    probe: Callable[[], FineTuneProbe] | None = None

    @property
    def label(self) -> str:
        """Readable name."""
        return f"{point_label(self.point)} seed={self.seed}".strip()


def point_label(point: Mapping[str, Any]) -> str:
    """Format a point: `adapter.rank=4 train.steps=100`."""
    return " ".join(f"{key}={value}" for key, value in point.items())


@dataclass(frozen=True)
class CellResult:
    """Outcome of a cell (`flatshift.experiments.results.cells` defines each status).

    reason: for missing metrics; None when done. metrics: its eval.json, {split: {metric: {"value", …}}}; empty unless
    done. seconds: wall time. figures: results of its probe. checks: findings of `data.checks` in its rows, kind →
    sentence.
    """

    status: Status
    reason: str | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    figures: dict[str, Any] | None = None
    checks: dict[str, str] = field(default_factory=dict)


def make_cell(
    resolved: Resolved, *, point: dict[str, Any], seed: int, written: Mapping[str, Any] | None = None
) -> Cell:
    """Return the cell of a resolved recipe, with a key over everything its result depends on.

    That is every value except the sweep block, device and threads (`train.precision: auto` counts as its resolved
    value), and the bytes of the input files, of a backbone in a local directory (its tokenizer too), and of an initial
    adapter.
    """
    resolved = resolve_auto(resolved)
    if resolved.recipe.eval.train_limit is None:
        evaluation = dataclasses.replace(resolved.recipe.eval, train_limit=TRAINING_ROWS)
        resolved = dataclasses.replace(resolved, recipe=dataclasses.replace(resolved.recipe, eval=evaluation))
    digests = [file_digest(path) for path in list_input_files(resolved.recipe)]
    digests += backbone_digests(resolved.recipe.backbone)
    digests += settings_digests(resolved.recipe)
    return Cell(recipe_key(resolved.recipe, digests), point, seed, resolved, written or {})


def settings_digests(recipe: Recipe) -> list[list[str]]:
    """Return [setting, digest] of files that settings refer to: a chat template, initial adapters, own features."""
    digests = []
    if (template := recipe.task.input_format.template_record()) is not None:
        digests.append(["template", template["sha256"]])
    for setting in ("start", "under"):
        if (name := getattr(recipe.adapter, setting)) is not None:
            digests.append([setting, _adapter_digest(name, f"adapter.{setting}")])
    if recipe.select is not None and isinstance(own := recipe.select.embedder, PrecomputedFeatures):
        named = {side: name for side, name in vars(own).items() if name and side != "kind" and not is_remote(name)}
        digests += [[f"features.{side}", files.file_digest(user_path(name))[0]] for side, name in named.items()]
    return digests


@functools.cache
def backbone_digests(name: str) -> list[list[str]]:
    """Return [file, digest] of weights, configuration and tokenizer of a local directory or GGUF file; none for any
    other name."""
    directory = user_path(name)
    if name.endswith(".gguf") and not name.startswith("package:"):  # with its parts or splits
        from flatshift.finetune.models.gguf_backbone import find_gguf_files

        return [[path.name, file_sha256(path)] for path in find_gguf_files(name, directory, ())]
    if name.startswith("package:") or assets.backbone_directory(name) is not None or not directory.is_dir():
        return []
    files = [*assets.non_weight_files(directory), *sorted(directory.glob("*.safetensors"))]
    return [[path.name, file_sha256(path)] for path in files]


@functools.cache
def _adapter_digest(name: str, key: str) -> str:
    from flatshift.finetune.adapters.saved import SavedAdapter

    return SavedAdapter.find(name, context=key).digest()


@functools.cache
def file_digest(path: str) -> list[str]:
    """Return the SHA-256 of each data file that `path` expands to."""
    return [entry["sha256"] for entry in files.describe_files([path])]


def run_cell(directory: Path, cell: Cell, threads: int | None) -> bool:
    """Train and evaluate one cell in `directory` and write its result.json last; a failure is a result with its reason.

    threads: of this process, where the recipe does not say.
    Returns True if this process is fit for another cell: not after an error that nobody foresaw (a device that failed
    keeps failing). Raises Interrupted for a full disk or a signal, and leaves no result then.
    """
    recipe = cell.resolved.recipe
    data = recipe.data
    if data.cache == "auto" and (data.label_noise or data.train.limit):  # drawn by the seed: few other cells reuse them
        recipe = dataclasses.replace(recipe, data=dataclasses.replace(data, cache=None))
    if threads is not None and recipe.train.threads is None:
        recipe = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, threads=threads))
    with disk_full_interrupts(f"running cell {cell.key}"):
        # A directory without a result is left from a killed run.
        if directory.exists():
            shutil.rmtree(directory)
        result, fit = capture_result(lambda: train_cell(directory, cell, recipe), directory)
        finish_cell(directory, cell, result)
    return fit


def train_cell(directory: Path, cell: Cell, recipe: Recipe) -> CellResult:
    """Train and evaluate a cell as `flatshift train` does, without a report; its weights are deleted afterwards.

    recipe: the cell's own, for this process.
    Raises Diverged, also for a trained adapter whose loss on the evaluated rows is not a finite number.
    """
    from flatshift.experiments.data.splits import prepare_data
    from flatshift.experiments.select.target import check_target
    from flatshift.experiments.workflows.context import run_context
    from flatshift.experiments.workflows.run_parts import remove_weights
    from flatshift.experiments.workflows.train import execute_parts
    from flatshift.finetune.train.divergence import Diverged

    check_rules(recipe, CELL_RULES)
    rows = prepare_data(recipe)
    check_target(recipe, rows.skipped)
    probe = cell.probe() if cell.probe is not None else None
    run = RunDirectory.create(directory, recipe_yaml=cell.resolved.to_yaml())
    with run_context(recipe, run, Console(quiet=True, log=run.log), cell=True, probe=probe) as context:
        metrics = execute_parts(context, rows)
    remove_weights(directory)
    for split, figures in metrics.items():
        if "loss" in figures and figures["loss"]["value"] is None:
            raise Diverged(f"the trained adapter's loss on the {split} rows is not a finite number")
    checks = {finding.kind: str(finding) for finding in rows.checks}
    return CellResult("done", metrics=metrics, figures=None if probe is None else probe.figures(), checks=checks)


def capture_result(measure: Callable[[], CellResult], directory: Path) -> tuple[CellResult, bool]:
    """Call `measure`; return (result of the cell, True if this process can run another). An unexpected error goes into
    the cell's log.txt with its traceback. Interrupted and a full disk pass through."""
    started = time.monotonic()
    fit = True
    try:
        with disk_full_interrupts(f"writing {directory}"):
            result = measure()
    except Interrupted:
        raise
    except ValueError as error:
        from flatshift.finetune.train.divergence import Diverged

        result = CellResult("diverged" if isinstance(error, Diverged) else "failed", str(error))
    except Exception as error:
        fit = False
        name = "out of memory" if is_out_of_memory(error) else type(error).__name__
        result = CellResult("failed", f"{name}: {error}")
        directory.mkdir(parents=True, exist_ok=True)
        RunDirectory(directory).log(traceback.format_exc())
    gc.collect()  # a PEFT model refers to itself: without this, each cell's weights outlive it
    return dataclasses.replace(result, seconds=time.monotonic() - started), fit


def finish_cell(directory: Path, cell: Cell, result: CellResult) -> None:
    """Write a cell's result.json, creating `directory` if necessary; the cell is never run again after that."""
    directory.mkdir(parents=True, exist_ok=True)
    outcome = {k: v for k, v in dataclasses.asdict(result).items() if v or k not in ("figures", "checks")}
    try:  # the evaluated adapter's step: the best on dev; none without a dev set, or if training did not end
        best_step = json.loads((directory / _DONE).read_bytes()).get("best_step")
    except FileNotFoundError:
        best_step = None
    document = {
        "cell": cell.key,
        "point": cell.point,
        "seed": cell.seed,
        **outcome,
        "seconds": round(result.seconds, 2),
        "best_step": best_step,
        "flatshift": flatshift_version(),
        "code": source_digest(),
    }
    # Files of the cell that its metrics come from, except its result.
    records = [path for pattern in ("*.json*", "*.yaml") for path in directory.glob(pattern) if path.name != RESULT]
    records = [path for path in records if path.is_file() and not path.name.startswith(".")]
    write_sealed(directory / RESULT, document, siblings=records)
