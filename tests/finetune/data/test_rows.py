"""Files in, rows out: formats, names, bad records, and what the messages say."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import lzma
import sys
import tracemalloc
from decimal import Decimal
from pathlib import Path

import pytest

from flatshift.finetune.data import formats
from flatshift.finetune.data.config import Columns
from flatshift.finetune.data.files import describe_files, expand_files
from flatshift.finetune.data.formats import HubName
from flatshift.finetune.data.labels import read_number
from flatshift.finetune.data.rows import canonical_label, limit_rows, read_rows, require_rows
from flatshift.finetune.errors import UserError
from tests.support.data_models import write_jsonl

RECORDS = [{"text": f"größe {i}", "label": i % 3, "extra": [i]} for i in range(50)]


def texts(*files: Path | str, **options) -> list[str]:
    return [row.values["text"] for row in read_rows([str(file) for file in files], **options)]


def refused(*files: Path | str, **options) -> str:
    with pytest.raises(UserError) as error:
        list(read_rows([str(file) for file in files], **options))
    return str(error.value)


def compressed(path: Path, suffix: str) -> Path:
    data = path.read_bytes()
    out = path.with_name(path.name + suffix)
    if suffix == ".zst":
        zstandard = pytest.importorskip("zstandard")
        # Two frames, as parallel compressors write.
        half = len(data) // 2
        data = b"".join(zstandard.ZstdCompressor().compress(part) for part in (data[:half], data[half:]))
    else:
        data = {".gz": gzip.compress, ".xz": lzma.compress}[suffix](data)
    out.write_bytes(data)
    return out


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz", ".zst"])
def test_jsonl_in_every_compression(tmp_path, suffix):
    path = write_jsonl(tmp_path / "a.jsonl", RECORDS)
    if suffix:
        path = compressed(path, suffix)
    rows = list(read_rows([str(path)], required=("text", "label")))
    assert [row.values["text"] for row in rows] == [record["text"] for record in RECORDS]
    assert [row.values["label"] for row in rows] == [str(i % 3) for i in range(50)]
    assert rows[3].values["extra"] == [3] and rows[3].record == RECORDS[3]
    assert (rows[3].id, rows[3].where, rows[3].index) == ("0-3", f"{path}:4", 3)


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_truncated_and_corrupt_archives_are_named(tmp_path, suffix):
    path = compressed(write_jsonl(tmp_path / "a.jsonl", RECORDS * 200), suffix)
    whole = path.read_bytes()
    path.write_bytes(whole[:-12])
    assert f"{path}: corrupt or truncated" in refused(path)
    path.write_bytes(b"this is not an archive at all")
    assert f"{path}: corrupt or truncated" in refused(path)


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_one_truncated_shard_of_several_is_skipped_by_file(tmp_path, suffix):
    broken = compressed(write_jsonl(tmp_path / "b.jsonl", RECORDS * 200), suffix)
    broken.write_bytes(broken.read_bytes()[:-12])
    (tmp_path / "b.jsonl").unlink(missing_ok=True)
    write_jsonl(tmp_path / "c.jsonl", [{"text": "last"}])
    assert f"{broken}: corrupt or truncated" in refused(tmp_path)
    skipped: list[str] = []
    rows = list(read_rows([str(tmp_path)], bad_rows="skip", skipped=skipped))
    assert rows[-1].values["text"] == "last" and 1 <= len(rows) <= 10_000
    (told,) = skipped
    assert told.startswith(f"{broken}: corrupt or truncated") and f"; {len(rows) - 1:,} records before" in told
    assert [about["rows"] for about in describe_files([str(tmp_path)])] == [None, 1]


def test_a_directory_of_shards_is_its_files_in_name_order(tmp_path):
    for name in ("b", "a"):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": name}])
    for other in ("README.md", "_SUCCESS", ".hidden.jsonl"):
        (tmp_path / other).write_text("x")
    assert [row.values["text"] for row in read_rows([str(tmp_path)])] == ["a", "b"]
    (tmp_path / "c.csv").write_text("text\nc\n")
    assert "holds .csv and JSONL files; name those that are meant" in refused(tmp_path)


def test_zstd_without_its_package_says_how_to_get_it(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(b"")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert "pip install 'flatshift[zstd]'" in refused(path)


def test_datasets_without_its_package_says_how_to_get_it(tmp_path, monkeypatch):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'flatshift[hf]'" in refused(tmp_path / "saved")
    assert "pip install 'flatshift[hf]'" in refused("hub:owner/name:train")


def test_blank_lines_count_as_lines_and_a_bom_is_no_text(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": "b"}')
    rows = list(read_rows([str(path)]))
    assert [(row.values["text"], row.id, row.where, row.index) for row in rows] == [
        ("a", "0-0", f"{path}:1", 0),
        ("b", "0-3", f"{path}:4", 1),
    ]
    assert describe_files([str(path)])[0]["rows"] == 2


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "a"', "not valid JSON (Expecting ',' delimiter at column 13)"),
        (b"text", "not valid JSON (Expecting value at column 1)"),
        (b'["text"]', "a JSON array, not an object"),
        (b"null", "a JSON null, not an object"),
        (b'{"text": null}', "column 'text' is null"),
        (b'{"text": 3}', "column 'text' is a int, not text"),
        (b'{"txt": "a"}', "no column 'text'; did you mean 'txt'? (set data.columns.text)"),
        (b'{"body": "a", "id": 1}', "no column 'text'; there are 'body', 'id'"),
        (b'{"text": "\xff"}', "not valid UTF-8"),
        (b'{"text": "\\ud800"}', "surrogate"),
        (b'{"text": ' + b"[" * 100_000, "nested deeper than 64 levels"),
        (b'{"text": "a", "more": ' + b"[" * 65 + b"]" * 65 + b"}", "nested deeper than 64 levels"),
        (b'{"text": "a", "text": "b"}', "the key 'text' is there twice in one object; keep one of them"),
        (b'{"text": "a", "more": [{"k": 1, "k": 1}]}', "the key 'k' is there twice"),
        (b'{"text": ' + b"9" * 5000 + b"}", "a number of more than 4,300 digits"),
        (b'{"text": "a", "id": [1]}', "column 'id' is a list"),
        (b'{"text": "a", "id": "\\ud83d"}', "column 'id' has half of a surrogate pair"),
    ],
)
def test_bad_rows_are_refused_by_line_or_skipped(tmp_path, line, reason):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n' + line + b'\n{"text": "three"}\n')
    message = refused(path)
    assert message.startswith(f"{path}:2: ") and reason in message and "skip" not in message
    skipped: list[str] = []
    assert refused(path, skipped=skipped) == message + "; or leave such rows out with data.bad_rows: skip"
    assert refused(path, skipped=skipped, setting="select.columns").endswith("with select.bad_rows: skip")
    path.write_bytes(line + b'\n{"text": "three"}\n')
    assert "skip" not in refused(path, skipped=skipped), "in a first row the mistake may be in all"
    path.write_bytes(b'{"text": "one"}\n' + line + b'\n{"text": "three"}\n')
    rows = list(read_rows([str(path)], bad_rows="skip", skipped=skipped))
    # A skipped row still counts for names and for the index of own features.
    assert [(row.id, row.index) for row in rows] == [("0-0", 0), ("0-2", 2)]
    assert skipped == [message]


def test_required_label_must_be_a_name_or_a_number(tmp_path):
    for value, reason in (
        (None, "is null"),
        ("", "is empty"),
        ([1], "is a list"),
        (float("nan"), "is nan"),
    ):
        path = write_jsonl(tmp_path / "a.jsonl", [{"text": "a", "label": value}])
        assert f"column 'label' {reason}" in refused(path, required=("text", "label"))
        assert "label" not in next(read_rows([str(path)])).values


def test_canonical_labels():
    assert [canonical_label(value) for value in (1, "1", 1.0, 2.5, True, "a b")] == [
        "1",
        "1",
        "1",
        "2.5",
        "True",
        "a b",
    ]
    with pytest.raises(ValueError, match="has half of a surrogate pair"):
        canonical_label("a\ud800")


def test_a_column_named_by_the_user_that_no_row_has_is_refused_after_the_last(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "a", "hypothesis": "b"}, {"text": "c", "uid": 1}])
    wanted = {"columns": Columns(text2="hypotesis", id="uid"), "used": ("text2", "id")}
    rows = read_rows([str(path)], **wanted)
    assert [next(rows).id, next(rows).id] == ["0-0", "1"]  # a stream is as good as any
    with pytest.raises(UserError, match=r"a\.jsonl: no column 'hypotesis'; did you mean 'hypothesis'\? \(set data\."):
        next(rows)
    with pytest.raises(UserError, match=r"'hypotesis'.*\(set data\.columns\.text2\)"):
        list(read_rows([str(path)], **wanted, first=2))
    assert len(list(read_rows([str(path)], columns=Columns(text2="hypothesis", id="uid"), used=("text2", "id")))) == 2
    assert len(list(read_rows([str(path)], columns=wanted["columns"]))) == 2  # not used: a pool has no second texts
    null = write_jsonl(tmp_path / "null.jsonl", [{"text": "a", "second": None}])
    assert list(read_rows([str(null)], columns=Columns(text2="second"), used=("text2",)))  # there, and empty


def test_columns_are_mapped_and_may_swap(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "second", "text2": "first", "y": 1, "name": "n"}])
    blank = write_jsonl(tmp_path / "b.jsonl", [{"text": "a", "text2": text} for text in (" \n", "", None, "b")])
    assert ["text2" in row.values for row in read_rows([str(blank)])] == [False, False, False, True]
    assert [row.values["text2"] for row in read_rows([str(blank)], required=("text2",), bad_rows="skip")][:2] == [
        " \n",
        "",
    ]
    columns = Columns(text="text2", text2="text", label="y", id="name")
    (row,) = read_rows([str(path)], columns=columns, required=("text", "text2", "label", "y"))
    assert row.values == {"text": "first", "text2": "second", "label": "1", "id": "n", "y": 1, "name": "n"}
    assert row.id == "n"
    assert row.record == {"text": "second", "text2": "first", "y": 1, "name": "n"}
    path = write_jsonl(tmp_path / "c.jsonl", [{"text": "a", "id": 7}, {"text": "b", "id": 7}])
    rows = list(read_rows([str(path)], columns=Columns(id="\0"), required=("text", "id")))
    assert [(row.id, row.values["id"]) for row in rows] == [("0-0", 7), ("0-1", 7)], "a column as any other"


def test_given_ids_must_be_unique_over_all_files(tmp_path):
    a = write_jsonl(tmp_path / "a.jsonl", [{"text": "a", "id": 7}, {"text": "b", "id": None}])
    b = write_jsonl(tmp_path / "b.jsonl", [{"text": "c", "id": "x"}, {"text": "d", "id": "7"}])
    assert [row.id for row in read_rows([str(a)])] == ["7", "0-1"]
    assert refused(a, b) == f"{b}:2: id '7' was already given at {a}:1; ids must be unique"


@pytest.mark.parametrize("first", [True, False], ids=["given first", "by place first"])
def test_a_given_id_is_not_the_name_of_a_row_without_one(tmp_path, first):
    rows = [{"text": "a"}, {"text": "b"}, {"text": "c", "id": "0-9"}, {"text": "d"}]
    given, named = (0, 3) if first else (3, 0)
    rows[given]["id"] = f"0-{named}"
    file = write_jsonl(tmp_path / "a.jsonl", rows)
    assert refused(file) == (
        f"{file}:4: id '0-{named}' was already given at {file}:1; ids must be unique; "
        "a record without an id is named by its file and line"
    )
    rows[given]["id"] = "0-2"  # of a row that has another id
    assert [row.id for row in read_rows([str(write_jsonl(file, rows))])][given] == "0-2"


def test_csv_with_quoted_newlines_knows_its_lines(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes('\ufefftext,label\r\n"one\nstill one",1\r\n\r\n"tw""o",2\r\nthree\r\nfour,4\r\n'.encode())
    skipped: list[str] = []
    rows = list(read_rows([str(path)], required=("text", "label"), bad_rows="skip", skipped=skipped))
    assert [(row.values["text"], row.values["label"], row.id, row.where) for row in rows] == [
        ("one\nstill one", "1", "0-0", f"{path}:2"),
        ('tw"o', "2", "0-1", f"{path}:5"),
        ("four", "4", "0-3", f"{path}:7"),
    ]
    assert skipped == [f"{path}:6: 1 fields where the header has 2"]
    assert describe_files([str(path)])[0]["rows"] == 4


def test_one_name_is_no_list_of_files(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "one"}])
    with pytest.raises(UserError, match=r"files are a list; write \['.*a\.jsonl'\]"):
        list(read_rows(str(path)))


def test_csv_problems(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('text,label\n"never closed,1\nb,2\n')
    assert f"{path}:2: not valid CSV" in refused(path)
    path.write_text("text,text\na,b\n")
    assert f"{path}:1: the header has the column 'text' twice" in refused(path)
    path.write_bytes(b"text,label\n\xff,1\nb,2\n")
    assert f"{path}:2: not valid UTF-8" in refused(path)
    path.write_text("txet,label\na,1\n")
    assert "did you mean 'txet'" in refused(path)
    path.write_text("text\n" + "long " * 100_000 + "\n")  # beyond the csv module's default field size
    assert len(texts(path)[0]) == 500_000


def test_tsv(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text("text\tlabel\na, b\t1\n")
    assert texts(path) == ["a, b"]


def test_parquet(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(RECORDS), path, row_group_size=7)
    rows = list(read_rows([str(path)], required=("text", "label")))
    assert [row.values["text"] for row in rows] == [record["text"] for record in RECORDS]
    assert (rows[9].id, rows[9].where, rows[9].values["extra"]) == ("0-9", f"{path}:10", [9])
    assert describe_files([str(path)])[0]["rows"] == 50
    path.write_bytes(path.read_bytes()[:-20])
    assert f"{path}: " in refused(path) and "Parquet" in refused(path)
    decimals = {"text": ["a", "b"], "id": [Decimal(2**70), Decimal(1)], "label": [Decimal("1.50"), Decimal(-3)]}
    pq.write_table(pa.table(decimals), path)
    rows = list(read_rows([str(path)], label=read_number))
    assert [(row.id, row.values["label"]) for row in rows] == [(str(2**70), 1.5), ("1", -3.0)]


def test_a_hub_name_has_a_configuration_a_revision_and_a_split():
    for name, parts in (
        ("hub:imdb", ("imdb", None, None, None)),
        ("hub:a/b:train", ("a/b", None, None, "train")),
        ("hub:a/b@refs/pr/1:train[:9]", ("a/b", None, "refs/pr/1", "train[:9]")),
        ("hub:a/b[2022.en]@abc:test", ("a/b", "2022.en", "abc", "test")),
    ):
        assert HubName.read(name) == parts and str(HubName.read(name)) == name
    assert expand_files(["hub:a/b[x]:train"]) == [Path("hub:a/b[x]:train")]
    for name in ("hub:", "hub:a[]:train", "hub:a[b:train", "hub::train"):
        assert f"{name}: not the name of a hub data set; write hub:NAME[CONFIG]@REV" in refused(name)


def test_one_configuration_of_several_is_named(tmp_path):
    pytest.importorskip("datasets")
    repository = tmp_path / "repository"
    for name in "ab":
        (repository / name).mkdir(parents=True)
        write_jsonl(repository / name / "train.jsonl", [{"text": f"of {name}"}])
    told = [f"- config_name: {n}\n  data_files: [{{split: train, path: {n}/train.jsonl}}]\n" for n in "ab"]
    (repository / "README.md").write_text("---\nconfigs:\n" + "".join(told) + "---\n", encoding="utf-8")
    assert texts(f"hub:{repository}[b]:train") == ["of b"]
    assert f"several configurations; name one: hub:{repository}[a]:train, hub:" in refused(f"hub:{repository}:train")
    assert "cannot be opened (BuilderConfig 'c' not found" in refused(f"hub:{repository}[c]:train")


def call(name: str, arguments: dict) -> dict:
    return {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}],
    }


def test_arrow_makes_no_argument_up(tmp_path):
    """One tool's argument is a null in the calls and schemas of all others, once they share a column."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schemas = [
        {"name": name, "parameters": {"properties": {key: {"type": "string"}}}}
        for name, key in (("weather", "city"), ("time", "zone"))
    ]
    wanted = [
        {"messages": [{"role": "user", "content": "w?"}, call("weather", {"city": "Bonn"})], "tools": schemas},
        {"messages": [{"role": "user", "content": "t?"}, call("time", {"zone": "CET"})], "tools": schemas[1:]},
    ]
    written = [{**record, "meta": {"a": None}, "clip": [0.5, None]} for record in wanted]
    pq.write_table(pa.Table.from_pylist(written), tmp_path / "a.parquet")
    sources = [tmp_path / "a.parquet"]
    if importlib.util.find_spec("datasets") is not None:
        import datasets

        datasets.Dataset(pa.Table.from_pylist(written)).save_to_disk(tmp_path / "saved")
        sources.append(tmp_path / "saved")
    for source in sources:
        rows = list(read_rows([str(source)], required=("messages",)))
        assert [{name: row.values[name] for name in wanted[0]} for row in rows] == wanted
        assert [row.nulls for row in rows] == [1 + 2, 1 + 1], "an argument, and a property of each schema"
        assert rows[0].values["meta"] == {"a": None} and rows[0].values["clip"] == [0.5, None]
    explicit = [{"messages": [{"role": "user", "content": "w?"}, call("weather", {"zone": None})]}]
    (row,) = read_rows([str(write_jsonl(tmp_path / "a.jsonl", explicit))], required=("messages",))
    assert row.values["messages"] == explicit[0]["messages"] and row.nulls == 0


