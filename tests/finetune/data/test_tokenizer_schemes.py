"""The schemes of the mGPT study: lossless on any text, each doing what it says, and read by transformers as written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from flatshift.finetune.data.tokenizer_schemes import FLAG, LEAST, OPERATORS, SCHEMES, find_capitals, train_tokenizer
from flatshift.finetune.errors import UserError

TEXTS = [
    "The cat sat on the mat. The dog sat on the Log in Berlin, the cat sat on the mat.",
    "In 2024 we paid 1,234.50 = 1000 + 234.5 for NASA's Größe Über Äpfel; Ελλάδα, Москва, İstanbul.",
    "the the the cat cat cat house houses housing 日本語 12 12 12 34+34 34+34",
] * 4
HOSTILE = [
    "", " ", "\r\n\t ", " A", "A", "A A", f"{FLAG}a", f"{FLAG} a", FLAG, "\x0f", "\x0f.", "\x0f,", f"\x0f{FLAG}\x0f,A",
    f" {FLAG}", "\x0fA", "ẞß İi ıI ǅ Ǆ ſ K", "ΣΣς Σας", "<eos> <bos>A<pad>", "<0x41>", "é\u0301", "\u0000",
    "\U0001f600👩‍👩‍👧",
    "  NASA  Paid 12+3=15 ", "\ue000", "\U0010ffff", "ABCabc" * 50,
]  # fmt: skip


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    return {scheme: train_tokenizer(scheme, TEXTS, vocabulary=400) for scheme in SCHEMES}


def pieces(tokenizer: Any, text: str) -> list[str]:
    """What each token is by itself."""
    return [tokenizer.decode([i]) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]


def back(tokenizer: Any, text: str) -> str:
    return str(tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_hostile_texts_come_back(made, scheme):
    for text in [*HOSTILE, *TEXTS]:
        assert back(made[scheme], text) == text


@settings(max_examples=150, deadline=None)
@given(
    st.text(st.characters(codec="utf-8"), max_size=40)
    | st.text(st.sampled_from(f"{FLAG}\x0f.,aAbB éÉ ßẞσςΣ09+-<>0x"), max_size=30)
)
def test_any_text_comes_back(made, text):
    for tokenizer in made.values():
        assert back(tokenizer, text) == text


@pytest.mark.parametrize("scheme", ["case", "combined"])
def test_a_flag_stands_for_each_capital(made, scheme):
    tokenizer = made[scheme]
    small, large = pieces(tokenizer, "on the mat"), pieces(tokenizer, "on The mat")
    flag = tokenizer(FLAG, add_special_tokens=False)["input_ids"]
    assert len(flag) == 2  # a flag that a text has itself is written otherwise
    assert [p for p in large if p != FLAG] == small and large.count(FLAG) == 1
    assert large.index(FLAG) == small.index(" the")  # before the blank, so the word is the same token
    assert pieces(tokenizer, "NASA").count(FLAG) == 4
    vocabulary = [tokenizer.decode([i]) for i in range(len(tokenizer))]
    assert not any(FLAG in piece and piece != FLAG for piece in vocabulary)  # it is merged with nothing
    for c in "ABCÜÄΕМ":  # capitals of the training text are in no token
        assert c in find_capitals(TEXTS) and not any(
            c in p and len(p) > 1 and not p.startswith("<") for p in vocabulary
        )


def test_default_keeps_capitals(made):
    assert FLAG not in pieces(made["default"], "The cat") and "The" in "".join(pieces(made["default"], "The cat"))


@pytest.mark.parametrize("scheme", ["arithmetic", "combined"])
def test_digits_and_operators_stand_alone(made, scheme):
    tokenizer = made[scheme]
    assert pieces(tokenizer, "12+34")[-5:] == ["1", "2", "+", "3", "4"]
    vocabulary = [tokenizer.decode([i]) for i in range(3, len(tokenizer))]
    assert not any(len(p) > 1 and any(c.isdigit() or c in OPERATORS for c in p) for p in vocabulary)
    assert any(len(p) > 1 and any(c.isdigit() for c in p) for p in map(made["default"].decode, range(3, 400)))


def test_characters_and_bytes_of_the_rest(made):
    tokenizer = made["character"]
    assert pieces(tokenizer, "the cat") == list("the cat")
    names = tokenizer.convert_ids_to_tokens(tokenizer("☃", add_special_tokens=False)["input_ids"])
    assert names == ["<0xE2>", "<0x98>", "<0x83>"]
    few = train_tokenizer("character", ["aaab bc"], vocabulary=LEAST + 2)
    assert len(few) == LEAST + 2 and {"a", "b"} <= few.get_vocab().keys() and "c" not in few.get_vocab()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_saved_is_what_others_read(made, scheme, tmp_path: Path):
    made[scheme].save_pretrained(tmp_path)
    read, plain = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert len(read) <= 400
    for text in [*HOSTILE, *TEXTS[:3]]:
        ids = made[scheme](text, add_special_tokens=False)["input_ids"]
        assert read(text, add_special_tokens=False)["input_ids"] == ids == plain.encode(text).ids
        assert read.decode(ids) == text == plain.decode(ids, skip_special_tokens=False)


def test_capitals_lead_back():
    found = find_capitals(["Éa İ ẞ K Ǆ"])
    assert {*"ABZ", "É", "Ǆ"} <= {*found} and not {"İ", "ẞ", "\u212a"} & {*found}


@pytest.mark.parametrize(
    ("scheme", "texts", "vocabulary", "said"),
    [
        ("words", TEXTS, 400, "there are default, case"),
        ("case", TEXTS, 200, "bytes and special tokens take 259"),
        ("case", ["", ""], 400, "no text"),
    ],
)
def test_refusals(scheme, texts, vocabulary, said):
    with pytest.raises(UserError, match=said):
        train_tokenizer(scheme, texts, vocabulary=vocabulary)
