"""End tokens of an exported model: the tokens that training supervised as the end, beside the backbone's
own, in `generation_config.json`, and in `config.json` where a decoder keeps them there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from flatshift.experiments.recipe.schema import Recipe
from flatshift.finetune.atomic import read_object, write_json
from flatshift.finetune.data.encoding import end_token
from flatshift.finetune.models.backbone import Backbone, open_backbone

SETTINGS = "generation_config.json"


def trained_ends(path: Path) -> dict[str, int]:
    """The tokens by which the supervised answers of the run in `path` ended, by how they are written: its manifest
    notes them."""
    found: dict[str, int] = read_object(path / "manifest.json", "ends")["ends"]
    return found


def all_ends(recipe: Recipe, trained: Iterable[int]) -> list[int]:
    """Every token at which an answer is over: the backbone's own, the `trained` ones, the tokenizer's."""
    backbone = open_backbone(recipe.backbone)
    closing = end_token(backbone.tokenizer)
    return list(dict.fromkeys([*_own_ends(backbone), *trained, *([] if closing is None else [closing])]))


def save_generation_settings(recipe: Recipe, folder: Path, ends: Sequence[int]) -> None:
    """Write the backbone's own generation settings into `folder`, with these `ends` and a token to pad with."""
    from transformers import GenerationConfig

    backbone = open_backbone(recipe.backbone)
    file = backbone.directory / SETTINGS
    if file.is_file():
        settings = read_object(file)
    else:
        settings = GenerationConfig.from_model_config(backbone.own_config({})).to_diff_dict()
    settings.pop("_from_model_config", None)
    if settings.get("pad_token_id") is None:
        settings["pad_token_id"] = backbone.tokenizer.pad_token_id
    write_json(folder / SETTINGS, settings | {"eos_token_id": _shown(ends)})


def set_ends(config: Any, ends: Sequence[int]) -> None:
    """Let a decoder's configuration name these `ends` where it names one; an encoder-decoder's heads need a single."""
    from huggingface_hub.errors import StrictDataclassError

    for one in (config, config.get_text_config()):
        if getattr(one, "eos_token_id", None) is not None and not config.is_encoder_decoder:
            with contextlib.suppress(StrictDataclassError):  # an architecture that takes a single one
                one.eos_token_id = _shown(ends)


def _own_ends(backbone: Backbone) -> list[int]:
    file = backbone.directory / SETTINGS
    found = read_object(file).get("eos_token_id") if file.is_file() else None
    if found is None:
        found = getattr(backbone.config.get_text_config(), "eos_token_id", None)
    return [] if found is None else [found] if isinstance(found, int) else list(found)


def _shown(ends: Sequence[int]) -> int | list[int] | None:
    return None if not ends else ends[0] if len(ends) == 1 else list(ends)
