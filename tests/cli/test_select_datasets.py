"""Pools from the `datasets` package through `flatshift select`: hub data sets are streamed, saved ones are read.

The package itself is not a test dependency: a stand-in has the two functions that are called and what they return.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from flatshift.cli import run

ROWS = 9000


class Streaming:
    """Like `datasets.IterableDataset`: iterated once, of unknown length."""

    def __init__(self, count: int = ROWS, fail_at: int | None = None):
        self.count, self.fail_at, self.given, self.begun = count, fail_at, 0, 0

    def __iter__(self) -> Iterator[dict]:
        self.begun += 1
        for i in range(self.count):
            if i == self.fail_at:
                raise ConnectionError("the hub went away\nand more")
            self.given += 1
            yield {"text": f"word{i % 7} and word{i % 11}", "id": i, "domain": "ab"[i % 2], "meta": {"n": [i]}}


@pytest.fixture
def package(monkeypatch) -> types.ModuleType:
    """A stand-in for `datasets`; `calls` records how it was asked."""
    module = types.ModuleType("datasets")
    module.calls = []
    module.source = Streaming()

    def load_dataset(path, name=None, *, split=None, revision=None, streaming=False):
        module.calls.append((path, split, revision, streaming))
        if path == "no/such":
            raise FileNotFoundError("Dataset 'no/such' doesn't exist on the Hub\nor cannot be accessed")
        return {"train": module.source, "test": Streaming(3)} if split is None else module.source

    def load_from_disk(path):
        module.calls.append(path)
        return module.source

    module.load_dataset, module.load_from_disk = load_dataset, load_from_disk
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


def words(tmp_path: Path, pool: str, *more: str) -> list[str]:
    target = tmp_path / "t.jsonl"
    target.write_text('{"text": "word1 and word2"}\n{"text": "word3 and word4"}\n', encoding="utf-8")
    made = [
        "select",
        "--pool",
        pool,
        "--data.holdout",
        "0",
        "--target",
        str(target),
        "--budget",
        "20",
        "--out",
        str(tmp_path / "out"),
    ]
    return [*made, "--method", "dsir", *more]


def test_a_hub_data_set_is_streamed_once(package, tmp_path: Path) -> None:
    assert run(words(tmp_path, "hub:owner/name@abc:train")) == 0
    assert package.calls == [("owner/name", "train", "abc", True)]
    assert (package.source.begun, package.source.given) == (1, ROWS), "one pass: rows are spilled, not read again"
    table = pq.read_table(tmp_path / "out" / "scores.parquet").to_pydict()
    assert table["id"] == [str(i) for i in range(ROWS)] and table["domain"][:2] == ["a", "b"]
    first = json.loads((tmp_path / "out" / "selected.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert first["meta"] == {"n": [first["id"] if isinstance(first["id"], int) else int(first["id"])]}
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["inputs"][0] == {"path": "hub:owner/name@abc:train", "sha256": None, "bytes": None, "rows": None}


def test_a_saved_data_set_is_read(package, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "state.json").write_text("{}", encoding="utf-8")
    package.source = Streaming(30)
    assert run(words(tmp_path, str(saved))) == 0
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text(encoding="utf-8"))
    assert set(package.calls) == {str(saved)} and manifest["inputs"][0]["rows"] == 30


@pytest.mark.parametrize(
    ("pool", "told"),
    [
        ("hub:owner/name", "has several splits; name one: hub:owner/name:train, hub:owner/name:test"),
        ("hub:no/such:train", "cannot be opened (Dataset 'no/such' doesn't exist on the Hub)"),
    ],
)
def test_what_cannot_be_opened_is_one_sentence(package, tmp_path: Path, capsys, pool: str, told: str) -> None:
    assert run(words(tmp_path, pool)) == 2
    message = capsys.readouterr().err
    assert told in message and "Traceback" not in message and not (tmp_path / "out").exists()


def test_a_stream_that_breaks_off_selects_nothing(package, tmp_path: Path, capsys) -> None:
    package.source = Streaming(fail_at=5000)
    assert run(words(tmp_path, "hub:owner/name:train")) == 2
    message = capsys.readouterr().err
    assert "hub:owner/name:train" in message and "record 5001" in message and "the hub went away" in message
    assert "Traceback" not in message and not (tmp_path / "out").exists()


def test_the_package_itself(tmp_path: Path) -> None:
    """Where it is at hand: a saved set, and a folder streamed as the hub's are."""
    datasets = pytest.importorskip("datasets")
    rows = [{"text": f"word{i % 7} and word{i % 11}", "id": str(i)} for i in range(50)]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "repository").mkdir()
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "repository" / "train.jsonl").write_text(lines, encoding="utf-8")
    tables = []
    for number, pool in enumerate((str(tmp_path / "saved"), f"hub:{tmp_path / 'repository'}:train")):
        given = words(tmp_path, pool)
        given[given.index("--out") + 1] = str(tmp_path / f"out{number}")
        assert run(given) == 0
        tables.append(pq.read_table(tmp_path / f"out{number}" / "scores.parquet").to_pydict())
    assert tables[0] == tables[1] and tables[0]["id"] == [row["id"] for row in rows]
