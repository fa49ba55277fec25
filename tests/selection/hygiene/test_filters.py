"""Length, language and repetition filters against slow readings of their rules."""

from __future__ import annotations

import random
import re
from collections import Counter

import numpy as np
import pytest

from flatshift.selection.hygiene import Language, LengthFilter, Repetition
from flatshift.selection.hygiene import filters as module
from flatshift.selection.hygiene.filters import (
    _COMMON,
    _SCRIPTS,
    check_language,
    check_length,
    check_repetition,
    detect_language,
    repetition_shares,
)
from flatshift.selection.hygiene.hygiene_config import KNOWN

# The first article of the Universal Declaration of Human Rights and a line of everyday speech.
SENTENCES = {
    "en": "All human beings are born free and equal in dignity and rights. They were not at home when we called.",
    "de": "Alle Menschen sind frei und gleich an Würde und Rechten geboren. Wir haben sie nicht zu Hause gefunden.",
    "fr": "Tous les êtres humains naissent libres et égaux en dignité et en droits. Nous ne les avons pas vus.",
    "es": "Todos los seres humanos nacen libres e iguales en dignidad y derechos. No los hemos visto en la casa.",
    "it": "Tutti gli esseri umani nascono liberi ed eguali in dignità e diritti. Non sono a casa, ma al mare.",
    "pt": "Todos os seres humanos nascem livres e iguais em dignidade e em direitos. Não os vimos em casa.",
    "nl": "Alle mensen worden vrij en gelijk in waardigheid en rechten geboren. Wij hebben ze niet gezien.",
    "sv": "Alla människor är födda fria och lika i värde och rättigheter. Vi har inte sett dem på länge.",
    "pl": "Wszyscy ludzie rodzą się wolni i równi pod względem swej godności i swych praw. Nie było ich w domu.",
    "ru": "Все люди рождаются свободными и равными в своём достоинстве и правах. Они не были у нас.",
    "uk": "Всі люди народжуються вільними і рівними у своїй гідності та правах. Вони ще не були у нас.",
    "el": "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια και τα δικαιώματα.",
    "ja": "すべての人間は、生れながらにして自由であり、かつ、尊厳と権利とについて平等である。",
    "zh": "人人生而自由,在尊严和权利上一律平等。",
    "ko": "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.",
    "hi": "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है।",
    "ar": "يولد جميع الناس أحرارا متساوين في الكرامة والحقوق. وقد كان من على هذا إلى ذلك.",
}


# ------------------------------------------------------------------------------------------------ length


def test_length_counts_characters_without_outer_blanks_and_words() -> None:
    texts = ["", "  \n", "one", "  one two ", "one two three four", "x" * 30]
    broken = {
        rule: bad.tolist() for rule, bad, _ in check_length(texts, LengthFilter(min_chars=4, max_chars=20, max_words=3))
    }
    assert broken == {
        "fewer than 4 characters": [True, True, True, False, False, False],
        "more than 20 characters": [False, False, False, False, False, True],
        "fewer than 0 words": [False] * 6,
        "more than 3 words": [False, False, False, False, True, False],
    }
    ((rule, bad, figure),) = check_length(texts, LengthFilter())
    assert rule == "fewer than 1 characters" and bad.tolist() == [True, True] + [False] * 4
    assert figure.tolist() == [0, 0, 3, 7, 18, 30]


# ------------------------------------------------------------------------------------------------ language


@pytest.mark.parametrize("code", SENTENCES)
def test_sentences_are_recognised(code: str) -> None:
    found, share = detect_language(SENTENCES[code])
    assert found == code and 0.1 <= share <= 1


def test_language_keeps_what_is_wanted_and_what_it_cannot_tell() -> None:
    texts = [*SENTENCES.values(), "H2SO4 + NaOH", "Beryl's singing always sends me to sleep.", "", "12 34"]
    assert all(detect_language(text)[0] is None for text in ("H2SO4 + NaOH", "", "12 34"))
    for keep in (("en",), ("de", "ja"), tuple(SENTENCES)):
        rule, broken, share = check_language(texts, Language(keep=keep))
        assert rule == "not " + " or ".join(keep)
        assert broken[: len(SENTENCES)].tolist() == [code not in keep for code in SENTENCES]
        assert not broken[len(SENTENCES)] and not broken[-2:].any() and len(share) == len(texts)
    _, broken, _ = check_language(texts, Language(undecided="drop"))
    assert not broken[0] and broken[1 : len(SENTENCES) + 1].all() and broken[-2:].all()
    assert (*_COMMON, *_SCRIPTS) == KNOWN
    assert len(set(KNOWN)) == len(KNOWN) and set(SENTENCES) <= set(KNOWN)


