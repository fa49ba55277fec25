"""`flatshift watch`: the page of a sweep at work, on localhost only; and the sentence on one more of each axis."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flatshift.commands import watch
from flatshift.experiments.report.chapters.sweep import one_more
from flatshift.experiments.results.analysis import Analysis
from flatshift.experiments.results.sweep import read_sweep
from flatshift.finetune.errors import UserError


def sweep_at(directory: Path, *, done: int = 12) -> Path:
    """Ranks 1, 4, 16 and 64 under three seeds, of which so many cells have finished: lowest at rank 4."""
    level = {1: 0.5, 4: 0.3, 16: 0.4, 64: 0.45}
    cells = [(rank, seed) for rank in level for seed in range(3)]
    rows = [
        {
            "cell": f"c{place}",
            "status": "done",
            "adapter.rank": rank,
            "seed": seed,
            "test.error": level[rank] + 0.01 * seed,
            "train.error": 0.3 if rank < 16 else 0.0,
        }
        for place, (rank, seed) in enumerate(cells[:done])
    ]
    directory.mkdir()
    pq.write_table(pa.Table.from_pylist(rows), directory / "cells.parquet")
    grid = {"adapter.rank": [str(rank) for rank in level]}
    plan = {"format": 2, "recipe": "r", "grid": grid, "design": "grid", "seeds": 3, "cells": 12}
    (directory / "sweep.json").write_text(json.dumps(plan), encoding="utf-8")
    return directory


def fetch(server, path: str = "/") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_address[1]}{path}", timeout=10) as answer:
        return str(answer.read().decode())


def test_the_page_comes_again_until_the_plan_is_done(tmp_path: Path) -> None:
    page = watch._Page(sweep_at(tmp_path / "part", done=9), 5.0)
    server = watch.serve(page, 0)
    assert server.server_address[0] == "127.0.0.1"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert "No cell has finished yet" in fetch(server)
        page.draw()
        text = fetch(server)
        assert "9 of 12 cells" in text and 'http-equiv="refresh" content="5"' in text and "test error" in text
        page.directory = sweep_at(tmp_path / "whole")
        page.draw()
        assert page.done and "12 of 12 cells" in fetch(server) and "refresh" not in fetch(server).split("<body")[0]
        with pytest.raises(urllib.error.HTTPError, match="404"):
            fetch(server, "/../sweep.json")
        (page.directory / "cells.parquet").write_bytes(b"half written")
        page.draw()
        assert "not a readable Parquet file" in fetch(server) and "test error" in fetch(server)
    finally:
        server.shutdown()
        server.server_close()
    assert sorted(p.name for p in page.directory.iterdir()) == ["cells.parquet", "sweep.json"]


def test_what_cannot_be_watched_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no sweep directory"):
        watch.run([str(tmp_path)])
    with pytest.raises(UserError, match="--every must be at least 1,"):
        watch.run([str(sweep_at(tmp_path / "s")), "--every", "0"])
    with pytest.raises(UserError, match="--port 99999 cannot be had"):
        watch.run([str(tmp_path / "s"), "--port", "99999"])


def test_a_finished_sweep_is_shown_and_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert watch.run([str(sweep_at(tmp_path / "s")), "--every", "1", "--port", "0"]) == 0
    assert "12 of 12 cells" in capsys.readouterr().out


def test_one_more_of_an_axis_is_the_paired_change(tmp_path: Path) -> None:
    data = read_sweep(sweep_at(tmp_path / "s"))
    assert data is not None
    said = one_more(data, Analysis(data))
    assert "rank r 4 → 16 changes it by 0.1" in said and "that is before the point where training rows" in said
