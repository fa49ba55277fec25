"""What a worker process of a sweep does: take a unit of cells, leave their results, ask for the next."""

from __future__ import annotations

import functools
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from experiments.sweep.cell import Cell, outcome_of, run_cell
from experiments.sweep.directory import at_work
from experiments.sweep.source import source_digest
from finetune.errors import Interrupted
from finetune.run_directory import RunDirectory

Unit = tuple[Cell, ...]
"""Cells that one worker trains at a time: one, or a stack on a shared backbone."""

RunUnit = Callable[[Path, Unit, int | None], bool]
"""(sweep directory, cells, threads) → whether the process is fit for another unit."""


@dataclass(frozen=True)
class Answer:
    """What became of a unit."""

    kind: Literal["done", "stopped", "disk full"]
    """stopped: a signal came. disk full: nothing more can be written; the sweep must end."""
    text: str = ""
    fit: bool = True
    """Whether this process can take another unit."""


READY = Answer("done")


def run_unit(out: Path, unit: Unit, threads: int | None) -> bool:
    """Train and judge the cells of a unit; returns whether this process is fit for another one.

    A stack that fails as a whole (out of memory) leaves those of its cells without a result that had none.
    """
    directories = [out / "cells" / cell.key for cell in unit]
    log = RunDirectory(out).log
    for cell in unit:
        log(f"start {cell.key} ({cell.label}) in process {os.getpid()}")
    if len(unit) == 1:
        fit = run_cell(directories[0], unit[0], threads)
    else:
        fit = _run_stack(out, directories, unit, threads)
    log("\n".join(f"end {cell.key}" for cell in unit))
    return fit


def _run_stack(out: Path, directories: Sequence[Path], unit: Unit, threads: int | None) -> bool:
    from experiments.sweep.stacking import run_stack

    def measure() -> dict[str, Any]:
        run_stack(directories, unit, threads)
        return {}

    outcome, fit = outcome_of(measure, out)
    if outcome.status == "failed":
        RunDirectory(out).log(f"a stack of {len(unit)} cells failed: {outcome.reason}")
    return fit


def start_worker(parent: int, threads: int) -> None:
    """Give a worker its share of the cores, and end it when its parent was killed.

    The share must be in the environment before torch and BLAS are imported: pools of all cores in every worker wait
    for each other (evaluation was eight times slower). An orphan must not write into a sweep that somebody restarted.
    """
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(3)

    threading.Thread(target=watch, daemon=True).start()


def serve(parent: int, threads: int, out: Path, run: RunUnit, connection: Connection) -> None:
    """The life of a worker: says that it is ready, then answers each unit, until told None or left alone."""
    start_worker(parent, threads)
    source_digest()  # now: what is edited while the worker lives is not what it runs
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what it means
    with at_work(out):
        if os.getppid() != parent:
            return
        connection.send(READY)
        try:
            while (unit := connection.recv()) is not None:
                answer = _answer(out, unit, threads, run)
                _settle()
                connection.send(answer)
                if not answer.fit:
                    return
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return


@functools.cache
def _settle() -> None:
    """Once, after the first unit: what it imported stays, and is spared every later search for garbage (0.3 s each)."""
    gc.collect()
    gc.freeze()


def _answer(out: Path, unit: Unit, threads: int, run: RunUnit) -> Answer:
    try:
        return Answer("done", fit=run(out, unit, threads))
    except Interrupted as error:
        return Answer("stopped" if was_signal(error) else "disk full", str(error), fit=False)


def was_signal(error: Interrupted) -> bool:
    """Whether it was a signal that ended a cell, not a full disk (which is the error's cause)."""
    return error.__cause__ is None or isinstance(error.__cause__, KeyboardInterrupt)
