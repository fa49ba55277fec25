"""Directory of a study: the workers in it, and its finished cells."""

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
from flatshift.finetune.digests import DONE, FILES, file_digests
from flatshift.finetune.errors import UserError
from flatshift.finetune.lock import try_lock

WORKERS = ".workers.lock"
"""Lock file that every worker process holds for as long as it may write into cells."""
_ORPHANS_S = 30.0


@contextmanager
def study_lock(out: Path) -> Iterator[None]:
    """Hold the lock of a worker that may write into cells."""
    with _open_lock(out) as fd:
        while try_lock(fd, shared=True) is False:  # another command is waiting for orphans
            time.sleep(0.01)
        yield


@contextmanager
def _open_lock(out: Path) -> Iterator[int]:
    fd = os.open(out / WORKERS, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        yield fd
    finally:
        os.close(fd)


def await_orphans(out: Path) -> None:
    """Wait until the workers of a killed study are gone: they notice within a second that they are orphans. Raises
    UserError if one stays."""
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + _ORPHANS_S
    with _open_lock(out) as fd:
        # None: this file system has no locks.
        while try_lock(fd) is False:
            if time.monotonic() > deadline:
                raise UserError(
                    f"{out}: a worker of an earlier command is still at work there; end it (`fuser {out / WORKERS}` "
                    "says its process id), or name another --out"
                )
            time.sleep(0.05)


def write_done(out: Path, names: Iterable[str]) -> None:
    """Write done.json: SHA-256 of the existing files among `names`, and of the files of each cell."""
    files = [*(out / name for name in names), *(out / "cells").glob("*/*.json*"), *(out / "cells").glob("*/*.yaml")]
    write_json(out / DONE, {FILES: file_digests(out, [file for file in files if file.is_file()])})


def read_results(out: Path, cells: Sequence[Cell]) -> dict[str, dict[str, Any]]:
    """Return key → result, without metrics, of the cells that have one. Raises UserError for an unreadable one."""
    results = {}
    for key in dict.fromkeys(cell.key for cell in cells):
        result = read_result(out / "cells" / key)
        if result is not None:
            result.pop("metrics", None)  # thousands of cells are in memory at once
            results[key] = result
    return results


def stale_results(results: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return key → `version code` of results from a different version of the code."""
    now = (flatshift_version(), source_digest())
    versions = {key: (result.get("flatshift"), result.get("code")) for key, result in results.items()}
    return {key: f"{v or 'unknown'} {code or 'unknown'}" for key, (v, code) in versions.items() if (v, code) != now}


def stale_keys(results: dict[str, dict[str, Any]], console: Console, *, rerun: bool) -> set[str]:
    """Return the keys of finished cells from different code if they are to run again; print how many there are."""
    stale = stale_results(results)
    if stale:
        versions = ", ".join(f"{count} by flatshift {name}" for name, count in Counter(stale.values()).most_common())
        action = "they run again" if rerun else "they are kept; --rerun-stale runs them again"
        console.say(f"{len(stale)} finished cells were made by other code than this ({versions}): {action}")
    return set(stale) if rerun else set()
