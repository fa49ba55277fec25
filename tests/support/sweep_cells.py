"""Cheap stand-ins for the cells of a sweep: each behaves as its point says, in a process that a worker can spawn."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import time
from pathlib import Path

from flatshift.experiments.recipe import load_recipe
from flatshift.experiments.studies.cell import Cell, CellResult, capture_result, finish_cell
from flatshift.finetune.errors import Interrupted
from flatshift.finetune.run_directory import RunDirectory


def cells_that(behaviours: list[str], *, seeds: int = 1) -> list[Cell]:
    """One point per behaviour: `ok`, `die`, `die (late) once`, `boom`, `full`, `writing` or `stop once`."""
    resolved = load_recipe("double-descent")
    return [
        Cell(f"{place:04d}{seed:04d}", {"behaves": name, "place": place}, seed, resolved)
        for place, name in enumerate(behaviours)
        for seed in range(seeds)
    ]


def behave(out: Path, cell: Cell, threads: int | None) -> bool:
    """A `RunCell` that does what the point of the cell says."""
    RunDirectory(out).log(f"start {cell.key}")
    name, directory = cell.point["behaves"], out / "cells" / cell.key
    if name == "die" or (name == "die once" and _first(out, cell)):
        (out / "cells" / f".{cell.key}.{os.getpid()}.tmp").mkdir(parents=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "die late once" and _first(out, cell):
        while len(list((out / "cells").glob("*/result.json"))) < 2:
            time.sleep(0.05)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "stop once" and _first(out, cell):
        raise Interrupted("stopped by a signal")
    if name == "writing":
        directory.mkdir(parents=True)
        (directory / ".result.json.12345678.tmp").touch()
        time.sleep(60)
    if name == "full":
        while out.name == "writing" and not list(out.rglob(".result.json.*.tmp")):
            time.sleep(0.05)
        raise Interrupted(f"the disk is full while writing {directory}") from OSError(errno.ENOSPC, "no space")

    def measure() -> CellResult:
        if name == "boom":
            raise RuntimeError("a device failed")
        found = {"process": os.getpid(), "threads": threads or 0, "blas": int(os.environ["OMP_NUM_THREADS"])}
        return CellResult("done", metrics={"test": {name: {"value": value} for name, value in found.items()}})

    result, fit = capture_result(measure, directory)
    finish_cell(directory, cell, dataclasses.replace(result, seconds=0.5))
    return fit


def _first(out: Path, cell: Cell) -> bool:
    """Whether this cell is here for the first time."""
    try:
        (out / f"seen-{cell.key}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def starts(out: Path) -> list[str]:
    """Keys in the order in which cells were started."""
    lines = (out / "log.txt").read_text(encoding="utf-8").splitlines()
    return [line.split(" start ")[1] for line in lines if " start " in line]


class Unloadable:
    """A `RunCell` that ends the process which unpickles it."""

    def __reduce__(self) -> tuple:
        return os._exit, (7,)
