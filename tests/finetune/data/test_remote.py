"""Inputs by the address of a store: objects in memory, and those of a real S3 server on localhost."""

from __future__ import annotations

import contextlib
import gzip
import json
import lzma
import subprocess
import sys
import threading
import urllib.request
import uuid
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import flatshift
from flatshift.cli import run
from flatshift.finetune.data import formats, remote
from flatshift.finetune.data.files import describe_files, expand_files
from flatshift.finetune.data.rows import read_rows
from flatshift.finetune.errors import UserError, is_remote, store_address, user_path
from tests.support.object_store import ObjectStore, Put, bucket, forget_clients, object_store

fsspec = pytest.importorskip("fsspec")

ROWS = [{"text": f"word{i} and word{i % 7}", "label": str(i % 2)} for i in range(40)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
LONG = LINES * 400
"""More than what is read of a file at once."""


def parquet(rows: list[dict], **how) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink, **how)
    return sink.getvalue().to_pybytes()


def texts(*names: str) -> list[str]:
    return [row.values["text"] for row in read_rows(names)]


# ----------------------------------------------------------------------------------------------------- without a server


@pytest.fixture
def memory() -> Iterator[Put]:
    """Puts objects into a place of its own in memory, and names the place."""
    place = f"memory:///{uuid.uuid4().hex}"
    store = fsspec.filesystem("memory")

    def put(objects: dict[str, bytes]) -> str:
        for name, content in objects.items():
            store.pipe_file(f"{place}/{name}", content)
        return place

    yield put
    if store.exists(place):
        store.rm(place, recursive=True)


