"""Tokenizer of an exported adapter or merged model: set up to tokenize as in training, saved, loaded again without this
project's settings, and compared with training's own tokens on rows of the run."""

from __future__ import annotations

from itertools import chain, islice
from pathlib import Path
from typing import Any

from flatshift.experiments.data.sources import list_source_files
from flatshift.experiments.recipe.schema import Recipe
from flatshift.finetune.data.example import Example
from flatshift.finetune.data.rows import Row
from flatshift.finetune.errors import UserError, first_error_line
from flatshift.finetune.models.backbone import open_backbone, quiet_transformers

_ROWS = 64
"""Rows of the run that are compared."""
_ANY_LENGTH = 1 << 30
_PROBES = ("some text", "Über 3 Wörter,\nin two lines", "猫が座った。")
"""Texts to compare if the run's rows are unavailable."""

RunRows = list[tuple[Row, Example]]


def save_tokenizer(recipe: Recipe, folder: Path, *, rows: RunRows | None) -> tuple[Any, int]:
    """Write the run's tokenizer into `folder`; returns it as loaded again, and the number of compared rows.

    rows: rows of the run with their examples, as from `read_run_rows`; None: unavailable, probes are compared.
    Raises UserError if the saved tokenizer gives other tokens than training.
    """
    from transformers import AutoTokenizer

    tokenizer, task = open_backbone(recipe.backbone).own_tokenizer(), recipe.task
    task.input_format.prepare_tokenizer(tokenizer)
    # Heads truncate by `truncation=True` as in training; generative models may use all positions.
    if task.traits.is_sequence_level or task.traits.masks_tokens:
        tokenizer.model_max_length = recipe.train.max_length
        tokenizer.truncation_side = recipe.train.truncation or task.traits.truncation_side
        tokenizer.padding_side = "right"
    for name in ("is_local", "local_files_only"):  # they are about files of this machine
        tokenizer.init_kwargs.pop(name, None)
    tokenizer.save_pretrained(folder)
    config = open_backbone(recipe.backbone).config
    try:
        with quiet_transformers():
            saved = AutoTokenizer.from_pretrained(folder, config=config, trust_remote_code=False)
    except Exception as error:
        raise UserError(
            f"the tokenizer of {recipe.backbone!r} cannot be read once saved: {first_error_line(error)}"
        ) from error
    if rows is None:
        different = [text for text in _PROBES if saved(text)["input_ids"] != tokenizer(text)["input_ids"]]
        where = repr(different[0]) if different else ""
    else:
        wrong = [
            row
            for row, example in rows
            if not task.input_format.matches_saved(saved, row, example, recipe.train.max_length)
        ]
        where = wrong[0].where if wrong else ""
    if where:
        raise UserError(
            f"the saved tokenizer of backbone {recipe.backbone!r} reads {where} otherwise than training did, so that "
            "the model would be asked what it never saw; convert it to a fast one (tokenizer.json) first"
        )
    return saved, 0 if rows is None else len(rows)


def read_run_rows(recipe: Recipe, labels: tuple[str, ...] | None, *, most: int = _ROWS, whole: bool = True) -> RunRows:
    """Return the first rows of the run's test files, else of dev, else of train, each with its training example; with
    `whole` only the rows of a head are truncated.

    Raises UserError or OSError if the files cannot be read, and UserError if no row is left.
    """
    data, task = recipe.data, recipe.task.without_limits()  # limits are shares of all rows, and these are few
    backbone = open_backbone(recipe.backbone)
    parts = list_source_files(data)
    chosen = parts["test"] or parts["dev"] or parts["train"]
    skipped: list[str] = []
    found = list(islice(chain.from_iterable(part.rows(data, task, skipped) for part in chosen), most))
    encoder = task.encoder(
        backbone.tokenizer,
        recipe.train.max_length
        if task.traits.is_sequence_level or task.traits.masks_tokens or not whole
        else _ANY_LENGTH,
        label_names=labels or task.class_names(found),
        bad_rows=data.bad_rows,
        decoder_start=backbone.decoder_start if task.traits.encoder_decoder else None,
        truncation=recipe.train.truncation,
    )
    pairs: RunRows = []
    for row in found:
        encoded = encoder.add([row])
        skipped += encoded.skipped
        pairs += [(row, example) for example in encoded.examples[:1]]
    if not pairs:
        raise UserError(f"no row of the run's files is left{f', the first for {skipped[0]}' if skipped else ''}")
    return pairs
