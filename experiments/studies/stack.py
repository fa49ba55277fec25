"""Cells of a sweep that share a frozen backbone: which may, and how they train together.

    for stack in stacks(cells, width=32):
        run_stack([out / "cells" / cell.key for cell in stack.cells], stack.cells, threads=1)

A stack leaves for every cell what `experiments.studies.run_cell` leaves, with the same figures to rounding; a cell that
fails fails alone; a stack that is stopped, or in which a device fails, leaves no result for the cells under way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.data.splits import Prepared, prepare
from experiments.recipe.config import Recipe
from experiments.run.console import Console, graceful_stop
from experiments.studies.cell import Cell, Result, finish_cell, result_of, run_cell, without_cache
from finetune.atomic import write_json
from finetune.compute.numerics import cpu_threads
from finetune.data.units import fold_units
from finetune.models.backbone import load_backbone, load_tokenizer, resolve_backbone, resolve_device
from finetune.run_directory import RunDirectory, disk_full_interrupts
from finetune.stacked.footprint import estimate
from finetune.stacked.refusing import NotStackable, refusal

WIDTH = 32
"""Cells of a stack where nobody says how many."""


@dataclass(frozen=True)
class Stack:
    """Cells that train together."""

    cells: tuple[Cell, ...]
    reason: str | None = None
    """Why its one cell trains alone; None for a cell that no other goes with."""


def stackable(recipe: Recipe) -> str | None:
    """Why a cell of this recipe trains alone, in a sentence; None where it may share the backbone."""
    if recipe.warmup is not None:
        return "warmup: a cell that is warmed up first has a stage of its own before the one it could share"
    if recipe.mesh.size > 1 or recipe.mesh.auto:
        return "mesh: a cell on a mesh has its devices to itself"
    return refusal(recipe.task, recipe.adapter, recipe.train, recipe.regularizer)


def stacks(cells: Sequence[Cell], *, width: int | None = None, memory: int | None = None) -> list[Stack]:
    """`cells` in the stacks that they train in, each stack's cells alike in cost; all cells are in one of them.

    In order of their seeds: a sweep that is stopped has whole seeds, which can be paired. Cells share a stack if they
    share backbone, task, files, precision, device and adapted layers.

    Args:
        width: cells of a stack at most; None: as many as memory allows, up to `WIDTH`.
        memory: bytes that a stack may hold; None: three quarters of what is free on the device.
    """
    alike: dict[str, list[Cell]] = {}
    found: list[Stack] = []
    for cell in cells:
        reason = stackable(cell.resolved.recipe)
        if reason is None:
            alike.setdefault(_kind(cell.resolved.recipe), []).append(cell)
        else:
            found.append(Stack((cell,), reason))
    for group in alike.values():
        group.sort(key=lambda cell: _cost(cell.resolved.recipe))
        found += [Stack(tuple(part)) for part in _cut(group, width or WIDTH, memory)]
    found.sort(key=lambda stack: min(cell.seed for cell in stack.cells))
    return found


def _kind(recipe: Recipe) -> str:
    """What the cells of a stack have in common."""
    data = dataclasses.asdict(recipe.data)
    data.pop("label_noise")
    data["train"].pop("limit")
    train = recipe.train
    common: list[Any] = [recipe.backbone, dataclasses.asdict(recipe.task), data, recipe.adapter.targets]
    common += [train.precision, train.backbone_dropout, train.device, train.threads, train.deterministic]
    return json.dumps(common, sort_keys=True, default=str)


def _cost(recipe: Recipe) -> tuple[Any, ...]:
    """Cells of like length first of all, so that a stack does not run half empty; then like in batch.

    Of these whole seeds: they see the same rows, which go once through the blocks that lie below all adapters.
    """
    train = recipe.train
    batch = train.batch_size * train.accumulate
    return train.steps, batch, train.seed, recipe.adapter.rank, recipe.regularizer.kind


def _cut(cells: list[Cell], width: int, memory: int | None) -> Iterator[list[Cell]]:
    """Runs of at most `width` cells that fit the memory; equal in length as far as that goes."""
    recipe = cells[0].resolved.recipe
    directory, device = resolve_backbone(recipe.backbone), resolve_device(recipe.train.device)
    free = memory if memory is not None else _free(device.type)
    count = -(-len(cells) // width)
    start = 0
    for turn in range(count, 0, -1):
        stop = start + -(-(len(cells) - start) // turn)
        while start < stop:
            size = stop - start
            while size > 1 and _bytes(directory, cells[start : start + size], device.type) > free:
                size = -(-size // 2)
            yield cells[start : start + size]
            start += size


def _bytes(directory: Path, cells: Sequence[Cell], device: str) -> int:
    recipes = [cell.resolved.recipe for cell in cells]
    return estimate(directory, [(recipe.adapter, recipe.train) for recipe in recipes], device=device)


def _free(device: str) -> int:
    """Three quarters of the free bytes of a device."""
    if device == "cuda":
        import torch

        return torch.cuda.mem_get_info()[0] * 3 // 4
    lines = Path("/proc/meminfo")
    if not lines.is_file():
        return 1 << 62  # nothing is known: let the width decide
    found = {line.split(":")[0]: line.split(":")[1] for line in lines.read_text().splitlines()}
    return int(found["MemAvailable"].split()[0]) * 1024 * 3 // 4


# --------------------------------------------------------------------------------------------- running


@dataclass
class _Member:
    """A cell on its way through a stack."""

    directory: Path
    cell: Cell
    recipe: Recipe
    seconds: float = 0.0
    """Its share of the wall time so far."""
    prepared: Prepared | None = None
    run: RunDirectory | None = None
    engine: Any = None
    arguments: dict[str, Any] | None = None


def run_stack(directories: Sequence[Path], cells: Sequence[Cell], threads: int | None) -> None:
    """Train and judge `cells` together; each gets in its directory what `run_cell` would leave, and its result last.

    threads: of this process, where the recipes do not say. Cells that turn out not to go together run one by one.
    Raises Interrupted for a signal or a full disk, and RuntimeError for an error of any cell that nobody foresaw: a
    device that failed goes on failing. Cells without a result then begin anew the next time.
    """
    members = []
    for directory, cell in zip(directories, cells, strict=True):
        if directory.exists():
            shutil.rmtree(directory)
        members.append(_Member(directory, cell, without_cache(cell.resolved.recipe)))
    clock = _Clock(members)
    own = members[0].recipe.train.threads
    with (
        disk_full_interrupts(f"running a stack of {len(cells)} cells"),
        cpu_threads(own if own is not None else threads),
        graceful_stop(lambda line: None) as stop,
    ):
        ready = [member for member in members if _prepare(member, clock, len(cells))]
        by_names: dict[tuple[str, ...] | None, list[_Member]] = {}
        seen: list[Prepared] = []
        for member in ready:
            assert member.prepared is not None
            member.prepared = _common(member.prepared, seen)
            by_names.setdefault(member.prepared.label_names, []).append(member)
        for group in by_names.values():
            try:
                _train(group, clock, stop, len(cells))
            except NotStackable as error:
                for member in clock.left(group):
                    fit = run_cell(member.directory, member.cell, threads, alone=str(error))
                    RunDirectory(member.directory).log(f"alone: {error}")
                    clock.end(member)
                    if not fit:
                        raise RuntimeError(f"cell {member.cell.key} failed in a way that nobody foresaw") from None


class _Clock:
    """Shares the wall time out among the cells that have not ended."""

    def __init__(self, members: Sequence[_Member]) -> None:
        self._live = list(members)
        self._last = time.monotonic()

    def end(self, member: _Member) -> None:
        """`member` takes part no longer."""
        now = time.monotonic()
        for other in self._live:
            other.seconds += (now - self._last) / len(self._live)
        self._last = now
        self._live = [other for other in self._live if other is not member]

    def left(self, members: Sequence[_Member]) -> list[_Member]:
        """Those of `members` that have not ended."""
        return [member for member in members if any(member is other for other in self._live)]


def _outcome_of(measure: Callable[[], Result], directory: Path) -> Result:
    """What came of a cell. Raises RuntimeError if this process is not fit for the others."""
    outcome, fit = result_of(measure, directory)
    if not fit:
        raise RuntimeError(outcome.reason)
    return outcome


def _end(member: _Member, outcome: Result, clock: _Clock, stacked: int) -> None:
    clock.end(member)
    outcome = dataclasses.replace(outcome, seconds=member.seconds, stacked=stacked)
    finish_cell(member.directory, member.cell, outcome)
    member.prepared = member.engine = member.arguments = None


def _attempt(member: _Member, measure: Callable[[], None], clock: _Clock, stacked: int) -> bool:
    """Do one part of a cell's work; False, and the cell is ended, where that failed."""

    def nothing_yet() -> Result:
        measure()
        return Result("done")

    outcome = _outcome_of(nothing_yet, member.directory)
    if outcome.status != "done":
        _end(member, outcome, clock, stacked)
        return False
    return True


