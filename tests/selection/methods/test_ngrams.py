"""Trigram models beside a naive dictionary, counting in parts, and what Moore–Lewis and the classifier prefer."""

from collections import Counter, defaultdict

import numpy as np
import pytest

from flatshift.selection import ClassifierSelector, MooreLewisSelector, Pool, SelectionError, TokenRows
from flatshift.selection.methods.ngrams import (
    KneserNey,
    TrigramCounts,
    kneser_ney_discounts,
    trigram_keys,
)

SIZE = 7


def texts(count, seed, size=SIZE):
    r = np.random.default_rng(seed)
    return [r.integers(0, size, r.integers(0, 15)).tolist() for _ in range(count)]


def naive(rows, size):
    """p(w | u v) by dictionaries, from the definition in Chen and Goodman (1998), with continuation counts below."""
    three = Counter()
    for row in rows:
        padded = [size, size, *row]
        three.update((padded[i], padded[i + 1], padded[i + 2]) for i in range(len(row)))
    two = Counter((v, w) for _, v, w in three)
    one = Counter(w for _, w in two)

    def level(counts):
        spectrum = [sum(1 for c in counts.values() if c == n) for n in range(6)]
        d = kneser_ney_discounts(np.array(spectrum))
        by = defaultdict(list)
        for gram, c in counts.items():
            by[gram[:-1] if isinstance(gram, tuple) else ()].append(c)
        return {
            "taken": {g: c - d[min(c, 3)] for g, c in counts.items()},
            "total": {context: sum(cs) for context, cs in by.items()},
            "rest": {context: sum(d[min(c, 3)] for c in cs) / sum(cs) for context, cs in by.items()},
        }

    l1, l2, l3 = level(one), level(two), level(three)

    def p(u, v, w):
        p1 = l1["taken"].get(w, 0.0) / l1["total"][()] + l1["rest"][()] / size
        p2 = l2["taken"].get((v, w), 0.0) / l2["total"].get((v,), 1.0) + l2["rest"].get((v,), 1.0) * p1
        return l3["taken"].get((u, v, w), 0.0) / l3["total"].get((u, v), 1.0) + l3["rest"].get((u, v), 1.0) * p2

    return p


@pytest.mark.parametrize("count", [1, 3, 40])
def test_probabilities_are_the_naive_ones_and_sum_to_one(count):
    rows = [*texts(count, count), [1, 2, 3]]
    model = KneserNey.of(TokenRows.of(rows, SIZE))
    p = naive(rows, SIZE)
    bits = SIZE.bit_length()
    grid = [(u, v, w) for u in range(SIZE + 1) for v in range(SIZE + 1) for w in range(SIZE)]
    keys = np.array([(u << 2 * bits) | (v << bits) | w for u, v, w in grid], dtype=np.uint64)
    found = model.probability(keys)
    np.testing.assert_allclose(found, [p(*gram) for gram in grid], rtol=1e-12)
    np.testing.assert_allclose(found.reshape(-1, SIZE).sum(1), 1.0, rtol=1e-12)


def test_a_text_begins_after_its_border_and_not_after_its_neighbour():
    bits = SIZE.bit_length()
    keys = trigram_keys(np.array([1, 2, 3, 4], np.uint16), np.array([0, 3, 0, 1]), SIZE).tolist()
    grams = [(SIZE, SIZE, 1), (SIZE, 1, 2), (1, 2, 3), (SIZE, SIZE, 4)]
    assert keys == [(u << 2 * bits) | (v << bits) | w for u, v, w in grams]


def test_counting_in_parts_is_counting_at_once_and_stays_within_its_bound():
    rows = texts(300, 5, size=50)
    whole = TrigramCounts(50).add_all(TokenRows.of(rows, 50)).table()
    parts = TrigramCounts(50)
    for row in rows:
        parts.add(np.array(row, np.uint16), np.array([len(row)]))
    assert all((a == b).all() for a, b in zip(whole, parts.table(), strict=True))
    assert (np.diff(whole[0].astype(np.int64)) > 0).all() and whole[1].sum() == sum(map(len, rows))
    bound = TrigramCounts(50, maximum=500).add_all(TokenRows.of(rows * 3, 50))
    assert bound.dropped >= 1 and len(bound.table()[0]) <= 500


def test_a_vocabulary_that_no_key_holds_is_refused():
    with pytest.raises(SelectionError, match="more than the 2,097,150"):
        TrigramCounts(1 << 21)


