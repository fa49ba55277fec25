"""`flatshift select` on pools of any size: cache, pieces, domains, embedders; what is written and what is refused."""

from __future__ import annotations

import errno
import gzip
import json
import os
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from flatshift.cli import run
from flatshift.experiments.select import embedding
from tests.support.data_models import write_jsonl

WORDS = [f"{a}{b}" for a in ("al", "be", "ga", "de") for b in ("pha", "ta", "mma", "lta", "rho")]


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """60 records of three domains with words of their own, a target that looks like `b`."""
    rng = np.random.default_rng(0)

    def text(domain: int, count: int) -> str:
        return " ".join(rng.choice(WORDS[domain * 5 : domain * 5 + 10], count))

    pool = [{"text": text(i % 3, 6 + i % 9), "domain": "abc"[i % 3], "n": i} for i in range(60)]
    target = [{"text": text(1, 8)} for _ in range(6)]
    words = [
        "--pool",
        str(write_jsonl(tmp_path / "p.jsonl", pool)),
        "--data.holdout",
        "0",
        "--target",
        str(write_jsonl(tmp_path / "t.jsonl", target)),
    ]
    return ["select", *words, "--budget", "5", "--select.embedder.dim", "6"]


def table(out: Path) -> dict:
    return pq.read_table(out / "scores.parquet").to_pydict()


def manifest(out: Path) -> dict:
    return json.loads((out / "manifest.json").read_text(encoding="utf-8"))


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "selected.jsonl").read_text(encoding="utf-8").splitlines()]


def test_a_cache_changes_nothing_but_the_work(files, tmp_path: Path) -> None:
    cache = ["--select.cache", str(tmp_path / "cache")]
    for name, more in (("plain", []), ("one", cache), ("two", cache)):
        assert run([*files, "--out", str(tmp_path / name), "--method", "knn", *more]) == 0
    plain, one, two = (table(tmp_path / name) for name in ("plain", "one", "two"))
    assert plain == one == two
    assert "cache" not in manifest(tmp_path / "plain")
    assert manifest(tmp_path / "one")["cache"] == {"shards_computed": 2, "shards_reused": 0, "shards_broken": 0}
    assert manifest(tmp_path / "two")["cache"] == {"shards_computed": 0, "shards_reused": 2, "shards_broken": 0}
    assert not [path for path in (tmp_path / "one").iterdir() if path.name.startswith(".")], "nothing left behind"


