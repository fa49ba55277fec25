"""Rows on disk as a list: what was read comes back, whole, in part, cut to pieces; and ids without their strings."""

import datetime
import json
from pathlib import Path

import numpy as np
import pytest

from flatshift.finetune.data import view as view_module
from flatshift.finetune.data.config import Columns
from flatshift.finetune.data.rows import Row, SeenIds, read_rows
from flatshift.finetune.data.view import spill_rows
from flatshift.finetune.errors import UserError


def jsonl(path: Path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def rows() -> list[dict]:
    r = np.random.default_rng(0)
    made = []
    for i in range(9000):
        row = {
            "n": i,
            "body": f"Text {i} — {'ü' * int(r.integers(0, 30))} end",
            "kind": "ab"[i % 2],
            "meta": {"deep": [i]},
        }
        made.append(row | ({"key": f"k{i}"} if i % 3 else {}))
    return made


COLUMNS = Columns(text="body", id="key")


def view_of(files, path: Path, **more):
    return spill_rows(read_rows(files, columns=COLUMNS), path, columns=COLUMNS, domain_column="kind", **more)


def test_a_view_is_the_list_it_was_made_of(tmp_path: Path, rows):
    file = jsonl(tmp_path / "p.jsonl", rows)
    wanted = list(read_rows([file], columns=COLUMNS))
    view = view_of([file], tmp_path / "spill")
    assert not (tmp_path / "spill").exists(), "the file goes with the view"
    assert len(view) == len(wanted) and list(view) == wanted
    assert list(view[17].record) == list(wanted[17].record), "columns keep their order"
    assert view[-1] == wanted[-1] and view[4090:4100] == wanted[4090:4100] and view[::2000] == wanted[::2000]
    assert list(view.texts) == [row.values["text"] for row in wanted] and view.texts[5] == wanted[5].values["text"]
    assert list(view.ids) == [row.id for row in wanted] and view.ids[8990:] == [row.id for row in wanted[8990:]]
    assert view.domains() == [row.values["kind"] for row in wanted]
    assert (view.indices() == np.arange(9000)).all()
    with pytest.raises(IndexError):
        view[9000]


def _held(name: str) -> int:
    """Bytes of this process that /proc names so."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads /proc")
def test_reading_a_large_view_holds_a_bounded_part_of_it(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(view_module, "_RESIDENT", 1 << 20)
    texts = [f"{i} " + "x" * 4000 for i in range(8000)]
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    view = spill_rows(read_rows([str(source)]), tmp_path / "kept", columns=Columns())
    before = most = _held("RssFile")
    for number, text in enumerate(view.texts):
        assert text == texts[number]
        if number % 500 == 0:
            most = max(most, _held("RssFile"))
    assert most - before < 20 << 20 < sum(map(len, texts)), "all of 32 MB, unless pages are handed back"
    assert view[77].values["text"] == texts[77]


def test_take_reorders(tmp_path: Path, rows):
    view = view_of([jsonl(tmp_path / "p.jsonl", rows)], tmp_path / "spill")
    numbers = np.random.default_rng(1).permutation(9000)[:500]
    some = view.take(numbers)
    assert list(some) == [view[i] for i in numbers.tolist()] and (some.indices() == numbers).all()
    again = some.take([3, 3, 0])
    assert list(again.ids) == [view.ids[int(numbers[i])] for i in (3, 3, 0)]
    assert len(view.take([])) == 0 and list(view.take([])) == [] and view.take([]).domains() is None


def test_pieces_know_their_source(tmp_path: Path):
    data = [
        {"body": "one two three", "key": "a", "start": "mine"},
        {"body": "four"},
        {"body": "five six"},
        {"body": " "},
    ]
    view = view_of([jsonl(tmp_path / "p.jsonl", data)], tmp_path / "spill")
    cut = view.cut([[(0, 3), (4, 13)], None, [], [(0, 1)]])
    assert list(cut.ids) == ["a#0", "a#1", "0-1", "0-3#0"] and list(cut.texts) == ["one", "two three", "four", " "]
    piece = cut[1]
    place = {"source_id": "a", "start": 4, "end": 13}
    assert piece.record == {"body": "two three", "key": "a", "source": {"start": "mine"}, **place}
    assert piece.values["text"] == "two three" and piece.values["id"] == "a#1" and piece.index == 0
    assert cut[2] == view[1], "a row left whole is itself"
    twice = cut.take([1, 2]).cut([[(0, 3), (4, 9)], [(1, 4)]])
    assert list(twice.ids) == ["a#1#0", "a#1#1", "0-1#0"] and list(twice.texts) == ["two", "three", "our"]
    assert [(row.record["source_id"], row.record["start"], row.record["end"]) for row in twice] == [
        ("a", 4, 7),
        ("a", 8, 13),
        ("0-1", 1, 4),
    ]
    with pytest.raises(ValueError, match="2 entries"):
        view.cut([None, None])


def test_no_piece_gets_the_id_of_another_row(tmp_path: Path):
    data = [{"body": "one two", "key": "a"}, {"body": "three", "key": "b"}, {"body": "four", "key": "a#0"}]
    view = view_of([jsonl(tmp_path / "p.jsonl", data)], tmp_path / "spill")
    with pytest.raises(UserError, match=r"p\.jsonl:3: id 'a#0' is also that of a record or piece of .*p\.jsonl:1:"):
        view.cut([[(0, 3), (4, 7)], None, None])
    assert list(view.cut([None, [(0, 2)], None]).ids) == ["a", "b#0", "a#0"]
    assert list(view.cut([[(0, 3)], [(0, 5)], [(0, 4)]]).ids) == ["a#0", "b#0", "a#0#0"]


def test_values_json_does_not_know_and_text_that_is_none(tmp_path: Path):
    made = Row(
        {"text": "x", "when": datetime.date(2026, 1, 2)}, "i", "f:1", {"text": "x", "when": datetime.date(2026, 1, 2)}
    )
    view = spill_rows([made], tmp_path / "s", columns=Columns())
    assert view[0].record == {"text": "x", "when": "2026-01-02"} and view.domains() is None
    empty = Row({"text": "x", "domain": ""}, "i", "f:1", {"text": "x", "domain": ""})
    assert spill_rows([empty], tmp_path / "s", columns=Columns()).domains() is None, "an empty cell of a CSV file"
    half = Row({"text": "x", "domain": "\ud800"}, "i", "f:7", {"text": "x"})
    with pytest.raises(UserError, match="f:7: the domain has half of a surrogate pair"):
        spill_rows([half], tmp_path / "s", columns=Columns())
    odd = Row({"text": "x"}, "i", "f:8", {"text": "x", "other": "\ud800", "not": float("nan")})
    assert spill_rows([odd], tmp_path / "s", columns=Columns())[0].record["other"] == "\ud800"
    assert len(spill_rows([], tmp_path / "s", columns=Columns())) == 0
    with pytest.raises(UserError, match="cannot be kept there"):
        (tmp_path / "file").write_text("")
        spill_rows([made], tmp_path / "file" / "s", columns=Columns())


def test_long_texts_make_small_batches(tmp_path: Path):
    made = [Row({"text": "x" * (9 << 20)}, str(i), f"f:{i}", {"text": "x" * (9 << 20)}) for i in range(3)]
    view = spill_rows(iter(made), tmp_path / "s", columns=Columns())
    assert [len(text) for text in view.texts] == [9 << 20] * 3


@pytest.mark.parametrize("batch", [1, 3, 16, 1000])
def test_repeated_ids_are_found_however_far_back(batch: int):
    r = np.random.default_rng(batch)
    ids = [f"id{i}" for i in range(300)]
    for first, second in ((0, 299), (17, 18), (100, 250)):
        given = list(ids)
        given[second] = given[first]
        seen = SeenIds(batch)
        found = [hit for i, name in enumerate(given) for hit in seen.add(name, f"f:{i}")] + seen.finish()
        assert found == [(given[first], f"f:{second}")]
    seen = SeenIds(batch)
    assert not [hit for name in r.permutation(ids) for hit in seen.add(str(name), "")] + seen.finish()


def test_a_repeated_id_far_back_names_both_places(tmp_path: Path):
    data = [{"text": "a", "id": f"r{i}"} for i in range(70_000)]
    data[69_999]["id"] = "r5"
    file = jsonl(tmp_path / "p.jsonl", data)
    with pytest.raises(UserError, match=r"p\.jsonl:70000: id 'r5' was already given at .*p\.jsonl:6"):
        for _ in read_rows([file]):
            pass
