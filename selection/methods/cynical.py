"""Cynical selection (Axelrod 2017, arXiv 1709.02279): greedily the text that lowers the target's cross-entropy most.

Moore and Lewis score every text by itself, so that the first choices repeat one another and the rest of the target is
never covered. Here a text is scored given those already chosen: an n-gram that the selection holds often enough gains
little more. If no other text gains as much, the same one is chosen again, to be read more than once: a few repeats cost
a language model little (Muennighoff et al. 2023, arXiv 2305.16264). The objective is a submodular function of n-gram
counts (Kirchhoff and Bilmes 2014), so that gains only fall as the selection grows, and a text is rescored only when its
last known gain leads.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

from flatshift.selection.errors import SelectionError
from flatshift.selection.features.tokens import text_sums
from flatshift.selection.lazy import np
from flatshift.selection.methods.base import (
    Pool,
    Progress,
    Selector,
    Target,
    check_budget,
    check_number,
    move_behind,
    require_field,
)
from flatshift.selection.validation import SelectorContext, check_fields, from_settings

if TYPE_CHECKING:
    from flatshift.selection.features.tokens import TokenRows

_ORDERS = (1, 2, 3)
_BLOCK = 256
"""Texts whose n-grams are looked up together."""
_LOOKS, _MOST_LOOKS = 8192, 1 << 18
"""Texts rescored with the same bounds: a 32nd of the pool within these limits. Their n-grams are kept, about a kB
each."""

_MULTIPLIER = 0x9E3779B97F4A7C15
"""Multiplier of multiplicative hashing (Knuth): 2^64 over the golden ratio."""


@dataclass(frozen=True, kw_only=True)
class Cynical:
    """Cynical selection: one text after another, each the one that lowers the target's cross-entropy most per token
    given those already chosen; uni-, bi- and trigrams of the backbone's tokens."""

    kind: Literal["cynical"] = "cynical"
    title: ClassVar[str] = "Cynical selection"
    needs: ClassVar[tuple[str, ...]] = ("tokens",)
    mixture: float = 0.67
    """Share of the selection in the mixture with the pool (what the backbone has seen) whose cross-entropy counts. The
    smaller, the more it favours n-grams that are rarer in the pool than in the target, and the less those still
    missing."""
    prior: float = 15.0
    """Virtual tokens without gain added to every text, so that a long text needs less gain per token than a short one.
    0: the plain gain per token."""
    minimum: int = 8
    """Minimum number of tokens; shorter texts are ranked last, because a few tokens may resemble the target by
    chance."""
    repeats: int = 1
    """Maximum number of times that a text may be chosen. Above 1 it is chosen again if that lowers the cross-entropy
    more than any text not yet chosen, and the budget counts each time."""

    def __post_init__(self) -> None:
        check_fields(self, "mixture", above=0, most=0.99)
        check_fields(self, "prior", least=0)
        check_fields(self, "minimum", least=1)
        check_fields(self, "repeats", least=1)

    def build(self, around: SelectorContext) -> CynicalSelector:
        return from_settings(CynicalSelector, self, around)


