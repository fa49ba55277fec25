"""A training cell: warm-up on the arm's text, perplexity of the target's texts, then the few-label fine-tune.

The loop is that of `flatshift train`, on a copy of a frozen backbone that a worker keeps in memory.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.studies.selection_quality.cells import TrainingCell
from benchmarks.studies.selection_quality.choosing import chosen_rows
from benchmarks.studies.selection_quality.pool import open_pool, split_rows, target_texts
from benchmarks.studies.selection_quality.settings import settings_tree
from benchmarks.studies.selection_quality.texts import join_packed, packed_rows, plain_form
from flatshift.experiments.recipe.schema import Recipe, short_hash
from flatshift.finetune.config import Optimizer, Train
from flatshift.finetune.data.encoding import encode
from flatshift.finetune.data.example import Example
from flatshift.finetune.data.rows import Row, limit_rows
from flatshift.finetune.lock import temporary_directory
from flatshift.finetune.seeds import derive_seed, numpy_generator
from flatshift.finetune.tasks import LanguageModel, Task
from flatshift.finetune.train.divergence import Diverged
from flatshift.finetune.train.stage import TrainingStage
from flatshift.finetune.train.trainer import Trainer

if TYPE_CHECKING:
    from torch import Tensor

    from flatshift.finetune.parallel.engine import Engine

_LANGUAGE = LanguageModel(pack=False)
_KEPT = 12
"""Warm-ups that a worker remembers: those of a random draw and of the whole pool serve every target."""
_WARM: OrderedDict[str, tuple[dict[str, Tensor], dict[str, Any]]] = OrderedDict()
"""Key → (warmed adapter, what it read)."""


def run_training(root: Path, cell: TrainingCell) -> dict[str, Any]:
    """Figures of one run: `metrics`, per-item parts, and CPU-seconds by stage."""
    recipe = cell.recipe
    train, evaluation, labels = split_rows(cell.rows, recipe.task, cell.judged)
    seconds: dict[str, float] = {}
    metrics: dict[str, float] = {}
    items: dict[str, Any] = {}
    clock = time.process_time()

    def lap(stage: str) -> None:
        nonlocal clock
        now = time.process_time()
        seconds[stage], clock = round(now - clock, 3), now

    engine = fresh_engine(recipe, _LANGUAGE, None)
    warm, remembered = _warmed(root, cell, engine)
    lap("warm-up")
    if cell.kind != "fine-tune trial":
        nats, tokens = _nats(cell, engine, evaluation)
        metrics |= {"nats": nats.sum() / tokens.sum(), "perplexity": math.exp(nats.sum() / tokens.sum())}
        items["nats"] = round(math.fsum(round(n, 4) for n in nats.tolist()), 3), int(tokens.sum())
        lap("perplexity")
    if cell.forgetting:
        nats, tokens = _nats(cell, engine, _elsewhere(root, cell))
        metrics["pool_nats"] = nats.sum() / tokens.sum()
        lap("forgetting")
    if cell.form or cell.form_after:
        plain = engine
        if cell.form:
            plain = fresh_engine(recipe, _LANGUAGE, None)
            _warmed(root, cell, plain, form=True)
        rows = [dataclasses.replace(r, values={**r.values, "text": plain_form(r.values["text"])}) for r in evaluation]
        nats, tokens = _nats(cell, plain, rows)
        metrics["form_nats"] = nats.sum() / tokens.sum()
        lap("plain form")
    if cell.fine_tune_lr is not None:
        engine = fresh_engine(recipe, recipe.task, labels)
        if warm is not None:
            _take_over(engine, warm[0])
        labelled = limit_rows(train, min(cell.rows.labels, len(train)), seed=derive_seed(cell.seed, "limit", "train"))
        settings: dict[str, Any] = {"max_length": recipe.train.max_length, "label_names": labels}
        own, others = (_encoded(recipe, recipe.task, rows, **settings) for rows in (labelled, evaluation))
        train_examples(recipe, engine, own, recipe.task, recipe.optimizer, recipe.train)
        lap("fine-tune")
        result, items["right"] = _classified(recipe, engine, others)
        metrics |= result
        lap("accuracy")
    about = warm[1] if warm else {}
    return {
        "metrics": {name: float(value) for name, value in metrics.items()},
        "items": items, "text": about, "seconds": seconds, "remembered": remembered,
    }  # fmt: skip


def _encoded(recipe: Recipe, task: Task, rows: Sequence[Row], **settings: Any) -> list[Example]:
    return encode(rows, task=task, tokenizer=kept_tokenizer(recipe.backbone), **settings).examples


def _elsewhere(root: Path, cell: TrainingCell) -> list[Row]:
    """Passages of the pool, the same for every cell."""
    stored = open_pool(root, cell.pool.key)
    order = numpy_generator(0, "quality", "forgetting").permutation(len(stored))[: cell.forgetting]
    return [Row({"text": stored.texts[i]}, stored.ids[i], f"passage {i}") for i in np.sort(order).tolist()]


def _warmed(
    root: Path, cell: TrainingCell, engine: Engine, form: bool = False
) -> tuple[tuple[dict[str, Tensor], dict[str, Any]] | None, bool]:
    """Train `engine`'s adapter on the arm's text (form: in plain form); also whether an equal warm-up was remembered
    instead."""
    from flatshift.finetune.adapters.adapter import lora_only, trainable

    recipe, warmup = cell.recipe, cell.recipe.warmup
    if cell.lr is None:
        return None, False
    assert warmup is not None
    texts, name = _texts(root, cell)
    own_texts: Sequence[str] = _own_texts(cell) if cell.own else []
    if own_texts:
        name = f"{name} and {cell.own} of {short_hash(own_texts)}"
    if form:
        texts, own_texts = ([plain_form(text) for text in some] for some in (texts, own_texts))
        name = f"{name} in plain form"
    train = dataclasses.replace(
        recipe.train, steps=warmup.steps, batch_size=warmup.batch_size, accumulate=warmup.accumulate,
        max_length=cell.packed,
    )  # fmt: skip
    optimizer = dataclasses.replace(recipe.optimizer, lr=warmup.lr)
    settings = map(settings_tree, (train, optimizer, recipe.adapter, recipe.regularizer))
    key = short_hash([name, recipe.backbone, *settings])
    remembered = key in _WARM
    if remembered:
        _WARM.move_to_end(key)
        _take_over(engine, _WARM[key][0])
    else:
        rows = warmup.steps * warmup.batch_size * warmup.accumulate
        own = round(cell.own * rows)
        lengths = {"length": cell.packed, "seed": derive_seed(cell.seed, "stream")}
        tokenizer = kept_tokenizer(recipe.backbone)
        result = packed_rows(texts, tokenizer, rows=rows - own, **lengths)
        if own:
            result = join_packed(result, packed_rows(own_texts, tokenizer, rows=own, **lengths))
        train_examples(recipe, engine, result.examples, _LANGUAGE, optimizer, train)
        adapter = {name: tensor.detach().clone() for name, tensor in lora_only(trainable(engine.model)).items()}
        about = {"passages": result.passages, "tokens": result.tokens, "epochs": round(result.epochs, 3)}
        _WARM[key] = adapter, about
        if len(_WARM) > _KEPT:
            _WARM.popitem(last=False)
    return _WARM[key], remembered


def _texts(root: Path, cell: TrainingCell) -> tuple[Sequence[str], str]:
    """The passages that a warm-up draws from, and a name that is theirs alone."""
    if cell.source == "target":
        texts = _own_texts(cell)
        return texts, short_hash(texts)
    stored = open_pool(root, cell.pool.key)
    if cell.source == "pool":
        return stored.texts, cell.pool.key
    assert cell.selection is not None and cell.budget is not None
    rows = np.sort(chosen_rows(root, cell.selection, cell.budget))
    return [stored.texts[i] for i in rows.tolist()], short_hash([cell.pool.key, rows.tolist()])


def _own_texts(cell: TrainingCell) -> list[str]:
    """The target's own texts, those that selectors see."""
    return [str(row.values["text"]) for row in target_texts(cell.rows, cell.recipe.task, cell.seed)]


