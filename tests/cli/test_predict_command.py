"""`flatshift predict`: every kind of task, every format, the figures of eval, and a kill in the middle."""

from __future__ import annotations

import csv
import gzip
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flatshift.cli import run
from flatshift.experiments.results.predictions import NAME as PREDICTIONS
from flatshift.experiments.workflows import predict
from flatshift.experiments.workflows.predict import Predictor
from flatshift.finetune.tasks import Completion
from tests.support.data_models import byte_tokenizer, row, tiny_model
from tests.support.seq2seq_models import save_encoder_decoder

SMALL = [
    *("--train.steps", "3", "--train.batch_size", "4", "--train.max_length", "32", "--train.eval_every", "0"),
    *("--train.precision", "fp32", "--eval.bootstrap", "20", "--train.threads", "1", "--eval.train_limit", "0"),
]
ROWS = [
    {"text": f"is my card number {i} {'lost again' if i % 3 else 'here'}", "label": ("card", "loss", "other")[i % 3]}
    for i in range(24)
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A run of a kind of task, made once: `trained("classify", *flags)`."""
    home = tmp_path_factory.mktemp("runs")
    made: dict[tuple[str, ...], Path] = {}

    def make(recipe: str, *words: str, rows: list[dict[str, Any]] = ROWS) -> Path:
        key = (recipe, *words)
        if key not in made:
            out = home / f"run-{len(made)}"
            file = write(home / f"rows-{len(made)}.jsonl", rows)
            files = ["--data.train.files", str(file), "--data.train.limit", "null"]
            files += ["--data.dev.files", "[]", "--data.test.files", str(file), "--data.test.limit", "null"]
            files += ["--data.checks.copies", "warn"]
            assert run(["train", recipe, *files, *SMALL, *words, "--out", str(out)]) == 0
            made[key] = out
        return made[key]

    return make


CLASSIFY = ("classify", "--regularizer.kind", "plain", "--backbone", "flatshift-encoder-3m")


def test_labels_are_those_that_eval_counted(trained: Callable[..., Path], tmp_path: Path) -> None:
    out = trained(*CLASSIFY)
    kept = pq.read_table(out / PREDICTIONS).to_pydict()
    accuracy = json.loads((out / "eval.json").read_text(encoding="utf-8"))["test"]["accuracy"]["value"]
    assert set(kept["split"]) == {"test"} and np.mean(
        [said == true for said, true in zip(kept["predicted"], kept["label"], strict=True)]
    ) == pytest.approx(accuracy)
    assert kept["label"] == [row["label"] for row in ROWS]

    unlabelled = write(tmp_path / "new.jsonl", [{"text": row["text"]} for row in ROWS])
    assert run(["predict", str(out), "--data", str(unlabelled), "--out", str(tmp_path / "said.jsonl")]) == 0
    said = [json.loads(line) for line in (tmp_path / "said.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [one["label"] for one in said] == kept["predicted"] and [one["text"] for one in said] == [
        r["text"] for r in ROWS
    ]
    for i, one in enumerate(said):
        shares = [one[f"p_{name}"] for name in ("card", "loss", "other")]
        assert sum(shares) == pytest.approx(1) and one["probability"] == max(shares)
        assert one["probability"] == pytest.approx(kept["probability"][i], abs=1e-5)


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".tsv"])
def test_formats_hold_the_same(trained: Callable[..., Path], tmp_path: Path, suffix: str) -> None:
    out, data = trained(*CLASSIFY), write(tmp_path / "new.jsonl", [{"text": row["text"]} for row in ROWS])
    for name in (f"said{suffix}", "said.jsonl"):
        assert run(["predict", str(out), "--data", str(data), "--out", str(tmp_path / name)]) == 0
    lines = [json.loads(line) for line in (tmp_path / "said.jsonl").read_text(encoding="utf-8").splitlines()]
    if suffix == ".parquet":
        assert pq.read_table(tmp_path / "said.parquet").to_pylist() == lines
    else:
        with (tmp_path / f"said{suffix}").open(encoding="utf-8", newline="") as stream:
            found = list(csv.DictReader(stream, delimiter="\t" if suffix == ".tsv" else ","))
        assert [(f["id"], f["label"]) for f in found] == [(one["id"], one["label"]) for one in lines]


def test_numbers_are_no_formulas(tmp_path: Path) -> None:
    texts = ["-1", "+1", "-0.5", "-1-1", "+x", "-", "=1", "-1\n", "1"]
    part = write(tmp_path / "part-0.jsonl", [{"label": text} for text in texts])
    predict._join_parts([part], tmp_path / "said.csv", ".csv", raw=False)
    with (tmp_path / "said.csv").open(encoding="utf-8", newline="") as stream:
        found = [one["label"] for one in csv.DictReader(stream)]
    assert found == ["-1", "+1", "-0.5", "'-1-1", "'+x", "'-", "'=1", "'-1\n", "1"]


def test_a_kill_loses_no_part_and_another_run_is_refused(
    trained: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, data = trained(*CLASSIFY), write(tmp_path / "new.jsonl", [{"text": row["text"]} for row in ROWS])
    words = ["predict", str(out), "--data", str(data), "--out"]
    monkeypatch.setattr(predict, "PART", 10)
    assert run([*words, str(tmp_path / "whole.jsonl")]) == 0
    asked: list[int] = []
    answer = Predictor.__call__

    def dies(self: Predictor, rows: Any) -> Any:
        asked.append(len(rows))
        if len(asked) == 2:
            raise KeyboardInterrupt
        return answer(self, rows)

    monkeypatch.setattr(Predictor, "__call__", dies)
    cut = tmp_path / "cut.jsonl"
    assert run([*words, str(cut)]) == 3
    assert not cut.exists() and (tmp_path / ".cut.jsonl.parts").is_dir()
    other = write(tmp_path / "other.jsonl", [{"text": "another"}])
    assert run(["predict", str(out), "--data", str(other), "--out", str(cut)]) == 2
    assert "or other data" in capsys.readouterr().err
    assert run([*words, str(cut)]) == 0
    assert asked == [10, 10, 10, 4] and cut.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert not (tmp_path / ".cut.jsonl.parts").exists()
    assert run([*words, str(cut)]) == 2
    assert "exists" in capsys.readouterr().err


def test_a_prompt_beyond_the_positions_is_skipped_with_the_bad_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    predictor, tokenizer = Predictor.__new__(Predictor), byte_tokenizer()
    predictor.task, predictor.tokenizer, predictor.bad_rows = Completion(max_new_tokens=2), tokenizer, "skip"
    predictor.engine = types.SimpleNamespace(model=tiny_model("gpt2", len(tokenizer)))
    predictor.recipe = types.SimpleNamespace(eval=types.SimpleNamespace(batch_size=2))
    monkeypatch.setattr(predict, "answer_questions", lambda *asked, **settings: ())
    (found,) = predictor._generate_answers([row(0, text="long " * 90), row(1, text="short")]).values()
    assert found["id"] == "0-1" and predictor.counts["skipped"][0].startswith("rows.jsonl:1: its 272 tokens")


@pytest.mark.parametrize("writes", [False, True])
def test_counts_are_of_all_parts(
    trained: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, writes: bool
) -> None:
    """After a kill too, and parts go on under the settings of their answers alone."""
    writer = ("seq2seq", "--task.max_new_tokens", "2", "--task.score", "generate", "--train.max_cut", "1")
    if writes:
        save_encoder_decoder("t5", tmp_path / "t5")
    out = trained(*writer, "--backbone", str(tmp_path / "t5")) if writes else trained(*CLASSIFY)
    rows = [{"text": f"{i} card " * 40} for i in range(20)]
    rows[3]["text"] = " "
    data = write(tmp_path / "new.jsonl", rows)
    words = ["predict", str(out), "--data", str(data), "--bad-rows", "skip", "--out", str(tmp_path / "said.jsonl")]
    monkeypatch.setattr(predict, "PART", 10)
    answer, asked = Predictor.__call__, []

    def dies(self: Predictor, rows: Any) -> Any:
        asked.append(len(rows))
        if len(asked) == 2:
            raise KeyboardInterrupt
        return answer(self, rows)

    monkeypatch.setattr(Predictor, "__call__", dies)
    assert run(words) == 3
    if writes:
        assert run([*words, "--task.num_beams", "2"]) == 2
        assert "or other data" in capsys.readouterr().err
    capsys.readouterr()
    assert run(words) == 0
    said = capsys.readouterr().err
    assert len(asked) == 3
    if writes:
        answers = (tmp_path / "said.jsonl").read_text(encoding="utf-8")
        opened = answers.count('"ended": false')
        assert f"{opened} of {answers.count('ended')} answers did not end within 2 tokens" in said and opened > 10
    else:
        assert "skipped 1 bad rows" in said and "19 of 19 rows were longer than train.max_length = 32" in said


def test_rows_with_other_columns(
    trained: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`predict`, `eval` and their next lines take the columns of the rows, and what becomes of bad ones."""
    out = trained(*CLASSIFY)
    data = write(tmp_path / "new.jsonl", [{"body": row["text"], "kind": row["label"]} for row in ROWS] + [{"body": 7}])
    said = tmp_path / "said.jsonl"
    words, named = ["predict", str(out), "--data", str(data), "--out", str(said)], ["--data.columns.text", "body"]
    assert run(words) == 2 and "(set data.columns.text)" in capsys.readouterr().err
    assert run([*words, *named]) == 2 and "new.jsonl:25: column 'body' is a int" in capsys.readouterr().err
    assert run([*words, *named, "--data.bad_rows", "skip", "--bad-rows", "refuse"]) == 2
    assert "--bad-rows" in capsys.readouterr().err
    named += ["--data.columns.label", "kind", "--data.bad_rows", "skip"]
    assert run([*words, *named]) == 0
    told = capsys.readouterr().err
    assert "skipped 1 bad rows" in told and f"eval {out} --data {data} {' '.join(named)}" in told
    assert [json.loads(line)["text"] for line in said.read_text(encoding="utf-8").splitlines()] == [
        row["text"] for row in ROWS
    ]
    judge = ["eval", str(out), "--data", str(data), "--json"]
    assert run(judge) == 2 and "(set data.columns.text)" in capsys.readouterr().err
    assert run([*judge, *named]) == 0
    alone = json.loads(capsys.readouterr().out)["data"]["accuracy"]
    assert alone["n"] == len(ROWS)
    assert run([*judge, *named, "--group-by", "kind"]) == 0
    assert json.loads(capsys.readouterr().out)["figures"][str(out)]["data"]["accuracy"]["value"] == alone["value"]
    assert run(["eval", str(out), *named]) == 2
    assert "`flatshift eval RUN --data FILE` evaluates other rows, and takes this" in capsys.readouterr().err


def test_rows_that_nobody_can_count(
    trained: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A data set of the hub, and files that break off: alone refused, behind others left out where asked."""
    out = trained(*CLASSIFY)
    package = types.ModuleType("datasets")
    package.load_dataset = lambda *given, **how: [{"text": row["text"]} for row in ROWS]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", package)
    assert run(["predict", str(out), "--data", "hub:owner/name:train", "--out", str(tmp_path / "hub.jsonl")]) == 0
    assert len((tmp_path / "hub.jsonl").read_text(encoding="utf-8").splitlines()) == len(ROWS)

    lines = "".join(json.dumps({"text": f"{row['text']} {i * 7919 % 1013}"}) + "\n" for i, row in enumerate(ROWS * 40))
    whole, torn, damaged = tmp_path / "whole.jsonl", tmp_path / "torn.jsonl.gz", tmp_path / "damaged.parquet"
    whole.write_text(lines[: lines.index("\n") + 1], encoding="utf-8")
    packed = gzip.compress(lines.encode())
    torn.write_bytes(packed[: len(packed) // 2])
    pq.write_table(pa.table({"text": ["one", "two"]}), damaged)
    damaged.write_bytes(damaged.read_bytes()[:-7])
    for file in (torn, damaged):
        for more in ([], ["--bad-rows", "skip"]):
            none = tmp_path / f"{file.name}-{len(more)}.jsonl"
            assert run(["predict", str(out), "--data", str(file), *more, "--out", str(none)]) == 2
            assert file.name in capsys.readouterr().err and not none.exists()
        said = tmp_path / f"{file.name}-said.jsonl"
        words = ["predict", str(out), "--data", str(whole), str(file), "--bad-rows", "skip", "--out", str(said)]
        assert run(words) == 0
        assert file.name in capsys.readouterr().err
        assert len(said.read_text(encoding="utf-8").splitlines()) >= 1


def test_a_prompt_may_read_the_label_and_a_file_numbers_and_texts(
    trained: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--task.prompt", "{label} {text2}", "--task.completion", "{text}", "--task.max_new_tokens", "2"]
    rows = [{"text": f"is my card number {i}", "label": f"kind {i % 3}", "text2": f"{i}"} for i in range(8)]
    out = trained("completion", *words, rows=rows)
    data = write(tmp_path / "new.jsonl", [{"text2": "7", "label": 1}, {"text2": "of", "label": "kind 2"}])
    said = tmp_path / "said.parquet"
    assert run(["predict", str(out), "--data", str(data), "--out", str(said)]) == 0
    assert [row["prompt"].split()[-1] for row in pq.read_table(said).to_pylist()] == ["7", "of"]
    known = write(tmp_path / "known.jsonl", rows[:6])
    capsys.readouterr()
    assert run(["eval", str(out), "--data", str(known), "--out", str(tmp_path / "judged"), "--json"]) == 0
    assert any("6 of 6 rows were trained on" in note for note in json.loads(capsys.readouterr().out)["notes"])
    part = write(tmp_path / "part", [{"a": 1, "b": None}, {"a": "x", "c": 2}])
    predict._join_parts([part], said, ".parquet", raw=True)
    assert pq.read_table(said).to_pylist() == [{"a": "1", "b": None, "c": None}, {"a": "x", "b": None, "c": 2}]


def test_own_columns_are_copied_where_asked_and_named_where_not(
    trained: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = ("completion", "--task.prompt", "{text}", "--task.completion", "{label}", "--task.max_new_tokens", "2")
    for out, label in ((trained(*CLASSIFY), "given_label"), (trained(*writer), "label")):
        data = write(tmp_path / "new.jsonl", [row | {"ticket": i, "on": None} for i, row in enumerate(ROWS[:5])])
        words = ["predict", str(out), "--data", str(data), "--out"]
        assert run([*words, str(tmp_path / f"{out.name}.csv")]) == 0
        assert "columns left out: label, ticket, on (--keep NAME copies one)" in capsys.readouterr().err
        made, plain = tmp_path / f"{out.name}.parquet", tmp_path / f"{out.name}.jsonl"
        assert run([*words, str(made), "--keep", "ticket", "label", "on"]) == 0
        assert "columns left out" not in capsys.readouterr().err
        assert run([*words, str(plain), "--quiet"]) == 0
        found = pq.read_table(made).to_pylist()
        assert [row["ticket"] for row in found] == list(range(5)) and {row["on"] for row in found} == {None}
        assert [row[label] for row in found] == [row["label"] for row in ROWS[:5]]
        without = [{n: v for n, v in row.items() if n not in ("ticket", "on", label)} for row in found]
        assert without == [json.loads(line) for line in plain.read_text(encoding="utf-8").splitlines()]
        assert run([*words, str(tmp_path / "no.csv"), "--keep", "tickt"]) == 2
        assert "no column 'tickt'; did you mean 'ticket'? (set --keep)" in capsys.readouterr().err
        assert not (tmp_path / "no.csv").exists()


def test_parts_of_a_refused_call_are_of_its_kept_columns(
    trained: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predict, "PART", 4)
    out = trained(*CLASSIFY)
    rows = [{"text": row["text"], "ticket": i} for i, row in enumerate(ROWS[:10])]
    data = write(tmp_path / "new.jsonl", [*rows[:9], {"text": " ", "ticket": 9}])
    words = ["predict", str(out), "--data", str(data), "--out", str(tmp_path / "said.jsonl")]
    assert run(words) == 2
    write(data, rows)
    assert run([*words, "--keep", "ticket"]) == 0
    told = [json.loads(line)["ticket"] for line in (tmp_path / "said.jsonl").read_text(encoding="utf-8").splitlines()]
    assert told == list(range(10))


def test_skipped_rows_are_not_counted(
    trained: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = trained(*CLASSIFY)
    data = write(tmp_path / "new.jsonl", [{"text": text} for text in ("one card", "  ", "two cards", "")])
    words = ["predict", str(out), "--data", str(data), "--bad-rows", "skip", "--out"]
    assert run([*words, str(tmp_path / "said.csv"), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["rows"] == 2
    assert answer["skipped"] == [f"{data}:2: the text is empty", f"{data}:4: the text is empty"]
    write(data, [{"body": "one card"}])
    assert run([*words, str(tmp_path / "none.csv")]) == 2
    said = capsys.readouterr().err
    assert f"no row is left to predict; 1 are bad, first {data}:1: no column 'text'; there are 'body'" in said
    assert not (tmp_path / "none.csv").exists()
    from flatshift.outcome import print_prediction_outcome

    for turn, proposes in (({"from": "human", "value": "Hi"}, False), ("Hi", True)):
        write(data, [{"text": "one card", "label": "card", "messages": [turn]}])
        print_prediction_outcome(out, [str(data)], [], [])
        assert ("flatshift eval" in capsys.readouterr().err) == proposes


NUMBERS = [{"text": f"number {i} of many", "label": float(i)} for i in range(16)]


@pytest.mark.parametrize(
    ("recipe", "words", "rows", "columns"),
    [
        pytest.param("classify", ["--task.multi", "true"], ROWS, {"labels", "p_card"}, marks=pytest.mark.slow),
        pytest.param("classify", ["--task", "regress"], NUMBERS, {"value"}, marks=pytest.mark.slow),
        ("language-model", ["--task", "language-model"], ROWS, {"nats", "tokens", "perplexity"}),
        ("language-model", ["--task.kind", "completion", "--task.score", "rank"], ROWS, {"label", "p_loss"}),
        pytest.param(
            "language-model",
            ["--task.kind", "completion", "--task.max_new_tokens", "4"],
            ROWS,
            {"answer", "ended"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=("sets", "numbers", "texts", "ranked", "written"),
)
def test_every_kind_answers(
    trained: Callable[..., Path], tmp_path: Path, recipe: str, words: list[str], rows: list[dict], columns: set[str]
) -> None:
    out = trained(recipe, "--regularizer.kind", "plain", *words, rows=rows)
    data = write(tmp_path / "new.jsonl", [{"text": row["text"]} for row in rows])
    assert run(["predict", str(out), "--data", str(data), "--out", str(tmp_path / "said.jsonl")]) == 0
    said = [json.loads(line) for line in (tmp_path / "said.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(said) == len(rows) and columns <= said[0].keys() and len({one["id"] for one in said}) == len(rows)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--out is missing"),
        (["--out", "said.xlsx"], ".parquet"),
        (["--out", "said.csv"], "--data"),
        (["--out", "said.csv", "--data", "nowhere.jsonl"], "no such file"),
        (["--out", "link.csv", "--data", "sample:banking/test"], "link.csv exists"),
    ],
)
def test_mistakes(
    trained: Callable[..., Path],
    tmp_path: Path,
    words: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.csv").symlink_to("nowhere")
    assert run(["predict", str(trained(*CLASSIFY)), *words]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert said in error and not list(tmp_path.glob("*.parts"))
