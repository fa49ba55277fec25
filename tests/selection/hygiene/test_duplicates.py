"""Exact and near-duplicates against brute force over sets, and against datasketch."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

import numpy as np
import pytest

from flatshift.selection.errors import SelectionError
from flatshift.selection.hashing import Shingler
from flatshift.selection.hygiene import NearDuplicates as Settings
from flatshift.selection.hygiene import duplicate_clusters, duplicates
from flatshift.selection.hygiene.duplicates import (
    ExactDuplicates,
    MinHasher,
    NearDuplicateGroups,
    choose_bands,
    normalise_text,
)
from flatshift.selection.hygiene.store import GrowingArray

WORDS = [f"{a}{b}{c}" for a in "bdfgkl" for b in "aeiou" for c in ("", "n", "rt", "st", "ll")]


def char_set(text: str, size: int = 5) -> set[str]:
    return {text[i : i + size] for i in range(len(text) - size + 1)} or ({text} if text else set())


def word_set(text: str, size: int) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[i : i + size]) for i in range(len(words) - size + 1)} or ({tuple(words)} if words else set())


def jaccard(a: set, b: set) -> float:
    return len(a & b) / len(a | b)


def corpus(seed: int, originals: int = 60, words: int = 40) -> list[str]:
    """Texts, each with some copies in which 0 to 8 words were replaced, all shuffled."""
    draw = random.Random(seed)
    texts = []
    for _ in range(originals):
        original = [draw.choice(WORDS) for _ in range(words)]
        texts.append(" ".join(original))
        for _ in range(draw.randrange(4)):
            copy = list(original)
            for place in draw.sample(range(words), draw.randrange(9)):
                copy[place] = draw.choice(WORDS)
            texts.append(" ".join(copy))
    draw.shuffle(texts)
    return texts


def components(sets: Sequence[set], threshold: float) -> list[int]:
    """The first row of each row's group, by comparing every pair."""
    label = list(range(len(sets)))
    for i in range(len(sets)):
        for j in range(i):
            if sets[i] and sets[j] and jaccard(sets[i], sets[j]) >= threshold:
                low, high = sorted((label[i], label[j]))
                label = [low if value == high else value for value in label]
    return label


def find(
    texts: Sequence[str], settings: Settings, *, batch: int = 50, alive: np.ndarray | None = None
) -> tuple[NearDuplicateGroups, np.ndarray, np.ndarray]:
    finder = NearDuplicateGroups(settings, seed=1, memory=1 << 26)
    batches = [texts[low : low + batch] for low in range(0, len(texts), batch)]
    for some in batches:
        finder.sign(some)
    finder.propose(np.ones(len(texts), dtype=bool) if alive is None else alive)
    for some in batches:
        finder.collect(some)
    return finder, *finder.resolve()


# ------------------------------------------------------------------------------------------------ exact


def test_normalisation_and_first_occurrence_match_a_dictionary() -> None:
    draw = random.Random(0)
    texts = [
        draw.choice(["one  Two", "ONE two", "one two\n", "ﬁnd", "find", "Straße", "STRASSE", "", " ", "x"])
        for _ in range(200)
    ]
    texts += ["e\u0301t\u00e9", "\u00e9te\u0301", "\ud800 broken"]
    finder = ExactDuplicates(memory=1 << 26)
    for low in range(0, len(texts), 7):
        finder.add([normalise_text(text) for text in texts[low : low + 7]])
    alive = np.array([draw.random() < 0.8 for _ in texts])
    seen: dict[str, int] = {}
    expected = [seen.setdefault(normalise_text(text), row) if alive[row] else row for row, text in enumerate(texts)]
    assert finder.first(alive).tolist() == expected
    assert normalise_text("one  Two") == normalise_text("ONE two\n") and normalise_text("ﬁnd") == "find"
    assert normalise_text("Straße") == normalise_text("STRASSE") and normalise_text(texts[200]) == normalise_text(
        texts[201]
    )
    assert finder.first(np.zeros(len(texts), dtype=bool)).tolist() == list(range(len(texts)))


