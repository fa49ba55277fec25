"""A training cell: warm-up on the arm's text, perplexity of the target's judged texts, then the few-label fine-tune."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.studies.cells.rows import split_rows
from benchmarks.studies.cells.training import fresh_engine, judge_examples, kept_tokenizer, train_examples
from benchmarks.studies.selection_quality.cells import TrainingCell
from benchmarks.studies.selection_quality.choosing import chosen_rows, target_texts
from benchmarks.studies.selection_quality.pool import open_pool
from benchmarks.studies.selection_quality.stream import Packed, packed_rows
from flatshift.experiments.recipe.schema import settings_tree, short_hash
from flatshift.finetune.data.encoding import encode
from flatshift.finetune.data.rows import Row, limit_rows
from flatshift.finetune.seeds import derive_seed, numpy_generator
from flatshift.finetune.tasks import LanguageModel

if TYPE_CHECKING:
    from torch import Tensor

    from flatshift.finetune.parallel.engine import Engine

WARM_UP, FINE_TUNE = "warm-up", "fine-tune"
_LANGUAGE = LanguageModel(pack=False)
_PARTS = re.compile(r"\w+|[^\w\s]+")
_ELSEWHERE = 300
"""Passages of the pool that tell what a warm-up costs elsewhere."""
_KEPT = 12
"""Warm-ups that a worker remembers: those of a random draw and of the whole pool serve every target."""


@dataclasses.dataclass(frozen=True)
class _Warm:
    """A warmed adapter, with what it cost and saw."""

    adapter: dict[str, Tensor]
    passages: int
    tokens: int
    epochs: float


_WARM: OrderedDict[str, _Warm] = OrderedDict()


def run_training(root: Path, cell: TrainingCell) -> dict[str, Any]:
    """Figures of one run: `metrics`, per-item parts, and CPU-seconds by stage."""
    recipe = cell.recipe
    tokenizer = kept_tokenizer(recipe.backbone)
    split = (cell.rows.validation, cell.rows.test, cell.rows.test_split)
    train, judged, labels = split_rows(cell.rows.file, recipe.task, split, cell.judged)
    seconds: dict[str, float] = {}
    clock = time.process_time()

    def lap(stage: str) -> None:
        nonlocal clock
        now = time.process_time()
        seconds[stage], clock = round(now - clock, 3), now

    engine = fresh_engine(recipe, _LANGUAGE, None)
    warm, remembered = _warmed(root, cell, engine, tokenizer)
    lap(WARM_UP)
    metrics: dict[str, float] = {}
    items: dict[str, Any] = {}
    if cell.kind != "fine-tune trial":
        texts = encode(judged, task=_LANGUAGE, tokenizer=tokenizer, max_length=cell.judged_length).examples
        figures, parts = judge_examples(recipe, engine, tokenizer, texts, _LANGUAGE)
        metrics |= {"nats": figures["loss"], "perplexity": math.exp(figures["loss"])}
        items["nats"] = round(math.fsum(parts[0]), 3), sum(parts[1])
        lap("perplexity")
    if cell.forgetting:
        texts = encode(_elsewhere(root, cell), task=_LANGUAGE, tokenizer=tokenizer, max_length=cell.judged_length)
        metrics["pool_nats"] = judge_examples(recipe, engine, tokenizer, texts.examples, _LANGUAGE)[0]["loss"]
        lap("forgetting")
    if cell.form:
        plain = fresh_engine(recipe, _LANGUAGE, None)
        _warmed(root, cell, plain, tokenizer, form=True)
        rows = [
            dataclasses.replace(row, values={**row.values, "text": plain_form(row.values["text"])}) for row in judged
        ]
        texts = encode(rows, task=_LANGUAGE, tokenizer=tokenizer, max_length=cell.judged_length).examples
        metrics["form_nats"] = judge_examples(recipe, plain, tokenizer, texts, _LANGUAGE)[0]["loss"]
        lap("plain form")
    if cell.fine_tune_lr is not None:
        engine = fresh_engine(recipe, recipe.task, labels)
        if warm is not None:
            _take_over(engine, warm.adapter)
        labelled = limit_rows(train, min(cell.rows.labels, len(train)), seed=derive_seed(cell.seed, "limit", "train"))
        encoded = [
            encode(rows, task=recipe.task, tokenizer=tokenizer, max_length=recipe.train.max_length, label_names=labels)
            for rows in (labelled, judged)
        ]
        train_examples(
            recipe,
            engine,
            tokenizer,
            encoded[0].examples,
            task=recipe.task,
            stage=FINE_TUNE,
            optimizer=recipe.optimizer,
            train=recipe.train,
            labels=labels,
        )
        lap(FINE_TUNE)
        figures, items["right"] = judge_examples(recipe, engine, tokenizer, encoded[1].examples, recipe.task)
        metrics |= figures
        lap("accuracy")
    about = {"passages": warm.passages, "tokens": warm.tokens, "epochs": round(warm.epochs, 3)} if warm else {}
    return {"metrics": metrics, "items": items, "text": about, "seconds": seconds, "remembered": remembered}


def _elsewhere(root: Path, cell: TrainingCell) -> list[Row]:
    """Passages of the pool, the same for every cell."""
    stored = open_pool(root, cell.pool.key)
    order = numpy_generator(0, "quality", "forgetting").permutation(len(stored))[:_ELSEWHERE]
    return [Row({"text": stored.texts[i]}, stored.ids[i], f"passage {i}") for i in np.sort(order).tolist()]


def plain_form(text: str) -> str:
    """Lower case, one space between words and runs of marks."""
    return " ".join(_PARTS.findall(text.lower()))


def _warmed(
    root: Path, cell: TrainingCell, engine: Engine, tokenizer: Any, form: bool = False
) -> tuple[_Warm | None, bool]:
    """Train `engine`'s adapter on the arm's text; also says whether an equal warm-up was remembered instead.

    form: on that text in plain form."""
    from flatshift.finetune.adapters.adapter import lora_only, trainable

    if cell.lr is None:
        return None, False
    recipe = cell.recipe
    warmup = recipe.warmup
    assert warmup is not None
    texts, name = _texts(root, cell)
    if form:
        texts, name = [plain_form(text) for text in texts], f"{name} in plain form"
    train = dataclasses.replace(
        recipe.train,
        steps=warmup.steps,
        batch_size=warmup.batch_size,
        accumulate=warmup.accumulate,
        max_length=cell.packed,
    )
    optimizer = dataclasses.replace(recipe.optimizer, lr=warmup.lr)
    settings = map(settings_tree, (train, optimizer, recipe.adapter, recipe.regularizer))
    key = short_hash([name, recipe.backbone, *settings])
    remembered = key in _WARM
    if remembered:
        _WARM.move_to_end(key)
        _take_over(engine, _WARM[key].adapter)
    else:
        rows = warmup.steps * warmup.batch_size * warmup.accumulate
        found = packed_rows(texts, tokenizer, rows=rows, length=cell.packed, seed=derive_seed(cell.seed, "stream"))
        _train(cell, engine, tokenizer, found, optimizer, train)
        adapter = {name: tensor.detach().clone() for name, tensor in lora_only(trainable(engine.model)).items()}
        _WARM[key] = _Warm(adapter, found.passages, found.tokens, found.epochs)
        if len(_WARM) > _KEPT:
            _WARM.popitem(last=False)
    return _WARM[key], remembered


def _train(cell: TrainingCell, engine: Engine, tokenizer: Any, found: Packed, optimizer: Any, train: Any) -> None:
    train_examples(
        cell.recipe,
        engine,
        tokenizer,
        found.examples,
        task=_LANGUAGE,
        stage=WARM_UP,
        optimizer=optimizer,
        train=train,
        labels=None,
    )


def _texts(root: Path, cell: TrainingCell) -> tuple[Sequence[str], str]:
    """The passages that a warm-up draws from, and a name that is theirs alone."""
    if cell.source == "target":
        texts = [str(row.values["text"]) for row in target_texts(cell.rows, cell.recipe.task, cell.seed)]
        return texts, short_hash(texts)
    stored = open_pool(root, cell.pool.key)
    if cell.source == "pool":
        return stored.texts, cell.pool.key
    assert cell.selection is not None and cell.budget is not None
    rows = np.sort(chosen_rows(root, cell.selection, cell.budget))
    return [stored.texts[i] for i in rows.tolist()], short_hash([cell.pool.key, rows.tolist()])


def _take_over(engine: Engine, adapter: dict[str, Tensor]) -> None:
    """Copy a warmed adapter into a fresh engine's own; a new head stays as it is."""
    from flatshift.finetune.adapters.adapter import copy_tensors, lora_only, trainable

    copy_tensors(adapter, lora_only(trainable(engine.model)), context="the warmed adapter")
