"""Vectors of the pool and of targets by one embedder: made once, kept in shards
(`flatshift.selection.features.FeatureCache`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.studies.selection_quality.cells import FeaturesCell
from benchmarks.studies.selection_quality.pool import open_pool
from flatshift.experiments.select.embedding import state_embedder
from flatshift.finetune.errors import UserError
from flatshift.finetune.seeds import derive_seed
from flatshift.selection.config import Static, TfIdf
from flatshift.selection.features import FeatureCache, StaticEmbedder, TfIdfEmbedder
from flatshift.selection.features.tfidf import load_or_fit

Embed = Callable[[list[str]], np.ndarray]
_SIF = 1e-4
"""Of the weight a/(a + p) of a token with probability p (Arora et al. 2017), which model2vec uses too."""
_ENCODED = 1024


def features_directory(root: Path) -> Path:
    """Where a study under `root` keeps its features."""
    return root / "features"


@functools.lru_cache(maxsize=4)
def pool_vectors(root: Path, cell: FeaturesCell) -> tuple[np.ndarray, np.ndarray]:
    """(row numbers (N,), features (N, d)) of the pool's part that `cell` is about; computed where no shard has them."""
    assert cell.recipe.select is not None
    stored = open_pool(root, cell.pool.key)
    rows = stored.part(cell.rows)
    texts = stored.texts if len(rows) == len(stored) else [stored.texts[i] for i in rows.tolist()]
    embed, key = _embedder(root, cell)
    cache = FeatureCache(features_directory(root))
    return rows, np.asarray(cache.features(texts, embed, key=key, dtype=cell.recipe.select.feature_type))


def vectors(root: Path, cell: FeaturesCell, texts: list[str]) -> np.ndarray:
    """(len(texts), d) float32 by the same embedder."""
    return np.asarray(_embedder(root, cell)[0](texts), dtype=np.float32)


@functools.lru_cache(maxsize=8)
def _embedder(root: Path, cell: FeaturesCell) -> tuple[Embed, str]:
    """texts → vectors, and the key that names it in the cache. Fitted on the pool alone: it serves every target."""
    recipe = cell.recipe
    assert recipe.select is not None
    embedder: Any = recipe.select.embedder
    if isinstance(embedder, TfIdf):
        seed = derive_seed(0, "quality", "tfidf")
        tfidf = TfIdfEmbedder(dim=embedder.dim, buckets=embedder.buckets, seed=seed, fit_rows=embedder.fit_rows)
        stored = open_pool(root, cell.pool.key)
        texts = [stored.texts[i] for i in stored.part(cell.rows).tolist()]
        load_or_fit(features_directory(root) / f"tfidf-{cell.key}.npz", tfidf, lambda: tfidf.fit(texts))
        return tfidf.transform, f"tfidf {tfidf.fingerprint}"
    if isinstance(embedder, Static):
        path = embedder.path or (str(distilled(root, cell.distil)) if cell.distil else "")
        if not path:
            raise UserError("select.embedder.path is empty: name static word vectors, or an encoder to distil")
        static = StaticEmbedder(path, max_tokens=embedder.max_length)
        return static.transform, f"static {static.fingerprint}"
    return state_embedder(embedder, backbone=recipe.backbone, device=recipe.train.device, keyed=True)


def distilled(root: Path, encoder: str) -> Path:
    """A directory of static vectors made of an encoder's states, token by token, as model2vec makes them.

    A token's vector is the masked mean of the encoder's states of the token alone, less the mean of all tokens, times
    a/(a + p) with p by Zipf's law from the token's place in the vocabulary. Kept under `root`.
    """
    import json
    import shutil

    import torch
    from safetensors.torch import save_file

    from flatshift.finetune.atomic import atomic_directory
    from flatshift.finetune.models.backbone import open_backbone
    from flatshift.finetune.models.hidden_states import hidden_state_encoder, model_fingerprint
    from flatshift.selection import pool_features

    source = open_backbone(encoder).directory
    place = features_directory(root) / f"static-{model_fingerprint(source)[:16]}"
    if place.is_dir():
        return place
    vocabulary = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    encode = hidden_state_encoder(source, max_length=8)
    states = [
        pool_features([token.removeprefix("##") for token in tokens[low : low + _ENCODED]], encode, batch_size=256,
                      normalise=False)
        for low in range(0, len(tokens), _ENCODED)
    ]  # fmt: skip
    table = np.concatenate(states)
    table -= table.mean(axis=0)
    share = 1.0 / np.arange(1, len(tokens) + 1)
    weight = _SIF / (_SIF + share / share.sum())
    table *= weight[:, None].astype(np.float32)
    with atomic_directory(place) as directory:
        save_file({"embeddings": torch.from_numpy(np.ascontiguousarray(table))}, directory / "model.safetensors")
        shutil.copyfile(source / "tokenizer.json", directory / "tokenizer.json")
        (directory / "config.json").write_text('{"normalize": true}\n', encoding="utf-8")
    return place
