"""13-gram decontamination against a literal, word-by-word reading of Megatron-LM's rules."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from flatshift.selection.hygiene import Decontaminate
from flatshift.selection.hygiene.decontaminate import Decontaminator, split_text

VOCABULARY = [f"{a}{b}" for a in "bdfgklmnprst" for b in ("a", "en", "o", "urt")]


def sentences(draw: random.Random, words: int) -> str:
    """Words with a full stop (or another mark, or none for a while) here and there."""
    parts = []
    for _ in range(words):
        word = draw.choice(VOCABULARY)
        parts.append(word.capitalize() if draw.random() < 0.2 else word)
        parts.append(draw.choice([" "] * 8 + [". ", "! ", ", ", "?\n"]))
    return "".join(parts)


def words_and_places(text: str) -> tuple[list[str], list[tuple[int, int]]]:
    found = list(re.finditer(r"\w+", text))
    return [match.group().lower() for match in found], [match.span() for match in found]


def evaluation_ngrams(texts: Sequence[str], settings: Decontaminate) -> set[tuple[str, ...]]:
    found = set()
    for text in texts:
        words, _ = words_and_places(text)
        if settings.shortest <= len(words) < settings.ngram:
            found.add(tuple(words))
        found |= {tuple(words[i : i + settings.ngram]) for i in range(len(words) - settings.ngram + 1)}
    return found


def cut_slowly(text: str, ngrams: set[tuple[str, ...]], settings: Decontaminate) -> list[str]:
    """Megatron-LM's loop: find the first match, keep what is left of it, go on with what is right of it."""
    sizes = sorted({len(ngram) for ngram in ngrams}, reverse=True)
    pieces: list[str] = []
    rest = [text]
    while rest:
        part = rest.pop(0)
        words, places = words_and_places(part)
        starts = ((i, size) for i in range(len(words)) for size in sizes if i + size <= len(words))
        hit = next(((i, size) for i, size in starts if tuple(words[i : i + size]) in ngrams), None)
        if hit is None:
            pieces.append(part)
            continue
        start, end = places[hit[0]][0], places[hit[0] + hit[1] - 1][1]
        left = start - settings.margin
        while left > 0 and part[left] not in ".!?":
            left -= 1
        if left > 0 and left + 1 >= settings.min_chars:
            pieces.append(part[: left + 1])
        right = end + settings.margin
        while right < len(part) and part[right] not in ".!?":
            right += 1
        if len(part) - right - 1 >= settings.min_chars:
            rest.append(part[right + 1 :])
    return pieces


@pytest.mark.parametrize("seed", range(6))
def test_pieces_are_those_of_the_literal_rules(seed: int) -> None:
    draw = random.Random(seed)
    settings = Decontaminate(
        ngram=5, shortest=3, margin=draw.choice([0, 10, 40]), min_chars=draw.choice([1, 30, 80]), common=None
    )
    evaluation = [sentences(draw, draw.randrange(1, 12)) for _ in range(40)]
    ngrams = evaluation_ngrams(evaluation, settings)
    pool = []
    for _ in range(80):
        parts = [sentences(draw, draw.randrange(60)) for _ in range(draw.randrange(1, 6))]
        pool.append(" ".join(part + draw.choice(["", " ", draw.choice(evaluation).upper()]) for part in parts))
    finder = Decontaminator(settings, evaluation)
    for low in range(0, len(pool), 7):
        finder.match(pool[low : low + 7])
    rows, owner = finder.contaminated(np.ones(len(pool), dtype=bool))
    words = [words_and_places(text)[0] for text in pool]

    def holds(text: Sequence[str], some: set[tuple[str, ...]]) -> bool:
        return any(tuple(text[i : i + len(ngram)]) == ngram for ngram in some for i in range(len(text)))

    assert rows.tolist() == [row for row, text in enumerate(words) if holds(text, ngrams)]
    assert 5 < len(rows) < 80
    for row, match in zip(rows, owner, strict=True):
        assert holds(words[row], evaluation_ngrams([evaluation[match]], settings))
        assert not any(holds(words[row], evaluation_ngrams([evaluation[j]], settings)) for j in range(match))
    for text in pool:
        pieces = [text[start:end] for start, end in finder.cut(text)]
        assert pieces == cut_slowly(text, ngrams, settings)
        assert not any(holds(words_and_places(piece)[0], ngrams) for piece in pieces)
    assert finder.ngrams == len(ngrams)
    assert finder.diagnostics["too_short"] == sum(len(words_and_places(text)[0]) < 3 for text in evaluation)


