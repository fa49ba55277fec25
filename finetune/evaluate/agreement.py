"""Agreement of a generated answer with the reference: text, words, numbers and tagged spans.

Each function takes (answer, reference) and returns a number, or (part, whole) of a metric that is Σ part / Σ whole.
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


def normalize_answer(text: str) -> str:
    """Normalise as SQuAD's `normalize_answer` (Rajpurkar et al., arXiv 1606.05250): lower case, no punctuation or
    English articles, single blanks between words."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def match_normalised(answer: str, reference: str) -> float:
    """Return 1.0 if both are equal once `normalize_answer`."""
    return float(normalize_answer(answer) == normalize_answer(reference))


def f1_words(answer: str, reference: str) -> float:
    """Return SQuAD's F1 of the words shared by the `normalize_answer` texts; 1 if both are empty, 0 if one is."""
    ours, theirs = normalize_answer(answer).split(), normalize_answer(reference).split()
    if not ours or not theirs:
        return float(ours == theirs)
    shared = sum((Counter(ours) & Counter(theirs)).values())
    return 2.0 * shared / (len(ours) + len(theirs))


def extract_number(text: str) -> Fraction | None:
    """Return the final answer of a text as an exact number: after the last `####` if there is one (GSM8K, arXiv
    2110.14168), else the last number. `1,200`, `−3.50` and `3/4` are numbers; an adjacent `$` or `%` is ignored."""
    _, mark, tail = text.rpartition(_MARK)
    found = _NUMBER.findall(tail if mark else text)
    for one in reversed(found[:1] if mark else found):
        try:
            return Fraction(one.replace(",", "").replace("−", "-").replace("+", ""))
        except (ValueError, ZeroDivisionError):
            continue
    return None


def numeric_match(answer: str, reference: str) -> float:
    """Return 1.0 if the `extract_number` the answer equals that of the reference; an answer without a number is
    wrong."""
    said = extract_number(answer)
    return float(said is not None and said == extract_number(reference))


def has_number(answer: str, reference: str) -> float:
    """Return 1.0 if the answer contains a number."""
    return float(extract_number(answer) is not None)


def parse_spans(tags: str) -> set[tuple[str, int, int]]:
    """Return (type, first, last) of every entity of tags like `B-PER I-PER O`, separated by blanks.

    IOB2, IOB1 and IOBES, parsed leniently like seqeval's default: an entity starts at B- or S-, where the type changes,
    and at I- or E- not preceded by an entity of its type; it ends before O, B-, S- or another type, and after E- or S-.
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
    """Return twice the spans that agree in type and both ends, and the number of spans on both sides: micro F1 over all
    examples (seqeval)."""
    ours, theirs = parse_spans(answer), parse_spans(reference)
    return 2.0 * len(ours & theirs), float(len(ours) + len(theirs))


def span_precision(answer: str, reference: str) -> tuple[float, float]:
    """Return the number of spans that agree, and of spans in the answer."""
    ours = parse_spans(answer)
    return float(len(ours & parse_spans(reference))), float(len(ours))


def span_recall(answer: str, reference: str) -> tuple[float, float]:
    """Return the number of spans that agree, and of spans in the reference."""
    theirs = parse_spans(reference)
    return float(len(parse_spans(answer) & theirs)), float(len(theirs))
