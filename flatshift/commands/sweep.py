"""A resumable grid over recipe keys and seeds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from finetune.errors import UserError
from flatshift import outcome
from flatshift.api import draw
from flatshift.command_line import parse, split_overrides


@dataclass(frozen=True)
class Flags:
    """Run a recipe over a grid of dotted keys and seeds; finished cells are never run again."""

    recipe: Positional[str]
    """Recipe file or shipped recipe."""
    grid: tuple[str, ...] | None = None
    """key=v1,v2,… for each axis (random: also key=lo..hi and key=lo..hi:log); by default the recipe's own
    `sweep.grid`."""
    seeds: int | None = None
    """Values of train.seed, from the recipe's own (0) on; by default the recipe's own `sweep.seeds`."""
    out: Path | None = None
    """Sweep directory (required); an existing one is continued, with the same grid or another."""
    design: Literal["grid", "paired", "random"] | None = None
    """All combinations, first values together and second together, or points drawn at random; grid by default."""
    points: int | None = None
    """How many points to draw (--design random)."""
    bisect: str | None = None
    """data.train.limit[=lo..hi]: find for each point how many training rows it still fits; written to emc.json."""
    epsilon: float | None = None
    """Mean train error up to which rows count as fitted (--bisect); 0.1 by default."""
    jobs: int | None = None
    """Processes that work on cells at the same time; by default one for each CUDA device, else 1."""
    stack: str | None = None
    """Cells that train together on one backbone: auto (as many as memory allows) or a number; 1: each alone."""
    devices: str = "auto"
    """auto (every CUDA device), cpu, or CUDA numbers such as 0,1; processes get them in turn."""
    max_cells: int | None = None
    """Refuse a plan of more cells (points times seeds) than this; 10000 by default."""
    part: str | None = None
    """i/n: run only this part of the cells, into a directory of its own (for arrays of jobs that share no disk)."""
    merge: tuple[Path, ...] = ()
    """Sweep directories whose finished cells are gathered in --out; nothing is trained, a missing cell is refused."""
    until: Literal["decided"] | None = None
    """decided: add seeds in steps, up to --seeds, until every curve has a verdict; the tests share their level out."""
    rerun_stale: bool = False
    """Run finished cells anew that another version of the code made."""
    rerun_failed: bool = False
    """Run cells anew that failed (no memory, a dead worker, rows that were refused), but for those that diverged."""


def run(argv: list[str]) -> int:
    """`flatshift sweep`."""
    rest, overrides = split_overrides(argv, Flags)
    flags: Flags = parse(Flags, "sweep", rest)
    if flags.out is None:
        raise UserError("--out is missing: name the sweep directory to make or continue")
    from experiments.studies.sweep import sweep

    code = sweep(
        flags.recipe,
        overrides,
        flags.out,
        grid=flags.grid,
        seeds=flags.seeds,
        design=flags.design,
        points=flags.points,
        bisection=flags.bisect,
        epsilon=flags.epsilon,
        jobs=flags.jobs,
        stack=flags.stack,
        devices=flags.devices,
        max_cells=flags.max_cells,
        until=flags.until,
        part=flags.part,
        merged=flags.merge,
        rerun_stale=flags.rerun_stale,
        rerun_failed=flags.rerun_failed,
        draw=draw,
    )
    outcome.of_sweep(flags.out, argv)
    return code
