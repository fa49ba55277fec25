"""Embedding of texts: hashing TF-IDF + SVD, pooled states of a given model, static word vectors, or your own `.npy`;
stored in resumable shards."""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "FeatureCache": "cache",
    "HashedNgrams": "tfidf",
    "SentenceLayout": "pooling",
    "ShardWriter": "directory",
    "ShardedRows": "matrix",
    "StaticEmbedder": "static",
    "IndexedRows": "matrix",
    "TfIdfEmbedder": "tfidf",
    "embed_in_shards": "cache",
    "load_features": "matrix",
    "load_or_fit": "tfidf",
    "open_directory": "directory",
    "write_manifest": "directory",
    "normalise_rows": "pooling",
    "pool_features": "pooling",
    "read_layout": "pooling",
    "sendable_rows": "matrix",
    "transformer_folder": "pooling",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
