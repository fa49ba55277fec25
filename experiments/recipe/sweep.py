"""What `flatshift sweep` is asked for beside its recipe. Imports nothing heavy: the command line parses with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """Which cells a sweep has, and how they are run; None: as the recipe's own `sweep` block says, or the default."""

    grid: tuple[str, ...] | None = None
    """key=v1,v2,… for each axis (random: also key=lo..hi and key=lo..hi:log); by default the recipe's own
    `sweep.grid`."""
    seeds: int | None = None
    """Values of train.seed, from the recipe's own (0) on; by default the recipe's own `sweep.seeds`."""
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
    shared: bool = False
    """Take part in a sweep whose --out several hosts share: start the same command on each; a cell is trained by one of
    them, and what a dead host was at is taken over."""
    lease: float | None = None
    """Seconds without a sign of life after which another host's cell is taken over (--shared); 60 by default."""
    until: Literal["decided"] | None = None
    """decided: add seeds in steps, up to --seeds, until every curve has a verdict; the tests share their level out."""
    rerun_stale: bool = False
    """Run finished cells anew that another version of the code made."""
    rerun_failed: bool = False
    """Run cells anew that failed (no memory, a dead worker, rows that were refused), but for those that diverged."""
