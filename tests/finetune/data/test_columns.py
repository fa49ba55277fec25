"""Examples as columns: what goes in comes out, in memory and from disk; damage is found and made good."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import time

import numpy as np
import pytest

from flatshift.finetune import cache_directory
from flatshift.finetune.data.batches import TrainingDataLoader
from flatshift.finetune.data.columns import _KNOWN, ColumnarExamples, ExampleWriter, open_examples
from flatshift.finetune.data.encoding import encode
from flatshift.finetune.data.eval_batching import EvalBatching
from flatshift.finetune.data.example import Example
from flatshift.finetune.data.token_cache import TokenCache
from flatshift.finetune.errors import UserError
from flatshift.finetune.tasks import Classify, Completion, LanguageModel, Seq2Seq
from tests.support.data_models import bert_tokenizer, byte_tokenizer, text_rows

TOKENIZER = byte_tokenizer()
KINDS = {
    "language-model": LanguageModel(),
    "rank": Completion(score="rank"),
    "generate": Completion(score="generate"),
    "classify": Classify(),
    "pair": Classify(),
    "seq2seq": Seq2Seq(score="generate"),
}


def encoded(kind: str, count: int = 60) -> list[Example]:
    rows = text_rows(count)
    if kind == "pair":
        rows = [
            dataclasses.replace(r, values={**r.values, "text2": "the dog"} if i % 2 else r.values)
            for i, r in enumerate(rows)
        ]
    tokenizer = bert_tokenizer() if kind == "pair" else TOKENIZER
    return encode(rows, task=KINDS[kind], tokenizer=tokenizer, max_length=48, decoder_start=0).examples


def write(examples, folder=None, paths=("rows.jsonl",), run=7) -> ColumnarExamples:
    writer = ExampleWriter(paths, folder)
    for low in range(0, len(examples), run):
        writer.add(examples[low : low + run])
    return writer.close()


@pytest.mark.parametrize("kind", KINDS)
def test_examples_come_back_as_they_were(kind, tmp_path):
    plain = encoded(kind)
    for held in (write(plain), write(plain, tmp_path), open_examples(tmp_path, len(plain), ["rows.jsonl"])):
        assert list(held) == plain and held == plain and plain == held
        assert [held[i] for i in (0, 59, -1)] == [plain[i] for i in (0, 59, -1)]
        assert list(held[5:50:3]) == plain[5:50:3] and list(held[5:50:3][2:4]) == plain[5:50:3][2:4]
        assert list(held.take([3, 3, 1])) == [plain[3], plain[3], plain[1]]
        with pytest.raises(IndexError):
            held[60]
    moved = open_examples(tmp_path, len(plain), ["elsewhere/rows.jsonl"])
    assert moved[4] == dataclasses.replace(plain[4], where="elsewhere/rows.jsonl:5")
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".npy"]


def test_values_that_only_some_rows_have():
    odd = [
        Example([1], [-100], "größe\udc80", "no place at all"),
        Example([1, 2], [-100, 2], "", "rows.jsonl:2", bytes=7, answer="", gold=0, choices=((1, 2), (3,))),
        Example([3], [3], "x", "a:b:c:9", segments=[0], decoder_ids=[], choices=((4,),)),
        Example([4, 5, 6], [-100, 5, 6], "y", "rows.jsonl:3", answer="日本", choices=((1, 2), (3,))),
    ]
    for run in (1, 4):
        assert list(write(odd, run=run)) == odd
    scores = [Example([1], 0.5, "a", "f:1"), Example([2], -1.25, "b", "f:2")]
    assert list(write(scores, paths=["f"])) == scores
    assert not write([]) and list(write([])) == []


def test_every_field_of_an_example_is_kept():
    assert {field.name for field in dataclasses.fields(Example)} == _KNOWN - {"file"}


@pytest.mark.parametrize("kind", KINDS)
def test_batches_from_disk_are_those_from_memory(kind, tmp_path):
    plain = encoded(kind)
    held = write(plain, tmp_path)
    settings = {"task": KINDS[kind], "batch_size": 4, "seed": 1, "max_length": 48, "pad_id": 0}
    one, other = TrainingDataLoader(plain, **settings), TrainingDataLoader(held, **settings)
    pairs = [pair for step in range(8) for pair in zip(one.at(step), other.at(step), strict=True)]
    part = held.take(np.arange(9, 39)[::-1])
    judged = EvalBatching(8, 0)
    pairs += zip(judged.batches(plain[9:39][::-1], KINDS[kind]), judged.batches(part, KINDS[kind]), strict=True)
    for a, b in pairs:
        assert a.rows == b.rows and a.supervised == b.supervised and (a.labels == b.labels).all()
        assert all((a.inputs[name] == b.inputs[name]).all() for name in a.inputs)


# --------------------------------------------------------------------------------------------------------------- cache


def make(folder):
    held = write(encoded("classify"), folder)
    return {"rows": len(held)}


def test_an_entry_is_made_once_and_a_damaged_one_again(tmp_path):
    cache, calls = TokenCache(tmp_path), []

    def counted(folder):
        calls.append(folder)
        return make(folder)

    first = cache.get("k", counted)
    again = cache.get("k", counted)
    assert len(calls) == 1 and first.folder == again.folder and again.metadata["rows"] == 60
    assert "read from" in again.notes[0] and "kept in" in first.notes[0]
    ids = first.folder / "input_ids.npy"
    whole = ids.read_bytes()
    about = first.folder / "about.json"
    for damage in (
        lambda: ids.write_bytes(whole[:-4]),
        lambda: ids.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1])),
        ids.unlink,
        lambda: about.write_text("{"),
        lambda: about.write_text("[]"),
        about.unlink,
    ):
        damage()
        before = len(calls)
        found = cache.get("k", counted)
        assert len(calls) == before + 1 and "is damaged" in found.notes[0]
        assert ids.read_bytes() == whole and len(found.notes) == 2


def test_what_fails_or_is_killed_leaves_no_entry(tmp_path):
    cache = TokenCache(tmp_path)

    def broken(folder):
        (folder / "half.npy").write_bytes(b"x")
        raise UserError("rows.jsonl:7: no")

    with pytest.raises(UserError, match=r"rows\.jsonl:7"):
        cache.get("k", broken)
    assert not list(tmp_path.glob("tokens-*")) and not list(tmp_path.glob("*.tmp"))

    def killed():
        cache.get("k", lambda folder: [(folder / "half.npy").write_bytes(b"x"), os._exit(9)])

    child = multiprocessing.get_context("fork").Process(target=killed)
    child.start()
    child.join()
    assert child.exitcode == 9 and len(list(tmp_path.glob(".tokens-k.*.tmp"))) == 1
    assert cache.get("k", make).metadata["rows"] == 60
    assert not list(tmp_path.glob(".tokens-k.*.tmp"))


def test_of_many_processes_one_makes_it(tmp_path):
    made, found = tmp_path / "made", tmp_path / "found"
    made.mkdir()
    found.mkdir()

    def slow(folder):
        (made / str(os.getpid())).touch()
        time.sleep(0.3)
        return make(folder)

    def rank():
        about = TokenCache(tmp_path / "cache").get("k", slow).metadata
        (found / f"{os.getpid()}-{about['rows']}").touch()

    children = [multiprocessing.get_context("fork").Process(target=rank) for _ in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert len(list(made.iterdir())) == 1
    assert sorted(path.name.split("-")[1] for path in found.iterdir()) == ["60"] * 4


def test_the_oldest_entries_make_room(tmp_path, monkeypatch):
    cache = TokenCache(tmp_path)
    for key in ("old", "mid", "new"):
        cache.get(key, make)
    size = cache_directory.list_cache_entries(tmp_path)[0].bytes
    for age, key in ((300, "mid"), (200, "old"), (100, "new")):
        then = time.time() - age
        os.utime(tmp_path / f"tokens-{key}" / "about.json", (then, then))
    cache.get("mid", make)  # used now
    monkeypatch.setenv(cache_directory.LIMIT, str(3.5 * size / 2**30))
    open_now = open_examples(tmp_path / "tokens-old", 60, ["rows.jsonl"])
    notes = cache.get("last", make).notes
    assert any("1 older entries made room" in note for note in notes)
    assert {entry.path.name for entry in cache_directory.list_cache_entries(tmp_path)} == {
        "tokens-mid",
        "tokens-new",
        "tokens-last",
    }
    assert list(open_now) == encoded("classify")  # who reads it goes on reading
    monkeypatch.setenv(cache_directory.LIMIT, "much")
    with pytest.raises(UserError, match="not a size in GiB"):
        cache_directory.cache_limit()


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv(cache_directory.PLACE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory.cache_root() == tmp_path / "flatshift"
    monkeypatch.setenv(cache_directory.PLACE, str(tmp_path / "own"))
    assert cache_directory.cache_root() == tmp_path / "own"
