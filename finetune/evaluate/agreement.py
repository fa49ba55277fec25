"""How far a written answer agrees with the given one: text, words, numbers, tagged spans. Pairs in, figures out.

Each function takes (answer, reference) and returns a number, or (part, whole) of a figure that is Σ part / Σ whole.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from fractions import Fraction

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_NUMBER = re.compile(r"(?<![\w.])[-−+]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:/\d+)?(?!\w)")
_MARK = "####"


def normalised(text: str) -> str:
    """Lower case, without punctuation and English articles, one blank between words: SQuAD's `normalize_answer`
    (Rajpurkar et al., arXiv 1606.05250)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def match_normalised(answer: str, reference: str) -> float:
    """1.0 where both are alike once `normalised`."""
    return float(normalised(answer) == normalised(reference))


def f1_words(answer: str, reference: str) -> float:
    """F1 of the words that the `normalised` texts share, as SQuAD's; 1 where both have none, 0 where one has."""
    ours, theirs = normalised(answer).split(), normalised(reference).split()
    if not ours or not theirs:
        return float(ours == theirs)
    shared = sum((Counter(ours) & Counter(theirs)).values())
    return 2.0 * shared / (len(ours) + len(theirs))


def number_of(text: str) -> Fraction | None:
    """The answer of a text, as an exact number: after the last `####` where there is one (GSM8K, arXiv 2110.14168),
    else the last number written. `1,200`, `−3.50` and `3/4` are numbers; `$` and `%` beside one do not matter."""
    _, mark, tail = text.rpartition(_MARK)
    found = _NUMBER.findall(tail if mark else text)
    for one in reversed(found[:1] if mark else found):
        try:
            return Fraction(one.replace(",", "").replace("−", "-").replace("+", ""))
        except (ValueError, ZeroDivisionError):
            continue
    return None


def numeric_match(answer: str, reference: str) -> float:
    """1.0 where the `number_of` the answer is that of the reference; an answer without a number is wrong."""
    said = number_of(answer)
    return float(said is not None and said == number_of(reference))


def has_number(answer: str, reference: str) -> float:
    """1.0 where the answer has a number at all."""
    return float(number_of(answer) is not None)


def spans(tags: str) -> set[tuple[str, int, int]]:
    """(type, first, last) of every entity of tags like `B-PER I-PER O`, separated by blanks.

    IOB2, IOB1 and IOBES, read leniently as seqeval's default does: an entity begins at B- or S-, where the type
    changes, and at I- or E- that no entity of its type precedes; it ends before O, B-, S- or another type, and after E-
    or S-.
    """
    found, start, kind = set(), 0, ""
    for place, tag in enumerate([*tags.split(), "O"]):
        mark, _, of = tag.partition("-")
        inside = mark in ("I", "E") and kind != "" and of == kind
        if kind and not inside:
            found.add((kind, start, place - 1))
            kind = ""
        if not inside and mark in ("B", "I", "E", "S"):
            start, kind = place, of or "_"
            if mark == "S":
                found.add((kind, place, place))
                kind = ""
        elif inside and mark == "E":
            found.add((kind, start, place))
            kind = ""
    return found


def span_f1(answer: str, reference: str) -> tuple[float, float]:
    """Twice the spans that agree in type and both ends, and those of both sides: micro F1 over all rows (seqeval)."""
    ours, theirs = spans(answer), spans(reference)
    return 2.0 * len(ours & theirs), float(len(ours) + len(theirs))


def span_precision(answer: str, reference: str) -> tuple[float, float]:
    """Spans that agree, of those of the answer."""
    ours = spans(answer)
    return float(len(ours & spans(reference))), float(len(ours))


def span_recall(answer: str, reference: str) -> tuple[float, float]:
    """Spans that agree, of those that are there."""
    theirs = spans(reference)
    return float(len(spans(answer) & theirs)), float(len(theirs))
