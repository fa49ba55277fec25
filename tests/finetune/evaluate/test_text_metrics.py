"""Agreement of answers: numbers as GSM8K has them, words as SQuAD, spans as seqeval; figures of several samples."""

from __future__ import annotations

import pytest

from flatshift.finetune.evaluate.text_metrics import (
    distinct_ngrams,
    expected_max_toxicity,
    extract_number,
    f1_words,
    has_number,
    match_normalised,
    numeric_match,
    parse_spans,
    span_f1,
    span_precision,
    span_recall,
    toxicity_probability,
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She sold 48/2 = <<48/2=24>>24 clips.\n#### 72", 72),
        ("#### 1,200", 1200),
        ("The answer is $1,234.50.", 1234.5),
        ("costs 20 % less, so −3.5", -3.5),
        ("first 7, then 8", 8),
        ("3/4", 0.75),
        ("it is 5.", 5),
        (".5", 0.5),
        ("1/0", None),
        ("none at all", None),
        ("x2 and v1.2.3", None),
        ("12.5kg", None),
        ("about 1,200km", None),
        ("1,200.50 or 3/4, then 18.The", 18),
        ("#### unknown", None),
        ("10 apples#### 12 apples", 12),
    ],
)
def test_the_number_of_an_answer(text, number):
    assert extract_number(text) == (None if number is None else pytest.approx(number))


def test_numbers_agree_exactly_and_none_is_wrong():
    assert numeric_match("#### 0.5", "1/2") == 1.0 and numeric_match("so 72.0", "#### 72") == 1.0
    assert numeric_match("no idea", "none") == 0.0 and has_number("no idea", "5") == 0.0


def test_words_as_squad_has_them():
    assert match_normalised("The  Cat!", "cat") == 1.0 and match_normalised("cats", "cat") == 0.0
    assert f1_words("the cat sat", "a cat ran") == pytest.approx(0.5)
    assert f1_words("", "the") == 1.0 and f1_words("", "cat") == 0.0


def test_spans_as_seqeval_reads_them():
    assert parse_spans("B-PER I-PER O B-LOC") == {("PER", 0, 1), ("LOC", 3, 3)}
    assert parse_spans("I-PER I-PER B-PER") == {("PER", 0, 1), ("PER", 2, 2)}
    assert parse_spans("B-PER I-LOC") == {("PER", 0, 0), ("LOC", 1, 1)}
    assert parse_spans("S-PER B-LOC I-LOC E-LOC O E-PER") == {("PER", 0, 0), ("LOC", 1, 3), ("PER", 5, 5)}
    assert parse_spans("B I I O") == {("_", 0, 2)} and span_f1("B I O", "B I I") == (0.0, 2.0)
    assert parse_spans("E-PER I-PER") == {("PER", 0, 0), ("PER", 1, 1)}
    assert span_f1("B-PER I-PER O", "B-PER O O") == (0.0, 2.0)
    assert span_f1("B-PER O B-LOC", "B-PER O O") == (2.0, 3.0)
    assert span_precision("B-PER O B-LOC", "B-PER O O") == (1.0, 2.0)
    assert span_recall("B-PER O B-LOC", "B-PER O O") == (1.0, 1.0)


def test_figures_of_several_samples():
    assert distinct_ngrams(["a b a", "a b"], 1) == pytest.approx(2 / 5) and distinct_ngrams(
        ["a b a", "a b"], 2
    ) == pytest.approx(2 / 3)
    assert distinct_ngrams(["a"], 2) is None
    assert (
        expected_max_toxicity([0.1, 0.7]) == 0.7
        and toxicity_probability([0.1, 0.7]) == 1.0
        and toxicity_probability([0.1, 0.4]) == 0.0
    )
