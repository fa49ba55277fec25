"""Linear classifier of target against pool, as in quality filters (DCLM: Li et al. 2024, arXiv 2406.11794).

DCLM uses fastText on words; here it is scikit-learn's logistic regression on hashed n-grams of the backbone's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

from flatshift.selection.features.tokens import TokenRows, ngram_keys
from flatshift.selection.hashing import mix64
from flatshift.selection.lazy import np
from flatshift.selection.methods.base import MethodSettings, Pool, Progress, Target, TokenSelector, move_behind
from flatshift.selection.shards import Arrays, Shard
from flatshift.selection.validation import bounded


@dataclass(frozen=True, kw_only=True)
class Classifier(MethodSettings):
    """Logistic regression of target against pool on hashed uni- and bigrams of the backbone's tokens (as DCLM filters);
    score −log odds."""

    kind: Literal["classifier"] = "classifier"
    title: ClassVar[str] = "A classifier of target against pool"
    needs: ClassVar[tuple[str, ...]] = ("tokens",)
    buckets: int = bounded(2**18, minimum=2)
    """Hash buckets of the n-grams."""
    strength: float = bounded(10.0, above=0)
    """C of scikit-learn's LogisticRegression: larger fits the target's texts more closely."""
    fit_rows: int = bounded(20_000, minimum=2)
    """Maximum number of pool texts for training, drawn by seed; the same maximum for the target."""
    minimum: int = bounded(8, minimum=1)
    """Minimum number of tokens; shorter texts are ranked last."""


class ClassifierSelector(TokenSelector, Classifier):
    """Scores by −log odds that a text is from the target. Features: its distinct n-grams, scaled to length one.

    Two classifiers are trained on two halves of the pool's sample, each with all target texts, classes balanced. A text
    is scored only by those not trained on it, so that it is not penalised for having been a negative example. Texts of
    fewer than `minimum` tokens follow behind all others. `evidence`: a token's weight plus that of its bigram with the
    one before. Needs tokens on both sides; ignores weights.
    """

    seed: int = 0

    def _fit(self, pool: Pool, target: Target, progress: Progress) -> None:
        rows, target_rows = self._sides(pool, target)
        sample = np.argsort(pool.draw(self.seed, "classifier sample"), kind="stable")[: self.fit_rows]
        # The result must not depend on the order of rows, bit for bit: the pool is drawn by id, the target sorted by
        # content.
        positives = sorted((target_rows[i] for i in range(len(target_rows))), key=lambda row: row.tobytes())
        generator = np.random.Generator(np.random.PCG64([self.seed, 0xC1A55]))
        if len(positives) > self.fit_rows:
            positives = [positives[i] for i in np.sort(generator.choice(len(positives), self.fit_rows, replace=False))]
        halves = [sample[0::2], sample[1::2]] if len(sample) > 1 else [sample]
        weights = self._weights = np.stack([self._train(rows, half, positives) for half in halves])
        half_of = np.full(len(rows), -1)
        for number, half in enumerate(halves if len(halves) > 1 else []):
            half_of[half] = number
        if pool.shards is None:
            scores = self._score(rows, half_of, progress)
        else:
            score = partial(_score_shard, buckets=self.buckets, size=rows.size)
            inputs = {"weights": weights, "half_of": half_of}
            parts = pool.shards("odds", score, inputs=inputs, earlier=rows.shards)
            scores = np.concatenate([part["scores"] for part in parts])
        short = rows.lengths < self.minimum
        self.scores_ = move_behind(scores, short, scores)
        self.diagnostics_ = {
            "learnt_pool": len(sample),
            "learnt_target": len(positives),
            "likelier_target": int((scores < 0).sum()),
            "short": int(short.sum()),
        }

    def _score(self, rows: TokenRows, half_of: np.ndarray, progress: Progress) -> np.ndarray:
        """Return −log odds of each text by the classifiers not trained on it; half_of: the number of the one that was,
        −1 for none."""
        weights = self._weights
        scores = np.empty(len(rows))
        for low, flat, lengths in rows.parts():
            odds = self._features(flat, lengths, rows.size) @ weights[:, :-1].T + weights[:, -1]
            half_numbers = half_of[low : low + len(lengths)]
            mean = odds.mean(1)
            other = odds[np.arange(len(odds)), 1 - half_numbers.clip(0)] if len(weights) > 1 else mean
            scores[low : low + len(lengths)] = -np.where(half_numbers < 0, mean, other)
            progress("classifying", low + len(lengths), len(rows))
        return scores

    def _gains(self, flat: np.ndarray, lengths: np.ndarray, size: int) -> np.ndarray:
        keys, _ = ngram_keys(flat, lengths, size)
        weights = self._weights[:, :-1].mean(0)[(mix64(keys) % np.uint64(self.buckets)).astype(np.int64)]
        gains = weights[: len(flat)].copy()
        text_of = np.repeat(np.arange(len(lengths)), lengths)
        gains[1:][text_of[1:] == text_of[:-1]] += weights[len(flat) :]
        return gains

    def _train(self, rows: TokenRows, half: np.ndarray, positives: list[np.ndarray]) -> np.ndarray:
        """Fit one classifier; return (buckets + 1,) weights and intercept."""
        from sklearn.linear_model import LogisticRegression

        texts: list[Any] = [*(rows[int(i)] for i in half), *positives]
        examples = TokenRows.of(texts, rows.size)
        features = self._features(*examples.part(0, len(examples)), rows.size)
        used = np.unique(features.indices)
        model = LogisticRegression(C=self.strength, class_weight="balanced", max_iter=200)
        model.fit(features[:, used], np.arange(len(examples)) >= len(half))
        out = np.zeros(self.buckets + 1)
        out[used], out[-1] = model.coef_[0], model.intercept_[0]
        return out

    def _features(self, flat: np.ndarray, lengths: np.ndarray, size: int) -> Any:
        """Return CSR (n, buckets) float64: 1/√(number of distinct n-grams) for each distinct n-gram of a text."""
        from scipy.sparse import csr_matrix

        keys, text_of = ngram_keys(flat, lengths, size)
        # A repeated n-gram counts once: a line of slashes is no evidence for anything.
        cells = np.unique(text_of * self.buckets + (mix64(keys) % np.uint64(self.buckets)).astype(np.int64))
        text_of, columns = np.divmod(cells, self.buckets)
        sizes = np.bincount(text_of, minlength=len(lengths))
        values = np.repeat(1.0 / np.sqrt(np.maximum(sizes, 1)), sizes)
        ends = np.concatenate([[0], np.cumsum(sizes)])
        return csr_matrix((values, columns, ends), shape=(len(lengths), self.buckets))


def _score_shard(shard: Shard, *, buckets: int, size: int) -> Arrays:
    scorer = ClassifierSelector(buckets=buckets)
    scorer._weights = np.asarray(shard.inputs["weights"])
    rows = TokenRows(shard.earlier["flat"], shard.earlier["ends"], size)
    half_of = shard.inputs["half_of"][shard.low : shard.high]
    return {"scores": scorer._score(rows, half_of, lambda stage, done, total: None)}
