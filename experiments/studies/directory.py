"""A study's directory: who works on it, and which of its cells are finished."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flatshift.experiments.results.cells import flatshift_version, read_result, source_digest
from flatshift.experiments.run.console import Console
from flatshift.experiments.studies.cell import Cell
from flatshift.finetune.atomic import write_json
from flatshift.finetune.digests import DONE, FILES, sums
from flatshift.finetune.errors import UserError
from flatshift.finetune.lock import taken

WORKERS = ".workers.lock"
"""Held by every worker process for as long as it may write into cells."""
_ORPHANS_S = 30.0


@contextmanager
def study_lock(out: Path) -> Iterator[None]:
    """Held by a worker for as long as it may write into cells."""
    fd = os.open(out / WORKERS, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        while taken(fd, shared=True) is False:  # somebody looks for orphans
            time.sleep(0.01)
        yield
    finally:
        os.close(fd)


def await_orphans(out: Path) -> None:
    """Wait until the workers of a killed study are gone: they find out within a second that they are orphans.

    Raises UserError if one stays.
    """
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + _ORPHANS_S
    fd = os.open(out / WORKERS, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        while taken(fd) is False:
            if time.monotonic() > deadline:
                raise UserError(
                    f"{out}: a worker of an earlier command is still at work there; end it (`fuser {out / WORKERS}` "
                    "says its process id), or name another --out"
                )
            time.sleep(0.05)
    finally:
        os.close(fd)


def note_finished(out: Path, names: Iterable[str]) -> None:
    """Write done.json: SHA-256 of those of `names` that are there, and of what each cell keeps
    (`flatshift.finetune.digests`)."""
    kept = [*(out / name for name in names), *(out / "cells").glob("*/*.json*"), *(out / "cells").glob("*/*.yaml")]
    write_json(out / DONE, {FILES: sums(out, [file for file in kept if file.is_file()])})


def results_of(out: Path, cells: Sequence[Cell]) -> dict[str, dict[str, Any]]:
    """Key → result, without its metrics, of those cells that have one. Raises UserError for one that cannot be read."""
    found = {}
    for key in dict.fromkeys(cell.key for cell in cells):
        result = read_result(out / "cells" / key)
        if result is not None:
            result.pop("metrics", None)  # thousands of cells are held at once
            found[key] = result
    return found


def stale(results: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Key → `version code` of the results that other code made than this."""
    now = (flatshift_version(), source_digest())
    made = {key: (result.get("flatshift"), result.get("code")) for key, result in results.items()}
    return {key: f"{v or 'unknown'} {code or 'unknown'}" for key, (v, code) in made.items() if (v, code) != now}


def stale_keys(results: dict[str, dict[str, Any]], console: Console, *, rerun: bool) -> set[str]:
    """Keys of the finished cells that other code made and that run anew for it; says how many there are."""
    made = stale(results)
    if made:
        versions = ", ".join(f"{count} by flatshift {name}" for name, count in Counter(made.values()).most_common())
        does = "they run anew" if rerun else "they are kept; --rerun-stale runs them anew"
        console.say(f"{len(made)} finished cells were made by other code than this ({versions}): {does}")
    return set(made) if rerun else set()
