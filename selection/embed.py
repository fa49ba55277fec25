"""Texts to features: hashing TF-IDF + SVD (offline), pooled states of a model handed in, or your own `.npy`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from selection.errors import SelectionError

EncodeBatch = Callable[[list[str]], tuple[Any, Any]]
"""texts of a batch -> (last hidden states (B, T, D), mask (B, T) that is 1 on real tokens); torch or NumPy."""


class TfIdfEmbedder:
    """Hashed bag of words, sublinear TF-IDF, truncated SVD, L2 norm 1. No model, no network, seeded.

    dim: components kept (fewer, with a warning and in `dim_`, where the texts do not span that many). buckets: hash
    buckets. seed: of the randomised SVD and of the rows it is fitted on. fit_rows: at most so many texts, drawn by
    seed from pool and target together, fit the SVD; document frequencies always come from all of them.
    A text without words gets the zero vector.
    """

    def __init__(self, *, dim: int = 128, buckets: int = 2**18, seed: int = 0, fit_rows: int = 50_000):
        self.dim = dim
        self.buckets = buckets
        self.seed = seed
        self.fit_rows = fit_rows

    def fit_transform(self, pool_texts: Sequence[str], target_texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Fit on pool and target together; returns float32 (N, dim_) and (M, dim_). Raises SelectionError."""
        counts = self._count([*pool_texts, *target_texts])
        self._fit(counts)
        weighted = self._weigh(counts)
        del counts
        n = len(pool_texts)
        return self._project(weighted[:n]), self._project(weighted[n:])

    def fit(self, texts: Sequence[str]) -> Self:
        """Fit on `texts` alone."""
        self._fit(self._count(texts))
        return self

    def transform(self, texts: Sequence[str]) -> np.ndarray:
        """float32 (len(texts), dim_)."""
        if not hasattr(self, "dim_"):
            raise SelectionError("TfIdfEmbedder is not fitted yet; call fit or fit_transform first")
        return self._project(self._weigh(self._count(texts)))

    def _count(self, texts: Sequence[str]) -> Any:
        from sklearn.feature_extraction.text import HashingVectorizer

        if self.dim < 1 or self.buckets < 2:
            raise SelectionError(f"dim must be at least 1 and buckets at least 2, not {self.dim} and {self.buckets}")
        if not len(texts):
            raise SelectionError("there are no texts to embed")
        # Signs that alternate would cancel colliding words and leave document frequencies without a meaning.
        hasher = HashingVectorizer(
            n_features=self.buckets, alternate_sign=False, norm=None, token_pattern=r"(?u)\b\w+\b", dtype=np.float32
        )
        return hasher.transform(texts)

    def _fit(self, counts: Any) -> None:
        from sklearn.decomposition import TruncatedSVD
        from sklearn.feature_extraction.text import TfidfTransformer

        if counts.nnz == 0:
            raise SelectionError("no text holds a single word; there is nothing to embed")
        self._tfidf = TfidfTransformer(sublinear_tf=True).fit(counts)
        generator = np.random.Generator(np.random.PCG64([self.seed, 0x7F1DF]))
        rows = counts.shape[0]
        if rows > self.fit_rows:
            counts = counts[np.sort(generator.choice(rows, self.fit_rows, replace=False))]
        fitted = self._tfidf.transform(counts)
        used = int((np.diff(fitted.tocsc().indptr) > 0).sum())
        self.dim_ = min(self.dim, fitted.shape[0], used)
        if self.dim_ < self.dim:
            warnings.warn(
                f"dim {self.dim} is more than these texts span ({fitted.shape[0]} texts, {used} distinct words); "
                f"using {self.dim_}",
                UserWarning,
                stacklevel=3,
            )
        self._svd = TruncatedSVD(self.dim_, random_state=int(generator.integers(2**31)), n_iter=4)
        self._svd.fit(fitted)

    def _weigh(self, counts: Any) -> Any:
        return self._tfidf.transform(counts)

    def _project(self, weighted: Any) -> np.ndarray:
        return normalised(self._svd.transform(weighted))


