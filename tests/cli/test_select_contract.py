"""`flatshift select` to the letter of its contract: files, columns, order, own features, and bad input."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from flatshift.cli import run
from flatshift.finetune.data.config import Columns
from flatshift.finetune.data.rows import read_rows
from tests.support.data_models import write_jsonl

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A pool of 40 records of two domains and a target of 6 that looks like the second."""
    rng = np.random.default_rng(0)
    pool = [
        {
            "text": " ".join(rng.choice(WORDS[:5] if i % 2 else WORDS[5:], 8)),
            "domain": "ab"[i % 2],
            "score": i,
            "rank": "x",
        }
        for i in range(40)
    ]
    target = [{"text": " ".join(rng.choice(WORDS[:5], 8))} for _ in range(6)]
    return write_jsonl(tmp_path / "pool.jsonl", pool), write_jsonl(tmp_path / "target.jsonl", target)


def select(files: tuple[Path, Path], out: Path, *more: str, budget: int = 10) -> int:
    pool, target = files
    words = [
        "select",
        "--pool",
        str(pool),
        "--data.holdout",
        "0",
        "--target",
        str(target),
        "--budget",
        str(budget),
        "--out",
        str(out),
        *more,
    ]
    return run(words)


@pytest.mark.parametrize("method", ["gotd", "knn", "dsir", "random"])
def test_outputs_follow_the_contract(files, tmp_path: Path, method: str) -> None:
    out = tmp_path / "out"
    assert select(files, out, "--method", method) == 0
    table = pq.read_table(out / "scores.parquet")
    assert [(f.name, str(f.type)) for f in table.schema] == [
        ("id", "string"),
        ("score", "double"),
        ("rank", "int64"),
        ("selected", "bool"),
        ("times", "int32"),
        ("nearest_target", "string"),
        ("domain", "string"),
    ]
    columns = table.to_pydict()
    assert columns["id"] == [f"0-{i}" for i in range(40)], "one row per record, in file order"
    assert sorted(columns["rank"]) == list(range(1, 41))
    assert columns["selected"] == [rank <= 10 for rank in columns["rank"]]
    by_rank = np.argsort(columns["rank"])
    assert (np.diff(np.array(columns["score"])[by_rank]) >= 0).all(), "smaller is better for every method"
    assert columns["domain"] == ["ab"[i % 2] for i in range(40)]
    chosen = [json.loads(line) for line in (out / "selected.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [record["rank"] for record in chosen] == list(range(1, 11))
    for record in chosen:
        row = columns["id"].index(record["id"])
        assert record["score"] == columns["score"][row]
        assert record["source"] == {"score": row, "rank": "x"}, "colliding input keys move under `source`"
        assert record["domain"] == columns["domain"][row]
    manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    assert [entry["rows"] for entry in manifest["inputs"]] == [40, 6]
    assert manifest["selection"]["method"] == method
    for name in ("report.html", "command.txt", "environment.json", "recipe.resolved.yaml", "log.txt"):
        assert (out / name).stat().st_size > 0
    assert list((out / "plots").glob("*.svg"))
    if method == "gotd":
        assert manifest["selection"]["marginal_error"] <= 1e-9
        assert set(columns["nearest_target"]) <= {f"0-{j}" for j in range(6)}
        assert sum(columns["domain"][i] == "b" for i in by_rank[:10]) >= 9, "the target looks like domain b"


def test_same_seed_same_bytes(files, tmp_path: Path) -> None:
    for name in ("one", "two"):
        assert select(files, tmp_path / name) == 0
    for name in ("scores.parquet", "selected.jsonl"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_ties_keep_file_order(tmp_path: Path) -> None:
    pool = write_jsonl(tmp_path / "p.jsonl", [{"text": "the same words"}] * 8)
    target = write_jsonl(tmp_path / "t.jsonl", [{"text": "the same words"}, {"text": "other words"}])
    np.save(tmp_path / "x.npy", np.ones((8, 3)))
    np.save(tmp_path / "y.npy", np.eye(3)[:2])
    own = ["--pool-features", str(tmp_path / "x.npy"), "--target-features", str(tmp_path / "y.npy")]
    assert select((pool, target), tmp_path / "out", *own, "--method", "knn", budget=3) == 0
    assert pq.read_table(tmp_path / "out" / "scores.parquet")["rank"].to_pylist() == list(range(1, 9))


def test_own_features_are_scored_as_given_against_pot(files, tmp_path: Path) -> None:
    ot = pytest.importorskip("ot")
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(40, 5)) * 3, rng.normal(size=(6, 5)) + 1
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    own = ["--pool-features", str(tmp_path / "x.npy"), "--target-features", str(tmp_path / "y.npy")]
    assert select(files, tmp_path / "out", *own, "--epsilon", "0.1") == 0
    cost = ((x[:, None] - y[None]) ** 2).sum(-1)
    a, b = np.full(40, 1 / 40), np.full(6, 1 / 6)
    epsilon = 0.1 * cost.mean()
    _, log = ot.sinkhorn(a, b, cost, epsilon, method="sinkhorn_log", numItermax=200_000, stopThr=1e-13, log=True)
    f = epsilon * log["log_u"]
    scores = pq.read_table(tmp_path / "out" / "scores.parquet")["score"].to_numpy()
    np.testing.assert_allclose(scores, f - f.mean(), atol=1e-7 * cost.mean())


def test_a_skipped_record_drops_its_feature_row(tmp_path: Path) -> None:
    good = [{"text": f"word {i}", "id": f"r{i}"} for i in range(6)]
    pool = write_jsonl(tmp_path / "p.jsonl", good)
    lines = pool.read_text(encoding="utf-8").splitlines()
    lines[2] = "{not json"
    pool.write_text("\n".join(lines) + "\n", encoding="utf-8")
    target = write_jsonl(tmp_path / "t.jsonl", [{"text": "a"}])
    np.save(tmp_path / "x.npy", np.arange(6.0)[:, None])
    np.save(tmp_path / "y.npy", np.array([[5.0]]))
    own = ["--pool-features", str(tmp_path / "x.npy"), "--target-features", str(tmp_path / "y.npy")]
    assert select((pool, target), tmp_path / "refused", *own, budget=2) == 2
    assert not (tmp_path / "refused").exists()
    assert select((pool, target), tmp_path / "out", *own, "--bad-rows", "skip", "--method", "knn", budget=2) == 0
    table = pq.read_table(tmp_path / "out" / "scores.parquet").to_pydict()
    assert table["id"] == ["r0", "r1", "r3", "r4", "r5"]
    assert table["score"] == [25.0, 16.0, 4.0, 1.0, 0.0]
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text(encoding="utf-8"))
    assert f"{pool}:3" in manifest["selection"]["skipped"]["pool"][0]


def test_features_have_no_row_for_the_rest_of_a_broken_file(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    texts = [np.random.default_rng(i).bytes(20_000).hex() for i in range(80)]
    whole = gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in texts).encode())
    (tmp_path / "p" / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    write_jsonl(tmp_path / "p" / "b.jsonl", [{"text": "x", "id": "x"}, {"text": "y", "id": "y"}])
    rows = sum(1 for _ in read_rows([str(tmp_path / "p")], bad_rows="skip", skipped=[]))
    assert 2 < rows < 82
    target = write_jsonl(tmp_path / "t.jsonl", [{"text": "a"}])
    np.save(tmp_path / "x.npy", np.arange(float(rows))[:, None])
    np.save(tmp_path / "y.npy", np.array([[rows - 2.0]]))
    own = ["--pool-features", str(tmp_path / "x.npy"), "--target-features", str(tmp_path / "y.npy")]
    sides = (tmp_path / "p", target)
    assert select(sides, tmp_path / "out", *own, "--bad-rows", "skip", "--method", "knn", budget=1) == 0
    assert json.loads((tmp_path / "out" / "selected.jsonl").read_text(encoding="utf-8"))["id"] == "x"


@pytest.mark.parametrize(
    ("pool_text", "more", "words"),
    [
        (None, (), "no such file"),
        ("", (), "empty"),
        ('{"text": "a"}\n{"text": \n', (), "p.jsonl:2"),
        ('{"text": "a"}\n{"txet": "b"}\n', (), "p.jsonl:2"),
        ('{"text": "a"}\n{"text": 5}\n', (), "p.jsonl:2"),
        ('{"text": "a"}\n{"text": "b"}\n', ("--budget", "3"), "2 records"),
        ('{"text": "a"}\n{"text": "b"}\n', ("--method", "gtod"), "'gotd'"),
        ('{"text": "a"}\n{"text": "b"}\n', ("--epsilon", "-1"), "epsilon"),
        ('{"text": "a"}\n{"text": "b"}\n', ("--pool-features", "x.npy"), "--target-features"),
        ('{"text": "a"}\n{"text": "b"}\n', ("--pool-features", "x.npy", "--target-features", "y.npy"), "x.npy"),
        ('{"text": "a", "id": 1}\n{"text": "b", "id": 1}\n', (), "'1'"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, monkeypatch, capsys, pool_text: str | None, more: tuple[str, ...], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if pool_text is not None:
        (tmp_path / "p.jsonl").write_text(pool_text, encoding="utf-8")
    write_jsonl(tmp_path / "t.jsonl", [{"text": "a"}])
    before = set(tmp_path.iterdir())
    budget = () if "--budget" in more else ("--budget", "1")
    code = run(
        ["select", "--pool", "p.jsonl", "--data.holdout", "0", "--target", "t.jsonl", *budget, "--out", "out", *more]
    )
    message = capsys.readouterr().err
    assert code == 2, message
    assert words in message and "Traceback" not in message
    assert set(tmp_path.iterdir()) == before


def test_feature_count_mismatch_and_nonempty_out(files, tmp_path: Path, capsys) -> None:
    np.save(tmp_path / "x.npy", np.ones((39, 2)))
    np.save(tmp_path / "y.npy", np.ones((6, 2)))
    own = ["--pool-features", str(tmp_path / "x.npy"), "--target-features", str(tmp_path / "y.npy")]
    assert select(files, tmp_path / "out", *own) == 2
    assert "39 rows for 40 records" in capsys.readouterr().err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine", encoding="utf-8")
    assert select(files, tmp_path / "full") == 2
    assert "not empty" in capsys.readouterr().err
    assert (tmp_path / "full" / "mine.txt").read_text(encoding="utf-8") == "mine"


def test_pieces_and_repeats_are_named_in_the_column_of_the_ids(tmp_path: Path) -> None:
    pool = [{"key": f"k{i}", "text": f"one two three four five six {i}"} for i in range(4)]
    pair = write_jsonl(tmp_path / "p.jsonl", pool), write_jsonl(tmp_path / "t.jsonl", [{"text": "two three"}])
    names = ("--id-column", "key", "--select.chunk.size", "3", "--method", "random")
    assert select(pair, tmp_path / "out", *names, budget=12) == 0
    chosen = list(read_rows([str(tmp_path / "out" / "selected.jsonl")], columns=Columns(id="key")))
    assert {row.id for row in chosen} == {f"k{i}#{k}" for i in range(4) for k in range(3)}
    assert all(row.record["key"] == row.record["id"] == row.id for row in chosen)


def test_a_collision_moves_neither_text_nor_domain_nor_an_own_source(tmp_path: Path) -> None:
    pool = [{"id": float(i), "source": f"word {i}", "score": i, "origin": "ab"[i % 2]} for i in range(5)]
    target = write_jsonl(tmp_path / "t.jsonl", [{"source": "word 1"}])
    words = ("--text-column", "source", "--method", "random")
    for number, domain in enumerate(("origin", "source")):
        own = write_jsonl(tmp_path / f"p{number}.jsonl", pool)
        assert select((own, target), tmp_path / str(number), *words, "--domain-column", domain, budget=5) == 0
        for line in (tmp_path / str(number) / "selected.jsonl").read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            row = int(record["id"])
            assert (record["id"], record["source"], record["origin"]) == (f"{row}", f"word {row}", "ab"[row % 2])
            assert record["source_2"] == {"score": row} and record["score"] != row, "1.0 is read as the id 1"


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ("score", ("--text-column", "score")),
        ("rank", ("--id-column", "rank")),
        ("start", ("--domain-column", "start", "--select.chunk.size", "9")),
        ("source_id", ("--domain-column", "source_id", "--select.hygiene.decontaminate", "{}")),
    ],
)
def test_a_column_that_the_selection_writes_cannot_be_read(files, tmp_path: Path, capsys, column, words) -> None:
    assert select(files, tmp_path / "out", *words) == 2
    assert f"selected.jsonl has a column '{column}' of its own; rename that of" in capsys.readouterr().err


def test_columns_by_flag_and_json(tmp_path: Path, capsys) -> None:
    rows = [{"body": f"word {i}", "key": f"k{i}", "kind": "z", "domain": "other"} for i in range(5)]
    pool = write_jsonl(tmp_path / "p.jsonl", rows)
    target = write_jsonl(tmp_path / "t.jsonl", [{"body": "word 1", "key": "t"}])
    names = ["--text-column", "body", "--id-column", "key", "--domain-column", "kind", "--json"]
    assert select((pool, target), tmp_path / "out", *names, "--method", "knn", budget=1) == 0
    assert json.loads(capsys.readouterr().out)["selection"]["budget"] == 1
    table = pq.read_table(tmp_path / "out" / "scores.parquet").to_pydict()
    assert table["id"] == [f"k{i}" for i in range(5)] and table["domain"] == ["z"] * 5
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "<dd>z</dd>" in page and "<dd>other</dd>" not in page, "the domain of a card"
    (chosen,) = (tmp_path / "out" / "selected.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(chosen)["body"] == "word 1", "records come out whole, under their own column names"


def test_pieces_of_the_shipped_pool_have_the_hidden_domain_of_their_text(files, tmp_path: Path) -> None:
    words = ("--method", "random", "--select.checks", "false", "--select.pool.limit", "12", "--select.chunk.size", "9")
    assert select((Path("sample:pool"), files[1]), tmp_path / "out", *words) == 0
    tags = dict(line.split("\t") for line in (tmp_path / "out" / "judged_domains.tsv").read_text().splitlines())
    assert list(tags) == pq.read_table(tmp_path / "out" / "scores.parquet")["id"].to_pylist()
    assert tags.keys() > {f"{name.partition('#')[0]}#0" for name in tags} and all(tags.values())
    assert len({name.partition("#")[0] for name in tags}) == 12
