"""Last hidden states of any model, handed in by a callable, pooled to one vector a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import numpy as np

from selection.errors import SelectionError

EncodeBatch = Callable[[list[str]], tuple[Any, Any]]
"""texts of a batch -> (last hidden states (B, T, D), mask (B, T) that is 1 on real tokens); torch or NumPy."""
Pooling = Literal["mean", "cls", "max", "last"]
"""`mean`, `max`: over real tokens; `cls`: the first real token; `last`: the last real token."""
POOLINGS: tuple[str, ...] = get_args(Pooling)


def pool_features(
    texts: Sequence[str],
    encode_batch: EncodeBatch,
    batch_size: int = 32,
    *,
    pooling: Pooling = "mean",
    normalise: bool = True,
    progress: Callable[[str, int, int], None] | None = None,
) -> np.ndarray:
    """A model's last hidden states, pooled over each text: float32 (len(texts), D), in the order of `texts`.

    pooling: see `Pooling`. normalise: to L2 norm 1. Texts are encoded in order of length, so that batches carry little
    padding. A text without a token gets the zero vector. Raises SelectionError where the callable returns other
    shapes, or states that are not finite.
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
        hidden, mask = map(_array, encode_batch([texts[i] for i in rows]))
        if hidden.ndim != 3 or mask.shape != hidden.shape[:2] or len(hidden) != len(rows):
            raise SelectionError(
                f"encode_batch must return states (B, T, D) and a mask (B, T) for {len(rows)} texts, "
                f"not {hidden.shape} and {mask.shape}"
            )
        pooled = _pooled(hidden, mask.astype(bool), pooling)
        if not np.isfinite(pooled).all():
            bad = int(rows[np.flatnonzero(~np.isfinite(pooled).all(axis=1))[0]])
            raise SelectionError(f"the model's states for text {bad} are not finite; try float32 precision")
        if features is None:
            features = np.empty((len(texts), pooled.shape[1]), dtype=np.float32)
        features[rows] = pooled
        if progress:
            progress("embedding", min(low + batch_size, len(order)), len(order))
    assert features is not None
    return normalised(features) if normalise else features


def _pooled(hidden: np.ndarray, real: np.ndarray, pooling: str) -> np.ndarray:
    """(B, D) of states (B, T, D) and mask (B, T) bool. Rows without a real token are 0."""
    some: np.ndarray = np.asarray(real.any(axis=1))
    if not real.shape[1]:  # no text of the batch has a token
        return np.zeros((len(hidden), hidden.shape[2]), dtype=np.float32)
    if pooling in ("cls", "last"):
        steps = real.shape[1]
        place = real.argmax(axis=1) if pooling == "cls" else steps - 1 - real[:, ::-1].argmax(axis=1)
        return np.where(some[:, None], hidden[np.arange(len(hidden)), place], 0.0)
    # Padding is cut out, not multiplied by zero: some attention kernels leave NaN in rows that saw nothing.
    if pooling == "max":
        return np.where(some[:, None], np.where(real[:, :, None], hidden, -np.inf).max(axis=1, initial=-np.inf), 0.0)
    weight = real.astype(np.float32)
    total = np.einsum("btd,bt->bd", np.where(real[:, :, None], hidden, 0.0), weight)
    return np.asarray(total / np.maximum(weight.sum(1), 1.0)[:, None])


def normalised(features: np.ndarray) -> np.ndarray:
    """Rows with L2 norm 1 as float32; zero rows stay zero."""
    wide = features.astype(np.float64)
    norms = np.sqrt(np.einsum("ij,ij->i", wide, wide))[:, None]
    return (wide / np.where(norms > 0, norms, 1.0)).astype(np.float32)


def _array(part: Any) -> np.ndarray:
    if hasattr(part, "detach"):
        part = part.detach().float().cpu().numpy()
    return np.asarray(part)
