"""How a cell trains and is judged: the loop that `flatshift train` uses, on a copy of a frozen backbone kept in memory.

A worker keeps each backbone as it was loaded; a cell trains on a copy, which is thrown away.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.studies.cells.refusing import refuse_beginning
from flatshift.experiments.recipe.schema import Recipe
from flatshift.finetune.config import Optimizer, Train
from flatshift.finetune.errors import UserError
from flatshift.finetune.lock import temporary_directory
from flatshift.finetune.seeds import derive_seed
from flatshift.finetune.tasks import Task
from flatshift.finetune.train.divergence import Diverged
from flatshift.finetune.train.stage import TrainingStage
from flatshift.finetune.train.trainer import Trainer

if TYPE_CHECKING:
    from flatshift.finetune.data.example import Example
    from flatshift.finetune.parallel.engine import Engine

_SETTLING = 3
"""Steps whose time is not counted."""


def fresh_engine(recipe: Recipe, task: Task, labels: tuple[str, ...] | None) -> Engine:
    """A copy of the pristine backbone with a fresh adapter, as `flatshift.finetune.parallel.build.build_engine` lays it
    out."""
    from flatshift.finetune.adapters.adapter import attach_adapter
    from flatshift.finetune.compute.precision import adapter_dtype
    from flatshift.finetune.parallel.activation_checkpoint import checkpoint_activations
    from flatshift.finetune.parallel.engine import Engine

    train = recipe.train
    narrow = train.backbone_precision == "bf16"
    pristine = _pristine(recipe.backbone, task, labels, train.precision, narrow, train.backbone_dropout, train.device)
    backbone = copy.deepcopy(pristine)
    refuse_beginning(recipe)
    dtype = adapter_dtype(train)
    model = attach_adapter(backbone, recipe.adapter, task=task, seed=train.seed, dtype=dtype)
    checkpoint_activations(model, train.checkpointing)
    return Engine.alone(model)


@functools.lru_cache(maxsize=12)
def _pristine(
    backbone: str,
    task: Task,
    labels: tuple[str, ...] | None,
    precision: Any,
    narrow: bool,
    dropout: float | None,
    device: str,
) -> Any:
    from flatshift.finetune.compute.cuda_status import resolve_device
    from flatshift.finetune.models.load import load_backbone

    return load_backbone(
        backbone,
        task=task,
        label_names=labels,
        precision=precision,
        narrow=narrow,
        dropout=dropout,
        device=resolve_device(device),
    )


@functools.lru_cache(maxsize=8)
def kept_tokenizer(backbone: str) -> Any:
    """The backbone's tokenizer, kept in memory."""
    from flatshift.finetune.models.backbone import open_backbone

    return open_backbone(backbone).tokenizer


def train_examples(
    recipe: Recipe,
    engine: Engine,
    tokenizer: Any,
    examples: Sequence[Example],
    *,
    task: Task,
    stage: str,
    optimizer: Optimizer,
    train: Train,
    labels: tuple[str, ...] | None,
) -> float | None:
    """Train one stage without dev rows; returns CPU-seconds of a step (median; None for too few steps)."""
    from flatshift.finetune.data.batches import TrainingDataLoader
    from flatshift.finetune.run_directory import RunDirectory
    from flatshift.regularizers import build

    batches = TrainingDataLoader(
        examples,
        task=task,
        batch_size=train.batch_size,
        accumulate=train.accumulate,
        seed=derive_seed(train.seed, "order"),
        max_length=train.max_length,
        pad_id=int(tokenizer.pad_token_id),
        group=train.group,
    )
    clock: list[float] = []
    with temporary_directory("flatshift-cell-") as folder:
        Trainer(
            engine,
            tokenizer,
            TrainingStage(
                name=stage,
                task=task,
                batches=batches,
                dev=[],  # judged once, after the last step
                optimizer=optimizer,
                train=train,
                evaluate=recipe.eval,
                regularizer=build(recipe.regularizer),
                run=RunDirectory(folder),
                seed=train.seed,
                on_step=lambda line: clock.append(time.process_time()),
            ),
        ).fit()
    taken = np.diff(clock)[_SETTLING:]
    return float(np.median(taken)) if len(taken) else None


def judge_examples(
    recipe: Recipe, engine: Engine, tokenizer: Any, examples: Sequence[Example], task: Task
) -> tuple[dict[str, float], Any]:
    """Figures on the judged rows, and each item's part: right or wrong as one text of 1 and 0, or [nats, tokens]."""
    from flatshift.finetune.compute.numerics import evaluation_mode
    from flatshift.finetune.data.eval_batching import EvalBatching
    from flatshift.finetune.evaluate.evaluator import head_scores
    from flatshift.finetune.evaluate.perplexity import document_nats
    from flatshift.finetune.evaluate.prediction_metrics import classification_metrics

    inference = EvalBatching.of(tokenizer, recipe.train, batch_size=recipe.eval.batch_size, device=engine.device)
    with evaluation_mode(engine.eval_model):
        if task.one_class:
            nats, logits = head_scores(engine.eval_model, examples, inference, task=task)
            predicted = logits.argmax(-1)
            gold = [int(example.labels) for example in examples]  # type: ignore[arg-type]
            figures = classification_metrics(gold, predicted.tolist(), resamples=0, confidence=0.95, seed=0)
            _refuse_nan(nats)
            values = {name: float(figure["value"] or 0.0) for name, figure in figures.items()}
            right = "".join("1" if p == g else "0" for p, g in zip(predicted.tolist(), gold, strict=True))
            return {"loss": float(nats.mean()), **values}, right
        if task.score != "perplexity":
            raise UserError("task.score: a comparison judges answers by their loss; take perplexity")
        nats, tokens = document_nats(engine.eval_model, examples, inference, task=task)
    _refuse_nan(nats)
    return {"loss": float(nats.sum() / tokens.sum())}, [[round(n, 4) for n in nats.tolist()], tokens.tolist()]


def _refuse_nan(nats: np.ndarray) -> None:
    if not np.isfinite(nats).all():
        raise Diverged("the trained model's loss on the judged rows is not a finite number")