def test_expand_sorts_globs_and_names_the_nearest(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "c.csv"):
        (tmp_path / name).write_text("")
    assert [path.name for path in expand_files([f"{tmp_path}/*.jsonl", f"{tmp_path}/c.csv"])] == [
        "a.jsonl",
        "b.jsonl",
        "c.csv",
    ]
    with pytest.raises(UserError, match=r"no file matches"):
        expand_files([f"{tmp_path}/*.parquet"])
    with pytest.raises(UserError, match=r"no such file; did you mean .*a\.jsonl"):
        expand_files([f"{tmp_path}/aa.jsonl"])
    with pytest.raises(UserError, match="there is no directory"):
        expand_files([f"{tmp_path}/nowhere/a.jsonl"])
    with pytest.raises(UserError, match="named twice"):
        expand_files([f"{tmp_path}/a.jsonl", f"{tmp_path}/*.jsonl"])


def test_fields_between_semicolons(tmp_path):
    """As spreadsheets write it where the comma stands in numbers; a header with a comma is one of commas."""
    (tmp_path / "a.csv").write_text('text;label\n"a; b";1,5\n')
    assert [row.values["text"] for row in read_rows([str(tmp_path / "a.csv")])] == ["a; b"]
    (tmp_path / "a.csv").write_text('\n"text";"a, b"\n"a; b";1\n')  # as R writes it
    assert [row.values["text"] for row in read_rows([str(tmp_path / "a.csv")])] == ["a; b"]
    (tmp_path / "a.csv").write_text("text\tlabel\na, b\t1\n")
    assert [row.values["text"] for row in read_rows([str(tmp_path / "a.csv")])] == ["a, b"]
    (tmp_path / "b.csv").write_text("text,note\na;b,c\n")
    assert [row.values["text"] for row in read_rows([str(tmp_path / "b.csv")])] == ["a;b"]


