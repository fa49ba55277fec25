"""One cell: train a method's adapter on a task and judge it once. The loop is the one that `flatshift train` uses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.cells.files import Result, write_result
from experiments.cells.training import fresh_engine, judge_examples, train_examples
from experiments.comparison.data import Material, material
from experiments.comparison.plan import StudyCell
from finetune.seeds import derive

if TYPE_CHECKING:
    from finetune.parallel.engine import Engine

_STAGE = "fine-tune"


def run_cell(directory: Path, cell: StudyCell, threads: int, *, died: str | None = None) -> None:
    """Run `cell` and write its result, last and whole (`experiments.cells.files.write_result`)."""
    about = {
        "kind": cell.kind,
        "method": cell.method,
        "task": cell.task,
        "seed": cell.seed,
        "setting": cell.setting.overrides(),
        "steps": cell.recipe.train.steps,
        "judged": cell.judged,
    }
    empty: Result = {"metrics": {}, "items": None}
    write_result(directory, cell.key, about, lambda: _measure(cell, threads), empty, died=died)


def _measure(cell: StudyCell, threads: int) -> dict[str, Any]:
    from finetune.compute.numerics import cpu_threads

    recipe = cell.recipe
    with cpu_threads(recipe.train.threads or threads):
        found = material(cell)
        engine = _fresh(cell, found.label_names)
        clock = train_examples(
            recipe,
            engine,
            found.tokenizer,
            found.train,
            task=recipe.task,
            stage=_STAGE,
            optimizer=recipe.optimizer,
            train=recipe.train,
            labels=found.label_names,
        )
        metrics, items = judge_examples(recipe, engine, found.tokenizer, found.judged, recipe.task)
        measured = _sharpness(cell, engine, found)
    return {"metrics": metrics, "items": items, "step_cpu_s": clock, "sharpness": measured}


def _fresh(cell: StudyCell, labels: tuple[str, ...] | None) -> Engine:
    return fresh_engine(cell.recipe, cell.recipe.task, labels)


def _sharpness(cell: StudyCell, engine: Engine, found: Material) -> float | None:
    from experiments.comparison.sharpness import rise_of

    if cell.sharpness is None:
        return None
    return rise_of(engine, found, cell.recipe, sigma=cell.sharpness, seed=derive(cell.seed, "sharpness"))
