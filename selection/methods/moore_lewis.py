"""Cross-entropy difference per token (Moore and Lewis 2010, Axelrod et al. 2011), trigrams of the backbone's tokens.

A text's value is how much likelier its tokens are in the target than in the pool, where the pool's model represents the
backbone's training text. The unit is the backbone's own token, so that case, spacing and punctuation count: the form of
the target's texts, which warm-up has to teach as well as their words.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from flatshift.selection.features.tokens import TokenRows, text_sums
from flatshift.selection.lazy import np
from flatshift.selection.methods.base import MethodSettings, Pool, Progress, Target, TokenSelector, move_behind
from flatshift.selection.shards import Arrays, Shard, ShardMap
from flatshift.selection.validation import bounded

if TYPE_CHECKING:
    from flatshift.selection.methods.ngrams import TrigramCounts


@dataclass(frozen=True, kw_only=True)
class MooreLewis(MethodSettings):
    """Cross-entropy difference (Moore–Lewis): −mean log p_target/p_pool per token, trigrams of the backbone's tokens;
    short texts shrunk to the pool's mean."""

    kind: Literal["moore-lewis"] = "moore-lewis"
    title: ClassVar[str] = "Cross-entropy difference"
    needs: ClassVar[tuple[str, ...]] = ("tokens",)
    share: float = bounded(0.2, above=0, maximum=1)
    """Weight of the target's model in its mixture with the pool's, which covers n-grams missing in the target's texts.
    The smaller, the less a token that the target lacks counts against a text, compared with those that it has."""
    prior: float = bounded(15.0, minimum=0)
    """Virtual tokens of an average pool text added to every text, so that a short text, which may resemble the target
    by chance, must do so more markedly than a long one. 0: the plain mean per token."""
    minimum: int = bounded(8, minimum=1)
    """Minimum number of tokens; shorter texts are ranked last, because a few tokens may resemble the target by
    chance."""
    memory_gib: float = bounded(1.0, minimum=0.001)
    """Memory limit of the pool's model, GiB: about 27 million distinct trigrams each; above it, the rarest are
    dropped."""


class MooreLewisSelector(TokenSelector, MooreLewis):
    """Scores by −(Σ_t g_t + prior·ḡ) / (n + prior) over the n tokens t of a text, where

    g_t = log (share·p_target + (1 − share)·p_pool)/p_pool, and ḡ is the mean of the texts' mean gains.

    p: interpolated modified Kneser–Ney trigrams (`flatshift.selection.methods.ngrams`), of all target and all pool
    texts. The ratio of one token is at least 1 − share, so that no single token rules out a text; share near 0 gives
    the order of the mean ratio itself, which is the gradient of the target's cross-entropy as the pool's model takes up
    a text, share 1 that of Moore and Lewis. `prior` shrinks short texts to the pool's mean. Texts of fewer than
    `minimum` tokens follow behind all others, among themselves by their scores. Needs tokens on both sides, and reads
    the pool twice; weights are ignored. `evidence`: the log of each token's ratio, nats.
    """

    def _fit(self, pool: Pool, target: Target, progress: Progress) -> None:
        from flatshift.selection.methods.ngrams import ROW_BYTES, KneserNey, TrigramCounts

        rows, target_rows = self._sides(pool, target)
        limit = max(1000, int(self.memory_gib * 2**30) // ROW_BYTES)
        counts = None if pool.shards is None else _count_shards(pool.shards, rows, limit)
        if counts is None:
            counts = TrigramCounts(rows.size, limit)
            for low, flat, lengths in rows.parts():
                counts.add(flat, lengths)
                progress("counting n-grams", low + len(lengths), len(rows))
        reference = KneserNey(*counts.table(), rows.size)
        self._models = KneserNey.of(target_rows, limit), reference
        if pool.shards is None:
            gains = self._text_gains(rows, progress)
        else:
            models = {
                f"{k} {name}": array for k, model in enumerate(self._models) for name, array in model.arrays().items()
            }
            score = partial(_shard_gains, share=self.share, size=rows.size)
            parts = pool.shards("gains", score, inputs=models, earlier=rows.shards)
            gains = np.concatenate([part["gains"] for part in parts])
        lengths = rows.lengths
        # fsum: the sum must not depend on the order of rows, bit for bit.
        usual = math.fsum(gains / np.maximum(lengths, 1)) / len(rows)
        scores = -(gains + self.prior * usual) / np.maximum(lengths + self.prior, 1.0)
        short = lengths < self.minimum
        self.scores_ = move_behind(scores, short, scores)
        self.diagnostics_ = {
            "tokens_pool": counts.tokens,
            "tokens_target": len(target_rows.flat),
            "ngrams_pool": reference.ngrams,
            "ngrams_target": self._models[0].ngrams,
            "ngrams_dropped_up_to": counts.dropped,
            "short": int(short.sum()),
        }

    def _text_gains(self, rows: TokenRows, progress: Progress) -> np.ndarray:
        """Return the sum of every text's gains, (N,) float64."""
        gains = np.empty(len(rows))
        for low, flat, lengths in rows.parts():
            gains[low : low + len(lengths)] = text_sums(self._gains(flat, lengths, rows.size), lengths)
            progress("comparing n-grams", low + len(lengths), len(rows))
        return gains

    def _gains(self, flat: np.ndarray, lengths: np.ndarray, size: int) -> np.ndarray:
        from flatshift.selection.methods.ngrams import trigram_keys

        model, reference = self._models
        keys, back = np.unique(trigram_keys(flat, lengths, size), return_inverse=True)
        gains = np.log(self.share * model.probability(keys) / reference.probability(keys) + (1.0 - self.share))
        return np.asarray(gains[back])


def _count_shards(shards: ShardMap, rows: TokenRows, limit: int) -> TrigramCounts | None:
    """Return the pool's trigrams summed over shards; None if there are more than `limit`, as those dropped then depend
    on the order in which texts are counted."""
    from flatshift.selection.methods.ngrams import TrigramCounts

    total = TrigramCounts(rows.size, limit)
    for part in shards("n-grams", partial(_count_trigrams, size=rows.size, limit=limit), earlier=rows.shards):
        total.add_counts(part["keys"], part["counts"], int(part["tokens"][0]))
        if part["dropped"][0] or total.dropped:
            return None
    return total


def _count_trigrams(shard: Shard, *, size: int, limit: int) -> Arrays:
    from flatshift.selection.methods.ngrams import TrigramCounts

    counts = TrigramCounts(size, limit).add_all(TokenRows(shard.earlier["flat"], shard.earlier["ends"], size))
    keys, numbers = counts.table()
    totals = {"tokens": np.array([counts.tokens]), "dropped": np.array([counts.dropped])}
    return {"keys": keys, "counts": numbers, **totals}


def _shard_gains(shard: Shard, *, share: float, size: int) -> Arrays:
    from flatshift.selection.methods.ngrams import KneserNey

    arrays: list[dict[str, np.ndarray]] = [{}, {}]
    for name, array in shard.inputs.items():
        arrays[int(name[0])][name[2:]] = array
    scorer = MooreLewisSelector(share=share)
    scorer._models = KneserNey.restore(arrays[0], size), KneserNey.restore(arrays[1], size)
    rows = TokenRows(shard.earlier["flat"], shard.earlier["ends"], size)
    return {"gains": scorer._text_gains(rows, lambda stage, done, total: None)}