def test_a_preferred_language_needs_a_clear_rival() -> None:
    """`in`, `of` and `is` are Dutch and English; each language has one common word more for itself in turn."""
    assert detect_language("in of is")[0] == "en" and detect_language("in of is", prefer=("nl",))[0] == "nl"
    assert detect_language("in of is wordt")[0] == "nl" and detect_language("in of is wordt", prefer=("en",))[0] == "en"
    assert detect_language("in of is wordt niet", prefer=("en",))[0] == "nl", "two words more decide"
    assert detect_language("in Qxyz") == (None, 0.5) and detect_language("in is " + "qx " * 30)[0] is None


# ------------------------------------------------------------------------------------------------ repetition


def shares_slowly(text: str, top: int, repeated: int) -> dict[str, float]:
    found = {}
    for name, pieces in (("lines", text.split("\n")), ("paragraphs", re.split("\n\n+", text))):
        pieces = [piece.strip() for piece in pieces if piece.strip()]
        again = [piece for place, piece in enumerate(pieces) if piece in pieces[:place]]
        one = len(pieces) < 2
        found[f"repeated {name}"] = 0.0 if one else len(again) / len(pieces)
        found[f"characters in repeated {name}"] = 0.0 if one else sum(map(len, again)) / sum(map(len, pieces))
    words = text.lower().replace(".", "").split()
    total = sum(map(len, words))
    for n in range(2, 2 + top):
        grams = Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))
        most = max(grams.values(), default=0)
        longest = max((sum(map(len, gram)) for gram, times in grams.items() if times == most), default=0)
        found[f"characters in the commonest {n}-gram"] = min(most * longest / total, 1) if most > 1 else 0.0
    for n in range(5, 5 + repeated):
        seen: set[tuple[str, ...]] = set()
        inside: set[int] = set()
        for place in range(len(words) - n + 1):
            gram = tuple(words[place : place + n])
            if gram in seen:
                inside |= set(range(place, place + n))
            seen.add(gram)
        found[f"characters in repeated {n}-grams"] = sum(len(words[i]) for i in inside) / total if total else 0.0
    return found


def repetitive(seed: int) -> list[str]:
    draw = random.Random(seed)
    texts = ["", "one", "one one", "the the the the the the"]
    for _ in range(60):
        vocabulary = [f"{a}{b}" for a in "abcdefg" for b in ("", "xx", "yyyy")][: draw.randrange(2, 20)]
        phrase = [draw.choice(vocabulary) for _ in range(12)]
        words: list[str] = []
        while len(words) < draw.randrange(5, 80):
            words += phrase[: draw.randrange(1, 12)] if draw.random() < 0.4 else [draw.choice(vocabulary)]
            if draw.random() < 0.2:
                words[-1] += draw.choice([".\n", "\n", "\n\n"])
        texts.append(" ".join(words))
        texts.append("".join(draw.choice(["one line\n", "a second line \n", "\n", words[0] + "\n"]) for _ in range(9)))
    return texts


def test_shares_match_a_slow_count(monkeypatch) -> None:
    texts = repetitive(0)
    fast = repetition_shares(texts)
    for row, text in enumerate(texts):
        slow = shares_slowly(text, 3, 6)
        assert {name: float(values[row]) for name, values in fast.items()} == pytest.approx(slow), text
    assert all(0 < values.max() <= 1 for values in fast.values())
    monkeypatch.setattr(module, "_WORDS_AT_ONCE", 10)
    for name, values in repetition_shares(texts).items():
        np.testing.assert_array_equal(values, fast[name])
    assert list(repetition_shares([])) == list(fast)


def test_repetition_judges_long_enough_texts_by_its_limits() -> None:
    draw = random.Random(1)
    plain = " ".join(f"{draw.choice('bcdfg')}{draw.choice('aeiou')}{i}" for i in range(60))
    texts = [plain, "over and over " * 30, "short and short and short", "\n".join([plain, "a line of it"] * 2)]
    broken = {rule: bad for rule, bad, _ in check_repetition(texts, Repetition())}
    assert not any(bad[0] or bad[2] for bad in broken.values())
    assert broken["characters in the commonest 2-gram above 0.2"][1]
    assert broken["repeated lines above 0.3"].tolist() == [False, False, False, True]
    assert broken["characters in repeated 10-grams above 0.1"].tolist() == [False, True, False, True]
    loose = Repetition(lines=1, line_chars=1, top_ngrams=(), repeated_ngrams=(1.0,), min_words=0)
    found = list(check_repetition(texts, loose))
    assert len(found) == 5 and not any(bad.any() for _, bad, _ in found)
