"""End tokens of an exported model: those that training had as the end of an answer, in addition to the backbone's own,
in `generation_config.json`, and for a decoder also in `config.json`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from flatshift.experiments.recipe.schema import Recipe
from flatshift.finetune.atomic import read_json_object, write_json
from flatshift.finetune.data.encoding import get_end_token
from flatshift.finetune.models.backbone import Backbone, open_backbone

SETTINGS = "generation_config.json"


def read_trained_ends(path: Path) -> dict[str, int]:
    """Return the tokens that ended the trained answers of the run in `path`, by their text, from its manifest."""
    found: dict[str, int] = read_json_object(path / "manifest.json", "ends")["ends"]
    return found


def collect_end_tokens(recipe: Recipe, trained: Iterable[int]) -> list[int]:
    """Return every token that ends an answer: the backbone's own, the `trained` ones, the tokenizer's."""
    backbone = open_backbone(recipe.backbone)
    closing = get_end_token(backbone.tokenizer)
    return list(dict.fromkeys([*_backbone_end_tokens(backbone), *trained, *([] if closing is None else [closing])]))


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

    for one in (config, config.get_text_config()):
        if getattr(one, "eos_token_id", None) is not None and not config.is_encoder_decoder:
            with contextlib.suppress(StrictDataclassError):  # an architecture that allows a single one only
                one.eos_token_id = _format_end_tokens(ends)


def _backbone_end_tokens(backbone: Backbone) -> list[int]:
    file = backbone.directory / SETTINGS
    found = read_json_object(file).get("eos_token_id") if file.is_file() else None
    if found is None:
        found = getattr(backbone.config.get_text_config(), "eos_token_id", None)
    return [] if found is None else [found] if isinstance(found, int) else list(found)


def _format_end_tokens(ends: Sequence[int]) -> int | list[int] | None:
    return None if not ends else ends[0] if len(ends) == 1 else list(ends)
