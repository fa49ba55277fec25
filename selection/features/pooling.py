"""Pooling of a model's last hidden states to one vector per text, for any model given as a callable; and the
sentence-transformers layout (pooling, length, normalisation), read without its package."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from flatshift.selection.errors import SelectionError
from flatshift.selection.lazy import np
from flatshift.selection.validation import Settings, bounded

EncodeBatch = Callable[[list[str]], tuple[Any, Any]]
"""Function texts of a batch → (last hidden states (B, T, D), mask (B, T) that is 1 on real tokens); torch or NumPy."""
Pooling = Literal["mean", "cls", "max", "last"]
"""`mean`, `max`: over real tokens; `cls`: the first real token; `last`: the last real token."""
POOLINGS: tuple[str, ...] = get_args(Pooling)


@dataclass(frozen=True, kw_only=True)
class BackboneEmbedder(Settings):
    """Masked mean of the backbone's last hidden states, L2-normalised."""

    kind: Literal["backbone"] = "backbone"
    max_length: int = bounded(256, minimum=1)
    """Maximum number of tokens per text."""


@dataclass(frozen=True, kw_only=True)
class Gradients(Settings):
    """Per-text gradients of a light adapter on the backbone, preconditioned as in Adam and projected (for `less`,
    `round-robin`, gotd and others). One forward and backward pass per text."""

    kind: Literal["gradients"] = "gradients"
    rank: int = bounded(4, minimum=1)
    """Rank of the adapter; gradients are taken with respect to its factors B, at B = 0."""
    dim: int = bounded(1024, minimum=1)
    """Dimension after projection (a subsampled randomised Hadamard transform)."""
    max_length: int = bounded(128, minimum=8)
    """Maximum number of tokens per text."""
    batch_size: int = bounded(16, minimum=1)
    """Texts per pass."""
    adam: bool = True
    """Divide each entry by the fourth root of its second moment: products are divided by the root, as by Adam."""
    moment_texts: int = bounded(256, minimum=1)
    """Pool texts, drawn by seed, for the second moments."""


@dataclass(frozen=True, kw_only=True)
class EncoderEmbedder(Settings):
    """Pooled last hidden states of any Hugging Face encoder or decoder. A directory in sentence-transformers' layout
    sets its own pooling, normalisation, prompt and length; any other: masked mean, L2-normalised."""

    kind: Literal["encoder"] = "encoder"
    path: str = ""
    """Hub name or local directory."""
    max_length: int = bounded(256, minimum=1)
    """Maximum number of tokens per text; capped by a sentence-transformers directory's own limit."""
    pooling: Literal["auto", "mean", "cls", "max", "last"] = "auto"
    """Pooling of a text's states to one normalised vector; `auto`: the directory's own settings, else `mean` over the
    text's tokens."""


def pool_features(
    texts: Sequence[str],
    encode_batch: EncodeBatch,
    batch_size: int = 32,
    *,
    pooling: Pooling = "mean",
    normalise: bool = True,
    progress: Callable[[str, int, int], None] | None = None,
) -> np.ndarray:
    """Pool a model's last hidden states over each text: float32 (len(texts), D), in the order of `texts`.

    pooling: see `Pooling`. normalise: to L2 norm 1. Texts are encoded in order of length, so that batches have little
    padding. A text without a token gets the zero vector. Raises SelectionError for other shapes, or states that are not
    finite.
    """
    if batch_size < 1:
        raise SelectionError(f"batch_size must be at least 1, not {batch_size}")
    if pooling not in POOLINGS:
        raise SelectionError(f"pooling must be one of {', '.join(POOLINGS)}, not {pooling!r}")
    if not len(texts):
        raise SelectionError("there are no texts to embed")
    order = np.argsort([len(text) for text in texts], kind="stable")
    features: np.ndarray | None = None
    for low in range(0, len(order), batch_size):
        rows = order[low : low + batch_size]
        hidden, mask = map(_to_numpy, encode_batch([texts[i] for i in rows]))
        if hidden.ndim != 3 or mask.shape != hidden.shape[:2] or len(hidden) != len(rows):
            raise SelectionError(
                f"encode_batch must return states (B, T, D) and a mask (B, T) for {len(rows)} texts, "
                f"not {hidden.shape} and {mask.shape}"
            )
        pooled = _pool_states(hidden, mask.astype(bool), pooling)
        if not np.isfinite(pooled).all():
            bad = int(rows[np.flatnonzero(~np.isfinite(pooled).all(axis=1))[0]])
            raise SelectionError(f"the model's states for text {bad} are not finite; try float32 precision")
        if features is None:
            features = np.empty((len(texts), pooled.shape[1]), dtype=np.float32)
        features[rows] = pooled
        if progress:
            progress("embedding", min(low + batch_size, len(order)), len(order))
    assert features is not None
    return normalise_rows(features) if normalise else features


