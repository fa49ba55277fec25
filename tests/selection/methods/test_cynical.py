"""Cynical selection: equal to the naive greedy, whatever is kept in memory; serves what is still missing."""

import math
from collections import Counter

import numpy as np
import pytest

from flatshift.selection import CynicalSelector, MooreLewisSelector, Pool, SelectionError, TokenRows
from flatshift.selection.methods import cynical

SIZE = 30


def ngrams(text):
    """Uni-, bi- and trigrams; two borders stand before a text."""
    padded = [SIZE, SIZE, *text]
    return [tuple(padded[i + 3 - order : i + 3]) for order in (1, 2, 3) for i in range(len(text))]


def texts(count, seed, most=SIZE):
    r = np.random.default_rng(seed)
    return [r.zipf(1.4, size=r.integers(1, 25)).clip(max=most - 1).tolist() for _ in range(count)]


def naive(pool, target, budget, mixture, prior, minimum, repeats):
    """(rows in the order taken, gain of each): every text looked at anew before every choice, until so many readings
    and as many tokens as they have in the mean are taken."""
    weights = {g: c / sum(map(len, target)) for g, c in Counter(g for t in target for g in ngrams(t)).items()}
    known, tokens = Counter(g for t in pool for g in ngrams(t)), sum(map(len, pool))
    wanted = budget * tokens / len(pool)
    kappa = (1 - mixture) / mixture * wanted
    base = {g: kappa * (known[g] + 1) / (tokens + 1) for g in weights}
    held: Counter = Counter()
    taken: list[int] = []
    gains = []
    while len(taken) < budget or sum(len(pool[row]) for row in taken) < wanted:
        best = (0.0, -1)
        for row, text in enumerate(pool):
            if taken.count(row) == repeats or len(text) < minimum:
                continue
            times = Counter(g for g in ngrams(text) if g in weights)
            gain = sum(w * math.log1p(times[g] / (base[g] + held[g])) for g, w in weights.items() if g in times)
            gain /= len(text) + prior
            if gain > best[0] + 1e-15:
                best = (gain, row)
        if best[1] < 0:
            break
        gains.append(best[0] * wanted / 3)
        taken.append(best[1])
        held.update(g for g in ngrams(pool[best[1]]) if g in weights)
    return taken, gains


@pytest.mark.parametrize("looks", [1, 20, 1000])
@pytest.mark.parametrize("mixture", [0.1, 0.67, 0.95])
@pytest.mark.parametrize(("prior", "minimum", "repeats"), [(0.0, 1, 1), (15.0, 8, 1), (15.0, 8, 3), (15.0, 8, 99)])
def test_is_the_naive_greedy(mixture, prior, minimum, repeats, looks, monkeypatch):
    monkeypatch.setattr(cynical, "_BLOCK", 7)
    monkeypatch.setattr(cynical, "_LOOKS", looks)
    pool, target = texts(150, 1), texts(20, 2, most=12)
    taken, gains = naive(pool, target, 30, mixture, prior, minimum, repeats)
    selector = CynicalSelector(mixture=mixture, prior=prior, minimum=minimum, repeats=repeats, budget=30)
    selector.fit(Pool(tokens=TokenRows.of(pool, SIZE)), Pool(tokens=TokenRows.of(target, SIZE)))
    assert selector.diagnostics_["taken"] == len(taken) >= 30
    assert selector.diagnostics_["passes"] == 1 if looks == 1000 else looks == 20 or selector.diagnostics_["passes"] > 1
    assert selector.select(len(taken)).tolist() == taken
    first = [taken.index(row) for row in dict.fromkeys(taken)]
    np.testing.assert_allclose(-selector.scores_[[taken[i] for i in first]], [gains[i] for i in first], rtol=1e-12)
    assert (len(first) == len(taken)) == (repeats == 1) and selector.diagnostics_["distinct_taken"] == len(first)
    order = selector.select(150).tolist()
    assert order[: len(taken)] == taken and not set(order[len(taken) :]) & set(taken)
    assert len(set(order[len(taken) :])) == 150 - len(taken)
    assert selector.ranks()[list(dict.fromkeys(taken))].tolist() == list(range(1, len(first) + 1))


