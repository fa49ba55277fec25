"""Embedding of texts: hashing TF-IDF + SVD, pooled states of a given model, static word vectors, or your own `.npy`;
stored in resumable shards."""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "HashedNgrams": "tfidf",
    "ShardWriter": "directory",
    "StaticEmbedder": "static",
    "TfIdfEmbedder": "tfidf",
    "load_or_fit": "tfidf",
    "open_directory": "directory",
    "write_manifest": "directory",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
