"""The sentence-transformers layout, read without its package: which pooling, which length, whether to normalise."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selection.errors import SelectionError
from selection.features.pooling import Pooling

_FLAGS: dict[str, Pooling | None] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_sqrt_len_tokens": None,
    "pooling_mode_weightedmean_tokens": None,
}
_NAMES: dict[str, Pooling] = {"cls": "cls", "mean": "mean", "max": "max", "lasttoken": "last"}


@dataclass(frozen=True)
class SentenceLayout:
    """What a sentence-transformers directory says beside its transformer."""

    transformer: Path
    """The directory with config.json and the weights."""
    pooling: Pooling
    normalise: bool
    max_length: int | None
    """Tokens read of a text, or None where the directory does not say."""
    lower: bool
    """Texts are lower-cased first."""
    prompt: str
    """What is put before every text."""


def read_layout(directory: str | Path) -> SentenceLayout | None:
    """The layout of `directory`, or None where it is no sentence-transformers directory (no modules.json).

    Raises SelectionError for a layout that would be followed only in part: modules or poolings that are not known.
    """
    root = Path(directory)
    if not (root / "modules.json").is_file():
        return None
    transformer, pooling, normalise = None, None, False
    for module in read_json(root / "modules.json", list):
        kind = str(module.get("type", "")).rpartition(".")[2]
        folder = root / str(module.get("path", ""))
        if kind == "Transformer" and transformer is None:
            transformer = folder
        elif kind == "Pooling" and transformer is not None and pooling is None:
            pooling = _pooling(folder / "config.json")
        elif kind == "Normalize" and pooling is not None:
            normalise = True
        else:
            raise SelectionError(
                f"{root / 'modules.json'}: the module {kind or module!r} is not supported "
                "(Transformer, Pooling, Normalize are, in this order); embed with its own package and give the "
                "features as .npy files"
            )
    if transformer is None or pooling is None:
        raise SelectionError(f"{root / 'modules.json'}: names no Transformer followed by Pooling; is it complete?")
    about = transformer / "sentence_bert_config.json"
    settings = read_json(about, dict) if about.is_file() else {}
    length = settings.get("max_seq_length")
    return SentenceLayout(
        transformer=transformer,
        pooling=pooling,
        normalise=normalise,
        max_length=length if isinstance(length, int) and length > 0 else None,
        lower=bool(settings.get("do_lower_case", False)),
        prompt=_prompt(root / "config_sentence_transformers.json"),
    )


def transformer_folder(directory: str | Path) -> Path:
    """Where the transformer of `directory` lies: a folder that modules.json names, or the directory itself."""
    root = Path(directory)
    modules = read_json(root / "modules.json", list) if (root / "modules.json").is_file() else []
    named = (str(m.get("path", "")) for m in modules if str(m.get("type", "")).endswith(".Transformer"))
    return root / next(named, "")


def _pooling(path: Path) -> Pooling:
    config = read_json(path, dict)
    if "pooling_mode" in config:
        asked = config["pooling_mode"]
        names = [asked] if isinstance(asked, str) else list(asked)
        found = [_NAMES.get(name) for name in names]
    else:
        names = [flag for flag, on in config.items() if flag.startswith("pooling_mode_") and on]
        found = [_FLAGS.get(flag) for flag in names]
    if len(found) != 1 or found[0] is None:
        raise SelectionError(
            f"{path}: the pooling {' + '.join(map(str, names)) or '(none)'} is not supported; "
            "one of cls, mean, max and lasttoken is"
        )
    if not config.get("include_prompt", True):
        raise SelectionError(f"{path}: include_prompt: false is not supported; use a model that pools the prompt too")
    return found[0]


def _prompt(path: Path) -> str:
    config = read_json(path, dict) if path.is_file() else {}
    name = config.get("default_prompt_name")
    if name is None:
        return ""
    prompts = config.get("prompts") or {}
    if name not in prompts:
        raise SelectionError(f"{path}: default_prompt_name {name!r} is none of its prompts")
    return str(prompts[name])


def read_json(path: Path, kind: type) -> Any:
    """The JSON of a model's file: an object (`kind` dict), or an array of objects (list). Raises SelectionError."""
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SelectionError(
            f"{path}: cannot be read ({error}); name a complete local copy of the repository"
        ) from error
    whole = isinstance(value, list) and all(isinstance(part, dict) for part in value)
    if not (whole if kind is list else isinstance(value, kind)):
        raise SelectionError(f"{path}: must hold a JSON {'object' if kind is dict else 'array of objects'}")
    return value