def test_what_is_chosen_lowers_the_cross_entropy_by_what_is_said():
    pool, target = texts(150, 3), texts(20, 4, most=12)
    selector = CynicalSelector(budget=30).fit(
        Pool(tokens=TokenRows.of(pool, SIZE)), Pool(tokens=TokenRows.of(target, SIZE))
    )
    known, tokens = Counter(g for t in pool for g in ngrams(t)), sum(map(len, pool))
    taken = selector.diagnostics_["taken"]
    held = Counter(g for row in selector.select(taken).tolist() for g in ngrams(pool[row]))
    kappa = 0.33 / 0.67 * 30 * tokens / len(pool)
    aims = [g for t in target for g in ngrams(t)]
    fall = sum(math.log1p(held[g] / (kappa * (known[g] + 1) / (tokens + 1))) for g in aims) / len(aims)
    assert selector.diagnostics_["gain_of_selection"] == pytest.approx(fall, rel=1e-12)


def test_both_halves_of_a_target_are_served_better_than_by_moore_lewis():
    r = np.random.default_rng(5)
    common = [r.integers(0, 10, size=20).tolist() for _ in range(400)]
    first = [r.choice([10, 11, 12], size=20).tolist() for _ in range(60)]
    second = [(r.choice([20, 21, 22], size=10).tolist() + r.integers(0, 10, size=10).tolist()) for _ in range(60)]
    pool, target = common + first[:40] + second[:40], first[40:] + second[40:]
    sides = Pool(tokens=TokenRows.of(pool, SIZE)), Pool(tokens=TokenRows.of(target, SIZE))
    kinds = [np.bincount(np.array([0] * 400 + [1] * 40 + [2] * 40)[selector.fit(*sides).select(30)], minlength=3)
             for selector in (CynicalSelector(budget=30), MooreLewisSelector())]  # fmt: skip
    assert kinds[0][1] >= 8 and kinds[0][2] >= 8 and kinds[0][0] == 0
    assert min(kinds[1][1:]) < min(kinds[0][1:])


def test_evidence_names_the_tokens_that_the_target_has():
    pool, target = texts(80, 6), [[3, 4, 5, 3, 4, 5]]
    selector = CynicalSelector(budget=5)
    assert not selector.explains
    selector.fit(Pool(tokens=TokenRows.of(pool, SIZE)), Pool(tokens=TokenRows.of(target, SIZE)))
    (gains,) = selector.evidence(TokenRows.of([[9, 3, 4, 5, 8]], SIZE))
    assert gains[0] == gains[4] == 0.0 and 0.0 < gains[1] < gains[2] < gains[3]


def test_where_little_of_the_pool_holds_what_the_target_holds():
    pool = [[1] * 9, [2, 3] * 5, [1] * 9, [4, 2, 3] * 3, [2, 2], [1, 2] * 6]
    sides = Pool(tokens=TokenRows.of(pool, SIZE)), Pool(tokens=TokenRows.of([[2, 3, 2, 3]], SIZE))
    selector = CynicalSelector(budget=5, repeats=1).fit(*sides)
    assert selector.diagnostics_["taken"] == 3 and set(selector.select(3).tolist()) == {1, 3, 5}
    assert selector.select(6).tolist()[3:] == [0, 2, 4], "without a gain by file order, too short behind all"
    with pytest.raises(SelectionError, match="no target text holds a single token; cynical"):
        selector.fit(sides[0], Pool(tokens=TokenRows.of([[], []], SIZE)))
    sides = Pool(tokens=TokenRows.of(pool, 1 << 21)), Pool(tokens=TokenRows.of([[2]], 1 << 21))
    with pytest.raises(SelectionError, match="more than the 2,097,150 of a trigram's key"):
        selector.fit(*sides)


def test_no_text_ties_with_the_last_that_was_chosen():
    """Bounds of texts with repeats inside reach the last gain taken; one step of rounding keeps them behind it."""
    r = np.random.default_rng(0)
    for _ in range(60):
        pool = [r.integers(0, 50, r.integers(8, 40)).tolist() for _ in range(120)]
        for row in range(0, 120, 3):
            pool[row] = (r.integers(0, 50, 3).tolist() * 12)[:30]
        target = [r.integers(0, 50, 20).tolist() for _ in range(6)] + [(r.integers(0, 50, 3).tolist() * 8)[:20]]
        selector = CynicalSelector(budget=int(r.integers(5, 60)))
        selector.fit(Pool(tokens=TokenRows.of(pool, 50)), Pool(tokens=TokenRows.of(target, 50)))
        taken = selector.diagnostics_["taken"]
        assert sorted(selector.select(120).tolist()) == list(range(120)) and selector.ties(taken) == 0
        assert selector.scores_[selector.select(taken)].max() < np.delete(selector.scores_, selector.readings_).min()
