"""Results of long studies in one committed file each, from which a later run goes on, and pages written from them.

Cells of many workers run in a directory of their own and are packed into a table (`CELLS`) at the end, also of a run
that was stopped; few results of one process are added to a JSON file one by one (`once`).
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks._cell_table import read_cells, write_cells
from flatshift.experiments.results.cells import RESULT
from flatshift.finetune.atomic import write_json, write_text
from flatshift.finetune.digests import write_sealed

CELLS = "cells.parquet"


@contextmanager
def packed(out: Path, table: Path) -> Iterator[None]:
    """Inside, the study in `out` has the cells of `table` and runs them no more; at the end all of them lie there."""
    cells = out / "cells"
    cells.mkdir(parents=True, exist_ok=True)
    for name, result in read_cells(table).items():
        if not (cells / name / RESULT).is_file():
            write_sealed(cells / name / RESULT, result)
    try:
        yield
    finally:
        pack(cells, table)


def pack(cells: Path, table: Path) -> None:
    """Add the finished cells in the directory `cells` to `table`, without their seals, which speak of files."""
    before = read_cells(table)
    files = {file.parent.name: file for file in cells.glob(f"*/{RESULT}")}
    outcome = before | {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items()}
    for result in outcome.values():
        result.pop("seal", None)
    if outcome != before:
        write_cells(table, outcome)


def once(file: Path, name: str, make: Callable[[], Any], *, again: bool = False) -> Any:
    """The result called `name` in the JSON `file`, made and added where it is not there yet, or `again`."""
    if again or name not in read(file):
        add(file, name, make())
    return read(file)[name]


def add(file: Path, name: str, result: Any) -> None:
    """Put a result into the JSON `file`, in place of one of the same name."""
    write_json(file, read(file) | {name: result})


def read(file: Path) -> dict[str, Any]:
    """The results by name in a JSON file; none where there is no file."""
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def write_between(page: Path, begin: str, end: str, text: str) -> None:
    """Put `text` into a page between two marks; all else stays."""
    before, rest = page.read_text(encoding="utf-8").split(begin)
    write_text(page, f"{before}{begin}\n{text}{end}{rest.split(end)[1]}")


def read_xz(file: Path) -> list[dict[str, Any]]:
    """Rows of a .jsonl.xz."""
    with lzma.open(file, "rt", encoding="utf-8") as stream:
        return [json.loads(line) for line in stream]


def write_rows(file: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write rows as JSONL; returns the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return file
