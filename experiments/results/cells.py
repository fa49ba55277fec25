"""Results of a study's cells, their status, and the code that produced them; shared by sweeps and comparisons.

done: trained and evaluated; it has metrics.
diverged: the loss or a gradient of a step, or the loss of the trained adapter on evaluation rows, was not finite.
    That is a finding about its settings, and deterministic: the cell is never run again, and every analysis counts it
    as the worst result. A bisection counts it as fitting no row, a trial as lost, a curve over settings drops and
    reports its seed, and a final run of a comparison counts with its task's majority baseline (if there is none, the
    seed is left out on both sides).
failed: it could not run or be evaluated: rejected rows, out of memory, a dead worker. That reveals nothing about its
    settings: it is in no analysis, makes the command's exit code 1, and can be tried again.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from flatshift.finetune.atomic import read_json_object
from flatshift.finetune.digests import verify_sealed
from flatshift.finetune.errors import UserError
from flatshift.finetune.machine import installed_version

Status = Literal["done", "diverged", "failed"]
RESULT = "result.json"
MARKER, FORMAT = "sweep.json", 2
"""Plan of a sweep, and the format version of that file."""
STUDY = "study.recipe.yaml"
"""Recipe of a comparison, written before its cells."""
CELLS, CURVES, POINTS, EMC = "cells.parquet", "curves.parquet", "points.csv", "emc.json"
"""Tables made from a sweep's cells."""
SLURM = "slurm"
"""Folder of submitit's scripts, logs and pickles in a study's directory."""
FORECAST = "forecast.json"
"""Forecast of a recipe, next to the tables of its predicted cells."""
FITS = {"train.unexplained": "unexplained share of the training labels", "train.error": "training error"}
"""Columns that measure the fit of training rows, the first that a cell has: a squared loss fits classes long before it
fits its labels."""


def unreached_status(status: str) -> str:
    """Return the status for the steps that a cell of this status did not reach."""
    return "stopped early" if status == "done" else status


def read_result(directory: Path) -> dict[str, Any] | None:
    """Return the result of the cell in `directory`; None if it has none yet.

    Raises UserError if the file is not a result, or if it or a record of the cell was changed.
    """
    path = directory / RESULT
    if not path.is_file():
        return None
    fix = "delete it, and the same command runs the cell again"
    return verify_sealed(path, read_json_object(path, "status", "reason", fix=fix), fix=fix)


def result_metrics(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return `<split>.<metric>` of a finished cell; classes also get `error`, and the number of its items, numbers
    `unexplained`: their squared error as a share of that of always predicting the training rows' mean."""
    values: dict[str, Any] = {}
    for split, metrics in result["metrics"].items():
        for name, metric in metrics.items():
            values[f"{split}.{name}"] = None if metric["value"] is None else float(metric["value"])
        if (accuracy := values.get(f"{split}.accuracy")) is not None:
            values |= {f"{split}.error": 1.0 - accuracy, f"{split}.error.items": metrics["accuracy"].get("n")}
        if (floor := values.get(f"{split}.mean_floor")) and (rmse := values.get(f"{split}.rmse")) is not None:
            values[f"{split}.unexplained"] = (rmse / floor) ** 2
    return values


def read_marker(out: Path) -> dict[str, Any]:
    """Return sweep.json unchanged. Raises UserError if it is unreadable or has a format unknown to this code."""
    path = out / MARKER
    marker = read_json_object(path, fix="delete it and run the sweep again, which keeps its cells")
    if (written := marker.get("format")) != FORMAT:
        raise UserError(
            f"{path} has format {written}, and this flatshift ({flatshift_version()}) knows {FORMAT}; continue with "
            "the version that wrote it, or name another directory"
        )
    return marker


_ROOT = Path(__file__).parents[2]  # not resolved: in a checkout the packages are links
_READERS = ("experiments/report/", "experiments/results/", "experiments/statistics/", "experiments/studies/compare/")
"""Modules that only read and show results: they cannot change a metric of a sweep."""


def flatshift_version() -> str:
    """Return the version of the installed distribution."""
    return installed_version("flatshift") or "uninstalled"


@functools.cache
def source_digest() -> str:
    """Return 12 hex digits over the Python files a cell runs through, as on disk at the first call."""
    digest = hashlib.sha256()
    for package in ("experiments", "finetune", "regularizers", "selection"):
        for path in sorted((_ROOT / package).rglob("*.py")):
            name = path.relative_to(_ROOT).as_posix()
            if not name.startswith(_READERS):
                data = path.read_bytes()
                digest.update(f"{name}\x1f{len(data)}\x1f".encode())
                digest.update(data)
    return digest.hexdigest()[:12]
