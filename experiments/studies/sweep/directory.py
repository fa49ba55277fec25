"""Directory of a sweep: its ownership, its plan, and merging parts computed on machines without a common disk.

sweep.json is the plan (format 2), cells/<hash>/ are its results. A sweep may be started again with another grid: cells
in both are not run again, the tables contain the current plan.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatshift.experiments.recipe import Resolved
from flatshift.experiments.recipe.auto import BACKBONE, PRECISION, read_decided_precisions
from flatshift.experiments.results.cells import (
    CELLS,
    CURVES,
    EMC,
    FORMAT,
    MARKER,
    POINTS,
    STUDY,
    flatshift_version,
    read_marker,
    source_digest,
)
from flatshift.experiments.run.console import Console
from flatshift.experiments.studies.cell import Cell
from flatshift.experiments.studies.directory import WORKERS, read_results
from flatshift.finetune.atomic import atomic_directory, has_only_leftovers, make_directory, remove_leftovers, write_json
from flatshift.finetune.config import Train
from flatshift.finetune.digests import DONE, check_entries, check_files
from flatshift.finetune.errors import UserError
from flatshift.finetune.lock import INSIDE
from flatshift.finetune.run_directory import COMMAND, ENVIRONMENT, RECIPE, disk_full_interrupts, write_provenance


def check_directory(out: Path) -> None:
    """Raise UserError for a path that cannot be a sweep's: a file, other content, or another format."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out: {out} is a file; name a sweep directory")
    if (out / MARKER).is_file():
        read_marker(out)
        return
    marker_lost = (out / "cells").is_dir() and (out / WORKERS).exists() and not (out / STUDY).exists()
    if out.exists() and not marker_lost and not has_only_leftovers(out, allowed=(INSIDE, WORKERS)):
        raise UserError(f"{out} is not empty and is not a sweep directory; name another --out")


def claim_directory(out: Path, plan: dict[str, Any], base: Resolved) -> None:
    """Write sweep.json, then its provenance. A kill at any point leaves a directory that the same command recognises.
    Tables and emc.json of another plan are removed: their content is in the cells."""
    with disk_full_interrupts(f"writing {out / MARKER}"):
        remove_leftovers(out)
        (out / DONE).unlink(missing_ok=True)  # it describes a finished sweep
        before = read_marker(out) if (out / MARKER).is_file() else {}
        if before and _without_stamps(before) != _without_stamps(plan):
            for name in (CELLS, CURVES, POINTS, EMC):
                (out / name).unlink(missing_ok=True)
    write_marker(out, plan)
    with disk_full_interrupts(f"writing {out}"):
        write_provenance(out, recipe_yaml=base.to_yaml())


SEALED = (MARKER, RECIPE, COMMAND, ENVIRONMENT, CELLS, CURVES, POINTS, EMC)
"""Files listed in done.json of a finished sweep, besides its cells."""


def check_finished(out: Path, unchecked: Sequence[str] = (CELLS, CURVES, POINTS)) -> None:
    """Raise UserError for a changed file of a finished sweep; missing and `unchecked` ones are made again."""
    check_files(out, lambda name: (out / name).is_file() and name not in unchecked)


def write_marker(out: Path, plan: dict[str, Any]) -> None:
    with disk_full_interrupts(f"writing {out / MARKER}"):
        write_json(out / MARKER, {"format": FORMAT, **plan, **_version_stamps()})


def _without_stamps(document: dict[str, Any]) -> dict[str, Any]:
    """Return a sweep.json without the version of the code, and without the row counts that a bisection tried."""
    plan = {**document, **_version_stamps()}
    if search := document.get("bisection"):
        plan.pop("cells", None)
        plan.pop("keys", None)
        plan["grid"] = {key: values for key, values in document["grid"].items() if key != search["key"]}
    return plan


def _version_stamps() -> dict[str, Any]:
    return {"flatshift": flatshift_version(), "code": source_digest(), "format": FORMAT}


@dataclass(frozen=True)
class SweepPart:
    """One of `total` jobs, counted from 1."""

    number: int
    total: int

    @classmethod
    def parse(cls, text: str) -> SweepPart:
        """Parse `3/8`. Raises UserError for anything else."""
        match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text.strip())
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise UserError(f"--part {text}: write i/n with 1 <= i <= n, for example 3/8")
        return cls(int(match[1]), int(match[2]))

    def cells(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return every `total`-th cell; the parts are disjoint and complete. Raises UserError for an empty part."""
        selected = list({cell.key: cell for cell in cells}.values())[self.number - 1 :: self.total]
        if not selected:
            raise UserError(
                f"--part {self.number}/{self.total}: the plan has {len(cells)} cells, so this part has none"
            )
        return selected


def check_parts(sources: Sequence[Path]) -> None:
    """Raise UserError for a directory that is not a sweep's, or is finished but was changed."""
    for source in sources:
        if not (source / MARKER).is_file():
            raise UserError(f"--merge: {source} is not a sweep directory (it has no {MARKER})")
        check_entries(source)
        read_marker(source)
        if (source / DONE).is_file():
            check_finished(source, unchecked=(CELLS,))


def merged_recipe(sources: Sequence[Path], planned: Train, axes: Collection[str]) -> Path:
    """Return the resolved recipe by which a merge resolves `auto`, the first source's. Raises UserError for sources
    that resolved a precision differently, unless it is an axis."""
    trains = {source: read_decided_precisions(source / RECIPE)[0] for source in sources}
    for name in (PRECISION, BACKBONE):
        decided = {getattr(train, name): source for source, train in trains.items() if train is not None}
        if len(decided) > 1 and getattr(planned, name) == "auto" and f"train.{name}" not in axes:
            (value, first), (other, second) = list(decided.items())[:2]
            raise UserError(
                f"--merge: train.{name} was resolved to {value} in {first} and to {other} in {second}; run the parts "
                f"of one of them again, all with --train.{name} written"
            )
    return sources[0] / RECIPE


def merge_parts(out: Path, cells: Sequence[Cell], sources: Sequence[Path], console: Console) -> None:
    """Copy the cells that `sources` have finished and `out` has not, or has failed, each atomically. Raises UserError
    for a damaged cell, and if cells are missing at the end; copied cells are kept."""
    planned = {cell.key: cell for cell in cells}
    make_directory(out / "cells")
    finished = read_results(out, cells)
    for source in sources:
        failed = {key for key, result in finished.items() if result["status"] == "failed"}
        new = read_results(source, [cell for key, cell in planned.items() if key in failed or key not in finished])
        new = {key: result for key, result in new.items() if key not in failed or result["status"] != "failed"}
        with disk_full_interrupts(f"writing {out}"):
            for key in new:
                with atomic_directory(out / "cells" / key) as temporary:
                    shutil.copytree(source / "cells" / key, temporary, dirs_exist_ok=True)
        finished |= new
        console.say(f"{source}: {len(new)} cells of this plan that were not there yet, or failed there")
    missing = [cell for key, cell in planned.items() if key not in finished]
    if missing:
        raise UserError(
            f"--merge: {len(missing)} of {len(planned)} cells are in none of the directories, for example "
            f"{missing[0].label}; name the parts that have them, computed with the same paths of data, or leave "
            "--merge out to run them here"
        )
