"""Documents: files of plain text, one document each, and texts longer than a row, read in pieces."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from flatshift.cli import run
from flatshift.experiments.data.splits import prepare_data, read_splits
from flatshift.experiments.recipe import from_mapping, from_override, load_recipe, resume_recipe
from flatshift.finetune.data.example import IGNORE
from flatshift.finetune.data.formats import iter_records
from flatshift.finetune.errors import UserError
from flatshift.finetune.models.backbone import open_backbone
from tests.support.data_models import write_jsonl

FAST = ["--train.steps", "2", "--train.batch_size", "2", "--train.max_length", "32", "--train.eval_every", "0"]
FAST += ["--eval.bootstrap", "20", "--eval.cold", "0", "--train.peak_tflops", "1", "--train.precision", "fp32"]


def text(number: int, words: int) -> str:
    return " ".join(f"word{number} says {i}" for i in range(words))


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Twenty notes, some long, in two directories, one of them packed; a README beside rows."""
    monkeypatch.chdir(tmp_path)
    for number in range(20):
        file = tmp_path / "notes" / ("deep" if number % 4 == 0 else "") / f"{number:02}.md"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"# Note {number}\r\n\r\n{text(number, 3 if number % 2 else 40)}\r\n", encoding="utf-8")
    (tmp_path / "one.txt.gz").write_bytes(gzip.compress("\ufeffa single text".encode()))
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "README.md").write_text("# What this is", encoding="utf-8")
    write_jsonl(tmp_path / "rows" / "a.jsonl", [{"text": text(i, 4)} for i in range(20)])
    return tmp_path


def prepared(recipe: str, files: list[str], **keys: object):
    laid = {"data.train.files": files, "data.holdout": 0, "train.max_length": 24, **keys}
    return prepare_data(load_recipe(recipe, [from_mapping(laid)]).recipe)


