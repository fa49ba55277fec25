"""`flatshift sweep`: plan, claim the directory, run cells without a result, write tables and report.

    flatshift sweep double-descent --grid adapter.rank=1,4,16 --seeds 3 --out sweeps/rank

Every cell is planned before any runs, so a wrong key or value costs nothing; errors that depend on the rows or the
backbone (a limit above the rows, a missing layer) make cells fail. The directory keeps all cells that ever finished
in it; the tables contain those of the last plan.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatshift.experiments.recipe import Resolved
from flatshift.experiments.recipe.resolve import describe_held_out_rows
from flatshift.experiments.recipe.schema import SweepConfig, SweepOptions
from flatshift.experiments.recipe.tree import Branch
from flatshift.experiments.run.console import Console
from flatshift.experiments.statistics.peak import InterimLook, plan_looks
from flatshift.experiments.studies.cell import Cell
from flatshift.experiments.studies.devices import DevicePlacement, choose_devices
from flatshift.experiments.studies.directory import read_results, stale_keys, write_done
from flatshift.experiments.studies.leases import CLAIMS, LONGEST_S, SHORTEST_S, Leases, check_unclaimed
from flatshift.experiments.studies.queue import run_cells
from flatshift.experiments.studies.sweep.axes import Axes, Design, axis_values, count_points, parse_grid
from flatshift.experiments.studies.sweep.bisection import Bisection, bisect, parse_bisection
from flatshift.experiments.studies.sweep.directory import (
    PLANNED,
    SEALED,
    SweepPart,
    check_directory,
    check_finished,
    check_parts,
    check_same_plan,
    claim_directory,
    count_other_cells,
    merge_parts,
    write_marker,
)
from flatshift.experiments.studies.sweep.sweep_plan import SweepBase
from flatshift.experiments.studies.sweep.table import Row, write_table
from flatshift.finetune.config import TraceRecording
from flatshift.finetune.errors import Interrupted, UserError
from flatshift.finetune.lock import exclusive_lock
from flatshift.finetune.run_directory import RECIPE, disk_full_interrupts

if TYPE_CHECKING:
    from flatshift.experiments.run.console import Draw

MOST_CELLS = 10_000
"""Most cells of a plan by default: planning takes a millisecond each, a run some seconds."""


def sweep(
    recipe: str | Resolved,
    overrides: Sequence[Branch],
    out: Path,
    options: SweepOptions,
    *,
    quiet: bool = False,
    draw: Draw | None = None,
) -> int:
    """Run the cells of a sweep that have no result yet; return 0, or 1 if any cell diverged or failed.

    recipe: file, shipped name, or resolved. overrides: applied to it. draw: draws its page. Raises UserError for an
    unknown key, a wrong value, an empty grid, or a foreign or locked directory, before any cell runs; Interrupted when
    stopped or when the disk is full.
    """
    asked = _parse_request(SweepBase.of(recipe, overrides), options)
    places = _place_workers(options, asked)
    share = None if options.part is None else SweepPart.parse(options.part)
    _check_exclusive_flags(options)
    check_parts(options.merge)
    steps = plan_looks(asked.seeds) if options.until is not None else ()
    asked.base.check(asked.axes)
    asked.refuse_more(MOST_CELLS if options.max_cells is None else options.max_cells)
    console = Console(quiet=quiet)
    if options.shared:
        return _sweep_shared(out, asked, options, places, console, draw)
    with exclusive_lock(out):
        check_unclaimed(out)
        asked, cells = _plan_cells(out, asked, console, share)
        claim_directory(out, asked.document(cells), asked.base.resolved)
        searched: dict[str, None] = {}

        def run(some: Sequence[Cell], label: str = "sweep") -> None:
            if asked.bisection is not None:  # a page during a search shows its cells only, none of another grid
                searched.update(dict.fromkeys(cell.key for cell in some))
                write_marker(out, {**asked.document(cells), "keys": list(searched)})
            results = read_results(out, some)
            rerun = stale_keys(results, console, rerun=options.rerun_stale)
            if options.rerun_failed:
                rerun |= _retryable_keys(results)
            run_cells(out, some, places, console, label=label, rerun=rerun)

        more: dict[str, Row] = {}
        try:
            if asked.bisection is not None:
                found = bisect(out, asked.base, cells, asked.bisection, asked.seeds, run)
                cells, more = found.cells, found.columns
                write_marker(out, asked.document(cells, found.tried))
            else:
                if others := count_other_cells(out, cells):
                    console.say(f"{others} finished cells in {out} are not of this plan: kept, but not in its tables")
                if options.merge:
                    merge_parts(out, cells, options.merge, console)
                elif steps:
                    cells = _run_until_decided(out, asked, cells, steps, run, console)
                else:
                    run(cells)
        except Interrupted:
            with contextlib.suppress(OSError):  # if the disk is full, the cells at least are saved
                write_table(out, cells)
            raise
        with disk_full_interrupts(f"writing the tables of {out}"):
            return _write_outputs(out, cells, more, console, draw)


def _plan_cells(
    out: Path, asked: _SweepRequest, console: Console, share: SweepPart | None
) -> tuple[_SweepRequest, list[Cell]]:
    """Return the requested sweep with its precision resolved, and its cells.

    Raises UserError for a foreign directory.
    """
    check_directory(out)
    check_finished(out)
    said: list[str] = []
    base = asked.base.settled(kept=out / RECIPE, say=said.append).in_steps(say=said.append)
    asked = dataclasses.replace(asked, base=base)
    said += describe_held_out_rows(base.resolved)
    cells = list(asked.base.plan(asked.axes, asked.seeds, design=asked.design, points=asked.points))
    if share is not None:
        cells = share.cells(cells)
    for line in said:
        console.say(line)
    if _could_record(asked):
        console.say(
            "cells record nothing along the steps; --record.steps log adds curves over the steps, norms, effective "
            "parameters and what tells an unstable training apart"
        )
    return asked, cells


def _sweep_shared(
    out: Path, asked: _SweepRequest, options: SweepOptions, places: DevicePlacement, console: Console, draw: Draw | None
) -> int:
    """Run cells together with other hosts until all have a result; each host then writes the same tables and page."""
    seconds = 60.0 if options.lease is None else options.lease

    def lost(name: str) -> None:
        print(
            f"flatshift: interrupted: {name} was taken over by another host, which had seen no sign of life from this "
            f"one for {seconds:g} s; start the same command again",
            file=sys.stderr,
            flush=True,
        )
        os._exit(3)

    check_directory(out)  # before anything is written to it
    there = out.exists()
    with contextlib.ExitStack() as stack:
        if not there:
            stack.callback(_remove_if_empty, out)
        leases = stack.enter_context(Leases(out / CLAIMS, seconds=seconds, lost=lost))
        whole = functools.partial(leases.exclusive, PLANNED, waits=lambda who: console.say(f"waiting for {who}"))
        with whole(), exclusive_lock(out):
            asked, cells = _plan_cells(out, asked, console, None)
            check_same_plan(out, asked.document(cells))
            claim_directory(out, asked.document(cells), asked.base.resolved)
        run_cells(out, cells, places, console, leases=leases)
        with whole(), exclusive_lock(out), disk_full_interrupts(f"writing the tables of {out}"):
            return _write_outputs(out, cells, {}, console, draw)


def _remove_if_empty(out: Path) -> None:
    with contextlib.suppress(OSError):
        out.rmdir()


def _place_workers(options: SweepOptions, asked: _SweepRequest) -> DevicePlacement:
    """Return the worker processes and the devices assigned to them in turn (`choose_devices`)."""
    placed = choose_devices(options.devices, asked.base.recipe.train.device)
    jobs = options.jobs
    workers = jobs if jobs is not None else max(1, len(placed))
    if workers < 1:
        raise UserError(f"--jobs must be at least 1, got {jobs}")
    if options.devices != "auto" and workers < len(placed):
        raise UserError(
            f"--jobs {jobs} leaves some of --devices {options.devices} without work; give at least {len(placed)}"
        )
    return DevicePlacement(workers, placed)


def _check_exclusive_flags(options: SweepOptions) -> None:
    """Raise UserError for flags that exclude each other."""
    if options.lease is not None and not options.shared:
        raise UserError("--lease has a meaning with --shared only; add that, or leave it out")
    if options.lease is not None and not SHORTEST_S <= options.lease <= LONGEST_S:
        raise UserError(f"--lease {options.lease:g}: give {SHORTEST_S:g} to {LONGEST_S:,.0f} seconds")
    if options.shared:
        others = {
            "--bisect": options.bisect, "--part": options.part, "--merge": options.merge, "--until": options.until,
            "--rerun-stale": options.rerun_stale, "--rerun-failed": options.rerun_failed,
        }  # fmt: skip
        if other := next((flag for flag, given in others.items() if given), None):
            raise UserError(f"--shared runs each cell of one plan once; {other} asks for more: leave one of them out")
    if options.bisect is not None and (options.part or options.merge):
        raise UserError("--bisect looks at each cell before it plans the next: it takes no --part and no --merge")
    if options.part and options.merge:
        raise UserError("--part runs cells and --merge only gathers them; give one of the two")
    if options.until is None:
        return
    given = {"--bisect": options.bisect is not None, "--part": options.part is not None, "--merge": options.merge}
    if other := next((flag for flag, used in given.items() if used), None):
        raise UserError(
            f"--until decided looks at whole curves as seeds come in; {other} has none: leave one of them out"
        )


def _run_until_decided(
    out: Path,
    asked: _SweepRequest,
    cells: list[Cell],
    steps: Sequence[InterimLook],
    run: Callable[[Sequence[Cell]], None],
    console: Console,
) -> list[Cell]:
    """Add seeds until every curve has a verdict, and return the cells that were run."""
    from flatshift.experiments.results.analysis import SweepAnalysis
    from flatshift.experiments.results.sweep import read_sweep

    first, some = asked.base.recipe.train.seed, cells
    for place, look in enumerate(steps):
        some = [cell for cell in cells if cell.seed - first < look.seeds]
        write_marker(out, {**asked.document(some), "seeds": look.seeds, "level": look.level, "most": asked.seeds})
        run(some)
        write_table(out, some)
        data = read_sweep(out)
        found = [] if data is None else [one.verdict.kind for one in SweepAnalysis(data).judged]
        # No curve yet counts as undecided.
        open_ones = found.count("undecided") if found else 1
        said = f"{look.seeds} seeds, each test at {look.level:.3f}: "
        if not open_ones:
            console.say(f"{said}decided ({', '.join(dict.fromkeys(found))})")
            break
        more = f"; continuing to {steps[place + 1].seeds} seeds" if place + 1 < len(steps) else "; no seeds are left"
        console.say(f"{said}{open_ones} of {len(found) or 1} curves undecided{more}")
    return some


@dataclass(frozen=True)
class _SweepRequest:
    """Request of a command line combined with the recipe's `sweep` block."""

    base: SweepBase
    axes: Axes
    seeds: int
    design: Design
    points: int | None
    bisection: Bisection | None
    metric: str

    def refuse_more(self, most: int) -> None:
        """Raise UserError for a plan of more than `most` cells, before any is created, and for seeds above the limit of
        a recipe."""
        points = count_points(self.axes, self.design, self.points)
        if points * self.seeds > most:
            raise UserError(
                f"{points:,} points under {self.seeds:,} seeds are {points * self.seeds:,} cells, above the {most:,} "
                "that a sweep plans unasked; take fewer values, --points or --seeds, or raise --max-cells"
            )
        if self.base.recipe.train.seed + self.seeds > 2**63:
            raise UserError(
                f"--seeds {self.seeds}: from train.seed {self.base.recipe.train.seed} on they pass 2^63 - 1"
            )

    def document(self, cells: Sequence[Cell], tried: Sequence[int] = ()) -> dict[str, Any]:
        """Return sweep.json without its version stamps."""
        listed = {key: values if isinstance(values, list) else [values] for key, values in self.axes.items()}
        grid = {key: [str(value) for value in values] for key, values in listed.items()}
        found: dict[str, Any] = {"recipe": self.base.name, "grid": grid, "design": self.design, "seeds": self.seeds}
        if self.bisection is None or tried:
            found["cells"] = len(cells)
            found["keys"] = [cell.key for cell in cells]
        if self.points is not None:
            found["points"] = self.points
        if self.metric != "auto":
            found["metric"] = self.metric
        if self.bisection is not None:
            found["bisection"] = self.bisection.document()
            grid[self.bisection.key] = [str(value) for value in tried]
        return found


