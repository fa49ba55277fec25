"""Cynical selection (Axelrod 2017, arXiv 1709.02279): greedily the text that lowers the target's cross-entropy most.

Moore and Lewis score every text by itself, so that the first choices repeat one another and the rest of the target is
never covered. Here a text is scored given those already chosen: an n-gram that the selection holds often enough gains
little more. If no other text gains as much, the same one is chosen again: a few repeats cost a language model little
(Muennighoff et al. 2023, arXiv 2305.16264). The objective is a submodular function of n-gram counts (Kirchhoff and
Bilmes 2014): gains only fall as the selection grows, and a text is rescored only when its last known gain leads.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, NamedTuple, Self

from flatshift.selection.features.tokens import TokenRows, text_sums
from flatshift.selection.lazy import np
from flatshift.selection.methods.base import (
    MethodSettings,
    Pool,
    Progress,
    Target,
    TokenSelector,
    check_budget,
    move_behind,
)
from flatshift.selection.shards import Arrays, Shard, ShardMap
from flatshift.selection.validation import bounded

_ORDERS = (1, 2, 3)
_BLOCK = 256  # texts whose n-grams are looked up together
_LOOKS, _MAX_LOOKS = 8192, 1 << 18
"""Texts rescored with the same bounds: a 32nd of the pool within these limits. Their n-grams take about a kB each."""

_SLACK = 1.0 + 2.0**-30
"""Factor of a bound, above the roundings of a sum over any text."""

_MULTIPLIER = 0x9E3779B97F4A7C15  # multiplier of multiplicative hashing (Knuth): 2^64 over the golden ratio


@dataclass(frozen=True, kw_only=True)
class Cynical(MethodSettings):
    """Cynical selection: one text after another, each the one that lowers the target's cross-entropy most per token
    given those already chosen; uni-, bi- and trigrams of the backbone's tokens."""

    kind: Literal["cynical"] = "cynical"
    title: ClassVar[str] = "Cynical selection"
    needs: ClassVar[tuple[str, ...]] = ("tokens",)
    mixture: float = bounded(0.67, above=0, maximum=0.99)
    """Share of the selection in the mixture with the pool (what the backbone has seen) whose cross-entropy counts. The
    smaller, the more it favours n-grams that are rarer in the pool than in the target, and the less those still
    missing."""
    prior: float = bounded(15.0, minimum=0)
    """Virtual tokens without gain added to every text, so that a long text needs less gain per token than a short one.
    0: the plain gain per token."""
    minimum: int = bounded(8, minimum=1)
    """Minimum number of tokens; shorter texts are ranked last, because a few tokens may resemble the target by
    chance."""
    repeats: int = bounded(1, minimum=1)
    """Maximum number of times that a text may be chosen. Above 1 it is chosen again if that lowers the cross-entropy
    more than any text not yet chosen. The budget, at most the pool's size, counts each time."""


