"""Tokenizer and end tokens of an exported adapter or merged model. The tokenizer is set up to tokenize as in training,
saved, loaded again without this project's settings, and compared with training's own tokens on rows of the run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from flatshift.experiments.data.sources import list_source_files
from flatshift.experiments.recipe.schema import Recipe
from flatshift.finetune.atomic import read_json_object, write_json
from flatshift.finetune.data.encoding import get_end_token
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
    task.prepare_tokenizer(tokenizer)
    # Heads truncate by `truncation=True` as in training; generative models may use all positions.
    if task.is_sequence_level or task.hides_tokens:
        tokenizer.model_max_length = recipe.train.max_length
        tokenizer.truncation_side = recipe.train.truncation or task.truncates
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
        different = [repr(text) for text in _PROBES if saved(text)["input_ids"] != tokenizer(text)["input_ids"]]
    else:
        length = recipe.train.max_length
        different = [row.where for row, example in rows if not task.reads_same(saved, row, example, length)]
    if different:
        raise UserError(
            f"the saved tokenizer of backbone {recipe.backbone!r} reads {different[0]} otherwise than training did, so "
            "that the model would be asked what it never saw; convert it to a fast one (tokenizer.json) first"
        )
    return saved, 0 if rows is None else len(rows)


def read_run_rows(
    recipe: Recipe, labels: tuple[str, ...] | None, *, maximum: int = _ROWS, whole: bool = True
) -> RunRows:
    """Return the first rows of the run's test files, else of dev, else of train, each with its training example; with
    `whole` only the rows of a head are truncated.

    Raises UserError or OSError if the files cannot be read, and UserError if no row is left.
    """
    data, task = recipe.data, recipe.task.without_limits()  # limits are shares of all rows, and these are few
    backbone = open_backbone(recipe.backbone)
    sources = list_source_files(data)
    chosen = sources["test"] or sources["dev"] or sources["train"]
    skipped: list[str] = []
    rows = list(islice(chain.from_iterable(source.rows(data, task, skipped) for source in chosen), maximum))
    encoder = task.encoder(
        backbone.tokenizer,
        recipe.train.max_length if task.is_sequence_level or task.hides_tokens or not whole else _ANY_LENGTH,
        label_names=labels or task.class_names(rows),
        bad_rows=data.bad_rows,
        decoder_start=backbone.decoder_start if task.encoder_decoder else None,
        truncation=recipe.train.truncation,
    )
    pairs: RunRows = []
    for row in rows:
        encoded = encoder.add([row])
        skipped += encoded.skipped
        pairs += [(row, example) for example in encoded.examples[:1]]
    if not pairs:
        raise UserError(f"no row of the run's files is left{f', the first for {skipped[0]}' if skipped else ''}")
    return pairs


SETTINGS = "generation_config.json"


def read_trained_ends(path: Path) -> dict[str, int]:
    """Return the tokens that ended the trained answers of the run in `path`, by their text, from its manifest."""
    ends: dict[str, int] = read_json_object(path / "manifest.json", "ends")["ends"]
    return ends


def collect_end_tokens(recipe: Recipe, trained: Iterable[int]) -> list[int]:
    """Return every token that ends an answer: the backbone's own, the `trained` ones, the tokenizer's."""
    backbone = open_backbone(recipe.backbone)
    file = backbone.directory / SETTINGS
    own = read_json_object(file).get("eos_token_id") if file.is_file() else None
    if own is None:
        own = getattr(backbone.config.get_text_config(), "eos_token_id", None)
    ends = [*(own if isinstance(own, list) else [own]), *trained, get_end_token(backbone.tokenizer)]
    return list(dict.fromkeys(end for end in ends if end is not None))


def save_generation_settings(recipe: Recipe, folder: Path, ends: Sequence[int]) -> None:
    """Write the backbone's own generation settings into `folder`, with these `ends` and a padding token."""
    from transformers import GenerationConfig

    backbone = open_backbone(recipe.backbone)
    file = backbone.directory / SETTINGS
    if file.is_file():
        settings = read_json_object(file)
    else:
        settings = GenerationConfig.from_model_config(backbone.own_config({})).to_diff_dict()
    settings.pop("_from_model_config", None)
    if settings.get("pad_token_id") is None:
        settings["pad_token_id"] = backbone.tokenizer.pad_token_id
    write_json(folder / SETTINGS, settings | {"eos_token_id": _format_end_tokens(ends)})


def set_end_tokens(config: Any, ends: Sequence[int]) -> None:
    """Set these `ends` in a decoder's configuration if it names one; the heads of an encoder-decoder need a single
    one."""
    from huggingface_hub.errors import StrictDataclassError

    for settings in (config, config.get_text_config()):
        if getattr(settings, "eos_token_id", None) is not None and not config.is_encoder_decoder:
            with contextlib.suppress(StrictDataclassError):  # an architecture that allows a single one only
                settings.eos_token_id = _format_end_tokens(ends)


def _format_end_tokens(ends: Sequence[int]) -> int | list[int] | None:
    return None if not ends else ends[0] if len(ends) == 1 else list(ends)
