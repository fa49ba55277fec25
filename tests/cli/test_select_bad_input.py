"""Bad input through `flatshift select`: one clear sentence or a counted, reported skip; never a wrong selection."""

from __future__ import annotations

import gzip
import json
import shlex
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flatshift.cli import run

POOL = [{"text": f"word{i % 5} and word{i % 7} make {i}", "id": f"p{i}"} for i in range(30)]
TARGET = [{"text": f"word{i} and word{i + 1}", "id": f"t{i}"} for i in range(4)]


def lines(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def select(folder: Path, *more: str, budget: int = 5, out: str = "out") -> int:
    pool = next(folder.glob("pool.*"))
    words = [
        "select",
        "--pool",
        str(pool),
        "--data.holdout",
        "0",
        "--target",
        str(folder / "target.jsonl"),
        "--budget",
        str(budget),
    ]
    vectors = not any(word in ("--pool-features", "--embedder", "dsir", "length", "random") for word in more)
    words += ["--select.embedder.dim", "4"] if vectors else []
    return run([*words, "--out", str(folder / out), *more])


def table(folder: Path, out: str = "out") -> dict:
    return pq.read_table(folder / out / "scores.parquet").to_pydict()


def about(folder: Path, out: str = "out") -> dict:
    return json.loads((folder / out / "manifest.json").read_text(encoding="utf-8"))["selection"]


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """A folder with a good pool and target."""
    (tmp_path / "pool.jsonl").write_bytes(lines(POOL))
    (tmp_path / "target.jsonl").write_bytes(lines(TARGET))
    return tmp_path


def features(folder: Path, x: np.ndarray, y: np.ndarray) -> tuple[str, ...]:
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y)
    return ("--pool-features", str(folder / "x.npy"), "--target-features", str(folder / "y.npy"))


def refused(folder: Path, capsys, *more: str, budget: int = 5) -> str:
    """The one sentence of a refusal that leaves nothing behind."""
    before = sorted(folder.rglob("*"))
    capsys.readouterr()
    code = select(folder, *more, budget=budget)
    message = capsys.readouterr().err
    assert code == 2, message
    assert "Traceback" not in message and sorted(folder.rglob("*")) == before
    (sentence,) = [line for line in message.splitlines() if line.startswith("flatshift: error: ")]
    return sentence


# ------------------------------------------------------------------------------------------ empty, too few


@pytest.mark.parametrize("side", ["pool", "target"])
@pytest.mark.parametrize("content", [b"", b"\n  \n"])
def test_an_empty_side(given: Path, capsys, side: str, content: bytes) -> None:
    (given / f"{side}.jsonl").write_bytes(content)
    assert f"no {side} rows" in refused(given, capsys) and "is empty" in refused(given, capsys)


@pytest.mark.parametrize("side", ["pool", "target"])
def test_a_limit_above_the_rows_is_named(given: Path, capsys, side: str) -> None:
    count = {"pool": 30, "target": 4}[side]
    told = refused(given, capsys, f"--select.{side}.limit", "99")
    assert f"select.{side}.limit: 99 is above the {count} rows there are" in told


def test_a_target_that_is_wrong_is_told_before_the_pool_is_read(given: Path, capsys) -> None:
    (given / "pool.jsonl").write_bytes(b"not read\n")
    (given / "target.jsonl").write_bytes(b"")
    assert "no target rows" in refused(given, capsys)


def test_every_row_skipped_is_an_empty_side(given: Path, capsys) -> None:
    (given / "pool.jsonl").write_bytes(b"{}\nnull\n")
    told = refused(given, capsys, "--bad-rows", "skip")
    assert "no pool rows: all 2 of" in told and "pool.jsonl:1" in told


@pytest.mark.parametrize("budget", [31, 0, -3])
def test_a_budget_that_cannot_be(given: Path, capsys, budget: int) -> None:
    told = refused(given, capsys, budget=budget)
    assert ("above the pool's 30 records" in told) if budget > 0 else ("budget" in told)


def test_a_budget_of_all_and_of_one(given: Path) -> None:
    assert select(given, budget=30) == 0 and select(given, budget=1, out="one") == 0
    assert all(table(given)["selected"]) and sum(table(given, "one")["selected"]) == 1
    assert table(given)["score"] == table(given, "one")["score"]


# ------------------------------------------------------------------------------------------ features