class CynicalSelector(TokenSelector, Cynical):
    """Repeatedly takes the text of the largest gain ΔF / (n + prior), n its tokens, where

        F(S) = Σ_g w_g log(1 + c_S(g) / (κ p(g)))   over the target's uni-, bi- and trigrams g,

    w_g: their share among those of the target; p(g) in the pool, one occurrence added; c_S(g): the count in the chosen
    texts; κ = (1 − mixture)/mixture · the tokens of `budget` mean texts. So F is, up to a constant, the fall of the
    target's cross-entropy (summed over the three orders) from the pool's distribution to the mixture of pool and
    selection. S is a multiset: a text may be taken up to `repeats` times, and is then to be read as often. Greedy by
    gain per token, exact by lazy evaluation (Minoux 1978; Leskovec et al. 2007, CELF). It ends with `budget` readings,
    or later if these have fewer tokens than as many mean texts.

    Passes over the pool (by shards, if it has them) bound each text's gain: log(1 + k/b) ≤ k·log(1 + 1/b) for k
    occurrences, and both fall as c_S grows. So a bound holds for all later choices, and a text whose bound is below the
    best gain of those looked at individually cannot be next: its n-grams need not be in memory.

    Scores are −gain at the time a text was first taken, in nats of cross-entropy (mean over the orders) that the whole
    budget would bring at this rate. Texts that were not taken follow by their gain given the selection (an upper bound:
    repeats inside a text count in full), those of fewer than `minimum` tokens behind all others. budget None: a tenth
    of the pool. Needs tokens on both sides, and reads the pool at least three times and leading texts individually;
    weights are ignored. `evidence`: the first gain of the n-grams that end in a token.
    """

    budget: int | None = None

    def _fit(self, pool: Pool, target: Target, progress: Progress) -> None:
        budget = max(1, len(pool) // 10) if self.budget is None else check_budget(self.budget, len(pool))
        rows, target_rows = self._sides(pool, target)
        self._ngrams = ngrams = _TargetNgrams(target_rows)
        if pool.shards is None:
            count = 1.0 + ngrams.count(rows, progress)
        else:
            counts = pool.shards("n-grams", partial(_count_ngrams, size=rows.size), inputs=ngrams.arrays(),
                                 earlier=rows.shards)  # fmt: skip
            count = sum((part["counts"] for part in counts), np.ones(len(ngrams)))
        tokens = budget * len(rows.flat) / len(rows)
        self._base = (1.0 - self.mixture) / self.mixture * tokens * count / (len(rows.flat) + 1.0)
        short = rows.lengths < self.minimum
        selection = self._select_greedily(rows, pool.shards, ~short, (budget, tokens), progress)
        scale = max(tokens, 1.0) / len(_ORDERS)
        self.scores_ = scale * self._bounds(rows, pool.shards, self._base + selection.counts, None)
        self.readings_, distinct = selection.rows, np.unique(selection.rows, return_index=True)
        if len(selection.rows):
            # Up to rounding, gains never increase, and no remaining gain is above the last one taken.
            reached = scale * np.maximum.accumulate(selection.scores)
            np.maximum(self.scores_, np.nextafter(reached[-1], np.inf), out=self.scores_)
            self.scores_[distinct[0]] = reached[distinct[1]]
        self.scores_ = move_behind(self.scores_, short, self.scores_)
        self.diagnostics_ = {
            "tokens_pool": len(rows.flat),
            "tokens_target": len(target_rows.flat),
            "ngrams_target": len(ngrams),
            "ngrams_held": int((selection.counts > 0).sum()),
            "gain_of_selection": float(ngrams.weights @ np.log1p(selection.counts / self._base)) / len(_ORDERS),
            "taken": len(selection.rows),
            "distinct_taken": len(distinct[0]),
            "looked_at": selection.looks,
            "passes": selection.passes,
            "short": int(short.sum()),
        }

    def _gains(self, flat: np.ndarray, lengths: np.ndarray, size: int) -> np.ndarray:
        return self._ngrams.look_up(self._gains_of_one(self._base), flat, lengths)

    def _gains_of_one(self, base: np.ndarray) -> np.ndarray:
        """Return (G + 1,) gain of one more occurrence of each n-gram; the last entry: of none of the target's."""
        return np.append(self._ngrams.weights * np.log1p(1.0 / base), 0.0)

    def _bounds(
        self, rows: TokenRows, shards: ShardMap | None, base: np.ndarray, progress: Progress | None
    ) -> np.ndarray:
        """Return (N,) lower bounds of −gain per token: the logarithm is concave, so that repeats in a text add less."""
        once = self._gains_of_one(base)
        if shards is None:
            sums = self._ngrams.sum_texts(once, rows, progress)
        else:
            add = partial(_sum_gains, size=rows.size)
            parts = shards("bounds", add, inputs={**self._ngrams.arrays(), "once": once}, earlier=rows.shards)
            sums = np.concatenate([part["sums"] for part in parts])
        return -sums / self._sizes(rows.lengths)

    def _sizes(self, lengths: np.ndarray) -> np.ndarray:
        return np.maximum(lengths + self.prior, 1.0)

    def _select_greedily(
        self,
        rows: TokenRows,
        shards: ShardMap | None,
        available: np.ndarray,
        goal: tuple[int, float],
        progress: Progress,
    ) -> _GreedySelection:
        """Run the greedy selection.

        available (N,): texts that may be taken, modified in place. goal: readings and tokens to be reached.
        """
        counts = np.zeros(len(self._base))
        times: dict[int, int] = {}
        scores: list[float] = []
        chosen: list[int] = []
        size = looks = passes = 0
        limit = min(max(_LOOKS, len(rows) // 32), _MAX_LOOKS)

        def is_complete() -> bool:
            return len(chosen) >= goal[0] and size >= goal[1]

        while not is_complete():
            bound = self._bounds(rows, shards, self._base + counts, progress if not chosen else None) * _SLACK
            bound[~available] = np.inf
            # The others hold no n-gram of the target.
            order = np.argsort(bound, kind="stable")[: np.count_nonzero(bound < 0.0)]
            if not len(order):
                break
            texts: dict[int, _TextNgrams] = {}
            leading: list[tuple[float, int, int]] = []
            position, passes, before = 0, passes + 1, len(chosen)
            # Outdated bounds let too many texts lead: then one more pass over the pool is cheaper.
            while not is_complete() and (position <= limit or len(chosen) == before):
                while position < len(order) and (not leading or bound[order[position]] <= leading[0][0]):
                    block = order[position : position + _BLOCK].tolist()
                    texts.update(self._look_up(rows, block))
                    for row in block:
                        heapq.heappush(leading, (self._score(texts[row], counts), row, len(chosen)))
                    position, looks = position + len(block), looks + len(block)
                if not leading:
                    break
                score, row, scored_at = heapq.heappop(leading)
                if scored_at < len(chosen):
                    heapq.heappush(leading, (self._score(texts[row], counts), row, len(chosen)))
                    continue
                text = texts[row]
                counts[text.ngrams] += text.times
                size += text.length
                scores.append(score)
                chosen.append(row)
                times[row] = times.get(row, 0) + 1
                if times[row] < self.repeats:
                    heapq.heappush(leading, (self._score(text, counts), row, len(chosen)))
                else:
                    available[row] = False
                    del texts[row]
                if len(chosen) <= goal[0] and (len(chosen) % _BLOCK == 0 or len(chosen) == goal[0]):
                    progress("choosing texts", len(chosen), goal[0])
        return _GreedySelection(counts, np.array(scores), np.array(chosen, dtype=np.int64), looks, passes)

    def _score(self, text: _TextNgrams, counts: np.ndarray) -> float:
        """Return −gain per token of a text given the counts in the selection."""
        ngrams, times, length = text
        gain = float(self._ngrams.weights[ngrams] @ np.log1p(times / (self._base[ngrams] + counts[ngrams])))
        return -gain / float(self._sizes(np.asarray(length)))

    def _look_up(self, rows: TokenRows, numbers: list[int]) -> dict[int, _TextNgrams]:
        """Look up the target's n-grams in the texts with these numbers."""
        texts = rows.take(numbers)
        flat, lengths = texts.part(0, len(texts))
        text_of = np.repeat(np.arange(len(lengths)), lengths)
        numbers_of_tokens = np.concatenate(self._ngrams.find(flat, lengths))
        pairs = np.tile(text_of, len(_ORDERS)) * len(self._ngrams) + numbers_of_tokens
        pairs, times = np.unique(pairs[numbers_of_tokens >= 0], return_counts=True)
        text_of, ngrams = np.divmod(pairs, len(self._ngrams))
        cuts = np.searchsorted(text_of, np.arange(1, len(numbers)))
        parts = (np.split(side.astype(np.int32), cuts) for side in (ngrams, times))
        return dict(zip(numbers, map(_TextNgrams, *parts, lengths.tolist()), strict=True))


class _TextNgrams(NamedTuple):
    """N-grams of the target in a pool text: (K,) their numbers, ascending; (K,) their counts; the text's tokens."""

    ngrams: np.ndarray
    times: np.ndarray
    length: int


class _GreedySelection(NamedTuple):
    """counts (G,): occurrences of each of the target's n-grams in the chosen texts. scores: −gain per token of each
    text at the time, in the order taken. rows: in the order taken, repeated ones each time; for equal gains the earlier
    row first. looks: individually scored texts. passes: over the pool, for bounds."""

    counts: np.ndarray
    scores: np.ndarray
    rows: np.ndarray
    looks: int
    passes: int


class _TargetNgrams:
    """Distinct uni-, bi- and trigrams of the target, numbered; `weights` (G,): each one's share of its order."""

    def __init__(self, target: TokenRows):
        from flatshift.selection.methods.ngrams import check_vocabulary, trigram_keys

        flat, lengths = target.part(0, len(target))
        self._size = check_vocabulary(target.size)
        whole = trigram_keys(flat, lengths, target.size)
        counted = [np.unique(whole & mask, return_counts=True) for mask in self._masks]
        starts = np.cumsum([len(keys) for keys, _ in counted]).tolist()
        self._single = np.full(target.size, -1)
        self._single[counted[0][0].astype(np.int64)] = np.arange(starts[0])
        self._tables = [_HashTable.of(keys, start) for (keys, _), start in zip(counted[1:], starts, strict=False)]
        self.weights = np.concatenate([times for _, times in counted]) / len(flat)

    def __len__(self) -> int:
        return len(self.weights)

    @property
    def _masks(self) -> list[np.uint64]:
        return [np.uint64((1 << (self._size.bit_length() * order)) - 1) for order in _ORDERS]

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the n-grams as arrays, for `restore`."""
        tables = {f"{name}{k}": array for k, table in enumerate(self._tables) for name, array in vars(table).items()}
        return {"weights": self.weights, "single": self._single, **tables}

    @classmethod
    def restore(cls, arrays: Arrays, size: int) -> Self:
        """Return the n-grams over `size` tokens that have these `arrays`."""
        ngrams = cls.__new__(cls)
        ngrams._size, ngrams.weights, ngrams._single = size, np.asarray(arrays["weights"]), np.asarray(arrays["single"])
        names = ("keys", "numbers", "starts")
        ngrams._tables = [_HashTable(*(np.asarray(arrays[f"{name}{k}"]) for name in names)) for k in range(2)]
        return ngrams

    def find(self, flat: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
        """Return by order (T,) int64: the number of the n-gram that ends in each token, −1 if unknown."""
        from flatshift.selection.methods.ngrams import trigram_keys

        whole = trigram_keys(flat, lengths, self._size)
        out = [self._single[flat]]
        known = np.flatnonzero(out[0] >= 0)
        for table, mask in zip(self._tables, self._masks[1:], strict=True):
            numbers = table.find(whole[known] & mask)
            known, numbers = known[numbers >= 0], numbers[numbers >= 0]
            out.append(np.full(len(whole), -1, dtype=np.int64))
            out[-1][known] = numbers  # a longer n-gram can be known only if the shorter one is
        return out

    def count(self, rows: TokenRows, progress: Progress | None = None) -> np.ndarray:
        """Return (G,) int64: occurrences of each n-gram in some texts."""
        counts = np.zeros(len(self), dtype=np.int64)
        for low, flat, lengths in rows.parts():
            for numbers in self.find(flat, lengths):
                counts += np.bincount(numbers[numbers >= 0], minlength=len(counts))
            if progress:
                progress("counting n-grams", low + len(lengths), len(rows))
        return counts

    def look_up(self, values: np.ndarray, flat: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return (T,) sum of the `values` (G + 1,) of the n-grams that end in each token."""
        return np.asarray(sum(values[numbers] for numbers in self.find(flat, lengths)))

    def sum_texts(self, values: np.ndarray, rows: TokenRows, progress: Progress | None = None) -> np.ndarray:
        """Return (N,) sum of the `values` (G + 1,) of each text's n-grams."""
        sums = np.empty(len(rows))
        for low, flat, lengths in rows.parts():
            sums[low : low + len(lengths)] = text_sums(self.look_up(values, flat, lengths), lengths)
            if progress:
                progress("comparing n-grams", low + len(lengths), len(rows))
        return sums


def _count_ngrams(shard: Shard, *, size: int) -> Arrays:
    """Return the occurrences of the target's n-grams in a shard that `tokenise_shard` tokenised."""
    ngrams = _TargetNgrams.restore(shard.inputs, size)
    return {"counts": ngrams.count(TokenRows(shard.earlier["flat"], shard.earlier["ends"], size))}


def _sum_gains(shard: Shard, *, size: int) -> Arrays:
    """Return the sum of the gains `once` of each text's n-grams."""
    ngrams = _TargetNgrams.restore(shard.inputs, size)
    rows = TokenRows(shard.earlier["flat"], shard.earlier["ends"], size)
    return {"sums": ngrams.sum_texts(np.asarray(shard.inputs["once"]), rows)}


class _HashTable:
    """Numbers of distinct uint64 keys. Keys in no order are found in one or two steps, where a binary search takes one
    for each halving.

    keys, numbers: by slot, the top bits of the multiplied key. starts: first entry of each slot, and the end.
    """

    def __init__(self, keys: np.ndarray, numbers: np.ndarray, starts: np.ndarray):
        self.keys, self.numbers, self.starts = keys, numbers, starts

    @classmethod
    def of(cls, keys: np.ndarray, start: int) -> Self:
        """Build the table of keys that are numbered in their order from `start`."""
        bits = (8 * len(keys)).bit_length()
        slots = _hash_slots(keys, bits)
        order = np.argsort(slots, kind="stable")
        sizes = np.bincount(slots, minlength=1 << bits)
        return cls(keys[order], order + start, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32))

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Return (n,) int64, −1 for unknown keys."""
        slots = _hash_slots(keys, (len(self.starts) - 1).bit_length() - 1)
        start, end = self.starts[slots], self.starts[slots + 1]
        out = np.full(len(keys), -1, dtype=np.int64)
        pending, step = np.flatnonzero(start < end), 0
        while len(pending):
            index = start[pending] + step
            equal = self.keys[index] == keys[pending]
            out[pending[equal]] = self.numbers[index[equal]]
            pending, step = pending[~equal], step + 1
            pending = pending[start[pending] + step < end[pending]]
        return out


def _hash_slots(keys: np.ndarray, bits: int) -> np.ndarray:
    return ((keys * np.uint64(_MULTIPLIER)) >> np.uint64(64 - bits)).astype(np.int64)
