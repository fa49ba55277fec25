"""A sweep over jobs that share no disk: each runs its part of the cells, and one command merges their directories.

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

from experiments.results.cells import CELLS, MARKER, read_marker, result_files
from experiments.run.console import Console
from experiments.studies.cell import Cell
from experiments.studies.directory import results_of
from finetune.atomic import make_directory, replacing, replacing_directory
from finetune.digests import DONE, check_files
from finetune.errors import UserError
from finetune.run_directory import disk_full_interrupts


@dataclass(frozen=True)
class Part:
    """One of `of` jobs, counted from 1."""

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Part:
        """`3/8`. Raises UserError for anything else."""
        found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text.strip())
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise UserError(f"--part {text}: write i/n with 1 <= i <= n, for example 3/8")
        return cls(int(found[1]), int(found[2]))

    def cells(self, cells: Sequence[Cell]) -> list[Cell]:
        """Every `of`-th cell; the parts have none in common and leave none out. Raises UserError for a part of none."""
        mine = list({cell.key: cell for cell in cells}.values())[self.number - 1 :: self.of]
        if not mine:
            raise UserError(f"--part {self.number}/{self.of}: the plan has {len(cells)} cells, so this part has none")
        return mine


def check_parts(sources: Sequence[Path]) -> None:
    """Raise UserError for a directory that is no sweep's, or finished and not what was saved."""
    for source in sources:
        if not (source / MARKER).is_file():
            raise UserError(f"--merge: {source} is not a sweep directory (it has no {MARKER})")
        read_marker(source)
        if (source / DONE).is_file():
            check_files(source, partial(_kept, source))


def _kept(source: Path, name: str) -> bool:
    return (source / name).is_file() and name != CELLS


def merge(out: Path, cells: Sequence[Cell], sources: Sequence[Path], console: Console) -> None:
    """Copy what `sources` have finished of `cells` and `out` has not, each cell whole or not at all.

    Raises UserError for a damaged cell, and if cells are missing at the end; what was copied stays.
    """
    wanted = {cell.key: cell for cell in cells}
    make_directory(out / "cells")
    there = results_of(out, cells)
    for source in sources:
        found = results_of(source, [cell for key, cell in wanted.items() if key not in there])
        with disk_full_interrupts(f"writing {out}"):
            for key in found:
                _copy(source / "cells" / key, out / "cells" / key)
        there |= found
        console.say(f"{source}: {len(found)} cells of this plan that were not there yet")
    missing = [cell for key, cell in wanted.items() if key not in there]
    if missing:
        raise UserError(
            f"--merge: {len(missing)} of {len(wanted)} cells are in none of the directories, for example "
            f"{missing[0].label}; name the parts that have them, or leave --merge out to run them here"
        )


def _copy(cell: Path, to: Path) -> None:
    for file, copied in zip(result_files(cell)[1:], result_files(to)[1:], strict=True):
        if file.is_file():  # kept without its run
            with replacing(copied) as temporary:
                shutil.copyfile(file, temporary)
    if cell.is_dir():
        with replacing_directory(to) as temporary:
            shutil.copytree(cell, temporary, dirs_exist_ok=True)
