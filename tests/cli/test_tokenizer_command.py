"""`flatshift tokenizer`: every figure by hand, and what it says of text that is not parallel."""

from __future__ import annotations

import json

import numpy as np
import pytest

from flatshift.cli import run
from flatshift.finetune.evaluate.text import Vocabulary, tokenize_texts
from flatshift.finetune.models.backbone import open_backbone
from tests.support.data_models import bert_tokenizer, byte_tokenizer, write_jsonl

ROWS = [
    {"lang": "en", "id": 1, "text": "The house is red."},
    {"lang": "en", "id": 2, "text": "A dog barks."},
    {"lang": "de", "id": 1, "text": "Das Haus ist rot."},
    {"lang": "de", "id": 2, "text": "Ein Hund bellt."},
    {"lang": "ka", "id": 9, "text": "სახლი წითელია."},
]


def test_figures_by_hand():
    tokenizer = open_backbone("flatshift-5m").tokenizer
    found = tokenize_texts(Vocabulary(tokenizer), [row["text"] for row in ROWS])
    ids = [tokenizer(row["text"], add_special_tokens=False)["input_ids"] for row in ROWS]
    np.testing.assert_array_equal(found.tokens, [len(one) for one in ids])
    np.testing.assert_array_equal(found.words, [4, 3, 4, 3, 2])
    assert sum(found.used.values()) == found.tokens.sum() and set(found.used) == {i for one in ids for i in one}
    for text, one, cut in zip([row["text"] for row in ROWS], ids, found.split_words, strict=True):
        # a word is whole where one token is its text
        pieces = [tokenizer.decode([i]).strip() for i in one]
        whole = sum(word in pieces for word in text.rstrip(".").split())
        assert len(text.split()) - whole == cut
    assert found.byte_tokens[-1] > 0 and found.byte_tokens[0] == 0 and found.unknown.sum() == 0
    ratios = found.metrics(slice(0, 2))
    assert ratios["tokens_per_word"] == pytest.approx(found.tokens[:2].sum() / 7)
    assert ratios["bytes_per_token"] == pytest.approx(29 / found.tokens[:2].sum())


def test_bytes_and_unknown_words():
    found = tokenize_texts(Vocabulary(byte_tokenizer()), ["ab é"])
    assert found.tokens[0] == 5 and found.byte_tokens[0] == 2 and found.split_words[0] == 2
    tokenizer = bert_tokenizer()
    found = tokenize_texts(Vocabulary(tokenizer), ["☃ ☃"])
    assert found.unknown[0] == 2


