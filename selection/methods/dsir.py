"""Importance weights on hashed word n-grams (DSIR, Xie et al. 2023, arXiv 2302.03169)."""

from __future__ import annotations

from itertools import chain
from typing import Self

import numpy as np

from selection.errors import SelectionError
from selection.methods.base import Pool, Progress, Selector, Target, finite_number, keyed_uniform, need
from selection.methods.ngrams import NgramHasher, Sha256Hasher


class DSIRSelector(Selector):
    """Scores by −log w, w = Π p_target(bucket)/p_pool(bucket) over the text's hashed word uni- and bigrams.

    buckets: size of the hashed bag. resample: add Gumbel noise, fixed by seed and id, to log w before it is negated
    into the score, so that the k smallest scores are a draw without replacement in proportion to w; without it the
    score is −log w itself. smoothing: count added to every bucket of both bags (Laplace). floor: added to every
    probability after that. hashing: "fast" mixes the hashes of words, "sha256" finds the buckets of PyPI's
    data-selection, whose log weights come out with smoothing=0, floor=1e-8. Weights are not divided by length, as in
    DSIR: drop very short texts before. memory_bytes: of n-grams held between the two readings; texts beyond are hashed
    twice. `log_weights_` holds log w in any case.
    """

    def __init__(
        self,
        *,
        buckets: int = 10_000,
        resample: bool = False,
        hashing: str = "fast",
        smoothing: float = 1.0,
        floor: float = 0.0,
        seed: int = 0,
        memory_bytes: int = 1 << 30,
    ):
        self.buckets = buckets
        self.resample = resample
        self.hashing = hashing
        self.smoothing = smoothing
        self.floor = floor
        self.seed = seed
        self.memory_bytes = memory_bytes

    def fit(self, pool: Pool, target: Target, *, progress: Progress | None = None) -> Self:
        """Needs texts on both sides."""
        if isinstance(self.buckets, bool) or not isinstance(self.buckets, int) or not 1 <= self.buckets < 1 << 32:
            raise SelectionError(f"buckets must be at least 1 and below 2^32, not {self.buckets!r}")
        if self.hashing not in ("fast", "sha256"):
            raise SelectionError(f'hashing must be "fast" or "sha256", not {self.hashing!r}')
        finite_number(self.smoothing, "smoothing", least=0.0)
        finite_number(self.floor, "floor", least=0.0)
        if self.smoothing == self.floor == 0:
            raise SelectionError(
                "smoothing and floor are both 0, and a bucket the target lacks has no logarithm; set one"
            )
        pool_texts, target_texts = need(pool, target, "texts", "dsir")
        hasher = (NgramHasher if self.hashing == "fast" else Sha256Hasher)(self.buckets)
        wanted = np.zeros(self.buckets)
        for found, _ in hasher.batches(target_texts):
            wanted += np.bincount(found, minlength=self.buckets)
        present = np.zeros(self.buckets)
        kept: list[tuple[np.ndarray, np.ndarray]] = []
        done = remembered = held = 0
        for found, lengths in hasher.batches(pool_texts):
            present += np.bincount(found, minlength=self.buckets)
            done += len(lengths)
            held += len(found) * hasher.narrow.itemsize + lengths.nbytes
            if held <= self.memory_bytes:
                kept.append((found.astype(hasher.narrow), lengths))
                remembered = done
            if progress:
                progress("hashing n-grams", done, len(pool_texts))
        if not wanted.any():
            raise SelectionError("no target text holds a single word; dsir has nothing to compare with")
        gain = self._log_probability(wanted) - self._log_probability(present)
        again = hasher.batches(pool_texts, remembered)
        self.log_weights_ = np.concatenate([_sums(gain[found], lengths) for found, lengths in chain(kept, again)])
        self.scores_ = -self.log_weights_
        if self.resample:
            self.scores_ = self.scores_ + np.log(-np.log(keyed_uniform(pool, self.seed, "dsir gumbel")))
        self.nearest_target_ = None
        self.diagnostics_ = {"ngrams_pool": int(present.sum()), "ngrams_target": int(wanted.sum())}
        return self

    def _log_probability(self, counts: np.ndarray) -> np.ndarray:
        total = max(counts.sum() + self.smoothing * self.buckets, 1e-300)
        return np.log((counts + self.smoothing) / total + self.floor)


def _sums(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Sum of each consecutive run of `lengths` values, 0 for an empty run; a run's sum does not see its neighbours."""
    return np.bincount(np.repeat(np.arange(len(lengths)), lengths), weights=values, minlength=len(lengths))