@pytest.mark.parametrize("selector", [MooreLewisSelector(), ClassifierSelector(buckets=4096)])
def test_texts_of_the_targets_kind_come_first_and_short_ones_last(selector):
    r = np.random.default_rng(0)
    up = [(r.integers(40) + np.arange(12)) % 40 for _ in range(60)]
    down = [(r.integers(40) - np.arange(12)) % 40 for _ in range(240)]
    short = [(r.integers(40) + np.arange(3)) % 40 for _ in range(20)]
    rows = TokenRows.of([*down, *up, *short], 40)
    aims = TokenRows.of([(r.integers(40) + np.arange(12)) % 40 for _ in range(30)], 40)
    selector.fit(Pool(ids=[str(i) for i in range(320)], tokens=rows), Pool(tokens=aims))
    assert set(selector.select(60).tolist()) == set(range(240, 300))
    assert set(selector.select(320)[-20:].tolist()) == set(range(300, 320))
    assert selector.diagnostics_["short"] == 20


def test_scores_are_the_mean_ratio_and_the_evidence_adds_up():
    rows, aims = texts(80, 1), texts(20, 2)
    plain = MooreLewisSelector(share=0.7, prior=0.0, minimum=1)
    shrunk = MooreLewisSelector(share=0.7, prior=5.0, minimum=1)
    for selector in (plain, shrunk):
        selector.fit(Pool(tokens=TokenRows.of(rows, SIZE)), Pool(tokens=TokenRows.of(aims, SIZE)))
    p, q = naive(aims, SIZE), naive(rows, SIZE)
    gains = []
    for row in rows:
        padded = [SIZE, SIZE, *row]
        grams = [(padded[j], padded[j + 1], padded[j + 2]) for j in range(len(row))]
        gains.append([np.log(0.7 * p(*gram) / q(*gram) + 0.3) for gram in grams])
    means = np.array([np.mean(some) if some else 0.0 for some in gains])
    full = [i for i, row in enumerate(rows) if row]
    np.testing.assert_allclose(plain.scores_[full], -means[full], rtol=1e-10, atol=1e-12)
    expected = [-(sum(gains[i]) + 5.0 * means.mean()) / (len(gains[i]) + 5.0) for i in full]
    np.testing.assert_allclose(shrunk.scores_[full], expected, rtol=1e-10, atol=1e-12)
    (spoke,) = plain.evidence(TokenRows.of([rows[3]], SIZE))
    assert len(spoke) == len(rows[3]) and -np.mean(spoke) == pytest.approx(plain.scores_[3])


def test_a_short_text_has_to_be_like_the_target_more_markedly_than_a_long_one():
    """Flukes of nine tokens come before long texts of the target's kind by the plain mean, and behind them shrunk."""
    r = np.random.default_rng(0)
    up = [(r.integers(40) + np.arange(80)) % 40 for _ in range(20)]
    for text in up:
        text[::8] = r.integers(0, 40, len(text[::8]))
    fluke = [(r.integers(40) + np.arange(9)) % 40 for _ in range(5)]
    noise = [r.integers(0, 40, 40) for _ in range(200)]
    pool = Pool(tokens=TokenRows.of([*up, *fluke, *noise], 40))
    target = Pool(tokens=TokenRows.of([(r.integers(40) + np.arange(60)) % 40 for _ in range(30)], 40))
    plain, shrunk = (MooreLewisSelector(prior=prior).fit(pool, target).select(20) for prior in (0.0, 40.0))
    assert len({*range(20, 25)} & {*plain.tolist()}) >= 4 and {*shrunk.tolist()} == {*range(20)}


def cross_entropy(model, other, share, rows):
    """Mean −log probability, nats per token, under a mixture of both models."""
    flat, lengths = rows.part(0, len(rows))
    keys = trigram_keys(flat, lengths, rows.size)
    p = model.probability(keys)
    p = p if other is None else share * p + (1.0 - share) * other.probability(keys)
    return float(-np.log(p).sum()) / max(len(rows.flat), 1)


def test_cross_entropy_falls_where_the_model_read_the_same_kind():
    rows = TokenRows.of([(np.arange(10) + i) % 40 for i in range(40)], 40)
    other = TokenRows.of(texts(40, 3, size=40), 40)
    same, far = KneserNey.of(rows), KneserNey.of(other)
    assert cross_entropy(same, far, 0.5, rows) < cross_entropy(far, None, 1.0, rows)
    assert cross_entropy(same, None, 1.0, TokenRows.of([], 40)) == 0.0


def test_tokens_on_disk_are_those_in_memory(tmp_path):
    rows = texts(50, 9)
    words = [" ".join(map(str, row)) for row in rows]
    spilled = TokenRows.spilled(words, lambda some: [[int(w) for w in t.split()] for t in some], SIZE, tmp_path / "t")
    assert [row.tolist() for row in spilled[:]] == rows and not (tmp_path / "t").exists()
    assert [row.tolist() for row in spilled.take([7, 3])] == [rows[7], rows[3]]
    with pytest.raises(SelectionError, match="tokens must be between 0 and 6"):
        TokenRows.of([[7]], SIZE)
