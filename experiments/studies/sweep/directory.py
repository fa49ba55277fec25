"""Directory of a sweep: its ownership, its plan, and merging parts computed on machines without a common disk.

sweep.json is the plan (format 2), cells/<hash>/ are its results. A sweep may be started again with another grid: cells
in both are not run again, the tables contain the current plan.

    flatshift sweep RECIPE --grid … --part 3/8 --out part-3
    flatshift sweep RECIPE --grid … --merge part-1 part-2 … --out whole
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flatshift.experiments.recipe import Resolved
from flatshift.experiments.results.cells import (
    CELLS,
    CURVES,
    EMC,
    FORMAT,
    MARKER,
    POINTS,
    RESULT,
    flatshift_version,
    read_marker,
    result_files,
    source_digest,
)
from flatshift.experiments.run.console import Console
from flatshift.experiments.studies.cell import Cell
from flatshift.experiments.studies.directory import WORKERS, read_results
from flatshift.experiments.studies.leases import CLAIMS, claim_holder, list_claims
from flatshift.finetune.atomic import (
    atomic_directory,
    atomic_file,
    has_only_leftovers,
    make_directory,
    remove_leftovers,
    write_json,
)
from flatshift.finetune.digests import DONE, check_files
from flatshift.finetune.errors import UserError
from flatshift.finetune.lock import INSIDE
from flatshift.finetune.run_directory import COMMAND, ENVIRONMENT, RECIPE, disk_full_interrupts, write_provenance

PLANNED = "plan"
"""Claim of a host that needs a whole shared directory: to plan, and to write the tables."""


def check_directory(out: Path) -> None:
    """Raise UserError for a path that cannot be a sweep's: a file, other content, or another format."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out: {out} is a file; name a sweep directory")
    if not out.exists():
        return
    if not (out / MARKER).is_file():
        if (out / "cells").is_dir() and (out / WORKERS).exists():  # its broken marker was deleted
            return
        if not has_only_leftovers(out, allowed=(INSIDE, WORKERS, CLAIMS)):
            raise UserError(f"{out} is not empty and is not a sweep directory; name another --out")
        return
    read_marker(out)


def claim_directory(out: Path, plan: dict[str, Any], base: Resolved) -> None:
    """Write sweep.json, then its provenance.

    A kill at any point leaves a directory that the same command recognises. Tables and emc.json of another plan are
    removed: their content is in the cells.
    """
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


def check_same_plan(out: Path, plan: dict[str, Any]) -> None:
    """Raise UserError if hosts that share the directory are running another plan."""
    before = read_marker(out) if (out / MARKER).is_file() else {}
    others = [path for path in list_claims(out) if not path.name.startswith(PLANNED)]
    if before and others and _without_stamps(before) != _without_stamps(plan):
        raise UserError(
            f"{out}: {claim_holder(others[0])} is at work there on another recipe or grid; start the same command "
            "as there, "
            "or name another --out"
        )


SEALED = (MARKER, RECIPE, COMMAND, ENVIRONMENT, CELLS, CURVES, POINTS, EMC)
"""Files listed in done.json of a finished sweep, besides its cells."""


def check_finished(out: Path) -> None:
    """Raise UserError for a changed file of a finished sweep; a cell's missing file and the tables are made again."""
    check_files(out, lambda name: (out / name).is_file() and name not in (CELLS, CURVES, POINTS))


def write_marker(out: Path, plan: dict[str, Any]) -> None:
    with disk_full_interrupts(f"writing {out / MARKER}"):
        write_json(out / MARKER, {"format": FORMAT, **plan, **_version_stamps()})


def _without_stamps(document: dict[str, Any]) -> dict[str, Any]:
    """Return a sweep.json without the version of the code, and without the row counts that a bisection tried."""
    found = {**document, **_version_stamps()}
    if search := document.get("bisection"):
        found.pop("cells", None)
        found.pop("keys", None)
        found["grid"] = {key: values for key, values in document["grid"].items() if key != search["key"]}
    return found


def _version_stamps() -> dict[str, Any]:
    return {"flatshift": flatshift_version(), "code": source_digest(), "format": FORMAT}


def count_other_cells(out: Path, cells: Sequence[Cell]) -> int:
    """Count the finished cells in the directory that are not among `cells`."""
    mine = {cell.key for cell in cells}
    return sum(1 for path in (out / "cells").glob(f"*/{RESULT}") if path.parent.name not in mine)


# ---------------------------------------------------------------------------------------------- parts on other machines


@dataclass(frozen=True)
class SweepPart:
    """One of `of` jobs, counted from 1."""

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> SweepPart:
        """Parse `3/8`. Raises UserError for anything else."""
        found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text.strip())
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise UserError(f"--part {text}: write i/n with 1 <= i <= n, for example 3/8")
        return cls(int(found[1]), int(found[2]))

    def cells(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return every `of`-th cell; the parts are disjoint and complete. Raises UserError for an empty part."""
        mine = list({cell.key: cell for cell in cells}.values())[self.number - 1 :: self.of]
        if not mine:
            raise UserError(f"--part {self.number}/{self.of}: the plan has {len(cells)} cells, so this part has none")
        return mine


def check_parts(sources: Sequence[Path]) -> None:
    """Raise UserError for a directory that is not a sweep's, or is finished but was changed."""
    for source in sources:
        if not (source / MARKER).is_file():
            raise UserError(f"--merge: {source} is not a sweep directory (it has no {MARKER})")
        read_marker(source)
        if (source / DONE).is_file():
            check_files(source, partial(_is_checked_file, source))


def _is_checked_file(source: Path, name: str) -> bool:
    return (source / name).is_file() and name != CELLS


def merge_parts(out: Path, cells: Sequence[Cell], sources: Sequence[Path], console: Console) -> None:
    """Copy the cells that `sources` have finished and `out` has not, each atomically.

    Raises UserError for a damaged cell, and if cells are missing at the end; copied cells are kept.
    """
    wanted = {cell.key: cell for cell in cells}
    make_directory(out / "cells")
    there = read_results(out, cells)
    for source in sources:
        found = read_results(source, [cell for key, cell in wanted.items() if key not in there])
        with disk_full_interrupts(f"writing {out}"):
            for key in found:
                _copy_cell(source / "cells" / key, out / "cells" / key)
        there |= found
        console.say(f"{source}: {len(found)} cells of this plan that were not there yet")
    missing = [cell for key, cell in wanted.items() if key not in there]
    if missing:
        raise UserError(
            f"--merge: {len(missing)} of {len(wanted)} cells are in none of the directories, for example "
            f"{missing[0].label}; name the parts that have them, or leave --merge out to run them here"
        )


def _copy_cell(cell: Path, to: Path) -> None:
    for file, copied in zip(result_files(cell)[1:], result_files(to)[1:], strict=True):
        if file.is_file():  # kept without its run
            with atomic_file(copied) as temporary:
                shutil.copyfile(file, temporary)
    if cell.is_dir():
        with atomic_directory(to) as temporary:
            shutil.copytree(cell, temporary, dirs_exist_ok=True)