def _prepare(member: _Member, clock: _Clock, stacked: int) -> bool:
    """Read and encode its rows and make its run directory; False if that already is its end."""

    def measure() -> None:
        member.prepared = prepare(member.recipe)
        member.run = RunDirectory.create(member.directory, recipe_yaml=member.cell.resolved.to_yaml())

    return _attempt(member, measure, clock, stacked)


def _common(prepared: Prepared, seen: list[Prepared]) -> Prepared:
    """The same with the examples of an earlier cell where they are equal, so that memory has them once."""
    for split in ("train", "dev", "test"):
        mine = getattr(prepared, split)
        same = next((getattr(other, split) for other in seen if getattr(other, split) == mine), mine)
        prepared = dataclasses.replace(prepared, **{split: same})
    seen.append(prepared)
    return prepared


def _train(group: Sequence[_Member], clock: _Clock, stop: Callable[[], bool], stacked: int) -> None:
    """Train the cells of one set of classes together, and judge each as soon as it has ended."""
    from finetune.stacked.engine import cell_engine
    from finetune.stacked.host import Host
    from finetune.stacked.together import run_together, stage_work

    first = group[0]
    recipe, prepared = first.recipe, first.prepared
    assert prepared is not None
    backbone = load_backbone(
        recipe.backbone,
        task=recipe.task,
        label_names=prepared.label_names,
        precision=recipe.train.precision,
        dropout=recipe.train.backbone_dropout,
        device=resolve_device(recipe.train.device),
    )
    tokenizer = load_tokenizer(recipe.backbone)
    for member in group:
        member.engine = cell_engine(backbone, member.recipe.adapter, task=recipe.task, train=member.recipe.train)
    begun = [member for member in group if _arguments(member, tokenizer, clock, stacked)]
    if not begun:
        return
    host = Host(backbone, [member.engine for member in begun], task=recipe.task, pad_id=int(tokenizer.pad_token_id))
    stages = [stage_work(member.engine, tokenizer, **(member.arguments or {})) for member in begun]
    with host, contextlib.closing(run_together(host, stages, stop=stop)) as ends:
        for place, end in ends:
            member = begun[place]
            outcome = _outcome_of(_judged(member, tokenizer, end), member.directory)
            _end(member, outcome, clock, stacked)
    gc.collect()  # PEFT models refer to themselves