def _pool_states(hidden: np.ndarray, real: np.ndarray, pooling: str) -> np.ndarray:
    """Pool states (B, T, D) with mask (B, T) bool to (B, D). Rows without a real token are 0."""
    not_empty = np.asarray(real.any(axis=1))[:, None]
    if not real.shape[1]:  # no text of the batch has a token
        return np.zeros((len(hidden), hidden.shape[2]), dtype=np.float32)
    if pooling in ("cls", "last"):
        steps = real.shape[1]
        step = real.argmax(axis=1) if pooling == "cls" else steps - 1 - real[:, ::-1].argmax(axis=1)
        return np.where(not_empty, hidden[np.arange(len(hidden)), step], 0.0)
    # Padding is masked out, not multiplied by zero: some attention kernels leave NaN in fully masked rows.
    if pooling == "max":
        return np.where(not_empty, np.where(real[:, :, None], hidden, -np.inf).max(axis=1, initial=-np.inf), 0.0)
    weight = real.astype(np.float32)
    total = np.einsum("btd,bt->bd", np.where(real[:, :, None], hidden, 0.0), weight)
    return np.asarray(total / np.maximum(weight.sum(1), 1.0)[:, None])


def normalise_rows(features: np.ndarray) -> np.ndarray:
    """Scale rows to L2 norm 1 as float32; zero rows stay zero."""
    wide = features.astype(np.float64)
    norms = np.sqrt(np.einsum("ij,ij->i", wide, wide))[:, None]
    return (wide / np.where(norms > 0, norms, 1.0)).astype(np.float32)


def _to_numpy(value: Any) -> np.ndarray:
    return np.asarray(value.detach().float().cpu().numpy() if hasattr(value, "detach") else value)


_FLAGS: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
}
_NAMES: dict[str, Pooling] = {"cls": "cls", "mean": "mean", "max": "max", "lasttoken": "last"}


@dataclass(frozen=True)
class SentenceLayout:
    """Settings of a sentence-transformers directory. transformer: its folder with config.json and the weights.
    max_length: maximum number of tokens per text, None if not set. lower: lower-case texts. prompt: their prefix."""

    transformer: Path
    pooling: Pooling
    normalise: bool
    max_length: int | None
    lower: bool
    prompt: str


def read_layout(directory: str | Path) -> SentenceLayout | None:
    """Read the layout of `directory`; None if it is no sentence-transformers directory (no modules.json).

    Raises SelectionError for unknown modules or poolings, rather than following a layout only in part.
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
            pooling = _read_pooling(folder / "config.json")
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
    config = transformer / "sentence_bert_config.json"
    settings = read_json(config, dict) if config.is_file() else {}
    length = settings.get("max_seq_length")
    prompts = root / "config_sentence_transformers.json"
    prompted = read_json(prompts, dict) if prompts.is_file() else {}
    name = prompted.get("default_prompt_name")
    texts = {None: "", **(prompted.get("prompts") or {})}
    if name not in texts:
        raise SelectionError(f"{prompts}: default_prompt_name {name!r} is none of its prompts")
    return SentenceLayout(
        transformer=transformer,
        pooling=pooling,
        normalise=normalise,
        max_length=length if isinstance(length, int) and length > 0 else None,
        lower=bool(settings.get("do_lower_case", False)),
        prompt=str(texts[name]),
    )


def transformer_folder(directory: str | Path) -> Path:
    """Return the folder of the transformer of `directory`: the one in modules.json, or the directory itself."""
    root = Path(directory)
    modules = read_json(root / "modules.json", list) if (root / "modules.json").is_file() else []
    named = (str(m.get("path", "")) for m in modules if str(m.get("type", "")).endswith(".Transformer"))
    return root / next(named, "")


def _read_pooling(path: Path) -> Pooling:
    config = read_json(path, dict)
    if "pooling_mode" in config:
        modes = config["pooling_mode"]
        names = [modes] if isinstance(modes, str) else list(modes)
        poolings = [_NAMES.get(name) for name in names]
    else:
        names = [flag for flag, on in config.items() if flag.startswith("pooling_mode_") and on]
        poolings = [_FLAGS.get(flag) for flag in names]
    if len(poolings) != 1 or poolings[0] is None:
        raise SelectionError(
            f"{path}: the pooling {' + '.join(map(str, names)) or '(none)'} is not supported; "
            "one of cls, mean, max and lasttoken is"
        )
    if not config.get("include_prompt", True):
        raise SelectionError(f"{path}: include_prompt: false is not supported; use a model that pools the prompt too")
    return poolings[0]


def read_json(path: Path, kind: type) -> Any:
    """Read a model's JSON: an object (`kind` dict), or an array of objects (list). Raises SelectionError."""
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SelectionError(
            f"{path}: cannot be read ({error}); name a complete local copy of the repository"
        ) from error
    if not isinstance(value, kind) or (isinstance(value, list) and not all(isinstance(item, dict) for item in value)):
        raise SelectionError(f"{path}: must hold a JSON {'object' if kind is dict else 'array of objects'}")
    return value
