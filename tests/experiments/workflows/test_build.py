"""Tables of evaluated rows: their places, and where they are written."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flatshift.experiments.workflows.build import format_places, write_tables


def test_places_of_files_of_one_name_keep_what_tells_them_apart() -> None:
    assert format_places(["/x/a.jsonl:1", "/x/b.jsonl:1", "/x/a.jsonl:2#1"]) == [
        "a.jsonl:1",
        "b.jsonl:1",
        "a.jsonl:2#1",
    ]
    places = ["/x/one/t.jsonl:1", "/x/two/t.jsonl:1", "/x/two/t.jsonl:2", "/x/two/u.jsonl:1"]
    assert format_places(places) == ["one/t.jsonl:1", "two/t.jsonl:1", "two/t.jsonl:2", "u.jsonl:1"]
    moved = [place.replace("/x/", "/elsewhere/") for place in places]
    assert format_places(moved) == format_places(places), "a copy of the folder has the same rows"
    deep = ["/x/one/v/t.jsonl:1", "/x/two/v/t.jsonl:1", "t.jsonl:1"]
    assert format_places(deep) == ["one/v/t.jsonl:1", "two/v/t.jsonl:1", "t.jsonl:1"]
    assert format_places([]) == []


def test_a_folder_may_be_called_as_the_home_directory_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("~").mkdir()
    write_tables(Path("~") / "rows.parquet", [pa.table({"row": ["a"]})])
    assert pq.read_table(tmp_path / "~" / "rows.parquet").num_rows == 1
