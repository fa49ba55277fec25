"""DSIR against PyPI's data-selection: the same buckets, the same log weights, and by its formula where it is absent."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

from flatshift.selection import DSIRSelector, Pool
from flatshift.selection.methods import dsir
from flatshift.selection.methods.dsir import Sha256Hasher

R = np.random.default_rng(0)
WORDS = ["the", "Cat", "sat", "naïve", "東京", "x_1", "…", "don't", "e.g.", "GPU", "100", "%", "ﬁne"]
TEXTS = [" ".join(R.choice(WORDS, R.integers(1, 40))) for _ in range(120)] + ["", "  ", "one"]
TEXTS += ["İdil and the Людми́ла of తెప్పోత్సవం", "½ x² — ok"]
TARGET = [" ".join(R.choice(WORDS[:6], R.integers(3, 30))) for _ in range(20)]
PEER = {"hashing": "sha256", "smoothing": 0.0, "floor": 1e-8}


def bag(text: str, buckets: int) -> np.ndarray:
    """data-selection 1.0.3's features, from its published definition."""
    words = re.findall(r"\w+|[^\w\s]+", text.lower())
    grams = words + [" ".join(pair) for pair in itertools.pairwise(words)]
    counts = np.zeros(buckets, dtype=int)
    for gram in grams:
        counts[int(hashlib.sha256(gram.encode("utf-8")).hexdigest(), 16) % buckets] += 1
    return counts


def log_weights(pool: list[str], target: list[str], buckets: int) -> np.ndarray:
    raw, aim = (np.sum([bag(text, buckets) for text in texts], axis=0) for texts in (pool, target))
    gain = np.log(aim / aim.sum() + 1e-8) - np.log(raw / raw.sum() + 1e-8)
    return np.array([bag(text, buckets) @ gain for text in pool])


@pytest.mark.parametrize("buckets", [10_000, 97, 1, 70_000])
def test_log_weights_equal_the_formula(buckets: int) -> None:
    found = DSIRSelector(buckets=buckets, **PEER).fit(Pool(texts=TEXTS), Pool(texts=TARGET))
    np.testing.assert_allclose(found.log_weights_, log_weights(TEXTS, TARGET, buckets), atol=1e-9)
    assert (found.scores_ == -found.log_weights_).all()


def test_forgetting_bigrams_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [found for found, _ in Sha256Hasher(1000).batches(TEXTS)]
    monkeypatch.setattr(dsir, "_CACHED_PAIRS", 10)
    monkeypatch.setattr(dsir, "_BATCH", 7)
    parts = [found for found, _ in Sha256Hasher(1000).batches(TEXTS)]
    assert (np.concatenate(whole) == np.concatenate(parts)).all()


def test_log_weights_equal_the_package(tmp_path: Path) -> None:
    peer = pytest.importorskip("data_selection", reason="pip install data-selection")
    # From nltk 3.10 on the tokeniser is another engine, which takes combining marks for letters and fractions for none.
    pool = TEXTS if tuple(map(int, version("nltk").split(".")[:2])) < (3, 10) else TEXTS[:-2]
    for name, texts in (("raw", pool), ("target", TARGET)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    theirs = peer.HashedNgramDSIR(
        [str(tmp_path / "raw.jsonl")], [str(tmp_path / "target.jsonl")], cache_dir=str(tmp_path / "cache"), num_proc=1
    )
    theirs.fit_importance_estimator(num_tokens_to_fit="all")
    theirs.compute_importance_weights()
    wanted = np.load(tmp_path / "cache" / "log_importance_weights" / "0.npy")
    found = DSIRSelector(**PEER).fit(Pool(texts=pool), Pool(texts=TARGET))
    np.testing.assert_allclose(found.log_weights_, wanted, atol=1e-9)