def _arguments(member: _Member, tokenizer: Any, clock: _Clock, stacked: int) -> bool:
    """Make its batches and say what `flatshift train` would say; False if that already is its end."""
    from experiments.workflows.context import RunContext
    from experiments.workflows.train import fine_tune, stage_arguments
    from finetune.train.trackers import Trackers

    def measure() -> None:
        assert member.run is not None and member.prepared is not None
        own = dataclasses.replace(member.recipe.train, threads=None)  # the stack's threads are set
        recipe = dataclasses.replace(member.recipe, train=own)
        context = RunContext(
            recipe=recipe,
            run=member.run,
            console=Console(quiet=True, log=member.run.log),
            world=member.engine.world,
            stop=lambda: False,
            trackers=Trackers(member.run.log),
            cell=True,
        )
        member.arguments = stage_arguments(context, fine_tune(recipe, member.prepared), member.engine, tokenizer)

    return _attempt(member, measure, clock, stacked)


def _judged(member: _Member, tokenizer: Any, end: Any) -> Callable[[], Result]:
    """What evaluates a cell whose stage came to its `end`, by the ordinary code on its own PEFT model."""
    from experiments.workflows.build import judge_splits
    from experiments.workflows.run_parts import remove_weights

    def measure() -> Result:
        if isinstance(end, ValueError):
            raise end
        assert member.run is not None and member.prepared is not None
        fold_units(member.engine.parameters, member.prepared.units)
        result = judge_splits(member.recipe, member.engine, tokenizer, member.prepared, member.run.log)
        write_json(member.run.path / "eval.json", result)
        write_json(member.run.path / "timings.json", {"seconds": round(member.seconds, 2)})
        remove_weights(member.directory)
        return Result("done", metrics=result)

    return measure
