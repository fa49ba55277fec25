"""The detoxification study: rows of its parts do not meet, a seed draws the same again, finished cells stay."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest

from benchmarks import detox


def write(file: Path, rows: list[dict]) -> None:
    with lzma.open(file, "wt", encoding="utf-8") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def study(tmp_path, monkeypatch):
    for name, value in (("POOL", 20), ("TARGET", 5), ("CLEAN", 4), ("PROMPTS", 3)):
        monkeypatch.setattr(detox, name, value)
    monkeypatch.setattr(detox, "WORK", tmp_path / "work")
    monkeypatch.setattr(detox, "CELLS", tmp_path / "cells.json")
    write(tmp_path / "civilcomments_toxicspans_pool.jsonl.xz", [{"text": f"comment {i}"} for i in range(50)])
    write(tmp_path / "rtp_quark_val_5k.jsonl.xz", [{"prompt": f"prompt {i}"} for i in range(9)])
    return tmp_path


def texts(file: Path) -> list[str]:
    return [json.loads(line)["text"] for line in file.read_text().splitlines()]


def test_parts_do_not_meet(study):
    pairs = [{"toxic": f"bad {i}", "neutral": [f"good {i}"]} for i in range(30)]
    files = detox.inputs(study, pairs, 0)
    target, negative, clean = (texts(files[name]) for name in ("target", "negative", "clean"))
    numbers = [{text.split()[1] for text in part} for part in (target, negative, clean)]
    assert [len(part) for part in numbers] == [5, 5, 4] and len(set.union(*numbers)) == 14
    assert all(t.startswith("good") for t in target + clean) and all(t.startswith("bad") for t in negative)
    assert len(texts(files["pool"])) == 40 and sum(t.startswith("comment") for t in texts(files["pool"])) == 20
    before = {name: file.read_text() for name, file in files.items()}
    again = detox.inputs(study, pairs, 0)
    assert {name: file.read_text() for name, file in again.items()} == before
    other = detox.inputs(study, pairs, 1)
    assert all(other[name].read_text() != before[name] for name in before)


def test_a_finished_cell_is_not_made_again(study):
    made: list[int] = []

    def make() -> dict:
        made.append(1)
        return {"perplexity": 7.0}

    first = detox.cell("none-0", make)
    assert first == detox.cell("none-0", make) and first["perplexity"] == 7.0 and made == [1]


def test_what_is_read_of_it(study, monkeypatch, capsys):
    found = {
        name: {s: {**dict.fromkeys(detox.FIGURES, base + s / 10), "comments": 0.5, "cpu_s": 1.0} for s in range(3)}
        for name, base in (("none", 0.1), ("random", 0.5), ("contrast", 0.3))
    }
    for seed in range(3):  # differences that are not all alike
        found["contrast"][seed]["expected_max_toxicity"] += 0.01 * seed
    rows = {}
    monkeypatch.setattr(detox.Benchmark, "finish", lambda self: rows.update({row["what"]: row for row in self.rows}))
    detox.report({"test": {"accuracy": {"value": 0.9}}, "cpu_s": 2.0}, found)
    row = rows["expected maximum toxicity, contrast less random"]
    assert row["ours"] == pytest.approx(-0.19) and "mean -0.1900, 95 % interval over 3 seeds [" in row["reason"]
    assert rows["all of it"]["ours"] == pytest.approx(11.0)


def test_a_command_that_fails_says_so(capsys):
    with pytest.raises(detox.UserError, match="flatshift eval: exit code 2"):
        detox.command("eval")