def test_files_about_the_data_are_no_rows(tmp_path):
    (tmp_path / "README.md").write_text("# A card")  # the hub's, whose files are in `data/`
    assert f"as {tmp_path}/**/*.parquet, names files further down" in refused(tmp_path)
    (tmp_path / "dataset_info.json").write_text('{"mine": {"file_name": "mine.json"}}')  # LLaMA-Factory's
    assert "is a directory without a file to read" in refused(tmp_path)
    (tmp_path / "mine.json").write_text('[{"text": "a"}]')
    assert [row.values["text"] for row in read_rows([str(tmp_path)])] == ["a"]


def test_formats_that_are_not_rows(tmp_path):
    assert "is a directory without a file to read" in refused(tmp_path)
    (tmp_path / "a.doc").write_text("a")
    assert "unknown format '.doc'; known are JSONL" in refused(tmp_path / "a.doc")
    (tmp_path / "a.jsonl").write_text('[\n{"text": "a"}\n]')
    assert "a JSON array; name the file .json" in refused(tmp_path / "a.jsonl")
    (tmp_path / "a.json").write_text('{\n"text": "a"\n}\n{\n"text": "b"\n}')
    assert "a.json:1: a JSON object over several lines; write one object a line" in refused(tmp_path / "a.json")
    (tmp_path / "b.jsonl").write_bytes('{"text": "a"}\n'.encode("utf-16"))
    assert "is UTF-16; save it as UTF-8" in refused(tmp_path / "b.jsonl")