def test_the_command_with_parity_and_a_page(tmp_path, capsys):
    again = {**next(row for row in ROWS if row["lang"] == "de"), "text": "x" * 500}
    data = write_jsonl(tmp_path / "texts.jsonl", [*ROWS, again])
    out = tmp_path / "judged"
    words = ["--data", str(data), "--group-by", "lang", "--reference", "en", "--out", str(out)]
    assert run(["tokenizer", "flatshift-5m", "flatshift-t5-3m", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    groups = found["tokenizers"]["flatshift-5m"]["groups"]
    assert groups["en"]["parity"] == 1.0 and 1.0 < groups["de"]["parity"] < 5.0 and groups["ka"]["parity"] is None
    assert any(note.startswith("1 rows have the 'id' of an earlier row") for note in found["notes"])
    assert any("not" in note and "parallel" in note for note in found["notes"])
    assert "parity to en" in (out / "report.html").read_text()
    assert run(["report", str(out), "--out", str(tmp_path / "again.html")]) == 0
    capsys.readouterr()
    assert run(["tokenizer", "flatshift-5m", "--data", str(data), "--out", str(tmp_path / "told")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "told" / "report.html")
    assert run(["tokenizer", "flatshift-5m", "--data", str(data), "--group-by", "id", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == {"1": 3, "2": 2, "9": 1}, "ids of rows may repeat"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["flatshift-5m"], "texts with --data"),
        (["flatshift-5m", "--data", "DATA", "--reference", "en"], "add --group-by"),
        (["flatshift-5m", "--data", "DATA", "--group-by", "lang", "--reference", "xx"], "no row has lang 'xx'"),
        (["flatshift-5m", "--data", "DATA", "--group-by", "land"], "no column 'land'"),
        (["DATA", "--data", "DATA"], "no tokenizer that can be read"),
        (["nowhere", "--data", "DATA"], "neither a shipped name"),
        (
            ["flatshift-5m", "--data", "DATA", "--group-by", "lang", "--parallel", "id"],
            "--reference compares; add that",
        ),
        (
            ["flatshift-5m", "--data", "DATA", "--group-by", "lang", "--reference", "en", "--parallel", "sentence"],
            "--parallel: no row of 'en' has a column 'sentence'",
        ),
    ],
)
def test_mistakes_are_one_sentence(words, said, tmp_path, capsys):
    data = str(write_jsonl(tmp_path / "texts.jsonl", ROWS))
    assert run(["tokenizer", *(data if word == "DATA" else word for word in words)]) == 2
    assert said in capsys.readouterr().err


LEARN = ["--vocabulary", "300", "--bytes", "3000", "--hidden", "32", "--layers", "1"]


def texts(path, count=60):
    return str(
        write_jsonl(path, [{"lang": "ab"[i % 2], "text": f"The House number {i} is Red. " * 4} for i in range(count)])
    )


def test_schemes_are_learnt_and_judged(tmp_path, capsys):
    data, out = texts(tmp_path / "texts.jsonl"), tmp_path / "learnt"
    words = ["tokenizer", "train", "--data", data, "--out", str(out), *LEARN, "--seeds", "2"]
    assert run([*words, "--schemes", "default", "case", "--group-by", "lang", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((out / "tokenizers.json").read_text())
    assert list(found["models"]) == ["default", "case"] and found["models"]["default"]["beside"] is None
    cells = {name: [cell["bits_per_byte"] for cell in m["cells"].values()] for name, m in found["models"].items()}
    assert found["models"]["case"]["bits_per_byte"]["value"] == pytest.approx(np.mean(cells["case"]))
    beside = found["models"]["case"]["beside"]
    assert beside["value"] == pytest.approx(np.mean(cells["case"]) - np.mean(cells["default"])) and beside["n"] == 2
    assert set(found["tokenizers"]["case"]["groups"]) <= {"a", "b"}
    assert found["trained"]["documents"] + found["trained"]["held_out"] == 60
    page = (out / "report.html").read_text()
    assert "Small models trained alike" in page and "bits per byte" in page
    assert run(["tokenizer", str(out / "case"), str(out / "default/tokenizer.json"), "--data", data]) == 0
    assert run(["report", str(out), "--out", str(tmp_path / "again.html")]) == 0
    assert run([*words, "--schemes", "default"]) == 2  # it is finished and holds other schemes


def test_tokenizers_alone_have_their_figures(tmp_path, capsys):
    words = ["--data", texts(tmp_path / "texts.jsonl"), "--out", str(tmp_path / "learnt"), "--vocabulary", "300"]
    assert run(["tokenizer", "train", *words, "--seeds", "0", "--schemes", "case"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("case: ") and "tokens/word" in printed.out and "small models" not in printed.err


def test_a_killed_study_goes_on(tmp_path, capsys, monkeypatch):
    from flatshift.experiments.workflows import tokenizer

    data, out = texts(tmp_path / "texts.jsonl"), tmp_path / "learnt"
    words = ["tokenizer", "train", "--data", data, *LEARN, "--seeds", "2", "--schemes", "default", "--json"]
    whole, calls = tokenizer.train_and_evaluate, []

    def counted(*given, seed, **more):
        calls.append(seed)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return whole(*given, seed=seed, **more)

    monkeypatch.setattr(tokenizer, "train_and_evaluate", counted)
    assert run([*words, "--out", str(out)]) == 3
    assert not (out / "tokenizers.json").exists()
    assert run([*words, "--out", str(out), "--vocabulary", "301"]) == 2  # not what was begun
    capsys.readouterr()
    assert run([*words, "--out", str(out)]) == 0
    assert calls == [0, 1, 1]  # the first seed was kept
    again = json.loads(capsys.readouterr().out)
    monkeypatch.undo()
    assert run([*words, "--out", str(tmp_path / "whole")]) == 0
    assert json.loads(capsys.readouterr().out)["models"] == again["models"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--vocabulary", "200"], "take 259"),
        (["--seeds", "-1"], "0 or more"),
        (["--held-out", "1"], "between 0 and 1"),
        (["--hidden", "40"], "multiple of 32"),
        (["--schemes", "case", "case"], "names case twice"),
        (["--seeds", "0", "--hidden", "64"], "and --seeds 0 trains none"),
        (["--schemes", "words"], "invalid choice"),
        (["--group-by", "land"], "no column 'land'"),
    ],
)
def test_mistakes_of_learning_are_one_sentence(words, said, tmp_path, capsys):
    data, out = texts(tmp_path / "texts.jsonl", 8), tmp_path / "learnt"
    assert run(["tokenizer", "train", "--data", data, "--out", str(out), *words]) == 2
    assert said in capsys.readouterr().err and not out.exists()
