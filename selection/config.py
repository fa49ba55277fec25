"""How warm-up data is selected: methods and embedders, chosen by `kind`. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class GotD:
    """Optimal-transport gradients (GOT-D): the samples whose added mass lowers OT(pool, target) most."""

    kind: Literal["gotd"] = "gotd"
    epsilon: float = 0.05
    """Entropic regularisation, as a multiple of the exact weighted mean cost over all pairs."""
    tolerance: float | None = None
    """Marginal L1 error to reach; null: 1e-9 up to N·M = 1e7, 1e-3 above."""


@dataclass(frozen=True, kw_only=True)
class Random:
    """A uniform draw by seed: the control of every comparison."""

    kind: Literal["random"] = "random"


@dataclass(frozen=True, kw_only=True)
class KNN:
    """Nearest neighbours of the target, each sample at most once (score: squared distance to its nearest target)."""

    kind: Literal["knn"] = "knn"


@dataclass(frozen=True, kw_only=True)
class DSIR:
    """Importance resampling on hashed word uni- and bigrams (DSIR); score −log weight."""

    kind: Literal["dsir"] = "dsir"
    buckets: int = 10_000
    """Hash buckets of the n-gram features."""
    resample: bool = False
    """Add seeded Gumbel noise to the log weights, so that the selection is a draw in proportion to the weights, as in
    the paper; the noise is then part of the score. False: the score is −log weight, the selection its plain top-k."""


Method = GotD | Random | KNN | DSIR


@dataclass(frozen=True, kw_only=True)
class TfIdf:
    """Hashing TF-IDF followed by truncated SVD and L2 normalisation. Offline, no model."""

    kind: Literal["tfidf"] = "tfidf"
    dim: int = 128
    """Components kept by the SVD."""
    buckets: int = 2**18
    """Hash buckets."""


@dataclass(frozen=True, kw_only=True)
class Backbone:
    """Masked mean of the backbone's last hidden states, L2-normalised."""

    kind: Literal["backbone"] = "backbone"
    max_length: int = 256
    """Tokens read of each text."""


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """Masked mean of any Hugging Face encoder's last hidden states, L2-normalised."""

    kind: Literal["encoder"] = "encoder"
    path: str = ""
    """Hub name or local directory."""
    max_length: int = 256
    """Tokens read of each text."""


@dataclass(frozen=True, kw_only=True)
class Features:
    """Your own features, one row per record in file order, used as given (never normalised)."""

    kind: Literal["features"] = "features"
    pool: str = ""
    """`.npy` file, N×d."""
    target: str = ""
    """`.npy` file, M×d."""


Embedder = TfIdf | Backbone | Encoder | Features
