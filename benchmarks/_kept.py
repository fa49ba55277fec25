"""Cells of long studies, copied to where they can be committed as they finish, and pages written from their results."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from flatshift.experiments.results.cells import RESULT
from flatshift.finetune.atomic import write_json, write_text


def studied(out: Path, kept: Path, name: str, study: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Run `study(on_cell=…)`, which writes into `out`, with the cells of `kept`; publish what it leaves there.

    name: of the document in `kept`, beside the cells and report.html. Returns the document.
    """
    document = measured(out, kept, study)
    publish(out, kept, name, document)
    return document


def measured(out: Path, kept: Path, study: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Run `study(on_cell=…)`, which writes into `out`, with the cells of `kept`, and keep its cells there."""
    take_back(out / "cells", kept)
    document = study(on_cell=partial(keep, kept=kept))
    for file in (*(out / "cells").glob("*.json"), *(out / "cells").glob(f"*/{RESULT}")):
        keep(file, kept)
    return document


def publish(out: Path, kept: Path, name: str, document: dict[str, Any]) -> None:
    """Put the document as `name` and the report of `out` beside the kept cells."""
    write_json(kept / name, document)
    shutil.copyfile(out / "report.html", kept / "report.html")


def keep(file: Path, kept: Path) -> None:
    """Copy the result of a finished cell into `kept`/cells, on one line; its run stays where it is."""
    found = json.loads(file.read_text(encoding="utf-8"))
    if file.name == RESULT:
        found.pop("seal")  # it speaks of the run's files
    name = f"{file.parent.name}.json" if file.name == RESULT else file.name
    write_text(kept / "cells" / name, json.dumps(found) + "\n")


def take_back(cells: Path, kept: Path) -> None:
    """Cells that were committed need not run again."""
    cells.mkdir(parents=True, exist_ok=True)
    for file in (kept / "cells").glob("*.json"):
        if not (cells / file.name).is_file():
            shutil.copyfile(file, cells / file.name)


def write_between(page: Path, begin: str, end: str, text: str) -> None:
    """Put `text` into a page between two marks; all else stays."""
    before, rest = page.read_text(encoding="utf-8").split(begin)
    write_text(page, f"{before}{begin}\n{text}{end}{rest.split(end)[1]}")
