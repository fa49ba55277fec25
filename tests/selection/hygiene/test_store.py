"""Rows that share a key, under any limit of memory, against dictionaries and loops over all pairs."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest

from flatshift.selection.hygiene import (
    Hygiene,
    NearDuplicates,
    ReferenceTexts,
    clean_pool,
    duplicate_clusters,
    duplicates,
    store,
)
from flatshift.selection.hygiene.duplicate_clusters import DisjointSets, DuplicateClusters, first_matches
from flatshift.selection.hygiene.store import GrowingArray, sort_keys

ROW = store._ROW_BYTES


def keyed(keys: np.ndarray, rows: np.ndarray, block: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for low in range(0, len(keys), block):
        yield keys[low : low + block], rows[low : low + block]


def drawn(seed: int, count: int, kinds: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys, one kind of which is as frequent as all others together, and rows with gaps."""
    r = np.random.default_rng(seed)
    values = r.integers(0, 1 << 64, kinds, dtype=np.uint64)
    chosen = np.where(r.random(count) < 0.5, 0, r.integers(0, kinds, count))
    return values[chosen], np.cumsum(r.integers(1, 4, count))


@pytest.fixture(params=[1 << 18, 50])
def block(request, monkeypatch) -> int:
    monkeypatch.setattr(store, "_BLOCK", request.param)
    return int(request.param)


# ------------------------------------------------------------------------------------------------ sorting


@pytest.mark.parametrize("kinds", [1, 5, 10_000])
@pytest.mark.parametrize("held", [1, 7, 300, 997, 10_000])
def test_keys_come_in_order_and_equal_ones_by_row_whatever_is_held(kinds: int, held: int, block: int) -> None:
    keys, rows = drawn(kinds, 997, kinds)
    order = np.lexsort((rows, keys))
    found = list(sort_keys(keyed(keys, rows, 100), held * ROW))
    np.testing.assert_array_equal(np.concatenate([some for some, _ in found]), keys[order])
    np.testing.assert_array_equal(np.concatenate([some for _, some in found]), rows[order])
    assert all(len(some) <= block for some, _ in found)
    assert list(sort_keys(iter(()), held * ROW)) == []


def test_a_sort_takes_the_memory_that_it_was_given(monkeypatch) -> None:
    monkeypatch.setattr(store, "_BLOCK", 1 << 12)
    count, memory = 1_000_000, 2 << 20
    r = np.random.default_rng(0)

    def blocks() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for low in range(0, count, 5000):
            yield r.integers(0, 1 << 40, 5000, dtype=np.uint64), np.arange(low, low + 5000)

    tracemalloc.start()
    last, seen = -1, 0
    for keys, _ in sort_keys(blocks(), memory):
        assert last <= int(keys[0]) and (keys[1:] >= keys[:-1]).all()
        last, seen = int(keys[-1]), seen + len(keys)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seen == count
    assert peak < memory + (2 << 20), "the runs, and two arrays' buffers; the keys and rows alone are 16 MB"


# ------------------------------------------------------------------------------------------------ crowds


@pytest.mark.parametrize("held", [3, 10_000])
@pytest.mark.parametrize("kinds", [1, 3, 400])
def test_crowds_are_those_of_a_dictionary(kinds: int, held: int, block: int) -> None:
    keys, rows = drawn(kinds, 600, kinds)
    naive: dict[int, list[int]] = {}
    for key, row in zip(keys.tolist(), rows.tolist(), strict=True):
        naive.setdefault(key, []).append(row)
    expected = [naive[key] for key in sorted(naive) if len(naive[key]) > 1]
    found = DuplicateClusters(keyed(keys, rows, 64), held * ROW)
    assert found.rows.tolist() == [row for crowd in expected for row in crowd]
    assert found.number.tolist() == [number for number, crowd in enumerate(expected) for _ in crowd]