@pytest.mark.parametrize("chunk", [1, 7, 1 << 18])
def test_json_arrays_are_read_object_by_object(tmp_path, monkeypatch, chunk):
    """Against the whole file read at once, however the bytes come."""
    monkeypatch.setattr(formats, "_CHUNK", chunk)
    told = [{"text": "ä €\n[{", "more": [{"k": 1.5}, None]}, {"text": "b" * 50, "n": -12}, {"text": "c"}]
    path = tmp_path / "a.json"
    for indent in (None, 2):
        for written in (told, []):
            path.write_text("\ufeff " + json.dumps(written, indent=indent, ensure_ascii=False) + "\n", "utf-8")
            assert [record.values for record in formats.iter_records(path)] == json.loads(path.read_text("utf-8-sig"))
            assert formats.count_records(path) == len(written)
        for more in ({}, {"version": [1, {"data": 2}]}):
            path.write_text(json.dumps({"data": told, **more}, indent=indent, ensure_ascii=False) + "\n", "utf-8")
            assert [record.values for record in formats.iter_records(path)] == told and formats.count_records(
                path
            ) == len(told)
    path.write_text('{"data": [{"text": "a"}]} {"data": []}')
    with pytest.raises(UserError, match="not valid JSON behind the rows of 'data'"):
        list(formats.iter_records(path))
    path.write_text('{"data": [1, 2]}\n{"data": []}\n')  # rows with such a column
    assert [record.values for record in formats.iter_records(path)] == [{"data": [1, 2]}, {"data": []}]
    path.write_text('[{"text": "a"},\n 12,\n\n {"text": "b", "text": "c"},\n{"text": "d"}]')
    skipped: list[str] = []
    rows = list(read_rows([str(path)], bad_rows="skip", skipped=skipped))
    assert [(row.where, row.id) for row in rows] == [(f"{path}:1", "0-0"), (f"{path}:5", "0-3")]
    assert skipped == [
        f"{path}:2: a JSON number, not an object with columns",
        f"{path}:4: the key 'text' is there twice in one object; keep one of them",
    ]
    for text, reason in (
        ('[{"text": "a"}\n{"text": "b"}]', r"a\.json:2: not valid JSON \(a comma or \] is missing"),
        ('[{"text": "a"},\n{"text": }]', r"a\.json:2: not valid JSON"),
        ('[{"text": "a"},\n', "the JSON array does not end"),
        ('[{"text": "a"}]\n[]', r"a\.json:2: something follows the JSON array"),
        ('[{"text": ' + "[" * 100_000, "nested too deep"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=reason):
            list(read_rows([str(path)]))
    path.write_bytes(b'[{"text": "\xff"}]')
    with pytest.raises(UserError, match="not valid UTF-8"):
        list(read_rows([str(path)]))


def test_no_rows_says_why(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n\n")
    with pytest.raises(UserError, match=r"no train rows: .*a\.jsonl is empty"):
        require_rows(read_rows([str(path)]), files=[str(path)], purpose="train")
    path.write_text('{"tex": "a"}\n')
    skipped: list[str] = []
    rows = read_rows([str(path)], bad_rows="skip", skipped=skipped)
    with pytest.raises(UserError, match=r"all 1 of .* were skipped, the first for .*a\.jsonl:1: no column 'text'"):
        require_rows(rows, files=[str(path)], purpose="train", skipped=skipped)
    with pytest.raises(UserError, match="no file is named"):
        require_rows([], files=[], purpose="dev")


def test_describe_digests_the_bytes_on_disk(tmp_path):
    path = compressed(write_jsonl(tmp_path / "a.jsonl", RECORDS), ".gz")
    assert describe_files([str(path)]) == [
        {
            "path": str(path),
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "bytes": path.stat().st_size,
            "rows": 50,
        }
    ]


def test_memory_does_not_grow_with_the_file(tmp_path):
    peaks = []
    for count in (3_000, 30_000):
        path = tmp_path / f"{count}.jsonl"
        path.write_text((json.dumps({"text": "a" * 400}) + "\n") * count)
        tracemalloc.start()
        assert sum(1 for _ in read_rows([str(path)])) == count
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.3 * peaks[0]


def test_limits_are_nested_and_keep_the_order():
    rows = list(range(1000))
    small, large = limit_rows(rows, 30, seed=1), limit_rows(rows, 300, seed=1)
    assert set(small) < set(large) and len(small) == 30 and small == sorted(small)
    assert limit_rows(rows, 30, seed=2) != small
    assert limit_rows(rows, None, seed=1) == rows == limit_rows(rows, 1000, seed=1)
    for limit in (0, -1, 1001):
        with pytest.raises(UserError, match="limit"):
            limit_rows(rows, limit, seed=1)