# ------------------------------------------------------------------------------------------------ shingles


@pytest.mark.parametrize(("unit", "size"), [("char", 5), ("char", 1), ("char", 9), ("word", 1), ("word", 3)])
def test_shingles_are_equal_exactly_when_their_strings_are(unit, size: int) -> None:
    texts = [*corpus(2, originals=5), "ab", "", "abcd", "a" * 30, "déjà vu — 日本語のテキスト", "one two", " "]
    hashes, counts = Shingler(unit, size)(texts)
    assert counts.sum() == len(hashes)
    naive = []
    for text in texts:
        units = text if unit == "char" else text.replace("—", " ").split()
        runs = [tuple(units[i : i + size]) for i in range(len(units) - size + 1)] or ([tuple(units)] if units else [])
        naive.append(runs)
    assert counts.tolist() == [len(runs) for runs in naive]
    flat = [run for runs in naive for run in runs]
    pairs = set(zip(flat, hashes.tolist(), strict=True))
    assert len(pairs) == len({run for run, _ in pairs}) == len({value for _, value in pairs})


def test_shingles_do_not_depend_on_batches_and_are_the_same_on_every_machine(monkeypatch) -> None:
    texts = corpus(3, originals=20)
    whole, _ = Shingler("char", 5)(texts)
    alone = np.concatenate([Shingler("char", 5)([text])[0] for text in texts])
    np.testing.assert_array_equal(whole, alone)
    monkeypatch.setattr("flatshift.selection.hashing._TILE", 13)
    np.testing.assert_array_equal(whole, Shingler("char", 5)(texts)[0])
    windows = ["abcde", "bcdéf"]
    assert Shingler("char", 5)(windows)[0].tolist() == [spread_slowly([ord(c) for c in w]) for w in windows]
    codes = [int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little") for word in ("ab", "é")]
    assert Shingler("word", 2)(["ab é"])[0].tolist() == [spread_slowly(codes)]


def spread_slowly(codes: Sequence[int]) -> int:
    """The hash of one window in whole numbers: a polynomial, then the finaliser of SplitMix64."""
    value = 0
    for code in codes:
        value = (value * 0x9E3779B97F4A7C15 + code) % 2**64
    value = value * 0x9E3779B97F4A7C15 % 2**64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31


# ------------------------------------------------------------------------------------------------ MinHash


def test_signatures_estimate_jaccard_as_well_as_datasketch() -> None:
    datasketch = pytest.importorskip("datasketch")
    texts = corpus(4, originals=40)
    sets = [char_set(text) for text in texts]
    signatures = MinHasher(256, seed=3).signatures(*Shingler("char", 5)(texts))
    peers = []
    for some in sets:
        peer = datasketch.MinHash(num_perm=256, seed=3)
        peer.update_batch([shingle.encode() for shingle in some])
        peers.append(peer)
    draw = np.random.default_rng(0)
    pairs = draw.integers(0, len(texts), (400, 2))
    true = np.array([jaccard(sets[i], sets[j]) for i, j in pairs])
    ours = np.array([(signatures[:, i] == signatures[:, j]).mean() for i, j in pairs])
    peer_error = np.array([peers[i].jaccard(peers[j]) for i, j in pairs]) - true
    error = ours - true
    spread = np.sqrt(true * (1 - true) / 256)  # of an unbiased estimate from 256 independent maps
    informative = spread > 0
    assert abs((error[informative] / spread[informative]).mean()) < 0.25
    assert np.sqrt((error**2).mean()) < 1.15 * max(np.sqrt((peer_error**2).mean()), np.sqrt((spread**2).mean()))


def test_signatures_of_long_and_empty_texts(monkeypatch) -> None:
    texts = ["", "x" * 3 + "".join(corpus(5)), "abc", "", "defghij"]
    hashes, counts = Shingler("char", 5)(texts)
    whole = MinHasher(20, seed=0).signatures(hashes, counts)
    assert (whole[:, [0, 3]] == 0xFFFFFFFF).all()
    hasher = MinHasher(20, seed=0)
    maps = hasher.a[:, None].astype(np.uint64) * (hashes >> np.uint64(32)) + hasher.b[:, None]
    starts = np.cumsum(counts) - counts
    naive = [(maps[:, s : s + c] % 2**32).min(axis=1) for s, c in zip(starts, counts, strict=True) if c]
    np.testing.assert_array_equal(whole[:, [1, 2, 4]], np.stack(naive, axis=1))
    monkeypatch.setattr("flatshift.selection.hygiene.duplicates._TILE", 17)
    np.testing.assert_array_equal(whole, MinHasher(20, seed=0).signatures(hashes, counts))


def test_bands_reach_the_recall_with_as_many_rows_as_possible() -> None:
    for threshold, permutations, recall in [(0.8, 128, 0.95), (0.5, 128, 0.9), (0.9, 260, 0.99), (1.0, 16, 0.5)]:
        bands, rows = choose_bands(threshold, permutations, recall)
        assert bands * rows <= permutations
        assert 1 - (1 - threshold**rows) ** bands >= recall
        if rows < permutations:
            assert 1 - (1 - threshold ** (rows + 1)) ** (permutations // (rows + 1)) < recall
    with pytest.raises(SelectionError, match=r"near.recall: 4 permutations .* 0.344 at most"):
        choose_bands(0.1, 4, 0.9)


# ------------------------------------------------------------------------------------------------ near-duplicates


@pytest.mark.parametrize(("unit", "size", "threshold"), [("char", 5, 0.7), ("char", 5, 0.9), ("word", 2, 0.6)])
def test_groups_are_the_components_of_all_similar_pairs(unit, size: int, threshold: float) -> None:
    texts = corpus(6)
    sets = [char_set(text, size) if unit == "char" else word_set(text, size) for text in texts]
    settings = Settings(unit=unit, size=size, threshold=threshold, recall=0.999, permutations=256)
    finder, first, similarity = find(texts, settings)
    assert first.tolist() == components(sets, threshold)
    for row in np.flatnonzero(first != np.arange(len(texts))):
        assert similarity[row] == jaccard(sets[row], sets[first[row]])
    assert np.isnan(similarity[first == np.arange(len(texts))]).all()
    assert finder.diagnostics["left_out"] == 0
    assert 0 < (first != np.arange(len(texts))).sum() < finder.diagnostics["proposed"] + 1 <= len(texts) + 1


def test_no_pair_that_datasketch_finds_is_missed() -> None:
    datasketch = pytest.importorskip("datasketch")
    texts = corpus(7, originals=100)
    sets = [char_set(text) for text in texts]
    peer = datasketch.MinHashLSH(threshold=0.8, num_perm=128)
    hashes = []
    for row, some in enumerate(sets):
        one = datasketch.MinHash(num_perm=128)
        one.update_batch([shingle.encode() for shingle in some])
        peer.insert(row, one)
        hashes.append(one)
    _, first, _ = find(texts, Settings(threshold=0.8))
    pairs = [(i, j) for i, one in enumerate(hashes) for j in peer.query(one) if j < i]
    similar = [(i, j) for i, j in pairs if jaccard(sets[i], sets[j]) >= 0.8]
    assert len(similar) > 30
    assert all(first[i] == first[j] for i, j in similar)


def test_order_decides_who_is_first_and_batches_decide_nothing() -> None:
    texts = corpus(8)
    settings = Settings(threshold=0.7)
    _, first, similarity = find(texts, settings)
    for batch in (1, 7, len(texts)):
        _, again, same = find(texts, settings, batch=batch)
        np.testing.assert_array_equal(first, again)
        np.testing.assert_array_equal(similarity, same)
    _, backwards, _ = find(texts[::-1], settings)
    last = len(texts) - 1

    def groups(label: np.ndarray, place: Sequence[int]) -> set[frozenset[int]]:
        found: dict[int, set[int]] = {}
        for row, value in enumerate(label.tolist()):
            found.setdefault(value, set()).add(place[row])
        return {frozenset(group) for group in found.values()}

    assert groups(first, range(last + 1)) == groups(backwards, range(last, -1, -1))
    assert all(value <= row for row, value in enumerate(first.tolist()))


def test_rows_that_do_not_take_part_and_texts_without_shingles() -> None:
    texts = ["the very same words here", "", "the very same words here", "", "the very same words here!", "—"]
    alive = np.array([False, True, True, True, True, True])
    _, first, similarity = find(texts, Settings(unit="word", size=3), alive=alive)
    assert first.tolist() == [0, 1, 2, 3, 2, 5], "texts without a word are left to exact comparison"
    assert similarity[4] == 1.0


def test_a_chain_joins_texts_that_are_not_similar_themselves() -> None:
    base = [f"w{i}" for i in range(40)]
    texts = [" ".join(base[shift : shift + 30]) for shift in (0, 3, 6)]
    settings = Settings(unit="word", size=1, threshold=0.8, recall=0.999, permutations=512)
    _, first, similarity = find(texts, settings)
    assert first.tolist() == [0, 0, 0]
    assert similarity[1:].tolist() == [27 / 33, 24 / 36]


def test_a_crowd_is_compared_within_a_window_and_the_rest_counted(monkeypatch) -> None:
    """All texts share their band keys (one band of one row that is always the same), but few are similar."""
    monkeypatch.setattr(duplicate_clusters, "WINDOW", 16)
    monkeypatch.setattr(
        duplicates, "band_keys", lambda signatures, bands, rows: np.zeros((bands, signatures.shape[1]), np.uint64)
    )
    texts = [f"text number {i} " + WORDS[i % 150] * 12 for i in range(40)]
    texts += [texts[0] + "x", texts[25] + "x"]
    finder, first, _ = find(texts, Settings(threshold=0.6, permutations=1, recall=0.5))
    assert finder.bands == 1
    assert first[40] == 0, "the first of the crowd is compared with every row"
    assert first[41] == 25, "within the window"
    reach = [(i, j) for j in range(42) for i in range(j) if i == 0 or j - i <= duplicate_clusters.WINDOW]
    label = first.tolist()
    apart = sum(label[i] != label[j] for j in range(42) for i in range(j))
    assert finder.diagnostics["left_out"] == apart - sum(label[i] != label[j] for i, j in reach)


def test_arrays_on_disk_hold_the_same(monkeypatch) -> None:
    texts = corpus(9)
    _, first, similarity = find(texts, Settings(threshold=0.7))
    monkeypatch.setattr(duplicates, "GrowingArray", lambda dtype, limit=0: GrowingArray(dtype, 100))
    _, spilled, same = find(texts, Settings(threshold=0.7), batch=5)
    np.testing.assert_array_equal(first, spilled)
    np.testing.assert_array_equal(similarity, same)
    growing = GrowingArray(np.int32, limit=16)
    expected: list[int] = []
    for part in ([1, 2, 3], [], [4], [5, 6, 7, 8, 9], [10]):
        growing.append(np.array(part))
        expected += part
        assert growing.array().tolist() == expected and growing.length == len(expected)


def test_a_text_of_ten_megabytes() -> None:
    draw = np.random.default_rng(0)
    long = draw.integers(97, 123, 10_000_000, dtype=np.uint8).tobytes().decode()
    finder, first, similarity = find([long, "short text", long[:5_000_000] + "!" + long[5_000_000:]], Settings())
    assert first.tolist() == [0, 1, 0]
    assert 0.999 < similarity[2] < 1
    assert finder.diagnostics["proposed"] == 2
