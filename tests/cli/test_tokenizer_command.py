"""`flatshift tokenizer`: every figure by hand, and what it says of text that is not parallel."""

from __future__ import annotations

import json

import numpy as np
import pytest

from finetune.evaluate.fertility import Vocabulary, cut_texts
from finetune.models.backbone import open_backbone
from flatshift.cli import run
from tests.data_models import bert_tokenizer, byte_tokenizer, write_jsonl

ROWS = [
    {"lang": "en", "id": 1, "text": "The house is red."},
    {"lang": "en", "id": 2, "text": "A dog barks."},
    {"lang": "de", "id": 1, "text": "Das Haus ist rot."},
    {"lang": "de", "id": 2, "text": "Ein Hund bellt."},
    {"lang": "ka", "id": 9, "text": "სახლი წითელია."},
]


def test_figures_by_hand():
    tokenizer = open_backbone("flatshift-5m").tokenizer
    found = cut_texts(Vocabulary(tokenizer), [row["text"] for row in ROWS])
    ids = [tokenizer(row["text"], add_special_tokens=False)["input_ids"] for row in ROWS]
    np.testing.assert_array_equal(found.tokens, [len(one) for one in ids])
    np.testing.assert_array_equal(found.words, [4, 3, 4, 3, 2])
    assert sum(found.used.values()) == found.tokens.sum() and set(found.used) == {i for one in ids for i in one}
    for text, one, cut in zip([row["text"] for row in ROWS], ids, found.continued, strict=True):
        # a word is whole where one token is its text
        pieces = [tokenizer.decode([i]).strip() for i in one]
        whole = sum(word in pieces for word in text.rstrip(".").split())
        assert len(text.split()) - whole == cut
    assert found.parts[-1] > 0 and found.parts[0] == 0 and found.unknown.sum() == 0
    of = found.of(slice(0, 2))
    assert of["tokens_per_word"] == pytest.approx(found.tokens[:2].sum() / 7)
    assert of["bytes_per_token"] == pytest.approx(29 / found.tokens[:2].sum())


def test_bytes_and_unknown_words():
    found = cut_texts(Vocabulary(byte_tokenizer()), ["ab é"])
    assert found.tokens[0] == 5 and found.parts[0] == 2 and found.continued[0] == 2
    tokenizer = bert_tokenizer()
    found = cut_texts(Vocabulary(tokenizer), ["☃ ☃"])
    assert found.unknown[0] == 2


def test_the_command_with_parity_and_a_page(tmp_path, capsys):
    data = write_jsonl(tmp_path / "texts.jsonl", ROWS)
    out = tmp_path / "judged"
    words = ["--data", str(data), "--group-by", "lang", "--reference", "en", "--out", str(out)]
    assert run(["tokenizer", "flatshift-5m", "flatshift-t5-3m", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    groups = found["tokenizers"]["flatshift-5m"]["groups"]
    assert groups["en"]["parity"] == 1.0 and groups["de"]["parity"] > 1.0 and groups["ka"]["parity"] is None
    assert any("not" in note and "parallel" in note for note in found["notes"])
    assert "parity to en" in (out / "report.html").read_text()
    assert run(["report", str(out), "--out", str(tmp_path / "again.html")]) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["flatshift-5m"], "texts with --data"),
        (["flatshift-5m", "--data", "DATA", "--reference", "en"], "add --group-by"),
        (["flatshift-5m", "--data", "DATA", "--group-by", "lang", "--reference", "xx"], "no row has lang 'xx'"),
        (["flatshift-5m", "--data", "DATA", "--group-by", "land"], "no column 'land'"),
        (["DATA", "--data", "DATA"], "no tokenizer that can be read"),
        (["nowhere", "--data", "DATA"], "neither a shipped name"),
    ],
)
def test_mistakes_are_one_sentence(words, said, tmp_path, capsys):
    data = str(write_jsonl(tmp_path / "texts.jsonl", ROWS))
    assert run(["tokenizer", *(data if word == "DATA" else word for word in words)]) == 2
    assert said in capsys.readouterr().err
