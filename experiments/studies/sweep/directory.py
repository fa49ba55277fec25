"""A sweep's directory: whose it is, and what was asked for.

sweep.json says what is asked for (format 2), cells/<hash>/ hold what came of it. A sweep may come back with another
grid: cells that both have are not run again, the tables hold what is asked for now.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.recipe import Resolved
from experiments.results.cells import CELLS, CURVES, EMC, FORMAT, MARKER, POINTS, RESULT, read_marker
from experiments.results.code_version import flatshift_version, source_digest
from experiments.studies.cell import Cell
from experiments.studies.directory import WORKERS
from experiments.studies.leases import CLAIMS, claims_of, holder
from finetune.atomic import is_bare, sweep_leftovers, write_json
from finetune.digests import DONE, FILES, check_files, sums
from finetune.errors import UserError
from finetune.lock import INSIDE
from finetune.run_directory import COMMAND, ENVIRONMENT, RECIPE, disk_full_interrupts, write_provenance

PLANNED = "plan"
"""The claim of a host that looks at a shared directory as a whole: to plan, and to write the tables."""


def check_directory(out: Path) -> None:
    """Refuse a path that cannot be a sweep's. Raises UserError for a file, other content, or another format."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out: {out} is a file; name a sweep directory")
    if not out.exists():
        return
    if not (out / MARKER).is_file():
        if (out / "cells").is_dir() and (out / WORKERS).exists():  # its marker was broken and is deleted
            return
        if not is_bare(out, but=(INSIDE, WORKERS, CLAIMS)):
            raise UserError(f"{out} is not empty and is not a sweep directory; name another --out")
        return
    read_marker(out)


def claim(out: Path, plan: dict[str, Any], base: Resolved) -> None:
    """Write sweep.json, then where it came from.

    A kill at any point leaves a directory that the same command knows as its own.

    Tables and emc.json of another plan are removed: what they hold is in the cells.
    """
    with disk_full_interrupts(f"writing {out / MARKER}"):
        sweep_leftovers(out)
        (out / DONE).unlink(missing_ok=True)  # it speaks of a sweep that is finished
        before = read_marker(out) if (out / MARKER).is_file() else {}
        if before and _asked(before) != _asked(plan):
            for name in (CELLS, CURVES, POINTS, EMC):
                (out / name).unlink(missing_ok=True)
    write_marker(out, plan)
    with disk_full_interrupts(f"writing {out}"):
        write_provenance(out, recipe_yaml=base.to_yaml())


def refuse_other_plan(out: Path, plan: dict[str, Any]) -> None:
    """Raise UserError where hosts that share the directory are at work on another plan than this."""
    before = read_marker(out) if (out / MARKER).is_file() else {}
    others = [path for path in claims_of(out) if not path.name.startswith(PLANNED)]
    if before and others and _asked(before) != _asked(plan):
        raise UserError(
            f"{out}: {holder(others[0])} is at work there on another recipe or grid; start the same command as there, "
            "or name another --out"
        )


def note_finished(out: Path) -> None:
    """Write done.json: SHA-256 of the plan, the tables and what each cell keeps (`finetune.digests`)."""
    names = (MARKER, RECIPE, COMMAND, ENVIRONMENT, CELLS, CURVES, POINTS, EMC)
    kept = [*(out / name for name in names), *(out / "cells").glob("*/*.json*"), *(out / "cells").glob("*/*.yaml")]
    write_json(out / DONE, {FILES: sums(out, [file for file in kept if file.is_file()])})


def check_finished(out: Path) -> None:
    """Raise UserError for a file of a finished sweep that is not what was saved; a cell's that is missing is made anew,
    and so are the tables."""
    check_files(out, lambda name: (out / name).is_file() and name not in (CELLS, CURVES, POINTS))


def write_marker(out: Path, plan: dict[str, Any]) -> None:
    """Write sweep.json."""
    with disk_full_interrupts(f"writing {out / MARKER}"):
        write_json(out / MARKER, {"format": FORMAT, **plan, **_stamps()})


def _asked(document: dict[str, Any]) -> dict[str, Any]:
    """A sweep.json without what code wrote it, and without the rows that a bisection came to try."""
    found = {**document, **_stamps()}
    if search := document.get("bisection"):
        found.pop("cells", None)
        found.pop("keys", None)
        found["grid"] = {key: values for key, values in document["grid"].items() if key != search["key"]}
    return found


def _stamps() -> dict[str, Any]:
    return {"flatshift": flatshift_version(), "code": source_digest(), "format": FORMAT}


def count_others(out: Path, cells: Sequence[Cell]) -> int:
    """Finished cells in the directory that are not among `cells`."""
    mine = {cell.key for cell in cells}
    return sum(1 for path in (out / "cells").glob(f"*/{RESULT}") if path.parent.name not in mine)
