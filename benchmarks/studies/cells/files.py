"""A cell's result: one file named by the cell's key, written last and whole."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from finetune.atomic import read_object
from finetune.digests import unsealed, write_sealed
from finetune.errors import Interrupted

Result = dict[str, Any]
FINAL_STATES = ("done", "diverged", "refused")
"""The same settings end the same way again; `crashed` cells are run again by the next start."""


def cell_file(directory: Path, key: str) -> Path:
    """Where a cell's result lies."""
    return directory / f"{key}.json"


def read_result(directory: Path, key: str) -> Result:
    """The result of a cell that has one. Raises UserError if the file is none, or not what the cell left."""
    file, fix = cell_file(directory, key), "delete it, and the same command runs the cell anew"
    return unsealed(file, read_object(file, "status", fix=fix), fix=fix)


def is_final(directory: Path, key: str) -> bool:
    """Whether a cell has a result that another start would not change."""
    return cell_file(directory, key).is_file() and read_result(directory, key)["status"] in FINAL_STATES


def write_result(
    directory: Path,
    key: str,
    about: Mapping[str, Any],
    measure: Callable[[], Mapping[str, Any]],
    empty: Result,
    *,
    died: str | None = None,
) -> None:
    """Run `measure` and write `about`, what it returned and its time; a failure is a result with its reason.

    empty: what stands for the figures of a cell that failed. died: how the cell ended its workers; nothing is run then.
    `status`: done; diverged or refused (kept); crashed (run again by the next start).
    """
    started, cpu = time.monotonic(), time.process_time()
    outcome: Result = {"reason": None, **empty}
    outcome |= _outcome_of(measure) if died is None else {"status": "crashed", "reason": died}
    write_sealed(
        cell_file(directory, key),
        {
            "cell": key,
            **about,
            **outcome,
            "cpu_s": round(time.process_time() - cpu, 3),
            "wall_s": round(time.monotonic() - started, 3),
        },
    )


def _outcome_of(measure: Callable[[], Mapping[str, Any]]) -> Result:
    """The status of a cell, and its figures or the reason why it has none."""
    try:
        return {"status": "done", **measure()}
    except Interrupted as error:  # a full disk stays what it is
        if isinstance(error.__cause__, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        raise
    except ValueError as error:
        from finetune.train.loop import Diverged

        return {"status": "diverged" if isinstance(error, Diverged) else "refused", "reason": str(error)}
    except Exception as error:
        return {"status": "crashed", "reason": f"{type(error).__name__}: {error}"}
    finally:
        gc.collect()  # a PEFT model refers to itself: without this, each cell's weights outlive it
