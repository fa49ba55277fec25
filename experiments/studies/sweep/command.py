"""`flatshift sweep`: plan, claim the directory, run cells without a result, write tables and report.

Every cell is planned before any runs, so a wrong key or value costs nothing; errors that depend on the rows or the
backbone (a limit above the rows, a missing layer) make cells fail. The directory keeps all cells that ever finished
in it; the tables contain those of the last plan.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flatshift.experiments.recipe import Resolved
from flatshift.experiments.recipe.resolve import describe_held_out_rows
from flatshift.experiments.recipe.rules import check_recipe
from flatshift.experiments.recipe.schema import SweepConfig, SweepOptions
from flatshift.experiments.recipe.tree import Branch
from flatshift.experiments.results.cells import RESULT, read_marker
from flatshift.experiments.run.console import Console, Draw
from flatshift.experiments.statistics.peak import InterimLook, plan_looks
from flatshift.experiments.studies.cell import Cell
from flatshift.experiments.studies.directory import read_results, stale_keys, write_done
from flatshift.experiments.studies.executors.local import LocalExecutor, choose_devices
from flatshift.experiments.studies.queue import open_executor, parse_executor, run_cells
from flatshift.experiments.studies.sweep import directory
from flatshift.experiments.studies.sweep.axes import Axes, Design, axis_values, count_points, parse_grid
from flatshift.experiments.studies.sweep.bisection import Bisection, bisect, parse_bisection
from flatshift.experiments.studies.sweep.sweep_plan import SweepBase
from flatshift.experiments.studies.sweep.table import Row, write_table
from flatshift.finetune.config import TraceRecording
from flatshift.finetune.errors import Interrupted, UserError
from flatshift.finetune.lock import exclusive_lock
from flatshift.finetune.run_directory import RECIPE, disk_full_interrupts

MAX_CELLS = 10_000
"""Of a plan by default: planning takes a millisecond each, a run some seconds."""


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
    _check_sweep_keys(overrides, options)
    request = _parse_request(SweepBase.of(recipe, overrides), options)
    local = _local_executor(options, request)
    part = None if options.part is None else directory.SweepPart.parse(options.part)
    _check_exclusive_flags(options)
    directory.check_parts(options.merge)
    looks = plan_looks(request.seeds) if options.until is not None else ()
    request.base.check(request.axes)
    request.check_size(MAX_CELLS if options.max_cells is None else options.max_cells)
    console = Console(quiet=quiet)
    with open_executor(options, local, jobs=options.jobs) as executor, exclusive_lock(out):
        request, cells = _plan_cells(out, request, console, part, options.merge)
        directory.claim_directory(out, request.document(cells), request.base.resolved)
        searched: dict[str, None] = {}

        def run(batch: Sequence[Cell], label: str = "sweep") -> None:
            if request.bisection is not None:  # a page during a search shows its cells only, none of another grid
                searched.update(dict.fromkeys(cell.key for cell in batch))
                directory.write_marker(out, {**request.document(cells), "keys": list(searched)})
            results = read_results(out, batch)
            rerun = stale_keys(results, console, rerun=options.rerun_stale)
            if options.rerun_failed:  # a diverged run would diverge again
                rerun |= {key for key, result in results.items() if result["status"] == "failed"}
            run_cells(out, batch, executor, console, label=label, rerun=rerun)

        columns: dict[str, Row] = {}
        try:
            if request.bisection is not None:
                cells, columns, rows = bisect(out, request.base, cells, request.bisection, request.seeds, run)
                directory.write_marker(out, request.document(cells, rows))
            else:
                keys = {cell.key for cell in cells}
                if others := sum(path.parent.name not in keys for path in (out / "cells").glob(f"*/{RESULT}")):
                    console.say(f"{others} finished cells in {out} are not of this plan: kept, but not in its tables")
                if options.merge:
                    directory.merge_parts(out, cells, options.merge, console)
                elif looks:
                    cells = _run_until_decided(out, request, cells, looks, run, console)
                else:
                    executor.announce(functools.partial(_write_planned, out, cells, draw))
                    run(cells)
        except Interrupted:
            with contextlib.suppress(OSError):  # if the disk is full, the cells at least are saved
                write_table(out, cells)
            raise
        with disk_full_interrupts(f"writing the tables of {out}"):
            return executor.finish(lambda: _write_outputs(out, cells, columns, console, draw))


def _plan_cells(
    out: Path, request: _SweepRequest, console: Console, part: directory.SweepPart | None, sources: Sequence[Path]
) -> tuple[_SweepRequest, list[Cell]]:
    """Return the requested sweep with its precision resolved, that of `sources` to merge if there are any, and its
    cells. Raises UserError for a foreign directory."""
    directory.check_directory(out)
    directory.check_finished(out)
    lines: list[str] = []
    earlier = directory.merged_recipe(sources, request.base.recipe.train, request.axes) if sources else out / RECIPE
    base = request.base.settled(earlier=earlier, log=lines.append).in_steps(log=lines.append)
    request = replace(request, base=base)
    lines += describe_held_out_rows(base.resolved)
    cells = list(base.plan(request.axes, request.seeds, design=request.design, points=request.points))
    cells = cells if part is None else part.cells(cells)
    for line in lines:
        console.say(line)
    if _could_record(request):
        console.say(
            "cells record nothing along the steps; --record.steps log adds curves over the steps, norms, effective "
            "parameters and what tells an unstable training apart"
        )
    return request, cells


def _local_executor(options: SweepOptions, request: _SweepRequest) -> LocalExecutor:
    """Return the worker processes and the devices assigned to them in turn (`choose_devices`)."""
    kind, _ = parse_executor(options)
    if kind != "local" and options.devices != "auto":
        raise UserError(f"--devices {options.devices} names devices of this machine; with --on {kind}, give --gpus")
    devices, jobs = choose_devices(options.devices, request.base.recipe.train.device), options.jobs
    workers = jobs if jobs is not None else max(1, len(devices))
    if workers < 1:
        raise UserError(f"--jobs must be at least 1, got {jobs}")
    if options.devices != "auto" and workers < len(devices):
        raise UserError(
            f"--jobs {jobs} leaves some of --devices {options.devices} without work; give at least {len(devices)}"
        )
    return LocalExecutor(workers, devices)


def _check_exclusive_flags(options: SweepOptions) -> None:
    reasons = {
        "until": "--until decided looks at whole curves as seeds come in; --{other} has none: leave one of them out",
        "bisect": "--bisect looks at each cell before it plans the next: it takes no --part and no --merge",
        "part": "--part runs cells and --merge only gathers them; give one of the two",
    }
    given = [flag for flag in (*reasons, "merge") if getattr(options, flag)]
    if len(given) > 1:
        raise UserError(reasons[given[0]].format(other=given[1]))
    if options.merge and options.on != "local":
        raise UserError(f"--merge trains nothing, so --on {options.on} has no meaning with it; leave it out")


def _run_until_decided(
    out: Path,
    request: _SweepRequest,
    cells: list[Cell],
    looks: Sequence[InterimLook],
    run: Callable[[Sequence[Cell]], None],
    console: Console,
) -> list[Cell]:
    """Add seeds until every curve has a verdict, and return the cells that were run."""
    from flatshift.experiments.results.analysis import SweepAnalysis
    from flatshift.experiments.results.sweep import read_sweep

    first, batch = request.base.recipe.train.seed, cells
    for look, following in itertools.zip_longest(looks, looks[1:]):
        batch = [cell for cell in cells if cell.seed - first < look.seeds]
        state = {"seeds": look.seeds, "level": look.level, "most": request.seeds}
        directory.write_marker(out, {**request.document(batch), **state})
        run(batch)
        write_table(out, batch)
        data = read_sweep(out)
        kinds = [] if data is None else [curve.verdict.kind for curve in SweepAnalysis(data).curves]
        # No curve yet counts as undecided.
        undecided = kinds.count("undecided") if kinds else 1
        start = f"{look.seeds} seeds, each test at {look.level:.3f}: "
        if not undecided:
            console.say(f"{start}decided ({', '.join(dict.fromkeys(kinds))})")
            break
        next_step = f"continuing to {following.seeds} seeds" if following is not None else "no seeds are left"
        console.say(f"{start}{undecided} of {len(kinds) or 1} curves undecided; {next_step}")
    return batch


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

    def check_size(self, maximum: int) -> None:
        """Raise UserError for a plan of more than `maximum` cells, before any exists, and for seeds above 2⁶³ − 1."""
        points = count_points(self.axes, self.design, self.points)
        if points * self.seeds > maximum:
            raise UserError(
                f"{points:,} points under {self.seeds:,} seeds are {points * self.seeds:,} cells, above the "
                f"{maximum:,} that a sweep plans unasked; take fewer values, --points or --seeds, or raise --max-cells"
            )
        if self.base.recipe.train.seed + self.seeds > 2**63:
            raise UserError(
                f"--seeds {self.seeds}: from train.seed {self.base.recipe.train.seed} on they pass 2^63 - 1"
            )

    def document(self, cells: Sequence[Cell], tried: Sequence[int] = ()) -> dict[str, Any]:
        """Return sweep.json without its version stamps."""
        grid = {key: list(map(str, v)) if isinstance(v, list) else [str(v)] for key, v in self.axes.items()}
        document: dict[str, Any] = {"recipe": self.base.name, "grid": grid, "design": self.design, "seeds": self.seeds}
        if self.bisection is None or tried:
            document |= {"cells": len(cells), "keys": [cell.key for cell in cells]}
        if self.points is not None:
            document["points"] = self.points
        if self.metric != "auto":
            document["metric"] = self.metric
        if self.bisection is not None:
            document["bisection"] = asdict(self.bisection)
            grid[self.bisection.key] = [str(value) for value in tried]
        return document


def _could_record(request: _SweepRequest) -> bool:
    """Return True if the cells record nothing along the steps, but could."""
    recipe = request.base.recipe
    if recipe.record is not None or any(key.partition(".")[0] == "record" for key in request.axes):
        return False
    try:
        check_recipe(replace(recipe, record=TraceRecording()))
    except UserError:
        return False
    return True


def _check_sweep_keys(overrides: Sequence[Branch], options: SweepOptions) -> None:
    """Raise UserError for a key of the `sweep` block on the command line beside a flag that makes it void."""
    blocks = [block for override in overrides if isinstance(block := override.children.get("sweep"), Branch)]
    for key in ("grid", "design", "points"):
        flags = ["grid", key, *(["design"] if key == "points" and options.design != "random" else [])]
        flag = next((flag for flag in flags if getattr(options, flag) is not None), None)
        if flag is not None and any(key in block.children for block in blocks):
            instead = f", or write --{key}" if flag == "grid" != key else ""
            raise UserError(f"--sweep.{key} has no effect beside --{flag}; leave it out{instead}")


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
        if points is None and design in (None, "random"):
            points = block.points
        design = design or block.design
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


def _write_planned(out: Path, cells: Sequence[Cell], draw: Draw | None) -> int:
    """Write tables and page after the last cell, without the command that planned them, unless another plan has come.
    Return the exit code."""
    if read_marker(out).get("keys") != [cell.key for cell in cells]:
        return 0
    return _write_outputs(out.absolute(), cells, {}, Console(), draw)


def _write_outputs(
    out: Path, cells: Sequence[Cell], columns: dict[str, Row], console: Console, draw: Draw | None
) -> int:
    """Write tables and page; print failures and return the exit code."""
    table = write_table(out, cells, columns=columns)
    broken = [row for row in table if row["status"] != "done"]
    if broken:
        console.say(f"{len(broken)} cells diverged or failed, for example {broken[0]['cell']}: {broken[0]['reason']}")
    if any(row["status"] == "failed" for row in table):
        console.say("--rerun-failed tries again those that did not diverge")
    write_done(out, directory.SEALED)
    if draw is not None:
        console.say(f"report: {draw(out)}")
    return 1 if broken else 0