def _take_over(engine: Engine, adapter: dict[str, Tensor]) -> None:
    """Copy a warmed adapter into a fresh engine's own; a new head stays as it is."""
    from flatshift.finetune.adapters.adapter import copy_tensors, lora_only, trainable

    copy_tensors(adapter, lora_only(trainable(engine.model)), context="the warmed adapter")


# --------------------------------------------------------------------------------------------- one model


def fresh_engine(recipe: Recipe, task: Task, labels: tuple[str, ...] | None) -> Engine:
    """A copy of the pristine backbone with a fresh adapter, as `flatshift.finetune.parallel.build` lays it out."""
    from flatshift.finetune.adapters.adapter import attach_adapter
    from flatshift.finetune.compute.precision import adapter_dtype
    from flatshift.finetune.parallel.activation_checkpoint import checkpoint_activations
    from flatshift.finetune.parallel.engine import Engine

    train = recipe.train
    narrow = train.backbone_precision == "bf16"
    pristine = _pristine(recipe.backbone, task, labels, train.precision, narrow, train.backbone_dropout, train.device)
    backbone = copy.deepcopy(pristine)
    model = attach_adapter(backbone, recipe.adapter, task=task, seed=train.seed, dtype=adapter_dtype(train))
    checkpoint_activations(model, train.checkpointing)
    return Engine.alone(model)


