"""Context of a run: one object passed from the command to the training loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from flatshift.experiments.data.splits import PreparedData
from flatshift.experiments.recipe.schema import Recipe
from flatshift.experiments.run.console import Console, Draw, catch_stop_signals
from flatshift.finetune.compute.cuda_status import resolve_device
from flatshift.finetune.compute.matmul_rate import peak_rate
from flatshift.finetune.compute.numerics import cpu_threads
from flatshift.finetune.errors import UserError
from flatshift.finetune.parallel.engine import Engine
from flatshift.finetune.parallel.mesh import ProcessMesh
from flatshift.finetune.run_directory import RunDirectory
from flatshift.finetune.train.trackers import Trackers, open_trackers


class FineTuneProbe(Protocol):
    """Observer of a running fine-tune that measures more than the run's own metrics."""

    def step(self, line: Mapping[str, Any]) -> None:
        """Called after an optimizer step with its row of metrics.jsonl."""

    def judged(self, recipe: Recipe, engine: Engine, tokenizer: Any, prepared: PreparedData) -> None:
        """Called after the evaluation of the chosen adapter, which is loaded in `engine`."""

    def figures(self) -> dict[str, Any]:
        """Return the measurements as JSON values."""


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """Objects shared by all parts of a run, which none of them changes."""

    recipe: Recipe
    run: RunDirectory
    console: Console
    world: ProcessMesh
    """Position of this rank in the recipe's mesh."""
    stop: Callable[[], bool]
    """Returns True if a signal requested a stop."""
    trackers: Trackers
    peak_tflops: float | None = None
    """Peak rate of one device for the MFU; None if no MFU is wanted."""
    cell: bool = False
    """True for a cell of a study: its metrics belong to the study, so the run has no checksums, page or base-model
    metrics."""
    draw: Draw | None = None
    probe: FineTuneProbe | None = None

    def watch(self, label: str, rows: int) -> AbstractContextManager[Callable[[int], None]]:
        """Show an evaluation on the console; it ends at the first batch after a stop signal, on all ranks."""
        return self.console.evaluating(label, rows, stop=lambda: self.world.any(self.stop()))


@contextmanager
def run_context(
    recipe: Recipe,
    run: RunDirectory,
    console: Console,
    world: ProcessMesh | None = None,
    *,
    cell: bool = False,
    **rest: Any,
) -> Iterator[RunContext]:
    """Open the context of a run on this rank: its threads are set, signals caught and trackers open in the block.

    world: None for a single process. rest: further fields of `RunContext`.
    """
    if world is None:
        if recipe.mesh.size > 1 or recipe.mesh.auto:
            raise UserError("mesh: a cell of a sweep or study trains on one device; leave every axis at 1 and auto off")
        world = ProcessMesh.alone(resolve_device(recipe.train.device))
    run = dataclasses.replace(run, writes=world.is_main)
    with cpu_threads(recipe.train.threads), catch_stop_signals(console.say) as stop:
        trackers = open_trackers(recipe.tracker, run, config=dataclasses.asdict(recipe), log=console.say)
        try:
            yield RunContext(
                recipe=recipe,
                run=run,
                console=console,
                world=world,
                stop=stop,
                trackers=trackers,
                peak_tflops=None if cell else _resolve_peak_tflops(recipe, world, console),
                cell=cell,
                **rest,
            )
        finally:
            trackers.close()


def _resolve_peak_tflops(recipe: Recipe, world: ProcessMesh, console: Console) -> float:
    """Return the peak rate of one device, TFLOP/s: from the recipe, else measured."""
    if recipe.train.peak_tflops is not None:
        return recipe.train.peak_tflops
    precision = recipe.train.precision
    peak = peak_rate(str(world.device), precision) / 1e12
    shown = f"{peak:.3g} TFLOP/s" if peak >= 1 else f"{1000 * peak:.3g} GFLOP/s"
    threads = torch.get_num_threads()
    where = f"{threads} thread{'s' if threads > 1 else ''}" if world.device.type == "cpu" else "one device"
    console.detail(f"peak: {shown}, measured: the best {precision} matrix product on {where}; MFU is a share of it")
    return peak