@pytest.mark.parametrize("held", [5, 10_000])
@pytest.mark.parametrize(("piece", "window"), [(1000, 3), (7, 3), (4, 9), (1, 2)])
def test_pairs_join_what_is_similar_and_those_left_out_are_counted(
    piece: int, window: int, held: int, block: int, monkeypatch
) -> None:
    monkeypatch.setattr(duplicate_clusters, "PIECE", piece)
    monkeypatch.setattr(duplicate_clusters, "WINDOW", window)
    for seed in range(6):
        draw = random.Random(seed)
        kind = [draw.randrange(20) for _ in range(120)]  # rows of one kind are similar
        keys = np.array([0 if draw.random() < 0.4 else draw.randrange(1, 30) for _ in kind], dtype=np.uint64)
        groups, compared = DisjointSets(np.arange(len(kind))), set()
        groups.join(np.array([0, 7]), np.array([60, 100]))
        label = list(range(len(kind)))
        label[60], label[100] = 0, 7
        found = DuplicateClusters(keyed(keys, np.arange(len(kind)), 50), held * ROW)
        for one, other in found.pairs(groups):
            assert (groups.of(one) != groups.of(other)).all()
            compared |= set(zip(other.tolist(), one.tolist(), strict=True))
            similar = np.array([kind[i] == kind[j] for i, j in zip(one, other, strict=True)])
            groups.join(one[similar], other[similar])
        members = [[row for row in range(len(kind)) if keys[row] == key] for key in range(30)]
        together = {(i, j) for crowd in members for b, j in enumerate(crowd) for i in crowd[:b]}
        reach = {
            (crowd[a], crowd[b])
            for crowd in members
            for b in range(len(crowd))
            for a in range(b)
            if a == 0 or b - a <= window
        }
        for i, j in reach:
            if kind[i] == kind[j]:
                low, high = sorted((label[i], label[j]))
                label = [low if value == high else value for value in label]
        assert groups.of(np.arange(len(kind))).tolist() == label
        assert compared <= reach and {(i, j) for i, j in reach if label[i] != label[j]} <= compared
        apart = {(i, j) for i, j in together - reach if label[i] != label[j]}
        assert found.left_out(groups) == len(apart)


def test_leaders_tell_apart_what_shares_a_key_by_chance(block: int) -> None:
    draw = random.Random(3)
    values = [(draw.randrange(40), draw.randrange(3)) for _ in range(400)]
    alive = [row for row in range(400) if draw.random() < 0.8]
    seen: dict[tuple[int, int], int] = {}
    expected = [seen.setdefault(values[row], row) if row in set(alive) else row for row in range(400)]
    keys, second = np.array(values, dtype=np.uint64).T
    rows = np.array(alive)
    found = first_matches(400, keyed(keys[rows], rows, 33), lambda some: second[some], 20 * ROW)
    assert found.tolist() == expected


# ------------------------------------------------------------------------------------------------ the whole


def texts_of(count: int, seed: int = 0) -> list[str]:
    """Fresh texts, repeated ones, near copies, and a crowd that begins alike."""
    draw = random.Random(seed)

    def words(n: int) -> list[str]:
        return [draw.choice("bcdfghkl") + draw.choice("aeiou") + draw.choice("mnrst") for _ in range(n)]

    texts: list[str] = []
    for row in range(count):
        if row % 5 == 4:
            copy = texts[draw.randrange(row)].split()
            copy[draw.randrange(len(copy))] = draw.choice(words(3))
            texts.append(" ".join(copy))
        elif row % 7 == 6:
            texts.append("one page like every other of this site is here " * 3 + " ".join(words(5)))
        else:
            texts.append(" ".join(words(12)))
    return texts


def test_a_limit_that_forces_everything_onto_the_disk_changes_no_bit(monkeypatch) -> None:
    texts = texts_of(1200)
    settings = Hygiene(exact=True, near=NearDuplicates(threshold=0.7))
    references = [ReferenceTexts("target", texts[:40:3])]
    whole = clean_pool(texts, settings, references=references)
    monkeypatch.setattr(GrowingArray.__init__, "__defaults__", (1 << 8,))
    monkeypatch.setattr(store, "_BLOCK", 90)
    monkeypatch.setattr(duplicate_clusters, "PIECE", 70)
    monkeypatch.setattr(store, "_ROW_BYTES", (1 << 27) // 100)  # runs of a hundred keys
    spilled = clean_pool(texts, Hygiene(**{**vars(settings), "memory_gib": 0.25}), references=references)
    for name in ("rule", "value", "match"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(spilled, name))
    compared = [found.diagnostics["near"].pop("compared") for found in (whole, spilled)]
    assert whole.diagnostics == spilled.diagnostics and min(compared) > 100
    names = [str(row) for row in range(len(texts))]
    assert list(whole.drops(names)) == list(spilled.drops(names))
    assert whole.counts() == spilled.counts() and min(whole.counts().values()) > 10


def test_memory_does_not_grow_with_the_pool(monkeypatch) -> None:
    monkeypatch.setattr(GrowingArray.__init__, "__defaults__", (1 << 10,))
    monkeypatch.setattr(store, "_BLOCK", 256)
    monkeypatch.setattr(duplicate_clusters, "PIECE", 256)
    monkeypatch.setattr(store, "_ROW_BYTES", (1 << 27) // 256)
    monkeypatch.setattr(duplicates, "_BATCH", 1 << 12)
    monkeypatch.setattr(duplicates, "GrowingArray", lambda dtype, limit=0: GrowingArray(dtype))
    settings = Hygiene(exact=True, near=NearDuplicates(permutations=16, recall=0.5), memory_gib=0.25)

    def peak(count: int) -> int:
        texts = texts_of(count)
        clean_pool(texts[:50], settings)  # what is imported and cached
        tracemalloc.start()
        clean_pool(texts, settings, batch_characters=1 << 12)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    assert (peak(2400) - peak(800)) / 1600 < 20, "bytes a record; arrays of rows in memory would take a hundred"