CSV = ("text,label\n" + "".join(f"{row['text']},{row['label']}\n" for row in ROWS)).encode()
FORMS = {
    "a.jsonl": LINES,
    "a.jsonl.gz": gzip.compress(LINES),
    "a.jsonl.xz": lzma.compress(LINES),
    "a.json": json.dumps(ROWS).encode(),
    "a.csv": CSV,
    "a.csv.gz": gzip.compress(CSV),
    "a.parquet": parquet(ROWS),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_read_as_from_disk(tmp_path: Path, memory, name: str) -> None:
    (tmp_path / name).write_bytes(FORMS[name])
    place = memory({name: FORMS[name]})
    assert texts(f"{place}/{name}") == texts(str(tmp_path / name)) == [row["text"] for row in ROWS]
    (here,), (there,) = describe_files([str(tmp_path / name)]), describe_files([f"{place}/{name}"])
    assert there["path"] == f"{place}/{name}" and there["version"]["modified"] and "version" not in here
    assert {key: here[key] for key in ("sha256", "bytes", "rows")} == {
        key: there[key] for key in ("sha256", "bytes", "rows")
    }


def test_zstd_is_read_as_from_disk(memory) -> None:
    zstandard = pytest.importorskip("zstandard")
    place = memory({"a.jsonl.zst": zstandard.ZstdCompressor().compress(LINES)})
    assert texts(f"{place}/a.jsonl.zst") == [row["text"] for row in ROWS]


def test_patterns_and_directories_are_sorted_as_local_ones(tmp_path: Path, memory) -> None:
    names = ["b.jsonl", "a/c.jsonl", "a-b.jsonl", "B.jsonl", ".hidden.jsonl", "_meta.jsonl", "notes.txt"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(LINES)
    place = memory({name: LINES for name in names})
    for pattern in ("", "/*.jsonl", "/*/*.jsonl", "/a*.jsonl"):
        here = [str(path.relative_to(tmp_path)) for path in expand_files([f"{tmp_path}{pattern}"])]
        assert [str(file).removeprefix(f"{place}/") for file in expand_files([f"{place}{pattern}"])] == here
    assert [str(file) for file in expand_files([f"{place}/"])] == [str(file) for file in expand_files([place])]


@contextlib.contextmanager
def web(folder: Path) -> Iterator[str]:
    """Python's own server, which sends whole files only."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    with serving(partial(Handler, directory=str(folder))) as address:
        yield address


@contextlib.contextmanager
def serving(handler: Any) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.handle_error = lambda *_: None  # a reader that hangs up
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_what_is_not_there_is_one_sentence(memory) -> None:
    place = memory({"pool.jsonl": LINES, "other.csv": CSV, "saved/state.json": b"{}"})
    for name, told in {
        "pol.jsonl": f"no such object; did you mean {place}/pool.jsonl?",
        "*.parquet": "no object matches this pattern",
        "": "holds .csv and JSONL files",
        "saved": "copy it to this machine first",
        "pool.txt": "no such object",
    }.items():
        with pytest.raises(UserError) as refused:
            expand_files([f"{place}/{name}" if name else place])
        assert told in str(refused.value) and str(refused.value).startswith(place)
    with pytest.raises(UserError, match="named twice"):
        expand_files([f"{place}/pool.jsonl", f"{place}/*.jsonl"])
    with pytest.raises(UserError, match="cloud:// is no kind of store; known are s3://"):
        expand_files(["cloud://bucket/pool.jsonl"])


def test_an_object_cut_short_is_named(memory) -> None:
    place = memory({"a.jsonl.gz": gzip.compress(LINES)[:-9]})
    with pytest.raises(formats.BrokenFile, match=r"memory:///\w+/a.jsonl.gz: corrupt or truncated"):
        texts(f"{place}/a.jsonl.gz")


def test_an_object_that_changed_between_two_openings_is_refused(memory) -> None:
    place = memory({"a.jsonl": LINES})
    texts(f"{place}/a.jsonl")
    memory({"a.jsonl": LINES.replace(b"word1", b"WORD1")})
    for again in (texts, lambda name: describe_files([name])):
        with pytest.raises(UserError, match=r"a\.jsonl changed since this command first read it"):
            again(f"{place}/a.jsonl")


def test_a_file_address_is_the_local_path(tmp_path: Path) -> None:
    (tmp_path / "with space.jsonl").write_bytes(LINES)
    for address in (f"file://{tmp_path}/with space.jsonl", f"file://{tmp_path}/with%20space.jsonl"):
        assert expand_files([address]) == [tmp_path / "with space.jsonl"]


def test_addresses_are_told_from_paths() -> None:
    assert is_remote("s3://b/x") and is_remote("https://h/x.jsonl") and is_remote(Path("s3://b/x"))
    for name in ("pool.jsonl", "C:\\pool.jsonl", "a:b", "sample:pool", "hub:owner/name", "file:///x", "/s3:/x"):
        assert not is_remote(name)
    assert store_address(Path("s3://b/x")) == store_address("s3://b/x") == "s3://b/x"
    with pytest.raises(UserError, match="s3:/b/x: a local path is needed here"):
        user_path(Path("s3://b/x"))


@pytest.mark.parametrize("form", [["--out", "s3://b/out"], ["--out=file:///elsewhere/out"], ["--resume", "gs://b/run"]])
def test_results_stay_on_this_machine(form: list[str], tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["train", "classify", *form]) == 2
    told = capsys.readouterr().err
    assert "results are written to a local directory" in told and form[-1].partition("=")[2] in told
    assert not list(tmp_path.iterdir())


def test_python_takes_addresses_too(tmp_path: Path, memory) -> None:
    place = memory({"pool.jsonl": LINES, "target.jsonl": LINES[: LINES.index(b"\n") + 1]})
    chosen = flatshift.select(Path(f"{place}/pool.jsonl"), Path(f"{place}/target.jsonl"), budget=3)
    assert len(chosen.ids) == 3
    with pytest.raises(UserError, match="select: out s3://b/out: results are in a local directory"):
        flatshift.select(Path(f"{place}/pool.jsonl"), ["a text"], budget=3, out="s3://b/out")


def test_a_store_whose_package_is_missing_says_how_to_get_it(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    with pytest.raises(UserError, match=r"reading s3:// needs another package: pip install 'flatshift\[remote\]'"):
        expand_files(["s3://b/x.jsonl"])


def test_the_web_is_asked_again_after_waits(monkeypatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(remote.time, "sleep", waited.append)
    answers = iter([ConnectionResetError(), TimeoutError(), None])

    def ask() -> str:
        if (error := next(answers)) is not None:
            raise error
        return "here"

    assert remote.with_retries("https://h/x.jsonl", ask) == "here" and waited == list(remote._WAITS[:2])


def test_the_web_without_parts_gives_small_objects(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    for name, content in {"a.jsonl": LINES, "big.jsonl": LONG * 14}.items():
        (tmp_path / name).write_bytes(content)
    with web(tmp_path) as address:
        assert texts(f"{address}/a.jsonl?signed=1") == texts(f"{address}/a.jsonl") == [row["text"] for row in ROWS]
        (told,) = describe_files([f"{address}/a.jsonl"])
        assert told["rows"] == len(ROWS) and told["version"].keys() == {"modified"}
        with pytest.raises(UserError, match=r"no such object; did you mean http://127.0.0.1:\d+/a.jsonl\?"):
            expand_files([f"{address}/aa.jsonl"])
        with pytest.raises(UserError, match="the server gives no parts of an object; copy it to this machine first"):
            texts(f"{address}/big.jsonl")


def test_names_and_help_import_no_store() -> None:
    code = (
        "import sys\nfrom flatshift.cli import run\nrun(['train', '--help'])\n"
        "assert run(['train', 'classify', '--data.train.file', 's3://b/x.jsonl', '--out', 'o']) == 2\n"
        "sys.exit(bool({'torch', 'fsspec', 's3fs', 'upath'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


# -------------------------------------------------------------------------------------------------------- with a server


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    with object_store() as store:
        yield store


@pytest.fixture
def lake(server: ObjectStore, monkeypatch) -> Iterator[Put]:
    """A bucket of its own."""
    yield from bucket(server, monkeypatch)


SHARDS = {f"pool/{i}.jsonl.gz": gzip.compress(b"".join(LINES.splitlines(True)[i::3])) for i in range(3)}


def test_shards_on_s3_are_read_as_from_disk(lake, tmp_path: Path) -> None:
    place = lake(SHARDS)
    for name, content in SHARDS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    here = texts(f"{tmp_path}/pool")
    assert texts(f"{place}/pool/") == texts(f"{place}/pool/*.jsonl.gz") == here and len(here) == len(ROWS)
    told = describe_files([f"{place}/pool"])
    assert [line["sha256"] for line in told] == [line["sha256"] for line in describe_files([f"{tmp_path}/pool"])]
    assert all(line["version"]["etag"] and line["version"]["modified"] for line in told)


def test_parquet_on_s3_is_read_by_range(lake, monkeypatch) -> None:
    got: list[int] = []
    random = np.random.default_rng(0)
    part = remote._ObjectReader._read_block

    def counted(self, size: int) -> bytes:
        got.append(len(data := part(self, size)))
        return data

    monkeypatch.setattr(remote._ObjectReader, "_read_block", counted)
    monkeypatch.setattr(remote, "BLOCK", 1 << 16)
    rows = [{"text": random.bytes(512).hex(), "label": "1"} for _ in range(4000)]
    content = parquet(rows, row_group_size=500)
    name = f"{lake({'big.parquet': content})}/big.parquet"
    (file,) = expand_files([name])
    assert formats.count_records(file) == 4000 and sum(got) < len(content) / 10
    got.clear()
    read = read_rows([name])
    assert [next(read).values["text"] for _ in range(10)] == [row["text"] for row in rows[:10]]
    assert sum(got) < len(content) / 3, "a row group is read when its rows are asked for"
    assert [row.values["text"] for row in read] == [row["text"] for row in rows[10:]]


def test_what_s3_refuses_is_one_sentence(lake, monkeypatch) -> None:
    place = lake(SHARDS)
    for name, told in {
        f"{place}/pool/00.jsonl.gz": f"no such object; did you mean {place}/pool/0.jsonl.gz?",
        f"{place}x/pool/0.jsonl.gz": "no such bucket; check the name",
        f"{place}/pool/*.csv": "no object matches this pattern",
        f"{place}/nowhere/": "no such object",
    }.items():
        with pytest.raises(UserError) as refused:
            expand_files([name])
        assert told in str(refused.value) and len(str(refused.value)) <= 300
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    forget_clients()
    with pytest.raises(UserError, match=r"no credentials for s3:// .*; set AWS_ACCESS_KEY_ID and"):
        expand_files([f"{place}/pool/0.jsonl.gz"])


def test_an_object_on_s3_that_changes_is_refused(lake, monkeypatch) -> None:
    monkeypatch.setattr(remote, "BLOCK", 1 << 10)
    name = f"{lake({'a.jsonl': LONG})}/a.jsonl"
    rows = read_rows([name])
    next(rows)
    lake({"a.jsonl": LONG.replace(b"word", b"WORD")})
    with pytest.raises(UserError, match=r"a\.jsonl changed since this command first read it"):
        list(rows)  # in the middle: the next part is of another object
    with pytest.raises(UserError, match=r"a\.jsonl changed since this command first read it"):
        texts(name)


def test_a_store_that_is_busy_for_a_while_is_asked_again(server: ObjectStore, lake, monkeypatch) -> None:
    place = lake(SHARDS)
    refused: list[str] = []

    class Busy(BaseHTTPRequestHandler):
        """Passes every request on, once it was made three times."""

        def answer(self) -> None:
            if refused.count(asked := f"{self.command} {self.path}") < 2:
                refused.append(asked)
                self.send_error(503)
                return
            headers = {name: value for name, value in self.headers.items() if name != "Host"}
            request = urllib.request.Request(server.endpoint + self.path, headers=headers, method=self.command)
            with urllib.request.urlopen(request) as response:
                body = response.read()
                self.send_response(response.status)
                for name in ("ETag", "Last-Modified", "Content-Length", "Content-Range", "Content-Type"):
                    if name in response.headers:
                        self.send_header(name, response.headers[name])
                self.end_headers()
                self.wfile.write(body)

        do_GET = do_HEAD = answer

        def log_message(self, *_: object) -> None: ...

    with serving(Busy) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        forget_clients()
        assert len(texts(f"{place}/pool/0.jsonl.gz")) == len(ROWS[0::3])
    assert {what.split()[0] for what in refused} == {"HEAD", "GET"}


def test_a_store_that_goes_away_is_one_sentence(monkeypatch) -> None:
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    with object_store() as server:
        lakes = bucket(server, monkeypatch)
        monkeypatch.setattr(remote, "BLOCK", 1 << 10)
        name = f"{next(lakes)({'a.jsonl': LONG})}/a.jsonl"
        rows = read_rows([name], bad_rows="skip", skipped=[])
        next(rows)
        server.stop()
        with pytest.raises(UserError, match="the store does not answer") as refused:
            list(rows)
        assert not isinstance(refused.value, formats.BrokenFile), "rows behind an outage are no bad rows"
    forget_clients()
