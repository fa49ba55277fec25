"""`flatshift select` with `select.hygiene`: what is written, what is refused, and nothing while it is off."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flatshift.cli import run
from flatshift.selection.hygiene import duplicate_clusters
from tests.support.data_models import write_jsonl

SHARED = "we show that the proposed method is better than all of the methods that came before it"


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """20 fresh records, a repeated one, a nearly repeated one, an empty one, and two that hold an evaluation text."""
    draw = random.Random(0)

    def fresh() -> str:
        return " ".join(f"{draw.choice('bcdfgklmn')}{draw.choice('aeiou')}{draw.choice('rstxz')}a" for _ in range(30))

    rows = [{"text": fresh(), "id": f"r{i}", "domain": "x"} for i in range(20)]
    rows += [
        {"text": rows[3]["text"].upper(), "id": "again"},
        {"text": rows[4]["text"] + " nearly", "id": "nearly"},
        {"text": " ", "id": "empty"},
        {
            "text": f"{fresh()}. {fresh()}. {SHARED}. {fresh()}. {fresh()}.",
            "id": "holds",
            "domain": "y",
            "start": "mine",
        },
        {"text": SHARED, "id": "whole"},
    ]
    return {
        "pool": str(write_jsonl(tmp_path / "pool.jsonl", rows)),
        "target": str(
            write_jsonl(tmp_path / "target.jsonl", [{"text": fresh()}, {"text": rows[5]["text"], "id": "t"}])
        ),
        "eval": str(
            write_jsonl(
                tmp_path / "eval.jsonl",
                [
                    {
                        "question": f"What is it that would make anyone in this field say of a paper that {SHARED}?",
                        "answer": "Because.",
                        "id": "e",
                    }
                ],
            )
        ),
    }


def select(files: dict[str, str], out: Path, *more: str, method: str = "knn", budget: int = 5) -> int:
    words = [
        "select",
        "--pool",
        files["pool"],
        "--data.holdout",
        "0",
        "--target",
        files["target"],
        "--budget",
        str(budget),
    ]
    return run([*words, "--out", str(out), "--method", method, *more])


def hygiene(files: dict[str, str], *steps: str) -> list[str]:
    return [word for step in steps for word in (f"--select.hygiene.{step}").split(" ", 1)] + [
        "--select.eval.files",
        files["eval"],
    ]


EVERY = (
    "length {}",
    "exact true",
    "near.threshold 0.8",
    "decontaminate.margin 20",
    "decontaminate.min_chars 60",
    "decontaminate.ngram 13",
)


def test_turns_of_conversations_are_looked_for(files, tmp_path: Path) -> None:
    pool = [record for record in read_lines(Path(files["pool"])) if len(record.get("text") or "") > 60]
    turns = [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": pool[0]["text"]}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": turns}) + "\n", encoding="utf-8")
    words = ["--select.hygiene.exact", "true", "--select.eval.files", str(tmp_path / "chats.jsonl")]
    assert select(files, tmp_path / "out", *words, method="dsir") == 0
    drops = [(d["id"], d["match_in"]) for d in read_lines(tmp_path / "out" / "drops.jsonl")]
    assert (pool[0]["id"], "eval") in drops


@pytest.mark.parametrize("method", ["gotd", "dsir"])
def test_drops_are_listed_counted_and_absent_from_the_scores(files, tmp_path: Path, method: str) -> None:
    out = tmp_path / "out"
    assert select(files, out, *hygiene(files, *EVERY), method=method) == 0
    drops = read_lines(out / "drops.jsonl")
    assert [(d["id"], d["cause"], d["match"], d["match_in"]) for d in drops] == [
        ("r5", "exact-duplicate", "t", "target"),
        ("again", "exact-duplicate", "r3", "pool"),
        ("nearly", "near-duplicate", "r4", "pool"),
        ("empty", "length", None, None),
        ("holds", "cut", "e", "eval"),
        ("whole", "contaminated", "e", "eval"),
    ]
    kept = [f"r{i}" for i in range(20) if i != 5] + ["holds#0", "holds#1"]
    table = pq.read_table(out / "scores.parquet").to_pydict()
    assert table["id"] == kept and sorted(table["rank"]) == list(range(1, len(kept) + 1))
    assert table["domain"] == ["x"] * 19 + ["y"] * 2
    told = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    assert told["selection"]["pool"] == len(kept)
    report = told["hygiene"]
    assert (report["records"], report["kept"], report["cut"], report["pieces"]) == (25, 21, 1, 2)
    assert report["dropped"] == {"length": 1, "exact-duplicate": 2, "near-duplicate": 1, "contaminated": 1}
    assert report["compared_with"] == {"target": 2, "eval": 3}, "every text of a record without a text column"
    assert report["decontaminate"]["too_short"] == 2
    assert [Path(entry["path"]).name for entry in told["inputs"]] == ["pool.jsonl", "target.jsonl", "eval.jsonl"]
    assert "21 kept" in (out / "log.txt").read_text(encoding="utf-8")
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "Removed from the pool" in page and "near-duplicate" in page


def test_only_texts_that_were_compared_are_counted(files, tmp_path: Path, capsys) -> None:
    with Path(files["eval"]).open("a", encoding="utf-8") as handle:
        handle.write("{\n")
    words = ["--select.hygiene.exact", "true", "--select.hygiene.against", "[eval]", "--select.eval.files"]
    assert select(files, tmp_path / "out", *words, files["eval"], "--bad-rows", "skip", method="random") == 0
    assert f"evaluation: skipped 1 bad records, first {files['eval']}:2: " in capsys.readouterr().err
    told = json.loads((tmp_path / "out" / "manifest.json").read_text(encoding="utf-8"))
    assert told["hygiene"]["compared_with"] == {"eval": 3}


def test_pieces_are_written_with_their_source(files, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert select(files, out, *hygiene(files, *EVERY), budget=21) == 0
    chosen = {record["id"]: record for record in read_lines(out / "selected.jsonl")}
    (cut,) = [drop for drop in read_lines(out / "drops.jsonl") if drop["cause"] == "cut"]
    (source,) = [record for record in read_lines(Path(files["pool"])) if record["id"] == "holds"]
    for number, (start, end) in enumerate(cut["pieces"]):
        piece = chosen[f"holds#{number}"]
        assert piece["text"] == source["text"][start:end].strip() and SHARED not in piece["text"]
        assert (piece["source_id"], piece["start"], piece["end"]) == ("holds", start, end)
        assert piece["source"] == {"start": "mine"}, "nothing else of the record was in the way"


def test_other_languages_and_repetitions_are_dropped(files, tmp_path: Path) -> None:
    """Undecided texts stay by default; `repetition {}` looks at texts of 50 words and more alone."""
    german = "Das ist der Satz, den wir nicht mit den anderen und auch nicht für die Leser auf der Seite haben wollen. "
    english = "This is the sentence that we have for all of the readers who are not with us on the page and in it. "
    rows = [
        {"text": english, "id": "en"},
        {"text": german, "id": "de"},
        {"text": "zork blat " * 4, "id": "undecided"},
        {"text": english * 4, "id": "again"},
        {"text": "the same line\n" * 12, "id": "short"},
    ]
    own = files | {"pool": str(write_jsonl(tmp_path / "own.jsonl", rows))}
    step = "--select.hygiene."
    for name, words, dropped in (
        (
            "kept",
            [f"{step}language.keep", "[en]", f"{step}repetition", "{}"],
            {"de": "language", "again": "repetition"},
        ),
        (
            "both",
            [
                f"{step}language.keep",
                "[en, de]",
                f"{step}language.undecided",
                "drop",
                f"{step}repetition.min_words",
                "30",
            ],
            {"undecided": "language", "again": "repetition", "short": "repetition"},
        ),
    ):
        assert select(own, tmp_path / name, *words, budget=1, method="random") == 0
        found = {drop["id"]: drop for drop in read_lines(tmp_path / name / "drops.jsonl")}
        assert {key: drop["cause"] for key, drop in found.items()} == dropped
        assert found["again"]["rule"] and 0 < found["again"]["value"] <= 1
        counts = json.loads((tmp_path / name / "manifest.json").read_text(encoding="utf-8"))["hygiene"]["dropped"]
        assert sum(counts.values()) == len(dropped) and set(counts) == set(dropped.values())


def test_a_limit_of_memory_changes_no_drop(files, tmp_path: Path, monkeypatch, capsys) -> None:
    given = []
    ours = duplicate_clusters.sort_keys
    monkeypatch.setattr(
        duplicate_clusters, "sort_keys", lambda keys, memory: given.append(memory) or ours(keys, memory)
    )
    for name, words in (("usual", ()), ("little", ("memory_gib 0.25",))):
        assert select(files, tmp_path / name, *hygiene(files, *EVERY, *words)) == 0
    usual, little = ((tmp_path / name / "drops.jsonl").read_bytes() for name in ("usual", "little"))
    assert usual == little and sorted(set(given)) == [2**27, 2**30 - 2**27]
    assert select(files, tmp_path / "none", *hygiene(files, *EVERY, "memory_gib 0.2")) == 2
    assert "select.hygiene.memory_gib must be at least 0.25, got 0.2" in capsys.readouterr().err


LINES = "one two\nthree four five six\none two"  # a third of the lines, a fifth of the characters
PAIR = "red car and red car or red car"
LONG = "a b c d e f a b c d e"
REPETITION = {"min_words": "0", "lines": "1", "line_chars": "1", "top_ngrams": "[]", "repeated_ngrams": "[]"}


@pytest.mark.parametrize(
    ("text", "step", "value", "lax"),
    [
        ("x " * 30, "length.max_chars", "40", "80"),
        ("x " * 30, "length.max_words", "10", "30"),
        (LINES, "repetition.lines", "0.3", "0.4"),
        (LINES, "repetition.line_chars", "0.1", "0.3"),
        (PAIR, "repetition.top_ngrams", "[0.3]", "[1]"),
        (LONG, "repetition.repeated_ngrams", "[0.3]", "[0.5]"),
        ("It is so Because. So it is.", "decontaminate.shortest", "1", "2"),
    ],
)
def test_a_limit_drops_what_is_beyond_it(files, tmp_path: Path, text: str, step: str, value: str, lax: str) -> None:
    rows = [{"text": "some other words", "id": "other"}, {"text": text, "id": "beyond"}]
    own = files | {"pool": str(write_jsonl(tmp_path / "own.jsonl", rows))}
    others = {f"repetition.{name}": given for name, given in REPETITION.items()} if "repetition" in step else {}
    for limit, dropped in ((value, ["beyond"]), (lax, [])):
        words = hygiene(own, *map(" ".join, ({"exact": "true"} | others | {step: limit}).items()))
        assert select(own, tmp_path / limit, *words, budget=1, method="random") == 0
        assert [drop["id"] for drop in read_lines(tmp_path / limit / "drops.jsonl")] == dropped


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        (("near.size 5",), {"again", "nearly"}),
        (("near.size 100",), {"again"}),
        (("decontaminate {margin: 20, min_chars: 60}",), {"holds", "whole"}),
        (("decontaminate {margin: 20, min_chars: 60, common: 2}",), set()),
        (("decontaminate {margin: 20, min_chars: 60, max_pieces: 1}",), {"whole", "dropped"}),
    ],
)
def test_settings_of_copies_and_of_evaluation_texts(files, tmp_path: Path, steps, found: set[str]) -> None:
    """`dropped`: a record that would be cut is dropped whole."""
    if "near" in steps[0]:  # one word in the middle is another
        rows = read_lines(Path(files["pool"]))
        words = rows[4]["text"].split()
        rows[21]["text"] = " ".join([*words[:15], "other", *words[16:]])
        write_jsonl(Path(files["pool"]), rows)
    assert select(files, tmp_path / "out", *hygiene(files, *steps), budget=1, method="random") == 0
    drops = read_lines(tmp_path / "out" / "drops.jsonl")
    names = {"dropped" if (d["id"], d["cause"]) == ("holds", "contaminated") else d["id"] for d in drops}
    assert names - {"r5", "empty"} == found


def test_everything_is_off_by_default(files, tmp_path: Path) -> None:
    assert select(files, tmp_path / "out") == 0
    assert pq.read_table(tmp_path / "out" / "scores.parquet").num_rows == 24, "less the blank one"
    assert not (tmp_path / "out" / "drops.jsonl").exists()
    assert "hygiene" not in json.loads((tmp_path / "out" / "manifest.json").read_text(encoding="utf-8"))


def test_own_features_follow_the_records_that_stay(files, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(25.0)[:, None])
    np.save(tmp_path / "y.npy", np.array([[24.0], [24.0]]))
    own = ["--pool-features", str(tmp_path / "x.npy"), "--target-features", str(tmp_path / "y.npy")]
    steps = hygiene(files, "exact true", "near {}", "decontaminate.action drop")
    assert select(files, tmp_path / "out", *own, *steps) == 0
    table = pq.read_table(tmp_path / "out" / "scores.parquet").to_pydict()
    rows = [i for i in range(23) if i not in (5, 20, 21)]
    assert table["id"] == [f"r{i}" for i in rows if i < 20] + ["empty"]
    assert table["score"] == [float((24 - i) ** 2) for i in rows]


def test_a_recipe_s_own_test_rows_are_kept_out(files, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"data:\n  test:\n    files: [{files['target']}]\n"
        f"select:\n  pool: {{files: [{files['pool']}]}}\n  target: {{files: [{files['target']}]}}\n  budget: 3\n"
        "  method: random\n  hygiene:\n    exact: true\n    against: [eval]\n",
        encoding="utf-8",
    )
    assert run(["select", str(recipe), "--out", str(tmp_path / "out")]) == 0
    drops = read_lines(tmp_path / "out" / "drops.jsonl")
    assert [(d["id"], d["match"], d["match_in"]) for d in drops] == [("r5", "t", "eval"), ("again", "r3", "pool")]


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (("near.threshold 1.5",), "--select.hygiene.near.threshold: select.hygiene.near.threshold must be above 0"),
        (("near.unit line",), "cannot be 'line'; known: char, word"),
        (("nera.threshold 0.5",), "did you mean 'select.hygiene.near'"),
        (("near.threshold 0.01",), "near.recall"),
        (("near.permutations 1",), "near.recall: 1 permutations find a pair of similarity 0.8 with chance 0.800"),
        (("exact true", "length.min_chars 100000"), "leaves no record"),
        ((), "no step of select.hygiene that is on looks at it"),
        (("exact true", "against target"), "no step of select.hygiene that is on looks at it"),
    ],
)
def test_bad_settings_are_one_sentence_and_leave_nothing(files, tmp_path: Path, capsys, steps, words: str) -> None:
    before = set(tmp_path.iterdir())
    assert select(files, tmp_path / "out", *hygiene(files, *steps)) == 2
    message = capsys.readouterr().err
    assert words in message and "Traceback" not in message
    assert set(tmp_path.iterdir()) == before


def test_what_cannot_work_is_refused(files, tmp_path: Path, capsys) -> None:
    np.save(tmp_path / "x.npy", np.ones((25, 2)))
    np.save(tmp_path / "y.npy", np.ones((2, 2)))
    own = ["--pool-features", str(tmp_path / "x.npy"), "--target-features", str(tmp_path / "y.npy")]
    assert select(files, tmp_path / "out", *own, *hygiene(files, "decontaminate {}")) == 2
    assert "action to drop" in capsys.readouterr().err
    assert select(files, tmp_path / "out", "--select.hygiene.decontaminate.ngram", "13") == 2
    assert "no evaluation text to look for; name files in select.eval.files" in capsys.readouterr().err
    assert select(files, tmp_path / "out", *hygiene(files, "exact true"), budget=25) == 2
    assert "budget" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_the_answer_of_another_tool_is_followed(files, tmp_path: Path, form: str) -> None:
    answer = tmp_path / f"answer.{form}"
    ids, matches, reasons = ["r2", "again", "r9"], ["r1", "r3", None], ["minhash", None, "spam"]
    if form == "csv":
        answer.write_text("id,match,why\nr2,r1,minhash\nagain,r3,\nr9,,spam\n", encoding="utf-8")
    elif form == "jsonl":
        told = zip(ids, matches, reasons, strict=True)
        write_jsonl(answer, [{"id": i, "match": m, "why": w, "text": "as datatrove keeps it"} for i, m, w in told])
    else:
        pq.write_table(pa.table({"id": ids, "match": matches, "why": reasons}), answer)
    out = tmp_path / "out"
    assert select(files, out, "--select.hygiene.drops", str(answer), "--select.hygiene.exact", "true") == 0
    drops = read_lines(out / "drops.jsonl")
    assert [(d["id"], d["cause"], d["rule"], d["match"], d["match_in"]) for d in drops] == [
        ("r2", "listed", "minhash", "r1", "pool"),
        ("r5", "exact-duplicate", "the same text", "t", "target"),
        ("r9", "listed", "spam", None, None),
        ("again", "listed", "listed in drops", "r3", "pool"),
    ]
    kept = set(pq.read_table(out / "scores.parquet")["id"].to_pylist())
    assert not kept & {"r2", "r9", "again", "r5"} and {"r1", "r3", "nearly"} <= kept
    told = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    assert told["hygiene"]["dropped"] == {"listed": 3, "exact-duplicate": 1}
    assert told["hygiene"]["listed"] == {"entries": 3, "unknown": 0}
    assert Path(told["inputs"][-1]["path"]).name == answer.name and told["inputs"][-1]["sha256"]


def test_an_answer_for_another_pool_is_refused_or_counted(files, tmp_path: Path, capsys) -> None:
    rows = [{"id": "r2"}, {"id": "r77"}, {"id": "r78"}]
    answer = str(write_jsonl(tmp_path / "answer.jsonl", rows))
    drops = ["--select.hygiene.drops", answer]
    assert select(files, tmp_path / "out", *drops) == 2
    message = capsys.readouterr().err
    assert f"{answer}:2: the pool has no record 'r77' (2 of 3 ids" in message and "--bad-rows skip" in message
    assert not (tmp_path / "out").exists()
    write_jsonl(tmp_path / "answer.jsonl", [*rows, {"why": "nothing"}])
    assert select(files, tmp_path / "out", *drops) == 2
    assert f"{answer}:4: no column 'id'" in capsys.readouterr().err
    assert select(files, tmp_path / "out", *drops, "--bad-rows", "skip") == 0
    assert [d["id"] for d in read_lines(tmp_path / "out" / "drops.jsonl")] == ["r2"]
    told = json.loads((tmp_path / "out" / "manifest.json").read_text(encoding="utf-8"))
    assert told["hygiene"]["listed"] == {"entries": 3, "unknown": 2}
    assert select(files, tmp_path / "none", "--select.hygiene.drops", str(tmp_path / "answr.jsonl")) == 2
    assert "did you mean" in capsys.readouterr().err