def test_the_paper_s_numbers() -> None:
    """13 shared words in a long text: they go, with 200 characters on both sides and on to the ends of sentences."""
    shared = "one two three four five six seven eight nine ten eleven twelve thirteen"
    before = "".join(f"Before, sentence number {i:03d} stands. " for i in range(20))
    after = "".join(f"After, sentence number {i:03d} stands. " for i in range(20))
    text = before + shared + ". " + after
    finder = Decontaminator(Decontaminate(), [shared.upper() + "!"])
    (low, stop), (again, high) = finder.cut(text)
    assert (low, high) == (0, len(text))
    assert text[:stop].endswith("stands.") and text[stop - 1] == "."
    cut = text[stop:again]
    assert cut.count(shared) == 1
    left, right = cut.index(shared), len(cut) - cut.index(shared) - len(shared)
    assert 200 <= left < 240 and 200 <= right < 241, "200 characters, and on to the end of that sentence"
    assert finder.cut(shared) == [], "a short text loses everything"
    other = text.replace("seven", "7")
    assert finder.cut(other) == [(0, len(other))]


def test_pieces_too_short_too_many_and_texts_without_an_end() -> None:
    settings = Decontaminate(margin=2, min_chars=5, max_pieces=3)
    assert split_text("a" * 50, [(20, 25)], settings) == [], "no end of a sentence on either side"
    text = "Abcd efgh. XXXX YYYY. Zabcd efgh."
    assert split_text(text, [(11, 18)], settings) == [(0, 10), (21, 33)]
    assert split_text(text, [(11, 18)], Decontaminate(margin=2, min_chars=11)) == [(21, 33)]
    assert split_text(text, [(11, 18)], Decontaminate(margin=200, min_chars=5)) == []
    assert split_text(text, [(11, 18), (16, 20), (22, 27)], settings) == [(0, 10)], (
        "the second match went with the first"
    )
    assert split_text("", [], settings) == [(0, 0)]


def test_ordinary_phrases_are_told_by_their_number_in_the_pool_that_stands() -> None:
    phrase = "it is on the other hand to be said that this is not"
    leak = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda my nu"
    pool = [f"{i} {phrase} number {i}" for i in range(12)] + [leak] * 3 + [phrase.split()[0]]
    finder = Decontaminator(Decontaminate(common=10), [phrase, leak])
    finder.match(pool)
    rows, owner = finder.contaminated(np.ones(len(pool), dtype=bool))
    assert rows.tolist() == [12, 13, 14] and owner.tolist() == [1, 1, 1]
    assert finder.diagnostics["common"] == 1
    assert finder.cut(pool[0]) == [(0, len(pool[0]))], "a phrase is not cut either"
    standing = np.ones(len(pool), dtype=bool)
    standing[3:6] = False
    rows, _ = finder.contaminated(standing)
    assert rows.tolist() == [0, 1, 2, 6, 7, 8, 9, 10, 11, 12, 13, 14], "nine occurrences are contamination"
    assert Counter(finder._leak.tolist()) == {True: 2}
    every = Decontaminator(Decontaminate(common=None), [phrase, leak])
    every.match(pool)
    assert every.contaminated(np.ones(len(pool), dtype=bool))[0].tolist() == list(range(15))


def test_words_whose_lower_case_is_longer_keep_their_places() -> None:
    words = ["İstanbul", "DİYARBAKIR", "ﬁrst", "Straße", "naïve", "Ωmega", "déjà", "vu", "x1", "y_2", "314", "so"]
    text = "Before it. " + " ".join(words) + ". After it, a good while, nothing."
    finder = Decontaminator(Decontaminate(ngram=6, shortest=6, margin=0, min_chars=1), [" ".join(words)])
    finder.match([text])
    assert finder.contaminated(np.ones(1, dtype=bool))[0].tolist() == [0]
    assert [text[start:end] for start, end in finder.cut(text)] == ["Before it.", " After it, a good while, nothing."]


def test_evaluation_without_a_usable_text() -> None:
    finder = Decontaminator(Decontaminate(), ["too short", ""])
    finder.match(["any text at all", ""])
    assert finder.contaminated(np.ones(2, dtype=bool))[0].tolist() == []
    assert finder.diagnostics == {"ngrams": 0, "too_short": 2, "common": 0}