def _could_record(asked: _SweepRequest) -> bool:
    """Return True if the cells record nothing along the steps, but could."""
    from flatshift.experiments.recipe.rules import check_recipe

    recipe = asked.base.recipe
    if recipe.record is not None or any(key.partition(".")[0] == "record" for key in asked.axes):
        return False
    try:
        check_recipe(dataclasses.replace(recipe, record=TraceRecording()))
    except UserError:
        return False
    return True


def _parse_request(base: SweepBase, options: SweepOptions) -> _SweepRequest:
    from flatshift.finetune.train.stage import check_metric

    design, points, bisection = options.design, options.points, options.bisect
    block = base.recipe.sweep or SweepConfig()
    if options.grid is not None:
        if not options.grid:
            raise UserError("--grid: give key=v1,v2,…, or leave the flag out for the recipe's own `sweep.grid`")
        axes = parse_grid(options.grid)
    else:
        axes = {key: axis_values(key, values) for key, values in block.grid.items()}
        design, points = design or block.design, points if points is not None else block.points
    if options.epsilon is not None and bisection is None:
        raise UserError("--epsilon has a meaning with --bisect only")
    search = parse_bisection(bisection, options.epsilon, base.recipe) if bisection is not None else None
    if search is not None and search.key in axes:
        raise UserError(f"--bisect {search.key}: the key is an axis of the grid too; leave it out there")
    if not axes and search is None:
        raise UserError(f"recipe {base.name!r} has no `sweep.grid`: give --grid key=v1,v2,…")
    count = options.seeds if options.seeds is not None else block.seeds
    if count < 1:
        raise UserError(f"--seeds must be at least 1, got {count}")
    check_metric(block.metric, base.recipe.task, "sweep.metric")
    return _SweepRequest(base, axes, count, design or "grid", points, search, block.metric)


def _retryable_keys(results: dict[str, dict[str, Any]]) -> set[str]:
    """Return the keys of failed cells that might succeed next time: a diverged run would diverge again."""
    return {key for key, result in results.items() if result["status"] == "failed"}


def _write_outputs(out: Path, cells: Sequence[Cell], more: dict[str, Row], console: Console, draw: Draw | None) -> int:
    """Write tables and page; print failures and return the exit code."""
    table = write_table(out, cells, more=more)
    broken = {row["cell"]: row["reason"] for row in table if row["status"] != "done"}
    for key, reason in list(broken.items())[:1]:
        console.say(f"{len(broken)} cells diverged or failed, for example {key}: {reason}")
    if any(row["status"] == "failed" for row in table):
        console.say("--rerun-failed tries again those that did not diverge")
    write_done(out, SEALED)
    if draw is not None:
        console.say(f"report: {draw(out)}")
    return 1 if broken else 0