@pytest.mark.parametrize("method", ["gotd", "knn", "tsds"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", ["pool", "target"])
def test_features_that_are_not_finite_name_their_row(given: Path, capsys, method: str, value: float, side: str) -> None:
    x, y = np.random.default_rng(0).standard_normal((30, 3)), np.random.default_rng(1).standard_normal((4, 3))
    (x if side == "pool" else y)[2, 1] = value
    told = refused(given, capsys, *features(given, x, y), "--method", method)
    assert f"{side} features: row 2 holds a NaN or an infinity (record '{side[0]}2', " in told


@pytest.mark.parametrize("method", ["random", "length"])
@pytest.mark.parametrize("side", ["pool", "target"])
def test_features_that_the_method_does_not_read_are_checked_too(given: Path, capsys, method: str, side: str) -> None:
    x, y = np.random.default_rng(0).standard_normal((30, 3)), np.random.default_rng(1).standard_normal((4, 3))
    (x if side == "pool" else y)[2, 1] = np.nan
    told = refused(given, capsys, *features(given, x, y), "--method", method)
    assert f"{side} features: row 2 holds a NaN or an infinity (record '{side[0]}2', " in told
    told = refused(given, capsys, *features(given, np.ones((30, 3)), np.ones((4, 2))), "--method", method)
    assert "3 columns and target features 2" in told


def test_a_method_that_reads_no_features_maps_huge_ones(given: Path) -> None:
    x = np.random.default_rng(0).standard_normal((34, 3)) * 1e200
    assert select(given, *features(given, x[:30], x[30:]), "--method", "random") == 0
    for method in ("knn", "tsds", "less"):
        assert select(given, *features(given, x[:30], x[30:]), "--method", method, out=method) == 2


@pytest.mark.parametrize("side", ["pool", "target"])
def test_a_bad_feature_is_named_by_its_row_in_the_file(given: Path, capsys, side: str) -> None:
    """Not by its place among the rows that were kept."""
    x, y = np.random.default_rng(0).standard_normal((31, 3)), np.random.default_rng(1).standard_normal((5, 3))
    (x if side == "pool" else y)[3] = np.nan
    for name in ("pool", "target"):
        content = (given / f"{name}.jsonl").read_bytes()
        (given / f"{name}.jsonl").write_bytes(b"null\n" + content)
    told = refused(given, capsys, *features(given, x, y), "--bad-rows", "skip")
    assert f"{side} features: row 3 holds a NaN or an infinity (record '{side[0]}2', " in told
    assert f"{side}.jsonl:4)" in told


@pytest.mark.parametrize(
    ("x", "y", "told"),
    [
        (np.ones((30, 3)), np.ones((4, 2)), "3 columns and target features 2"),
        (np.ones((29, 3)), np.ones((4, 3)), "29 rows for 30 records"),
        (np.ones((30, 3)), np.ones((5, 3)), "5 rows for 4 records"),
        (np.ones(30), np.ones((4, 1)), "must hold a matrix"),
        (np.ones((30, 3), dtype=complex), np.ones((4, 3)), "must hold a matrix of numbers"),
        (np.full((30, 3), 1e200), np.full((4, 3), -1e200), "overflow"),
        (np.array([["a"] * 3] * 30), np.ones((4, 3)), "must hold a matrix of numbers"),
    ],
    ids=["width", "pool rows", "target rows", "vector", "complex", "overflow", "strings"],
)
def test_features_that_do_not_fit(given: Path, capsys, x: np.ndarray, y: np.ndarray, told: str) -> None:
    assert told in refused(given, capsys, *features(given, x, y))


def test_a_features_file_that_is_none(given: Path, capsys) -> None:
    more = features(given, np.ones((30, 3)), np.ones((4, 3)))
    (given / "x.npy").write_bytes((given / "x.npy").read_bytes()[:200])
    assert "x.npy is not a readable .npy file" in refused(given, capsys, *more)
    (given / "x.npy").write_bytes(b"not numpy")
    assert "x.npy is no .npy file" in refused(given, capsys, *more)


def test_rows_without_direction_have_no_cosine(given: Path, capsys) -> None:
    x = np.ones((30, 3))
    x[4] = 0.0
    more = (*features(given, x, np.ones((4, 3))), "--select.method.cost", "cosine")
    assert "pool features: row 4 is zero, so it has no cosine (record 'p4', " in refused(given, capsys, *more)


def test_all_rows_alike_are_ranked_by_file_order(given: Path, capsys) -> None:
    assert select(given, *features(given, np.ones((30, 3)), np.ones((4, 3)))) == 0
    assert table(given)["rank"] == list(range(1, 31)) and "checks" not in about(given)
    told = capsys.readouterr().err
    assert "warning: 30 records tie at the cut; file order decides which of them are chosen" in told
    assert about(given)["ties"] == 30
    assert "30 records tie at the cut; file order decided" in (given / "out/report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("method", ["gotd", "knn"])
def test_a_target_whose_halves_coincide_with_the_pool(given: Path, capsys, method: str) -> None:
    x, y = np.ones((30, 3)), np.concatenate([np.ones((11, 3)), np.eye(3)[:1]])
    (given / "target.jsonl").write_bytes(lines([{"text": f"word{i}"} for i in range(12)]))
    assert select(given, *features(given, x, y), "--method", method, budget=3) == 0
    assert about(given)["checks"]["held_out"] is None
    assert "a half that coincides with the pool" in capsys.readouterr().err


def test_a_check_that_breaks_down_leaves_the_selection(given: Path, capsys, monkeypatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("of the check")

    monkeypatch.setattr("flatshift.selection.checks.check.check_selection", broken)
    assert select(given) == 0 and "checks" not in about(given)
    assert "not checked, by a fault of the check: ZeroDivisionError: of the check" in capsys.readouterr().err
    assert "Traceback" in (given / "out/log.txt").read_text(encoding="utf-8")


def test_numbers_that_are_not_finite_in_a_record_are_null_in_the_selection(given: Path) -> None:
    (given / "pool.jsonl").unlink()
    rows = [{**row, "f": [1.0, np.nan, np.inf][i % 3], "deep": {"g": [np.nan]}} for i, row in enumerate(POOL)]
    pq.write_table(pa.Table.from_pylist(rows), given / "pool.parquet")
    assert select(given, budget=30) == 0

    def refuse(word: str) -> None:
        raise AssertionError(word)

    text = (given / "out/selected.jsonl").read_text(encoding="utf-8")
    found = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
    assert {row["id"]: row["f"] for row in found} == {f"p{i}": [1.0, None, None][i % 3] for i in range(30)}
    assert all(row["deep"] == {"g": [None]} for row in found)


# ------------------------------------------------------------------------------------------ weights, targets


def test_domains_of_weight_zero_are_scored_and_not_transported(given: Path) -> None:
    """A far domain whose weight underflows counts for nothing, and its rows come out with a score."""
    rows = [row | {"domain": "near" if i < 20 else "far"} for i, row in enumerate(POOL)]
    (given / "pool.jsonl").write_bytes(lines(rows))
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((30, 2)), rng.standard_normal((4, 2))
    x[20:] += 1e3
    more = [*features(given, x, y), "--select.relevance.use", "weight", "--select.relevance.temperature", "0.001"]
    assert select(given, *more) == 0
    scores = np.array(table(given)["score"])
    assert np.isfinite(scores).all() and scores[:20].max() < scores[20:].min()
    (given / "pool.jsonl").write_bytes(lines(rows[:20]))
    (given / "near").mkdir()
    for name in ("pool.jsonl", "target.jsonl"):
        (given / "near" / name).write_bytes((given / name).read_bytes())
    assert select(given / "near", *features(given / "near", x[:20], y)) == 0
    alone = np.array(table(given / "near")["score"])
    # ε is a multiple of the mean cost, which rows of weight 0 do not enter.
    np.testing.assert_allclose(scores[:20], alone, atol=1e-8)


def test_repeated_target_rows_weigh_as_often_as_they_stand_there(given: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((30, 3)), rng.standard_normal((4, 3))
    assert select(given, *features(given, x, y), out="once") == 0
    (given / "target.jsonl").write_bytes(lines([{"text": row["text"]} for row in TARGET for _ in range(3)]))
    assert select(given, *features(given, x, np.repeat(y, 3, axis=0)), out="thrice") == 0
    np.testing.assert_allclose(table(given, "thrice")["score"], table(given, "once")["score"], atol=1e-7)
    (given / "target.jsonl").write_bytes(lines([TARGET[0], TARGET[0]]))
    assert select(given, out="texts", budget=3) == 2, "ids are given twice"


@pytest.mark.parametrize("method", ["gotd", "knn", "tsds", "dsir"])
def test_a_target_of_one_row(given: Path, method: str) -> None:
    (given / "target.jsonl").write_bytes(lines(TARGET[:1]))
    assert select(given, "--method", method) == 0
    scores = np.array(table(given)["score"])
    assert np.isfinite(scores).all() and len(set(scores)) > 3
    if method == "gotd":
        assert about(given)["checks"]["held_out"] is None and about(given)["checks"]["coverage"]["limit"] is None


# ------------------------------------------------------------------------------------------ texts and files


@pytest.mark.parametrize(
    "method", ["gotd", "dsir", *(pytest.param(name, marks=pytest.mark.slow) for name in ("length", "knn", "random"))]
)
def test_empty_texts_are_left_out_and_very_long_ones_are_scored(given: Path, capsys, method: str) -> None:
    long = {"text": "word1 and word2 " * 200_000, "id": "long"}
    blank = [{"text": "", "id": "empty"}, {"text": " \n\u3000", "id": "spaces"}]
    (given / "pool.jsonl").write_bytes(lines([*POOL[:26], *blank, long, *POOL[26:]]))
    (given / "target.jsonl").write_bytes(lines([{"text": "\t", "id": "tab"}, *TARGET]))
    assert select(given, "--method", method) == 0
    columns = table(given)
    assert columns["id"] == [row["id"] for row in (*POOL[:26], long, *POOL[26:])]
    assert np.isfinite(columns["score"]).all() and sorted(columns["rank"]) == list(range(1, 32))
    assert about(given)["skipped"] == {
        "pool": [f"{given / 'pool.jsonl'}:{line}: the text is blank" for line in (27, 28)],
        "target": [f"{given / 'target.jsonl'}:1: the text is blank"],
    }
    assert (about(given)["pool"], about(given)["target"]) == (31, 4)
    assert "pool: skipped 2 bad records" in capsys.readouterr().err
    page = (given / "out" / "report.html").read_text(encoding="utf-8")
    assert "2 bad records of the pool left out" in page
    assert len(page) < 2 << 20, "a page shows the beginning of a text"


@pytest.mark.parametrize("method", ["gotd", "knn", "tsds", "gotd-contrast"])
def test_texts_of_which_the_embedder_knows_no_token_are_left_out(given: Path, capsys, method: str) -> None:
    """Their vectors are zero, nearer to the target than most texts are: they were the best of the pool."""
    mute = [{"text": "... !!!", "id": f"m{i}"} for i in range(3)]
    (given / "pool.jsonl").write_bytes(lines([*mute, *POOL]))
    (given / "target.jsonl").write_bytes(lines([*TARGET, {"text": "?", "id": "mute"}]))
    (given / "negative.jsonl").write_bytes(lines([{"text": "word5 and more"}, {"text": "-"}]))
    more = ("--negative", str(given / "negative.jsonl")) if method == "gotd-contrast" else ()
    assert select(given, "--method", method, *more) == 0
    assert table(given)["id"] == [row["id"] for row in POOL]
    skipped = about(given)["skipped"]
    assert [len(skipped["pool"]), len(skipped["target"])] == [3, 1]
    assert len(skipped.get("negative", [])) == (method == "gotd-contrast")
    told = f"{given / 'pool.jsonl'}:1: the embedder knows no token of the text"
    assert skipped["pool"][0] == told and f"pool: skipped 3 records, first {told}" in capsys.readouterr().err
    assert "mute" not in (table(given)["nearest_target"] or [])


def test_domains_are_judged_without_mute_texts(given: Path, capsys) -> None:
    rows = [row | {"domain": "ab"[i % 2]} for i, row in enumerate(POOL)]
    mute = [{"text": "...", "domain": "mute"} for _ in range(9)]
    (given / "pool.jsonl").write_bytes(lines([*rows, *mute]))
    assert select(given, "--select.relevance.keep", "2") == 0
    assert set(table(given)["domain"]) == {"a", "b"}
    assert "knows no token are as far as can be: mute" in capsys.readouterr().err


def test_blank_rows_with_features_of_their_own_stay(given: Path, capsys) -> None:
    blank = {"url": "http://a.b/c", "text": "", "id": "empty"}
    (given / "pool.jsonl").write_bytes(lines([blank, *POOL[1:]]))
    x = np.random.default_rng(0).standard_normal((30, 3)) + 9
    x[0] = 0
    own = features(given, x, np.zeros((4, 3)))
    assert select(given, *own, "--method", "knn") == 0
    assert table(given)["id"][0] == "empty" and about(given)["skipped"] == {"pool": [], "target": []}
    said = capsys.readouterr().err
    assert "1 chosen records have a blank text, and a training on them stops there" in said
    page = (given / "out" / "report.html").read_text(encoding="utf-8")
    assert "http://a.b" not in said and "http://a.b" not in page, "another column is not the text"
    assert select(given, *own, "--method", "knn", "--select.hygiene.length.min_chars", "1", out="full") == 0
    assert "empty" not in table(given, "full")["id"] and "blank text" not in capsys.readouterr().err


@pytest.mark.parametrize("side", ["pool", "target"])
def test_only_empty_texts_on_a_side(given: Path, capsys, side: str) -> None:
    (given / f"{side}.jsonl").write_bytes(lines([{"text": ""}, {"text": "  "}]))
    told = refused(given, capsys, budget=2)
    assert f"no {side} rows: all 2 of" in told and f"{side}.jsonl:1: the text is blank" in told
    (given / f"{side}.jsonl").write_bytes(lines([{"text": "!"}, {"text": ""}]))
    assert f"no {side} rows: all 2 of" in refused(given, capsys, budget=1)


def test_half_a_surrogate_pair_never_ends_a_finished_selection(given: Path, capsys) -> None:
    broken = "bad \ud83d"
    (given / "pool.jsonl").write_bytes(lines([{"title": broken, **row} for row in POOL]))
    assert select(given, "--select.hygiene.exact", "true", budget=2, out="whole") == 0
    first, _ = (given / "whole" / "selected.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(first)["title"] == broken
    for side, rows in (("pool", POOL), ("target", TARGET)):
        (given / f"{side}.jsonl").write_bytes(lines([*rows[:-1], rows[-1] | {"id": broken}]))
        told = refused(given, capsys)
        assert f"{side}.jsonl:{len(rows)}: column 'id' has half of a surrogate pair" in told
        assert select(given, "--bad-rows", "skip", out=f"skip {side}") == 0
        assert len(about(given, f"skip {side}")["skipped"][side]) == 1
        (given / f"{side}.jsonl").write_bytes(lines(rows))


@pytest.mark.parametrize(
    "more",
    [("--embedder", "static:nowhere"), ("--select.cache", "kept"), ("--select.feature_type", "float16")],
    ids=["embedder", "cache", "type"],
)
def test_settings_of_vectors_that_have_no_effect(given: Path, capsys, more: tuple[str, str]) -> None:
    name = {"--embedder": "select.embedder"}.get(more[0], more[0].removeprefix("--"))
    # A comparison's methods share one recipe: those that make no vectors run, and say what they have no use for.
    for method in ("dsir", "random"):
        assert select(given, "--method", method, *more, out=method) == 0
        assert f"note: {name} has no effect: {method} looks at no vectors" in capsys.readouterr().err


BROKEN = b'{"text": "word1 \xff\xfe", "id": "b"}\n'


def test_broken_utf8_is_refused_or_skipped_and_counted(given: Path, capsys) -> None:
    content = lines(POOL).split(b"\n")
    content[4] = BROKEN.strip()
    (given / "pool.jsonl").write_bytes(b"\n".join(content))
    assert "pool.jsonl:5: not valid UTF-8" in refused(given, capsys)
    assert select(given, "--bad-rows", "skip") == 0
    assert "skipped 1 bad records" in capsys.readouterr().err
    assert len(table(given)["id"]) == 29 and "p4" not in table(given)["id"]
    (skipped,) = about(given)["skipped"]["pool"]
    assert "pool.jsonl:5: not valid UTF-8" in skipped
    assert "1 bad record of the pool left out" in (given / "out" / "report.html").read_text(encoding="utf-8")


def test_utf16_is_told_apart(given: Path, capsys) -> None:
    (given / "pool.jsonl").write_bytes("\n".join(map(json.dumps, POOL)).encode("utf-16"))
    assert "is UTF-16; save it as UTF-8" in refused(given, capsys, "--bad-rows", "skip")


@pytest.mark.parametrize("rows", ["refuse", "skip"])
def test_a_truncated_archive_is_never_half_a_pool(given: Path, capsys, rows: str) -> None:
    (given / "pool.jsonl").unlink()
    whole = gzip.compress(lines([{"text": f"{i} {np.random.default_rng(i).bytes(8).hex()}"} for i in range(3000)]))
    (given / "pool.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    told = refused(given, capsys, "--bad-rows", rows)
    assert "pool.jsonl.gz: corrupt or truncated file" in told


@pytest.mark.parametrize(
    ("kind", "side"), [("jsonl", "pool"), ("jsonl", "target"), ("csv", "pool"), ("parquet", "pool")]
)
def test_a_missing_column_names_the_nearest(given: Path, capsys, kind: str, side: str) -> None:
    if kind == "jsonl":
        (given / f"{side}.jsonl").write_bytes(lines([{"txt": "a"}] * 6))
    else:
        (given / "pool.jsonl").unlink()
        if kind == "csv":
            (given / "pool.csv").write_bytes(b"txt,n\na,1\nb,2\n")
        else:
            pq.write_table(pa.table({"txt": ["a", "b"], "n": [1, 2]}), given / "pool.parquet")
    told = refused(given, capsys, budget=1)
    block = "data" if side == "target" else "select"
    assert f"no column 'text'; did you mean 'txt'? (set {block}.columns.text)" in told


def test_a_target_with_other_column_names_than_the_pool(given: Path, capsys) -> None:
    """`--data.columns` was accepted without a word, and no flag could name two texts."""
    rows = [{"ticket": f"T{i}", "complaint": row["text"], "kind": "ab"[i % 2]} for i, row in enumerate(POOL)]
    (given / "target.jsonl").write_bytes(lines(rows))
    expected = "target.jsonl:1: no column 'text'; there are 'ticket', 'complaint', 'kind' (set data.columns.text)"
    assert expected in refused(given, capsys, budget=1)
    words = ["select", "--pool", str(given / "pool.jsonl"), "--target", str(given / "target.jsonl"), "--budget", "2"]
    columns = ["--data.columns.text", "complaint", "--data.columns.label", "kind"]
    assert run([*words, *columns, "--out", str(given / "picked")]) == 0
    (command,) = [line for line in capsys.readouterr().err.splitlines() if "flatshift train warmup" in line]
    assert shlex.split(command)[-4:] == columns
    chosen = [json.loads(line) for line in (given / "picked" / "selected.jsonl").read_text().splitlines()]
    assert len(chosen) == 2 and all("text" in row for row in chosen)
    (given / "target.jsonl").write_bytes(lines([*rows, {"complaint": 3}]))
    assert "leave such rows out with select.bad_rows: skip" in refused(given, capsys, *columns, budget=1)


def test_a_named_column_that_is_missing(given: Path, capsys) -> None:
    assert "no column 'boddy'" in refused(given, capsys, "--text-column", "boddy")
    told = refused(given, capsys, "--select.columns.id", "idd")
    assert "pool.jsonl: no column 'idd'; did you mean 'id'? (set select.columns.id)" in told
    (given / "pool.jsonl").write_bytes(lines([row | {"kind": "a"} for row in POOL]))
    nearest = "did you mean 'kind'? (set select.domain_column or --domain-column)"
    for method in ("random", "domains"):
        told = refused(given, capsys, "--method", method, "--domain-column", "kinds")
        assert f"pool.jsonl: no column 'kinds'; {nearest}" in told
    told = refused(given, capsys, "--method", "domains")
    assert "pool.jsonl: no column 'domain'; there are 'text', 'id', 'kind' (set" in told


def test_ids_given_twice_name_both_places(given: Path, capsys) -> None:
    (given / "pool.jsonl").write_bytes(lines([*POOL, {"text": "more", "id": "p3"}]))
    told = refused(given, capsys)
    assert "pool.jsonl:31: id 'p3' was already given" in told and "pool.jsonl:4" in told


def test_a_file_named_twice_and_a_pattern_without_a_match(given: Path, capsys) -> None:
    target = str(given / "target.jsonl")
    base = ["select", "--data.holdout", "0", "--target", target, "--budget", "2", "--out", str(given / "out")]
    pool = str(given / "pool.jsonl")
    for files, told in (((pool, pool), "is named twice"), ((str(given / "*.csv"),), "no file matches")):
        assert run([*base, "--pool", *files]) == 2
        assert told in capsys.readouterr().err