class CynicalSelector(Selector):
    """Repeatedly takes the text of the largest gain ΔF / (n + prior), n its tokens, where

        F(S) = Σ_g w_g log(1 + c_S(g) / (κ p(g)))   over the target's uni-, bi- and trigrams g,

    w_g: their share among those of the target; p(g) in the pool, one occurrence added; c_S(g): the count in the chosen
    texts; κ = (1 − mixture)/mixture · the tokens of `budget` mean texts. So F is, up to a constant, the fall of the
    target's cross-entropy (summed over the three orders) from the pool's distribution to the mixture of pool and
    selection. S is a multiset: a text may be taken up to `repeats` times, and is then to be read as often. Greedy by
    gain per token, exact by lazy evaluation (Minoux 1978; Leskovec et al. 2007, CELF). It ends with `budget` readings,
    or later if these have fewer tokens than as many mean texts.

    Scores are −gain at the time a text was first taken, in nats of cross-entropy (mean over the orders) that the whole
    budget would bring at this rate. Texts that were not taken follow by their gain given the selection (an upper bound:
    repeats inside a text count in full), those of fewer than `minimum` tokens behind all others. budget None: a tenth
    of the pool. Weights are ignored. `evidence` returns the tokens that speak for a text.
    """

    def __init__(
        self,
        *,
        mixture: float = 0.67,
        prior: float = 15.0,
        minimum: int = 8,
        repeats: int = 1,
        budget: int | None = None,
    ):
        self.mixture = mixture
        self.prior = prior
        self.minimum = minimum
        self.repeats = repeats
        self.budget = budget

    def fit(self, pool: Pool, target: Target, *, progress: Progress | None = None) -> Self:
        """Select and score; needs tokens on both sides. Reads the pool at least three times, and leading texts
        individually."""
        check_number(self.mixture, "mixture", above=0.0, most=0.99)
        check_number(self.prior, "prior", least=0.0)
        check_number(self.minimum, "minimum", least=1)
        check_number(self.repeats, "repeats", least=1)
        budget = max(1, len(pool) // 10) if self.budget is None else check_budget(self.budget, len(pool))
        rows, aims = require_field(pool, target, "tokens", "cynical")
        if not len(aims.flat):
            raise SelectionError("no target text holds a single token; cynical has nothing to compare with")
        self._ngrams = ngrams = _TargetNgrams(aims)
        count = np.ones(len(ngrams))
        for low, flat, lengths in rows.parts():
            for found in ngrams.find(flat, lengths):
                count += np.bincount(found[found >= 0], minlength=len(count))
            if progress:
                progress("counting n-grams", low + len(lengths), len(rows))
        tokens = budget * len(rows.flat) / len(rows)
        self._base = (1.0 - self.mixture) / self.mixture * tokens * count / (len(rows.flat) + 1.0)
        short = rows.lengths < self.minimum
        held, reached, taken, looks, passes = self._greedy(rows, ~short, (budget, tokens), progress)
        self.scores_ = self._bounds(rows, self._base + held, None)
        self.readings_, distinct = taken, np.unique(taken, return_index=True)
        if len(taken):
            # Up to rounding, gains never increase, and no remaining gain is above the last one taken.
            reached = np.maximum.accumulate(reached)
            np.maximum(self.scores_, np.nextafter(reached[-1], np.inf), out=self.scores_)
            self.scores_[distinct[0]] = reached[distinct[1]]
        self.scores_ *= max(tokens, 1.0) / len(_ORDERS)
        if not short.all():
            self.scores_ = move_behind(self.scores_, short, self.scores_)
        self.nearest_target_ = None
        fall = float(ngrams.weights @ np.log1p(held / self._base)) / len(_ORDERS)
        self.diagnostics_ = {
            "tokens_pool": len(rows.flat),
            "tokens_target": len(aims.flat),
            "ngrams_target": len(ngrams),
            "ngrams_held": int((held > 0).sum()),
            "gain_of_selection": fall,
            "taken": len(taken),
            "distinct_taken": len(distinct[0]),
            "looked_at": looks,
            "passes": passes,
            "short": int(short.sum()),
        }
        return self

    @property
    def explains(self) -> bool:
        """True if `evidence` is available: after `fit`."""
        return hasattr(self, "_ngrams")

    def evidence(self, rows: TokenRows) -> list[Any]:
        """Return each text's evidence by token: the gain of the n-grams that end in it, with nothing chosen yet."""
        self._fitted()
        flat, lengths = rows.part(0, len(rows))
        return np.split(self._by_token(flat, lengths, self._base), np.cumsum(lengths)[:-1]) if len(rows) else []

    def _by_token(self, flat: np.ndarray, lengths: np.ndarray, base: np.ndarray) -> np.ndarray:
        """Return (T,) gain of one more occurrence of the n-grams that end in each token."""
        once = np.append(self._ngrams.weights * np.log1p(1.0 / base), 0.0)  # the last entry: no n-gram of the target
        return np.asarray(sum(once[found] for found in self._ngrams.find(flat, lengths)))

    def _bounds(self, rows: TokenRows, base: np.ndarray, progress: Progress | None) -> np.ndarray:
        """Return (N,) lower bounds of −gain per token: the logarithm is concave, so that repeats in a text add less."""
        bounds = np.empty(len(rows))
        for low, flat, lengths in rows.parts():
            gains = text_sums(self._by_token(flat, lengths, base), lengths)
            bounds[low : low + len(lengths)] = -gains / self._sizes(lengths)
            if progress:
                progress("comparing n-grams", low + len(lengths), len(rows))
        return bounds

    def _sizes(self, lengths: np.ndarray) -> np.ndarray:
        return np.maximum(lengths + self.prior, 1.0)

    def _greedy(
        self, rows: TokenRows, left: np.ndarray, least: tuple[int, float], progress: Progress | None
    ) -> _GreedyResult:
        """Run the greedy selection.

        left (N,): texts that may be taken, modified in place. least: readings and tokens to be reached.
        """
        base, held = self._base, np.zeros(len(self._base))
        times: dict[int, int] = {}
        reached: list[float] = []
        taken: list[int] = []
        size = looks = passes = 0
        once = min(max(_LOOKS, len(rows) // 32), _MOST_LOOKS)

        def enough() -> bool:
            return len(taken) >= least[0] and size >= least[1]

        while not enough():
            bound = self._bounds(rows, base + held, progress if not taken else None)
            bound[~left] = np.inf
            # The others hold no n-gram of the target.
            first = np.argsort(bound, kind="stable")[: np.count_nonzero(bound < 0.0)]
            if not len(first):
                break
            known: dict[int, _TextNgrams] = {}
            leading: list[tuple[float, int, int]] = []
            place, passes, before = 0, passes + 1, len(taken)
            # Outdated bounds let too many texts lead: then one more pass over the pool is cheaper.
            while not enough() and (place <= once or len(taken) == before):
                while place < len(first) and (not leading or bound[first[place]] <= leading[0][0]):
                    some = first[place : place + _BLOCK].tolist()
                    known.update(self._looked_up(rows, some))
                    for row in some:
                        heapq.heappush(leading, (self._score(known[row], held), row, len(taken)))
                    place, looks = place + len(some), looks + len(some)
                if not leading:
                    break
                found, row, when = heapq.heappop(leading)
                if when < len(taken):
                    heapq.heappush(leading, (self._score(known[row], held), row, len(taken)))
                    continue
                text = known[row]
                held[text.ngrams] += text.times
                size += text.length
                reached.append(found)
                taken.append(row)
                times[row] = times.get(row, 0) + 1
                if times[row] < self.repeats:
                    heapq.heappush(leading, (self._score(text, held), row, len(taken)))
                else:
                    left[row] = False
                    del known[row]
                if progress and len(taken) <= least[0] and (len(taken) % _BLOCK == 0 or len(taken) == least[0]):
                    progress("choosing texts", len(taken), least[0])
        return _GreedyResult(held, np.array(reached), np.array(taken, dtype=np.int64), looks, passes)

    def _score(self, text: _TextNgrams, held: np.ndarray) -> float:
        """Return −gain per token of a text given the held counts."""
        ngrams, times, length = text
        gain = float(self._ngrams.weights[ngrams] @ np.log1p(times / (self._base[ngrams] + held[ngrams])))
        return -gain / float(self._sizes(np.asarray(length)))

    def _looked_up(self, rows: TokenRows, some: list[int]) -> dict[int, _TextNgrams]:
        """Look up the target's n-grams in some texts, by row."""
        part = rows.take(some)
        flat, lengths = part.part(0, len(part))
        text_of = np.repeat(np.arange(len(lengths)), lengths)
        found = np.concatenate(self._ngrams.find(flat, lengths))
        pairs = np.tile(text_of, len(_ORDERS)) * len(self._ngrams) + found
        pairs, times = np.unique(pairs[found >= 0], return_counts=True)
        texts, ngrams = np.divmod(pairs, len(self._ngrams))
        cuts = np.searchsorted(texts, np.arange(1, len(some)))
        parts = (np.split(side.astype(np.int32), cuts) for side in (ngrams, times))
        return dict(zip(some, map(_TextNgrams, *parts, lengths.tolist()), strict=True))


class _TextNgrams(NamedTuple):
    """N-grams of the target in a text of the pool."""

    ngrams: np.ndarray
    """(K,) numbers of the target's n-grams in it, ascending."""
    times: np.ndarray
    """(K,) count of each."""
    length: int
    """Number of tokens."""


class _GreedyResult(NamedTuple):
    """Result of the greedy selection."""

    held: np.ndarray
    """(G,) occurrences of each of the target's n-grams in the chosen texts."""
    scores: np.ndarray
    """−gain per token of each at the time, in the order taken."""
    rows: np.ndarray
    """Rows in the order taken, repeated ones each time; for equal gains the earlier row first."""
    looks: int
    """Number of individually scored texts."""
    passes: int
    """Number of passes over the pool for bounds."""


class _TargetNgrams:
    """Distinct uni-, bi- and trigrams of the target's texts, numbered; `weights` (G,): the share of each among all of
    its order."""

    def __init__(self, aims: TokenRows):
        from flatshift.selection.methods.ngrams import check_vocabulary, trigram_keys

        flat, lengths = aims.part(0, len(aims))
        self._size = check_vocabulary(aims.size)
        bits = aims.size.bit_length()
        self._masks = [np.uint64((1 << (bits * order)) - 1) for order in _ORDERS]
        whole = trigram_keys(flat, lengths, aims.size)
        tables = [np.unique(whole & mask, return_counts=True) for mask in self._masks]
        starts = np.cumsum([len(keys) for keys, _ in tables]).tolist()
        self._single = np.full(aims.size, -1)
        self._single[tables[0][0].astype(np.int64)] = np.arange(starts[0])
        self._tables = [_HashTable(keys, start) for (keys, _), start in zip(tables[1:], starts, strict=False)]
        self.weights = np.concatenate([times for _, times in tables]) / len(flat)

    def __len__(self) -> int:
        return len(self.weights)

    def find(self, flat: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
        """Return by order (T,) int64: the number of the n-gram that ends in each token, −1 if it is not in the
        target."""
        from flatshift.selection.methods.ngrams import trigram_keys

        whole = trigram_keys(flat, lengths, self._size)
        out = [self._single[flat]]
        there = np.flatnonzero(out[0] >= 0)
        for table, mask in zip(self._tables, self._masks[1:], strict=True):
            numbers = table.numbers(whole[there] & mask)
            there, numbers = there[numbers >= 0], numbers[numbers >= 0]
            found = np.full(len(whole), -1, dtype=np.int64)
            found[there] = numbers
            out.append(found)  # a longer n-gram can be known only if the shorter one is
        return out


class _HashTable:
    """Numbers of distinct uint64 keys, counted from `start`. Keys in no order are found in one or two steps, where a
    binary search takes one for each halving."""

    def __init__(self, keys: np.ndarray, start: int):
        bits = (8 * len(keys)).bit_length()
        self._shift = np.uint64(64 - bits)
        slots = self._slots(keys)
        order = np.argsort(slots, kind="stable")
        self._keys, self._numbers = keys[order], order + start
        sizes = np.bincount(slots, minlength=1 << bits)
        self._starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        self._longest = int(sizes.max())

    def _slots(self, keys: np.ndarray) -> np.ndarray:
        return ((keys * np.uint64(_MULTIPLIER)) >> self._shift).astype(np.int64)

    def numbers(self, keys: np.ndarray) -> np.ndarray:
        """Return (n,) int64, −1 for unknown keys."""
        slots = self._slots(keys)
        first, end = self._starts[slots], self._starts[slots + 1]
        out = np.full(len(keys), -1, dtype=np.int64)
        open_ = np.flatnonzero(first < end)
        for step in range(self._longest):
            open_ = open_[first[open_] + step < end[open_]]
            place = first[open_] + step
            hit = self._keys[place] == keys[open_]
            out[open_[hit]] = self._numbers[place[hit]]
            open_ = open_[~hit]
        return out
