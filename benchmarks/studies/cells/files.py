"""A cell's result: one file named by the cell's key, written last and whole."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flatshift.finetune.digests import write_sealed
from flatshift.finetune.errors import Interrupted

Result = dict[str, Any]


def cell_file(directory: Path, key: str) -> Path:
    """Where a cell's result lies."""
    return directory / f"{key}.json"


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
    `status`: as `flatshift.experiments.results.cells` says.
    """
    started, cpu = time.monotonic(), time.process_time()
    outcome: Result = {"reason": None, **empty}
    outcome |= _outcome_of(measure) if died is None else {"status": "failed", "reason": died}
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
        from flatshift.finetune.train.divergence import Diverged

        return {"status": "diverged" if isinstance(error, Diverged) else "failed", "reason": str(error)}
    except Exception as error:
        return {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    finally:
        gc.collect()  # a PEFT model refers to itself: without this, each cell's weights outlive it
