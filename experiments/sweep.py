"""A grid over dotted recipe keys and seeds: resumable, idempotent, failures kept as results.

    flatshift sweep double-descent --grid adapter.rank=1,4,16 --seeds 3 --out sweeps/rank

A cell is keyed by the hash of its resolved recipe and of its input files. A cell with a result is never run again;
a half-finished one is wiped and run anew, so a kill at any moment loses at most the cells in flight.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from experiments.config import Recipe
from experiments.console import Console
from experiments.recipe import Resolved, from_override, load_recipe, recipe_key
from experiments.recipe.resolve import get_dotted
from experiments.recipe.tree import Branch
from finetune.atomic import replacing, sweep_leftovers, write_json
from finetune.errors import Interrupted, UserError


@dataclass(frozen=True)
class Cell:
    """One point of the grid under one seed."""

    key: str
    """Hash that names its directory."""
    point: dict[str, Any]
    """Dotted key → value."""
    seed: int
    resolved: Resolved


def sweep(
    recipe: str,
    overrides: Sequence[Branch],
    out: Path,
    *,
    grid: Sequence[str] = (),
    seeds: int | None = None,
    jobs: int = 1,
    quiet: bool = False,
) -> int:
    """Run the cells of a sweep that have no result yet; returns 0, or 1 if any cell failed.

    recipe: file or shipped name. overrides: laid over it. grid: `key=v1,v2,…` texts, else the recipe's own.
    jobs: worker processes; the cores are shared out between them.
    Raises UserError for an unknown key, a wrong value or an empty grid, before any cell runs.
    """
    base = load_recipe(recipe, overrides)
    axes = (
        parse_grid(grid)
        if grid
        else {k: list(v) for k, v in (base.recipe.sweep.grid if base.recipe.sweep else {}).items()}
    )
    if not axes:
        raise UserError(f"recipe {base.name!r} has no `sweep.grid`: give --grid key=v1,v2,…")
    count = seeds if seeds is not None else base.recipe.sweep.seeds if base.recipe.sweep else 3
    if count < 1:
        raise UserError(f"--seeds must be at least 1, got {count}")
    if jobs < 1:
        raise UserError(f"--jobs must be at least 1, got {jobs}")
    cells = list(plan_cells(recipe, overrides, axes, count))
    _claim(out, axes, count, base)
    console = Console(quiet=quiet)
    run_cells(out, cells, jobs, console)
    table = write_table(out, cells)
    failed = [row for row in table if row["status"] == "failed"]
    for row in failed[:5]:
        console.say(f"failed {row['cell']}: {row['reason']}")
    from experiments.report import build_report, write_plots

    write_plots(out)
    console.say(f"report: {build_report([out], out=out / 'report.html')}")
    return 1 if failed else 0


def parse_grid(grid: Sequence[str]) -> dict[str, list[Any]]:
    """`adapter.rank=1,2` texts as {key: values}. Raises UserError for a missing `=`, no values, or a repeated key."""
    axes: dict[str, list[Any]] = {}
    for text in grid:
        key, equals, values = text.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not values.strip():
            raise UserError(f"--grid {text!r}: write it as key=v1,v2,…")
        if key in axes:
            raise UserError(f"--grid: the key {key!r} is given twice; put its values in one list")
        axes[key] = [value.strip() for value in values.split(",")]
        if len(set(axes[key])) < len(axes[key]):
            raise UserError(f"--grid {key}: a value is given twice")
    return axes


def plan_cells(recipe: str, overrides: Sequence[Branch], axes: dict[str, list[Any]], seeds: int) -> Iterator[Cell]:
    """Resolve every cell of the grid; each passes the same strict builder as a single run."""
    base = load_recipe(recipe, overrides).recipe
    for key in axes:
        if key == "train.seed":
            raise UserError("--grid train.seed: seeds are an axis of their own; use --seeds")
        _check_key(base, key)
    for values in itertools.product(*axes.values()):
        laid = [from_override(key, value, f"--grid {key}") for key, value in zip(axes, values, strict=True)]
        for seed in range(seeds):
            resolved = load_recipe(recipe, [*overrides, *laid, from_override("train.seed", seed, "--seeds")])
            point = {key: get_dotted(resolved.recipe, key) for key in axes}
            yield cell_of(resolved, point=point, seed=seed)


def _check_key(base: Recipe, key: str) -> None:
    parent, _, _ = key.partition(".")
    if getattr(base, parent, 0) is None:  # a block the recipe leaves out: the builder will make it and judge the rest
        return
    try:
        get_dotted(base, key)
    except UserError as error:
        raise UserError(f"--grid: {error}") from None


def cell_of(resolved: Resolved, *, point: dict[str, Any], seed: int) -> Cell:
    """The cell of a resolved recipe, keyed by all that its result depends on.

    That is every value but the sweep block itself, device and threads, and the bytes of the input files.
    """
    from experiments.pipeline import recipe_inputs

    digests = [_digest(path) for path in recipe_inputs(resolved.recipe)]
    return Cell(recipe_key(resolved.recipe, digests), point, seed, resolved)


@functools.cache
def _digest(path: str) -> list[str]:
    from finetune.data import describe

    return [entry["sha256"] for entry in describe([path])]


def _claim(out: Path, axes: dict[str, list[Any]], seeds: int, base: Resolved) -> None:
    """Make the sweep directory, or check that an existing one is a sweep."""
    marker = out / "sweep.json"
    if out.exists() and any(out.iterdir()) and not marker.is_file():
        raise UserError(f"{out} is not empty and is not a sweep directory; name another --out")
    out.mkdir(parents=True, exist_ok=True)
    sweep_leftovers(out)
    from finetune.rundir import write_provenance

    write_provenance(out, recipe_yaml=base.to_yaml())
    write_json(
        marker, {"recipe": base.name, "grid": {k: [str(v) for v in vs] for k, vs in axes.items()}, "seeds": seeds}
    )


def _result(out: Path, cell: Cell) -> Path:
    return out / "cells" / cell.key / "result.json"


def run_cells(out: Path, cells: Sequence[Cell], jobs: int, console: Console, *, label: str = "sweep") -> None:
    """Run the cells that have no result yet, in `jobs` processes that share out the cores."""
    unique = {cell.key: cell for cell in cells}
    todo = [cell for cell in unique.values() if not _result(out, cell).is_file()]
    console.say(f"{label}: {len(unique)} cells, {len(unique) - len(todo)} done before, {len(todo)} to run")
    if not todo:
        return
    with console.task(label, len(todo), "cells") as bar:
        if jobs == 1:
            for done, cell in enumerate(todo, start=1):
                run_cell(out / "cells" / cell.key, cell, None)
                bar(done, _label(cell))
            return
        threads = max(1, (os.cpu_count() or 1) // jobs)
        workers = min(jobs, len(todo))
        context = get_context("spawn")
        with ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(os.getpid(), threads)) as pool:
            pending: dict[Future, Cell] = {
                pool.submit(run_cell, out / "cells" / cell.key, cell, threads): cell for cell in todo
            }
            done = 0
            try:
                while pending:
                    for future in wait(pending, return_when=FIRST_COMPLETED).done:
                        cell = pending.pop(future)
                        future.result()
                        done += 1
                        bar(done, _label(cell))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def _start_worker(parent: int, threads: int) -> None:
    """Give a worker its share of the cores, and end it when its parent was killed.

    The share must be in the environment before torch and BLAS are imported: pools of all cores in every worker wait
    for each other (evaluation was eight times slower). An orphan must not write into a sweep that somebody restarted.
    """
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(3)

    threading.Thread(target=watch, daemon=True).start()


def _label(cell: Cell) -> str:
    return " ".join(f"{key}={value}" for key, value in cell.point.items()) + f" seed={cell.seed}"


def run_cell(directory: Path, cell: Cell, threads: int | None) -> None:
    """Train and judge one cell in `directory` and write its result.json last; a failure is a result with its reason."""
    from experiments.pipeline import execute, remove_weights
    from experiments.preparing import prepare
    from finetune.rundir import RunDirectory

    if directory.exists():
        shutil.rmtree(directory)
    recipe = cell.resolved.recipe
    if threads is not None and recipe.train.threads is None:
        recipe = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, threads=threads))
    started = time.monotonic()
    outcome: dict[str, Any]
    try:
        prepared = prepare(recipe)
        run = RunDirectory.create(directory, recipe_yaml=cell.resolved.to_yaml())
        result = execute(run, recipe, prepared, Console(quiet=True, log=run.log), report=False)
        remove_weights(directory)
        outcome = {"status": "done", "reason": None, "metrics": result}
    except Interrupted:
        raise
    except ValueError as error:
        outcome = {"status": "failed", "reason": str(error), "metrics": {}}
    gc.collect()  # a PEFT model refers to itself: without this, each cell's weights outlive it
    directory.mkdir(parents=True, exist_ok=True)
    write_json(
        directory / "result.json",
        {
            "cell": cell.key,
            "point": cell.point,
            "seed": cell.seed,
            **outcome,
            "seconds": round(time.monotonic() - started, 2),
            "flatshift": _version(),
        },
    )


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("flatshift")
    except PackageNotFoundError:
        return "uninstalled"


def write_table(out: Path, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """cells.parquet: one row per cell of the plan, in plan order; metrics flattened as `split.metric`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = []
    for cell in cells:
        result = json.loads(_result(out, cell).read_text(encoding="utf-8"))
        row: dict[str, Any] = {"cell": cell.key, **cell.point, "seed": cell.seed}
        row |= {"status": result["status"], "reason": result["reason"], "seconds": result["seconds"]}
        for split, metrics in result["metrics"].items():
            row |= {f"{split}.{name}": float(m["value"]) for name, m in metrics.items()}
            if "accuracy" in metrics:
                row[f"{split}.error"] = 1.0 - float(metrics["accuracy"]["value"])
        rows.append(row)
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = pa.table({name: [row.get(name) for row in rows] for name in names})
    with replacing(out / "cells.parquet") as temporary:
        pq.write_table(table, temporary)
    return rows