@pytest.mark.parametrize("begins", [True, False], ids=["bos", "no bos"])
def test_every_token_of_a_long_document_is_supervised_once(corpus: Path, monkeypatch, begins: bool) -> None:
    opened = open_backbone("flatshift-5m")
    tokenizer = opened.tokenizer
    if not begins:
        from flatshift.finetune.data import encoding

        whole = encoding.SpecialTokens.of
        monkeypatch.setattr(
            encoding.SpecialTokens, "of", classmethod(lambda cls, *a, **k: dataclass_without_prefix(whole(*a, **k)))
        )
    found = prepared("language-model", ["notes/*.md"])
    assert any("of 15 documents are longer than train.max_length = 24 tokens and read in" in one for one in found.notes)
    assert all(len(example.input_ids) <= 24 for example in found.train)
    by_document: dict[str, list] = {}
    for example in found.train:
        by_document.setdefault(example.where.partition("#")[0], []).append(example)
    assert len(by_document) == 15 and len({example.id for example in found.train}) == len(found.train)
    for where, pieces in by_document.items():
        (record,) = iter_records(Path(where.rpartition(":")[0]))
        ids = [*tokenizer(record.values["text"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        learnt = [label for piece in pieces for label in piece.labels if label != IGNORE]
        assert learnt == (ids if begins else ids[1:]), "in order, each once"
        assert sum(piece.bytes for piece in pieces) >= len(record.values["text"].encode()) - (0 if begins else 8)
        if begins:
            assert all(piece.input_ids[0] == tokenizer.bos_token_id for piece in pieces)
        for before, after in pairwise(pieces):
            seen = after.input_ids[: after.labels.index(next(x for x in after.labels if x != IGNORE))]
            assert seen[-1] == before.input_ids[-1], "what comes before is read, not learnt again"


def dataclass_without_prefix(specials):
    from dataclasses import replace

    return replace(specials, prefix=())


def test_an_encoder_reads_pieces_too(corpus: Path) -> None:
    keys = {"task": {"kind": "masked-lm"}, "backbone": "flatshift-encoder-3m"}
    found = prepared("language-model", ["notes"], **keys)
    tokenizer = open_backbone("flatshift-encoder-3m").tokenizer
    (record,) = iter_records(Path("notes/02.md"))
    whole = [
        token if label == IGNORE else label
        for example in found.train
        if "02.md:1" in example.where
        for token, label in zip(example.input_ids, example.labels, strict=True)
    ]
    special = set(tokenizer.all_special_ids)
    wanted = tokenizer(record.values["text"], add_special_tokens=False)["input_ids"]
    assert [token for token in whole if token not in special] == wanted and len(wanted) > 24
    found = prepared("language-model", ["notes/02.md"], **keys, **{"data.holdout": 0.2})
    assert [len(one) > 0 for one in (found.train, found.dev, found.test)] == [True] * 3, "its end is held out"


def test_files_of_text_are_documents(corpus: Path) -> None:
    (record,) = iter_records(Path("notes/01.md"))
    assert record.values == {"text": f"# Note 1\n\n{text(1, 3)}"}
    assert [one.values for one in iter_records(Path("one.txt.gz"))] == [{"text": "a single text"}]
    long = {"train.max_length": 1024}
    assert len(prepared("language-model", ["notes/**/*.md"], **long).train) == 20
    assert len(prepared("language-model", ["notes"], **long).train) == 15, (
        "the files of a directory, not of those in it"
    )
    assert len(prepared("language-model", ["rows"], **long).train) == 20, "a README beside rows is no document"
    with pytest.raises(UserError, match=r"rows/\*: matches README\.md, a document, and files of records; name either"):
        prepared("language-model", ["rows/*"])
    (corpus / "bad.txt").write_bytes(b"a\xff")
    with pytest.raises(UserError, match=r"bad\.txt:1: not valid UTF-8 \(byte 2 of the file\)"):
        prepared("language-model", ["bad.txt"])


def test_documents_go_through_the_commands(corpus: Path, capsys: pytest.CaptureFixture) -> None:
    assert run(["train", "language-model", "--data", "notes", "--out", "lm", *FAST]) == 0
    said = capsys.readouterr().err
    assert "documents are longer than train.max_length = 32 tokens and read in" in said and "are cut" not in said
    found = json.loads((corpus / "lm" / "eval.json").read_text(encoding="utf-8"))
    assert found["test"]["loss"]["n"] == found["dev"]["loss"]["n"] == 2, "intervals are over documents, not pieces"
    assert run(["predict", "lm", "--data", "notes/02.md", "notes/03.md", "--out", "said.jsonl"]) == 0
    lines = [json.loads(line) for line in Path("said.jsonl").read_text(encoding="utf-8").splitlines()]
    tokenizer = open_backbone("flatshift-5m").tokenizer
    for line in lines:  # with the end of the document
        assert line["tokens"] == len(tokenizer(line["text"], add_special_tokens=False)["input_ids"]) + 1
        assert np.log(line["perplexity"]) == pytest.approx(line["nats"] / line["tokens"])
    assert len(lines) == 2 and "were cut" not in capsys.readouterr().err
    assert run(["eval", "lm", "--data", "one.txt.gz"]) == 0
    words = ["--pool", "notes", "--target", "notes/deep/*.md", "--budget", "3", "--method", "knn", "--out", "picked"]
    assert run(["select", *words, "--select.embedder.dim", "4", "--select.checks", "false"]) == 0
    chosen = [json.loads(line) for line in Path("picked/selected.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(chosen) == 3 and all(line["text"].startswith("# Note") for line in chosen)


def test_groups_of_documents_in_pieces(corpus: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["--task.kind", "masked-lm", "--backbone", "flatshift-encoder-3m", *FAST]
    assert run(["train", "language-model", "--data", "notes", "--out", "mlm", *words]) == 0
    rows = [{"text": text(1 + i, 3), "lang": "ab"[i % 2]} for i in range(4)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    capsys.readouterr()
    assert run(["eval", "mlm", "--data", "rows.jsonl", "--group-by", "lang", "--json"]) == 0
    groups = json.loads(capsys.readouterr().out)["group_by"]["figures"]["mlm"]["data"]
    assert {name: figures["loss"]["n"] for name, figures in groups.items()} == {"a": 2, "b": 2}


@pytest.mark.parametrize("breaks", ["\n\n", " "])
def test_of_a_single_document_its_end_is_held_out(corpus: Path, capsys: pytest.CaptureFixture, breaks: str) -> None:
    words = [f"token{i} of it" for i in range(300)]
    whole = "".join(word + (breaks if i % 10 == 9 else " ") for i, word in enumerate(words)).strip()
    Path("book.txt").write_text(whole, encoding="utf-8")
    assert run(["train", "language-model", "--data", "book.txt", "--out", "one", *FAST]) == 0
    said = capsys.readouterr().err
    assert "data.holdout: the document is cut, 0.1 of it for dev and test from its end each" in said
    figures = json.loads(Path("one/eval.json").read_text(encoding="utf-8"))
    assert figures["test"]["loss"]["value"] > 0 and figures["dev"]["loss"]["value"] > 0
    splits = read_splits(resume_recipe(corpus / "one").recipe)
    pieces = [part[0].values["text"] for part in (splits.train, splits.dev, splits.test)]
    assert breaks.join(pieces) == whole and [round(len(piece) / len(whole), 1) for piece in pieces] == [0.8, 0.1, 0.1]

    Path("more.txt").write_text(whole.replace("token", "sign"), encoding="utf-8")
    for files, more, counts in (
        (["book.txt", "more.txt"], [], (2, 2, 2)),
        (["book.txt"], ["--data.dev.files", "notes", "--data.holdout", "0.2"], (1, 15, 1)),
    ):
        out = f"with {len(files)}"
        assert run(["train", "language-model", "--data", *files, *more, "--out", out, *FAST]) == 0
        told = "data.holdout: each of 2 documents is cut" if not more else "is cut, 0.2 of it for test from its end\n"
        assert told in capsys.readouterr().err
        splits = read_splits(resume_recipe(corpus / out).recipe)
        assert tuple(map(len, (splits.train, splits.dev, splits.test))) == counts

    Path("short.txt").write_text("word", encoding="utf-8")
    assert run(["train", "language-model", "--data", "short.txt", "--out", "none", *FAST]) == 2
    assert "data.holdout: 0.1 of 1 rows" in capsys.readouterr().err


SPLIT = ["--train.overlong", "split"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*SPLIT, "--task.kind", "completion"], "task.kind: completion has none; set it to null, drop or refuse"),
        ([*SPLIT, "--train.truncation", "left"], "train.overlong: split does not go with train.truncation"),
        (["--data.label_noise", "0.1"], "train.overlong: split does not go with data.label_noise"),
    ],
)
def test_pieces_go_only_with_what_they_can(corpus: Path, capsys, words: list[str], message: str) -> None:
    assert run(["train", "language-model", "--data", "notes", *words, "--out", "none"]) == 2
    assert message in capsys.readouterr().err and not (corpus / "none").exists()


@pytest.mark.parametrize("setting", [("task.kind", "completion"), ("train.truncation", "left")], ids=" ".join)
def test_the_pieces_of_a_shipped_recipe_give_way_to_what_has_none(setting: tuple[str, str]) -> None:
    resolved = load_recipe("language-model", [from_override(*setting)])
    assert resolved.recipe.train.overlong is None and setting[0] in resolved.origins["train.overlong"]
    assert load_recipe("language-model", []).recipe.train.overlong == "split"
