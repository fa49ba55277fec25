"""Cross-entropy difference per token (Moore and Lewis 2010, Axelrod et al. 2011), trigrams of the backbone's tokens.

A text's value is how much likelier its tokens are in the target than in the pool, where the pool's model represents the
backbone's training text. The unit is the backbone's own token, so that case, spacing and punctuation count: the form of
the target's texts, which warm-up has to teach as well as their words.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from flatshift.selection.features.tokens import text_sums
from flatshift.selection.lazy import np
from flatshift.selection.methods.base import MethodSettings, Pool, Progress, Target, TokenSelector, move_behind
from flatshift.selection.validation import bounded


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
        counts = TrigramCounts(rows.size, limit)
        for low, flat, lengths in rows.parts():
            counts.add(flat, lengths)
            progress("counting n-grams", low + len(lengths), len(rows))
        reference = KneserNey(*counts.table(), rows.size)
        self._models = KneserNey.of(target_rows, limit), reference
        gains = np.empty(len(rows))
        for low, flat, lengths in rows.parts():
            gains[low : low + len(lengths)] = text_sums(self._gains(flat, lengths, rows.size), lengths)
            progress("comparing n-grams", low + len(lengths), len(rows))
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

    def _gains(self, flat: np.ndarray, lengths: np.ndarray, size: int) -> np.ndarray:
        from flatshift.selection.methods.ngrams import trigram_keys

        model, reference = self._models
        keys, back = np.unique(trigram_keys(flat, lengths, size), return_inverse=True)
        gains = np.log(self.share * model.probability(keys) / reference.probability(keys) + (1.0 - self.share))
        return np.asarray(gains[back])
