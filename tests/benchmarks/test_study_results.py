"""Results of long studies: a table gives back what was put in, and finished cells do not run again."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from benchmarks._cell_table import read_cells, write_cells
from benchmarks._study_results import once, packed, read
from flatshift.experiments.results.cells import read_result
from flatshift.finetune.digests import write_sealed
from flatshift.finetune.errors import UserError


def test_a_table_gives_back_every_value_key_and_order(tmp_path: Path) -> None:
    cells = {
        "b": {"status": "done", "reason": None, "metrics": {"loss": 0.1, "n": 3}, "trace": [{"t": 1}, {"x": 0.5}]},
        "a": {"status": "done", "seed": 1, "metrics": {}, "trace": [], "mixed": [1, 2.0], "share": {"a": 1, "b": 2}},
        "c": {"status": "failed", "reason": "no memory", "metrics": None, "lr": None, "share": {"b": 2, "a": 1}},
        "d": {"status": "done", "reason": None, "lr": 1e-3, "ok": True, "empty": {}, "none": None, "one": {"y": None}},
    }  # fmt: skip
    write_cells(tmp_path / "x.parquet", cells)
    assert json.dumps(read_cells(tmp_path / "x.parquet")) == json.dumps({name: cells[name] for name in "abcd"})
    assert read_cells(tmp_path / "none.parquet") == {}


def test_figures_are_columns_of_numbers(tmp_path: Path) -> None:
    write_cells(tmp_path / "x.parquet", {name: {"metrics": {"loss": 0.5}, "trace": [{"t": 1}]} for name in "ab"})
    table = pq.read_table(tmp_path / "x.parquet").flatten()
    assert table["metrics.loss"].to_pylist() == [0.5, 0.5] and str(table.schema.field("trace").type).startswith("list")


def test_cells_of_several_versions_have_their_keys_in_several_orders(tmp_path: Path) -> None:
    cells = {"a": {"x": 1, "y": {"n": 2}}, "b": {"new": None, "y": {"n": 3}, "x": 1}}
    write_cells(tmp_path / "x.parquet", cells)
    assert read_cells(tmp_path / "x.parquet") == cells
    with pytest.raises(ValueError, match=r"y\.parquet: the cells have no keys"):
        write_cells(tmp_path / "y.parquet", {"a": {}})
    assert [file.name for file in tmp_path.iterdir()] == ["x.parquet"]


def test_a_study_goes_on_from_its_table_also_after_a_stop(tmp_path: Path) -> None:
    table, out = tmp_path / "cells.parquet", tmp_path / "out"
    result = {"status": "done", "reason": None, "figure": 0.25}
    with pytest.raises(KeyboardInterrupt), packed(out, table):
        write_sealed(out / "cells" / "one" / "result.json", result)
        write_sealed(out / "cells" / "two" / "result.json", result)
        (out / "cells" / "three").mkdir()  # under way
        raise KeyboardInterrupt
    assert read_cells(table) == {"one": result, "two": result}
    again, before = tmp_path / "again", table.read_bytes()
    with packed(again, table):
        assert read_result(again / "cells" / "one") == read_result(again / "cells" / "two") == result
        assert read_result(again / "cells" / "three") is None
    assert table.read_bytes() == before
    file = again / "cells" / "one" / "result.json"
    file.write_text(file.read_text().replace("0.25", "0.5"))
    with pytest.raises(UserError, match="not what was saved"):
        read_result(again / "cells" / "one")


def test_a_result_is_made_once_or_again_where_asked(tmp_path: Path) -> None:
    file, made = tmp_path / "cells.json", iter(range(9))
    assert [once(file, "a", lambda: next(made)) for _ in range(2)] == [0, 0]
    assert once(file, "b", lambda: next(made)) == 1 and once(file, "a", lambda: next(made), again=True) == 2
    assert read(file) == {"a": 2, "b": 1} and read(tmp_path / "none.json") == {}
