"""One cell: train a method's adapter on a task and judge it once. The loop is the one that `flatshift train` uses.

A worker keeps each frozen backbone in memory as it was loaded; a cell trains on a copy, which is thrown away.
"""

from __future__ import annotations

import copy
import functools
import gc
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.comparison.data import Material, material
from experiments.comparison.plan import StudyCell
from finetune.atomic import write_json
from finetune.config import Classify, Completion, Task
from finetune.errors import Interrupted, UserError
from finetune.loop import Diverged, train_stage
from finetune.seeds import derive

if TYPE_CHECKING:
    from finetune.parallel.engine import Engine

_STAGE = "fine-tune"
_SETTLING = 3
"""Steps whose time is not counted."""


def cell_file(directory: Path, key: str) -> Path:
    """Where a cell's result lies."""
    return directory / f"{key}.json"


def run_cell(directory: Path, cell: StudyCell, threads: int) -> None:
    """Run `cell` and write its result, last and whole; a failure is a result with its reason.

    `status`: done; diverged or refused (kept: the same settings end the same way); crashed (run again by the next
    start).
    """
    started, cpu = time.monotonic(), time.process_time()
    outcome: dict[str, Any] = {"reason": None, "metrics": {}, "items": None}
    try:
        outcome |= {"status": "done", **_measure(cell, threads)}
    except Interrupted as error:  # a full disk stays what it is
        if isinstance(error.__cause__, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        raise
    except Diverged as error:
        outcome |= {"status": "diverged", "reason": str(error)}
    except ValueError as error:
        outcome |= {"status": "refused", "reason": str(error)}
    except Exception as error:
        outcome |= {"status": "crashed", "reason": f"{type(error).__name__}: {error}"}
    gc.collect()  # a PEFT model refers to itself: without this, each cell's weights outlive it
    write_json(
        cell_file(directory, cell.key),
        {
            "cell": cell.key,
            "kind": cell.kind,
            "method": cell.method,
            "task": cell.task,
            "seed": cell.seed,
            "setting": cell.setting.overrides(),
            "steps": cell.recipe.train.steps,
            "judged": cell.judged,
            **outcome,
            "cpu_s": round(time.process_time() - cpu, 3),
            "wall_s": round(time.monotonic() - started, 3),
        },
    )


def _measure(cell: StudyCell, threads: int) -> dict[str, Any]:
    from finetune.numerics import cpu_threads

    with cpu_threads(cell.recipe.train.threads or threads):
        found = material(cell)
        engine = _fresh(cell, found.label_names)
        clock = _train(cell, engine, found)
        metrics, items = _judge(cell, engine, found)
        measured = _sharpness(cell, engine, found)
    return {"metrics": metrics, "items": items, "step_cpu_s": clock, "sharpness": measured}


def _fresh(cell: StudyCell, labels: tuple[str, ...] | None) -> Engine:
    """A copy of the pristine backbone with a fresh adapter, as `finetune.parallel.build.build_engine` lays it out."""
    import torch

    from finetune.adapter import attach_adapter
    from finetune.parallel.activation import checkpoint_activations
    from finetune.parallel.engine import Engine

    recipe = cell.recipe
    pristine = _pristine(recipe.backbone, recipe.task, labels, recipe.train.precision, recipe.train.device)
    backbone = copy.deepcopy(pristine)
    dtype = torch.bfloat16 if recipe.train.adapter_precision == "bf16" else torch.float32
    model = attach_adapter(backbone, recipe.adapter, task=recipe.task, seed=recipe.train.seed, dtype=dtype)
    checkpoint_activations(model, recipe.train.checkpointing)
    return Engine.alone(model)


@functools.lru_cache(maxsize=12)
def _pristine(backbone: str, task: Task, labels: tuple[str, ...] | None, precision: Any, device: str) -> Any:
    from finetune.backbone import load_backbone, resolve_device

    return load_backbone(backbone, task=task, label_names=labels, precision=precision, device=resolve_device(device))


def _train(cell: StudyCell, engine: Engine, found: Material) -> float | None:
    """Train by the recipe; returns CPU-seconds of a step (median; None for too few steps)."""
    from finetune.data import Batches
    from finetune.rundir import RunDirectory
    from regularizers import build

    recipe = cell.recipe
    train = recipe.train
    batches = Batches(
        found.train,
        task=recipe.task,
        batch_size=train.batch_size,
        accumulate=train.accumulate,
        seed=derive(train.seed, "order"),
        max_length=train.max_length,
        pad_id=int(found.tokenizer.pad_token_id),
    )
    clock: list[float] = []
    with tempfile.TemporaryDirectory(prefix="flatshift-cell-") as scratch:
        train_stage(
            engine,
            found.tokenizer,
            stage=_STAGE,
            task=recipe.task,
            batches=batches,
            dev=[],  # judged once, after the last step
            optimizer=recipe.optimizer,
            train=train,
            evaluate=recipe.eval,
            regularizer=build(recipe.regularizer),
            run=RunDirectory(Path(scratch)),
            seed=train.seed,
            label_names=found.label_names,
            on_step=lambda line: clock.append(time.process_time()),
        )
    taken = np.diff(clock)[_SETTLING:]
    return float(np.median(taken)) if len(taken) else None


def _judge(cell: StudyCell, engine: Engine, found: Material) -> tuple[dict[str, float], Any]:
    """Figures on the judged rows, and each item's part: right or wrong as one text of 1 and 0, or [nats, tokens]."""
    import torch

    from finetune.evaluate import class_scores, document_nats, evaluating, judge_classes

    recipe, task = cell.recipe, cell.recipe.task
    how: dict[str, Any] = {
        "batch_size": recipe.eval.batch_size,
        "pad_id": int(found.tokenizer.pad_token_id),
        "device": engine.device,
        "autocast_dtype": torch.bfloat16 if recipe.train.precision == "bf16" else None,
    }
    with evaluating(engine.judged):
        if isinstance(task, Classify):
            nats, predicted = class_scores(engine.judged, found.judged, **how)
            gold = [int(example.labels) for example in found.judged]  # type: ignore[arg-type]
            figures = judge_classes(gold, predicted.tolist(), resamples=0, confidence=0.95, seed=0)
            _refuse_nan(nats)
            values = {name: float(figure["value"] or 0.0) for name, figure in figures.items()}
            right = "".join("1" if p == g else "0" for p, g in zip(predicted.tolist(), gold, strict=True))
            return {"loss": float(nats.mean()), **values}, right
        if isinstance(task, Completion) and task.score != "perplexity":
            raise UserError("task.score: a comparison judges completions by their loss; take perplexity")
        nats, tokens = document_nats(engine.judged, found.judged, task=task, **how)
    _refuse_nan(nats)
    return {"loss": float(nats.sum() / tokens.sum())}, [[round(n, 4) for n in nats.tolist()], tokens.tolist()]


def _refuse_nan(nats: np.ndarray) -> None:
    if not np.isfinite(nats).all():
        raise Diverged("the trained model's loss on the judged rows is not a finite number")


def _sharpness(cell: StudyCell, engine: Engine, found: Material) -> float | None:
    from experiments.comparison.sharpness import rise_of

    if cell.sharpness is None:
        return None
    return rise_of(engine, found, cell.recipe, sigma=cell.sharpness, seed=derive(cell.seed, "sharpness"))