def test_large_vectors_stay_on_disk(files, tmp_path: Path, monkeypatch) -> None:
    assert run([*files, "--out", str(tmp_path / "held")]) == 0
    monkeypatch.setattr(embedding, "MAX_BYTES", 0)
    assert run([*files, "--out", str(tmp_path / "disk")]) == 0
    assert table(tmp_path / "held") == table(tmp_path / "disk")
    assert not [path for path in (tmp_path / "disk").iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("unit", ["words", "chars", "tokens"])
def test_pieces_map_back_to_their_record(files, tmp_path: Path, unit: str) -> None:
    size = {"words": 5, "chars": 20, "tokens": 12}[unit]
    out = tmp_path / "out"
    assert run([*files, "--out", str(out), "--select.chunk.unit", unit, "--select.chunk.size", str(size)]) == 0
    source = [json.loads(line)["text"] for line in (tmp_path / "p.jsonl").read_text(encoding="utf-8").splitlines()]
    ids = table(out)["id"]
    assert len(ids) == len(set(ids)) > 60
    assert manifest(out)["chunk"] == {"unit": unit, "size": size, "records": 60, "pieces": len(ids)}
    if unit == "words":
        assert ids[:4] == ["0-0#0", "0-0#1", "0-1#0", "0-1#1"], "6 and 7 words"
        assert len(ids) == sum(-(-len(text.split()) // 5) for text in source)
    for piece in lines(out):
        row = int(piece["source_id"].removeprefix("0-"))
        assert piece["text"] == source[row][piece["start"] : piece["end"]] and piece["n"] == row
        assert piece["id"].startswith(f"{piece['source_id']}#")
        if unit != "tokens":
            assert len(piece["text"].split() if unit == "words" else piece["text"]) <= size


def test_domains_are_chosen_by_their_distance(files, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run([*files, "--out", str(out), "--method", "dsir", "--select.relevance.keep", "1"]) == 0
    about = manifest(out)["relevance"]
    assert (
        about["chosen"] == ["b"]
        and min(about["distances"], key=about["distances"].get) == "b"
        and about["sampled"] == dict.fromkeys("abc", 20)
    )
    assert set(table(out)["domain"]) == {"b"} and len(table(out)["id"]) == 20
    assert manifest(out)["selection"]["pool"] == 20 and about["records_before"] == 60


def test_domains_are_weighted_by_their_distance(files, tmp_path: Path, capsys) -> None:
    weight = ["--select.relevance.use", "weight"]
    assert run([*files, "--out", str(tmp_path / "w"), *weight]) == 0
    assert run([*files, "--out", str(tmp_path / "u")]) == 0
    masses = manifest(tmp_path / "w")["relevance"]["masses"]
    assert masses["b"] == max(masses.values()) and sum(masses.values()) == pytest.approx(1)
    assert table(tmp_path / "w")["score"] != table(tmp_path / "u")["score"]
    assert run([*files, "--out", str(tmp_path / "k"), *weight, "--method", "knn"]) == 2
    assert "knn does not look at the weights of domains" in capsys.readouterr().err


def test_static_vectors_from_a_text_file(files, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    lines_ = [f"{word} {' '.join(f'{v:.4f}' for v in rng.normal(size=4))}\n" for word in WORDS]
    (tmp_path / "v.vec.gz").write_bytes(gzip.compress("".join(lines_).encode()))
    words = [word for word in files if word not in ("--select.embedder.dim", "6")]
    out = tmp_path / "out"
    assert run([*words, "--out", str(out), "--embedder", f"static:{tmp_path / 'v.vec.gz'}", "--method", "knn"]) == 0
    assert manifest(out)["selection"]["embedder"] == "static"
    assert {record["domain"] for record in lines(out)} <= {"b", "a", "c"} and len(lines(out)) == 5


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--select.chunk.size", "0"], "size must be at least 1"),
        (["--select.relevance.keep", "1", "--domain-column", "topic"], "no column 'topic'; "),
        (["--select.relevance.keep", "1", "--budget", "30"], "above the pool's 20 records"),
        (["--select.relevance.epsilon", "0"], "epsilon must be above 0"),
        (
            ["--select.relevance.use", "weight", "--select.relevance.keep", "1"],
            "relevance.keep has no effect with use weight",
        ),
        (["--select.relevance.temperature", "2"], "relevance.temperature has no effect with use choose"),
        (["--embedder", "static:nowhere"], "nowhere: no such directory or file of word vectors"),
        (["--select.cache", "p.jsonl"], "nothing can be written there"),
    ],
)
def test_refusals_are_one_sentence_and_leave_nothing(files, tmp_path: Path, monkeypatch, capsys, more, words) -> None:
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.iterdir())
    given = [word for word in files if "--embedder" not in more or word not in ("--select.embedder.dim", "6")]
    if "--budget" in more:
        given = [word for word in given if word not in ("--budget", "5")]
    assert run([*given, "--out", "out", *more]) == 2
    message = capsys.readouterr().err
    assert words in message and "Traceback" not in message
    assert set(tmp_path.iterdir()) == before


def test_a_full_disk_interrupts(files, tmp_path: Path, monkeypatch, capsys) -> None:
    def full(path: Path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr("flatshift.selection.features.cache.atomic_file", full)
    assert run([*files, "--out", str(tmp_path / "out"), "--select.cache", str(tmp_path / "cache")]) == 3
    message = capsys.readouterr().err
    assert "the disk is full while selecting into" in message and "Traceback" not in message


def test_own_features_of_several_sources_follow_their_records(tmp_path: Path, monkeypatch) -> None:
    from flatshift.experiments.data.splits import read_splits
    from flatshift.experiments.recipe import from_mapping, load_recipe

    monkeypatch.chdir(tmp_path)
    for name in "ab":
        rows = [{"text": f"{name} {i}", "label": "x" if i % 2 else "y"} for i in range(5)]
        write_jsonl(tmp_path / f"{name}.jsonl", [*rows[:2], {"label": "x"}, *rows[2:]])
    sources = {name: {"files": [f"{name}.jsonl"]} for name in "ab"}
    changes = {"data.train.sources": sources, "data.bad_rows": "skip", "data.holdout": 0, "train.epochs": None}
    split = read_splits(load_recipe("classify", [from_mapping(changes | {"train.steps": 2})]).recipe)
    assert [row.index for row in split.train] == [0, 1, 3, 4, 5, 6, 7, 9, 10, 11] and split.records == 12


def test_own_features_refuse_what_they_cannot_follow(files, tmp_path: Path, capsys) -> None:
    np.save(tmp_path / "x.npy", np.ones((60, 2)))
    np.save(tmp_path / "y.npy", np.ones((6, 2)))
    given = [word for word in files if word not in ("--select.embedder.dim", "6")]
    given += ["--pool-features", str(tmp_path / "x.npy"), "--target-features", str(tmp_path / "y.npy")]
    for more, words in (
        (["--select.chunk.size", "5"], "pieces of a record have no row in features of your own"),
        (["--select.cache", "c"], "select.cache: features of your own"),
        (["--select.feature_type", "float16"], "select.feature_type: features of your own"),
    ):
        assert run([*given, "--out", str(tmp_path / "out"), *more]) == 2
        assert words in capsys.readouterr().err
