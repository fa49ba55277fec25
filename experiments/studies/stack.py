"""Cells of a sweep that share a frozen backbone: which may, and how they train together.

    for stack in stacks(cells, width=32):
        run_stack([out / "cells" / cell.key for cell in stack.cells], stack.cells, threads=1)

A stack leaves for every cell what `flatshift.experiments.studies.run_cell` leaves, with the same figures to rounding; a
cell that fails fails alone; a stack that is stopped, or in which a device fails, leaves no result for the cells under
way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatshift.experiments.data.splits import Prepared, prepare
from flatshift.experiments.recipe.schema import Recipe
from flatshift.experiments.results.cells import read_result
from flatshift.experiments.run.console import graceful_stop
from flatshift.experiments.studies.cell import Cell, Result, finish_cell, result_of, run_cell, train_cell, without_cache
from flatshift.finetune.compute.cuda_status import resolve_device
from flatshift.finetune.compute.numerics import cpu_threads
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.run_directory import RunDirectory, disk_full_interrupts
from flatshift.finetune.stacked.host import Host
from flatshift.finetune.stacked.limits import NotStackable, estimate, refusal
from flatshift.finetune.stacked.together import Stage, cell_engine, run_together

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
    if recipe.optimizer.kind == "gauss-newton":
        return "optimizer.kind: gauss-newton solves for the rows of one cell"
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
    directory, device = open_backbone(recipe.backbone).directory, resolve_device(recipe.train.device)
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


def run_stack(directories: Sequence[Path], cells: Sequence[Cell], threads: int | None) -> None:
    """Train and judge `cells` together; each gets in its directory what `run_cell` would leave, and its result last.

    Each cell runs as it would alone (`train_cell`), paused where it needs a pass; rows that are equal and the frozen
    backbone are in memory once. threads: of this process, where the recipes do not say. Cells that turn out not to go
    together run one by one.
    Raises Interrupted for a signal or a full disk, and RuntimeError for an error of any cell that nobody foresaw: a
    device that failed goes on failing. Cells without a result then begin anew the next time.
    """
    for directory in directories:
        if directory.exists():
            shutil.rmtree(directory)
    shared = _Shared()
    members = [_Member(directory, cell, shared, len(cells)) for directory, cell in zip(directories, cells, strict=True)]
    own = cells[0].resolved.recipe.train.threads
    with (
        disk_full_interrupts(f"running a stack of {len(cells)} cells"),
        cpu_threads(own if own is not None else threads),
        graceful_stop(lambda line: None) as stop,
    ):
        try:
            seated: dict[int, list[_Member]] = {}
            for member in members:
                if member.begin():
                    seated.setdefault(id(member.backbone), []).append(member)
            for group in seated.values():
                try:
                    _train(group, stop)
                except NotStackable as error:
                    _apart([member for member in group if read_result(member.directory) is None], threads, str(error))
        finally:
            for member in members:
                member.stage.close()


class _Shared:
    """What the cells of a stack have in memory once."""

    def __init__(self) -> None:
        self._prepared: list[Prepared] = []
        self._backbones: dict[tuple[str, ...] | None, Any] = {}

    def prepared(self, recipe: Recipe) -> Prepared:
        """The rows of a cell, those of an earlier one where they are equal."""
        found = prepare(recipe)
        for split in ("train", "dev", "test"):
            mine = getattr(found, split)
            same = next((rows for rows in (getattr(other, split) for other in self._prepared) if rows == mine), mine)
            found = dataclasses.replace(found, **{split: same})
        self._prepared.append(found)
        return found

    def backbone(self, recipe: Recipe, label_names: tuple[str, ...] | None) -> Any:
        """The frozen backbone for these classes."""
        if label_names not in self._backbones:
            self._backbones[label_names] = load_backbone(
                recipe.backbone,
                task=recipe.task,
                label_names=label_names,
                precision=recipe.train.precision,
                dropout=recipe.train.backbone_dropout,
                device=resolve_device(recipe.train.device),
            )
        return self._backbones[label_names]


class _Member:
    """A cell on its way through a stack."""

    def __init__(self, directory: Path, cell: Cell, shared: _Shared, stacked: int) -> None:
        recipe = without_cache(cell.resolved.recipe)
        train = dataclasses.replace(recipe.train, threads=None)  # the stack's own are set
        self.directory, self.cell, self.recipe = directory, cell, dataclasses.replace(recipe, train=train)
        self.stage = Stage(self._run)
        self.backbone: Any = None
        self.engine: Any = None
        self._shared, self._stacked = shared, stacked

    def begin(self) -> bool:
        """Let it read its rows and attach its adapter; False if that already was its end."""
        return next(self.stage, None) is not None

    def _run(self, stage: Stage) -> None:
        """The cell from its rows to its result."""

        def measure() -> Result:
            return train_cell(
                self.directory, self.cell, self.recipe, prepared=self._shared.prepared, load_model=self._lay_out
            )

        result, fit = result_of(measure, self.directory)
        if not fit:
            raise RuntimeError(result.reason)
        result = dataclasses.replace(result, seconds=stage.elapsed, stacked=self._stacked)
        finish_cell(self.directory, self.cell, result)
        self.engine = None

    def _lay_out(self, recipe: Recipe, task: Any, label_names: tuple[str, ...] | None, **_: Any) -> tuple[Any, Any]:
        """The cell's model on the shared backbone."""
        self.backbone = self._shared.backbone(recipe, label_names)
        self.engine = cell_engine(self.backbone, recipe.adapter, task=task, train=recipe.train)
        self.engine.compute = self.stage.compute
        self.stage.pause(self.engine)  # until all others are there
        return self.engine, open_backbone(recipe.backbone).tokenizer


def _train(group: Sequence[_Member], stop: Callable[[], bool]) -> None:
    """Train the cells of one set of classes together; each is judged as soon as it has ended."""
    first = group[0]
    pad_id = int(open_backbone(first.recipe.backbone).tokenizer.pad_token_id)
    with (
        Host(first.backbone, [member.engine for member in group], task=first.recipe.task, pad_id=pad_id) as host,
        contextlib.closing(run_together(host, [member.stage for member in group], stop=stop)) as ends,
    ):
        for _ in ends:
            pass
    gc.collect()  # PEFT models refer to themselves


def _apart(members: Sequence[_Member], threads: int | None, reason: str) -> None:
    """Run cells one by one that do not go together."""
    for member in members:
        member.stage.close()
        fit = run_cell(member.directory, member.cell, threads, alone=reason)
        RunDirectory(member.directory).log(f"alone: {reason}")
        if not fit:
            raise RuntimeError(f"cell {member.cell.key} failed in a way that nobody foresaw") from None
