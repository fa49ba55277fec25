"""What a cell of a study left behind, how it ended, and which code made it: one set of statuses for sweeps and
comparisons.

done: trained and judged; it has figures.
diverged: the loss or a gradient of an update, or the loss of the trained adapter on judged rows, was no finite number.
    That is a finding about its settings, which end so again: it is never run anew, and it stays in every analysis as
    the worst there is. A bisection takes it to fit no row, a trial to be lost, a curve over settings loses its seed
    and says so, and a final run of a comparison counts with its task's majority floor (where there is none, the seed
    is left out for both sides).
failed: it could not run or be judged: rows that were refused, no memory, a dead worker. That says nothing about its
    settings: it is in no analysis, makes the command's exit code 1, and can be tried again.
"""

from __future__ import annotations

import functools
import hashlib
import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from flatshift.finetune.digests import unsealed
from flatshift.finetune.errors import UserError

Status = Literal["done", "diverged", "failed"]
RESULT = "result.json"
MARKER, FORMAT = "sweep.json", 2
"""What a sweep was asked for, and the form of that."""
CELLS, CURVES, POINTS, EMC = "cells.parquet", "curves.parquet", "points.csv", "emc.json"
"""What a sweep's cells come to."""
_KEYS = {"status", "reason"}


def status_of(found: dict[str, Any]) -> Status:
    """How a cell ended, from its result or its row of a table, as any version wrote them."""
    status = found["status"]
    if status == "failed" and found.get("diverged"):
        return "diverged"
    return "failed" if status in ("refused", "crashed") else status


def ended(status: str) -> str:
    """How a cell of this status ended, for the steps that it did not reach."""
    return "stopped early" if status == "done" else status


def result_files(directory: Path) -> tuple[Path, Path]:
    """Where the result of the cell in `directory` may lie: in it, or beside it where it is kept without its run."""
    return directory / RESULT, directory.with_name(f"{directory.name}.json")


def read_result(directory: Path) -> dict[str, Any] | None:
    """The result of the cell in `directory`; None if it has none yet. Raises UserError if the file is no result, or it
    or a record of the cell is not what the cell left."""
    for path in result_files(directory):
        fix = f"delete the cell's {path.name}, and the same command runs the cell anew"
        try:
            found = json.loads(path.read_bytes())
            if not found.keys() >= _KEYS:
                raise ValueError("keys are missing")
        except FileNotFoundError:
            continue
        except (ValueError, AttributeError, RecursionError) as error:
            raise UserError(f"{path}: not a cell's result ({error}); {fix}") from None
        found = unsealed(path, found, fix=fix)
        return {**found, "status": status_of(found)}
    return None


def read_marker(out: Path) -> dict[str, Any]:
    """sweep.json as it is. Raises UserError if it cannot be read, or has another format than this code knows."""
    path = out / MARKER
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("not an object")
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: not valid JSON ({error}); delete it and run the sweep again, which keeps its cells"
        ) from None
    if (written := found.get("format")) != FORMAT:
        raise UserError(
            f"{path} has format {written}, and this flatshift ({flatshift_version()}) knows {FORMAT}; go on with the "
            "version that wrote it, or name another directory"
        )
    return found


# ------------------------------------------------------------------------------------------------- which code made them


_ROOT = Path(__file__).parents[2]  # not resolved: in a checkout the rooms are links
_PACKAGES = ("experiments", "finetune", "regularizers", "selection")
_SHOWS = ("experiments/report/", "experiments/results/", "experiments/statistics/", "experiments/studies/compare/")
"""What reads and shows results: no figure of a sweep comes from there."""


def flatshift_version() -> str:
    """The installed distribution's version."""
    try:
        return version("flatshift")
    except PackageNotFoundError:
        return "uninstalled"


@functools.cache
def source_digest() -> str:
    """12 hex digits of the Python files that a cell runs through, as they lie on disk when first asked."""
    digest = hashlib.sha256()
    for package in _PACKAGES:
        for path in sorted((_ROOT / package).rglob("*.py")):
            name = path.relative_to(_ROOT).as_posix()
            if not name.startswith(_SHOWS):
                data = path.read_bytes()
                digest.update(f"{name}\x1f{len(data)}\x1f".encode())
                digest.update(data)
    return digest.hexdigest()[:12]