@functools.lru_cache(maxsize=12)
def _pristine(
    backbone: str, task: Task, labels: Any, precision: Any, narrow: bool, dropout: float | None, device: str
) -> Any:
    from flatshift.finetune.compute.cuda_status import resolve_device
    from flatshift.finetune.models.load import load_backbone

    return load_backbone(
        backbone, task=task, label_names=labels, precision=precision, narrow=narrow, dropout=dropout,
        device=resolve_device(device),
    )  # fmt: skip


@functools.lru_cache(maxsize=8)
def kept_tokenizer(backbone: str) -> Any:
    """The backbone's tokenizer, kept in memory."""
    from flatshift.finetune.models.backbone import open_backbone

    return open_backbone(backbone).tokenizer


def train_examples(
    recipe: Recipe, engine: Engine, examples: Sequence[Example], task: Task, optimizer: Optimizer, train: Train
) -> None:
    """Train one stage without dev rows: it is evaluated once, after the last step."""
    from flatshift.finetune.data.batches import TrainingDataLoader
    from flatshift.finetune.run_directory import RunDirectory
    from flatshift.regularizers import build

    tokenizer = kept_tokenizer(recipe.backbone)
    batches = TrainingDataLoader(
        examples, task=task, batch_size=train.batch_size, accumulate=train.accumulate,
        seed=derive_seed(train.seed, "order"), max_length=train.max_length, pad_id=int(tokenizer.pad_token_id),
        group=train.group,
    )  # fmt: skip
    with temporary_directory("flatshift-cell-") as folder:
        stage = TrainingStage(
            name="warm-up" if task == _LANGUAGE else "fine-tune", task=task, batches=batches, dev=[],
            optimizer=optimizer, train=train, evaluate=recipe.eval, regularizer=build(recipe.regularizer),
            run=RunDirectory(folder), seed=train.seed,
        )  # fmt: skip
        Trainer(engine, tokenizer, stage).fit()


def _batching(recipe: Recipe, engine: Engine) -> Any:
    from flatshift.finetune.data.eval_batching import EvalBatching

    tokenizer = kept_tokenizer(recipe.backbone)
    return EvalBatching.of(tokenizer, recipe.train, batch_size=recipe.eval.batch_size, device=engine.device)


def _nats(cell: TrainingCell, engine: Engine, rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
    """Nats and tokens of each row, cut to the length that counts."""
    from flatshift.finetune.compute.numerics import evaluation_mode
    from flatshift.finetune.evaluate.perplexity import document_nats

    examples = _encoded(cell.recipe, _LANGUAGE, rows, max_length=cell.judged_length)
    with evaluation_mode(engine.eval_model):
        nats, tokens = document_nats(engine.eval_model, examples, _batching(cell.recipe, engine), task=_LANGUAGE)
    return _finite(nats), tokens


def _classified(recipe: Recipe, engine: Engine, examples: Sequence[Example]) -> tuple[dict[str, float], str]:
    """Metrics on the rows, and each row's part: 1 where it is right, else 0."""
    from flatshift.finetune.compute.numerics import evaluation_mode
    from flatshift.finetune.evaluate.evaluator import head_scores
    from flatshift.finetune.evaluate.prediction_metrics import classification_metrics

    with evaluation_mode(engine.eval_model):
        nats, logits = head_scores(engine.eval_model, examples, _batching(recipe, engine), task=recipe.task)
    predicted, gold = logits.argmax(-1).tolist(), [int(example.labels) for example in examples]  # type: ignore[arg-type]
    metrics = classification_metrics(gold, predicted, resamples=0, confidence=0.95, seed=0)
    values = {name: float(figure["value"] or 0.0) for name, figure in metrics.items()}
    right = "".join("1" if p == g else "0" for p, g in zip(predicted, gold, strict=True))
    return {"loss": float(_finite(nats).mean()), **values}, right


def _finite(nats: np.ndarray) -> np.ndarray:
    if not np.isfinite(nats).all():
        raise Diverged("the trained model's loss on the evaluated rows is not a finite number")
    return nats