def pool_features(
    texts: Sequence[str],
    encode_batch: EncodeBatch,
    batch_size: int = 32,
    *,
    progress: Callable[[str, int, int], None] | None = None,
) -> np.ndarray:
    """Masked mean of a model's last hidden states, L2 norm 1: float32 (len(texts), D), in the order of `texts`.

    Texts are encoded in order of length, so that batches carry little padding. A text without a token gets the zero
    vector. Raises SelectionError where the callable returns other shapes, or states that are not finite.
    """
    if batch_size < 1:
        raise SelectionError(f"batch_size must be at least 1, not {batch_size}")
    if not len(texts):
        raise SelectionError("there are no texts to embed")
    order = np.argsort([len(text) for text in texts], kind="stable")
    features: np.ndarray | None = None
    for low in range(0, len(order), batch_size):
        rows = order[low : low + batch_size]
        hidden, mask = (_array(part) for part in encode_batch([texts[i] for i in rows]))
        if hidden.ndim != 3 or mask.shape != hidden.shape[:2] or len(hidden) != len(rows):
            raise SelectionError(
                f"encode_batch must return states (B, T, D) and a mask (B, T) for {len(rows)} texts, "
                f"not {hidden.shape} and {mask.shape}"
            )
        weight = mask.astype(np.float32)
        # Padding is cut out, not multiplied by zero: some attention kernels leave NaN in rows that saw nothing.
        mean = np.einsum("btd,bt->bd", np.where(weight[:, :, None] > 0, hidden, 0.0), weight)
        mean /= np.maximum(weight.sum(1), 1.0)[:, None]
        if not np.isfinite(mean).all():
            bad = int(rows[np.flatnonzero(~np.isfinite(mean).all(axis=1))[0]])
            raise SelectionError(f"the model's states for text {bad} are not finite; try float32 precision")
        if features is None:
            features = np.empty((len(texts), mean.shape[1]), dtype=np.float32)
        features[rows] = mean
        if progress:
            progress("embedding", min(low + batch_size, len(order)), len(order))
    assert features is not None
    return normalised(features)


def load_features(path: str | Path, *, rows: int | None = None, flag: str = "features") -> np.ndarray:
    """A `.npy` matrix as a read-only memory map; nothing in it is executed.

    rows: how many records it must have a row for. flag: what the caller's user knows the file by, for messages.
    Raises SelectionError for a missing or foreign file, a wrong shape or type, or a row count that does not match.
    """
    path = Path(path)
    try:
        features = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise SelectionError(f"{flag}: {path} does not exist") from None
    except (ValueError, OSError, EOFError) as error:
        raise SelectionError(f"{flag}: {path} is not a readable .npy file of numbers ({error})") from error
    if not isinstance(features, np.ndarray):
        raise SelectionError(f"{flag}: {path} is an archive; save one array with numpy.save")
    if features.ndim != 2 or features.dtype.kind not in "fiu" or 0 in features.shape:
        raise SelectionError(
            f"{flag}: {path} must hold a matrix of numbers (rows, columns), "
            f"not shape {features.shape} of {features.dtype}"
        )
    if rows is not None and len(features) != rows:
        raise SelectionError(
            f"{flag}: {path} has {len(features)} rows for {rows} records; one row per record is needed"
        )
    return features


def normalised(features: np.ndarray) -> np.ndarray:
    """Rows with L2 norm 1 as float32; zero rows stay zero."""
    wide = features.astype(np.float64)
    norms = np.linalg.norm(wide, axis=1, keepdims=True)
    return (wide / np.where(norms > 0, norms, 1.0)).astype(np.float32)


def _array(part: Any) -> np.ndarray:
    if hasattr(part, "detach"):
        part = part.detach().float().cpu().numpy()
    return np.asarray(part)
