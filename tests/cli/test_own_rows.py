"""Training rows of the user's own: no sample judges them, a part of them does; `--data` names them in every command."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

import flatshift
from flatshift.cli import run
from flatshift.experiments.data.splits import read_splits
from flatshift.experiments.recipe import from_mapping, from_override, load_recipe, resume_recipe
from flatshift.experiments.results.predictions import read_predictions
from flatshift.finetune import assets
from tests.support.data_models import write_jsonl

FAST = ["--train.steps", "1", "--train.batch_size", "4", "--train.max_length", "24", "--train.eval_every", "0"]
FAST += ["--eval.bootstrap", "20", "--train.peak_tflops", "1", "--train.precision", "fp32"]


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Sixty requests of three classes, of 3 : 1 : 1."""
    monkeypatch.chdir(tmp_path)
    classes = ("pay", "pay", "pay", "card", "lost")
    write_jsonl(
        tmp_path / "rows.jsonl", [{"text": f"request {i} of {i * 7}", "label": classes[i % 5]} for i in range(60)]
    )
    return "rows.jsonl"


def judged(name: str, *overrides: tuple[str, object], of: str = "rows.jsonl") -> tuple[int, int, float]:
    """Files of dev and test, and the share that is held out."""
    data = load_recipe(
        name, [from_override("data.train.files", of), *(from_override(*one) for one in overrides)]
    ).recipe.data
    return len(data.dev.files), len(data.test.files), data.holdout


def test_naming_train_files_empties_the_recipes_sample(rows: str, tmp_path: Path) -> None:
    assert judged("classify") == judged("chat") == judged("double-descent") == (0, 0, 0.1)
    assert judged("classify", ("data.holdout", 0.2)) == (0, 0, 0.2)
    assert judged("classify", ("data.holdout", 0)) == (0, 0, 0)
    assert judged("classify", ("data.test.files", rows)) == (0, 1, 0), (
        "a file to judge by was named, so none is held out"
    )
    assert judged("classify", ("data.dev.files", "[]"), ("data.test.files", "[]")) == (0, 0, 0)
    assert judged("classify", ("data.test.files", "sample:banking/test"), ("data.holdout", 0.2)) == (0, 1, 0.2)
    assert judged("classify", of="sample:banking/train") == (1, 1, 0), "the recipe's own"
    assert judged("classify", of="sample:snli/train") == (0, 0, 0.1)
    assert judged("double-descent-steps") == (0, 0, 0.1) and judged("training-bump") == (0, 0, 0.05), (
        "their own holdout"
    )


def test_so_does_every_layer_that_can_name_them(rows: str, tmp_path: Path) -> None:
    mine, over = tmp_path / "mine.yaml", {"data.train.files": [rows]}
    mine.write_text("extends: classify\ndata: {train: {files: [rows.jsonl]}}\n", encoding="utf-8")
    found = [load_recipe(str(mine)), flatshift.load_recipe("classify", over)]
    assert all((one.recipe.data.dev.files, one.recipe.data.holdout) == ((), 0.1) for one in found)
    assert found[0].origins["data.holdout"].endswith("mine.yaml:2 names rows of your own")
    mixed = "extends: language-model\ndata: {train: {sources: {a: {files: [rows.jsonl]}}}}\n"
    mine.write_text(mixed, encoding="utf-8")
    data = load_recipe(str(mine)).recipe.data
    assert (data.train.files, data.test.files, data.holdout) == ((), (), 0.1)
    mine.write_text(
        "extends: classify\ndata: {train: {files: [a]}, dev: {files: [b]}, test: {files: [c]}}\n", encoding="utf-8"
    )
    assert judged(str(mine)) == (1, 1, 0), "what the user's own recipe names stays beside other rows"


@pytest.mark.parametrize("base", ["classify", "theirs.yaml"])
def test_files_and_sources_take_the_place_of_those_of_the_base_recipe(
    base: str, rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a shipped recipe, and of one with a limit and files of its own to evaluate by."""
    theirs = "data: {train: {files: [a.jsonl], limit: 9}, dev: {files: [b.jsonl]}, test: {files: [c.jsonl]}}\n"
    (tmp_path / "theirs.yaml").write_text(f"extends: classify\n{theirs}", encoding="utf-8")
    mine = "extends: {}\ndata: {{train: {{sources: {{a: {{files: [rows.jsonl]}}}}}}, "
    mine += "dev: {{files: []}}, test: {{files: []}}}}\n"
    (tmp_path / "mine.yaml").write_text(mine.format(base), encoding="utf-8")
    train = load_recipe("mine.yaml").recipe.data.train
    assert (train.files, train.limit, list(train.sources or ())) == ((), None, ["a"])
    assert run(["train", "mine.yaml", "--train.epochs", "null", *FAST, "--out", "mixed"]) == 0
    assert [each["name"] for each in json.loads(Path("mixed/manifest.json").read_text())["sources"]] == ["a"]
    assert run(["train", "mine.yaml", "--data", rows, "--train.epochs", "null", *FAST, "--out", "plain"]) == 0
    assert resume_recipe(Path("plain")).recipe.data.train.sources is None
    capsys.readouterr()
    both = "extends: classify\ndata: {train: {files: [rows.jsonl], sources: {a: {files: [rows.jsonl]}}}}\n"
    (tmp_path / "mine.yaml").write_text(both, encoding="utf-8")
    assert run(["train", "mine.yaml", *FAST, "--out", "both"]) == 2
    assert "sources and data.train.files cannot both be set" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["first", "limit"])
def test_more_rows_than_there_are_is_refused(name: str, rows: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the 60 rows, 48 are not held out."""
    words = ["train", "classify", "--data", rows, *FAST, "--out", "run"]
    assert run([*words, f"--data.train.{name}", "61"]) == 2
    assert re.search(rf"data\.train\.{name}: 61 (rows are asked for|is above the 48 rows)", capsys.readouterr().err)
    assert run([*words, f"--data.train.{name}", "48"]) == 0
    assert f"epochs of {48 if name == 'limit' else 38} rows" in capsys.readouterr().err


def test_rows_are_held_out_for_dev_alone(rows: str, capsys: pytest.CaptureFixture[str]) -> None:
    held_out = ["--data.holdout_splits", "[dev]"]
    assert run(["train", "classify", "--data", rows, *FAST, *held_out, "--out", "run"]) == 0
    assert "data.holdout: 0.1 for dev (" in capsys.readouterr().err
    assert json.loads(Path("run/eval.json").read_text()).keys() == {"dev"}
    both, alone = (
        read_splits(load_recipe("classify", [from_override("data.train.files", rows), *more]).recipe)
        for more in ([], [from_override("data.holdout_splits", "[dev]")])
    )
    assert (len(both.dev), len(both.test), len(alone.dev), len(alone.test)) == (6, 6, 6, 0)
    assert {row.id for row in alone.dev} <= {row.id for row in (*both.dev, *both.test)}
    words = ["train", "classify", "--data", rows, "--data.holdout", "0.2", "--data.holdout_splits"]
    assert run([*words, "[test]", "--data.test.files", rows, "--out", "no"]) == 2
    assert "holdout_splits names no split without files; name dev or test" in capsys.readouterr().err
    assert run([*words, "[train]", "--out", "no"]) == 2


def test_a_tenth_is_held_out_by_class_and_the_run_says_so(
    rows: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert run(["train", "classify", "--data", rows, "--out", "own", *FAST]) == 0
    said = capsys.readouterr().err
    assert "data.holdout: 0.1 for dev and as much for test (--data names rows of your own)" in said
    written = (tmp_path / "own" / "recipe.resolved.yaml").read_text(encoding="utf-8")
    assert "holdout: 0.1  # --data names rows of your own" in written
    splits = read_splits(resume_recipe(tmp_path / "own").recipe)
    counts = [Counter(row.values["label"] for row in part) for part in (splits.train, splits.dev, splits.test)]
    assert [sum(count.values()) for count in counts] == [48, 6, 6]
    assert all(3 <= count["pay"] <= 4 for count in counts[1:]) and all(
        count["card"] and count["lost"] for count in counts
    )
    again = flatshift.train("classify", "api", overrides={"data.train.files": [rows], "train.steps": 1}, quiet=True)
    assert again.recipe.data == resume_recipe(tmp_path / "own").recipe.data


def test_copies_of_one_text_go_to_one_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies after Unicode's NFKC and folded blanks; read at once or streamed, with whatever labels."""
    spelt = ("text {} of ﬁve", "text  {} of five", "text {} of\tfive", "text {} of five ")
    records = [{"text": spelt[i // 20].format(i % 20), "label": "ab"[(i // 3) % 2]} for i in range(80)]
    path = str(write_jsonl(tmp_path / "copies.jsonl", records))
    recipe = load_recipe("classify", [from_override("data.train.files", path)]).recipe
    splits = read_splits(recipe)
    number = [{row.values["text"].split()[1] for row in part} for part in (splits.train, splits.dev, splits.test)]
    assert [len(part) for part in (splits.train, splits.dev, splits.test)] == [64, 8, 8]
    assert [len(numbers) for numbers in number] == [16, 2, 2] and len(set().union(*number)) == 20
    from flatshift.experiments.data import encode
    from flatshift.experiments.data.splits import prepare_data

    read = prepare_data(recipe)
    monkeypatch.setattr(encode, "IN_MEMORY", 0)
    streamed = prepare_data(recipe)
    assert all(getattr(read, split) == getattr(streamed, split) for split in ("train", "dev", "test"))


@pytest.mark.parametrize(
    "records",
    [
        [
            {"messages": [{"role": "user", "content": f"q{i % 10}"}, {"role": "assistant", "content": "a"}]}
            for i in range(40)
        ],
        [{"prompt": f"q{i % 10}", "chosen": "yes", "rejected": "no", "id": str(i)} for i in range(40)],
        [{"question": f"q{i % 10}", "answer": "yes", "line": i} for i in range(40)],
        [{"text": "one premise", "text2": f"claim {i % 10}", "label": "ab"[i % 2]} for i in range(40)],
    ],
    ids=["chat", "preference", "completion", "pairs"],
)
def test_copies_are_known_in_every_form_of_rows(records: list[dict], tmp_path: Path) -> None:
    path = str(write_jsonl(tmp_path / "rows.jsonl", records))
    kinds = {"messages": "chat", "chosen": "preference", "question": "completion", "text": "classify"}
    name = next(recipe for column, recipe in kinds.items() if column in records[0])
    splits = read_splits(load_recipe(name, [from_override("data.train.files", path)]).recipe)
    places = [
        {int(row.where.rpartition(":")[2]) % 10 for row in part} for part in (splits.train, splits.dev, splits.test)
    ]
    assert [len(numbers) for numbers in places] == [8, 1, 1] and len(set().union(*places)) == 10


def test_single_answers_are_held_out_by_their_label_and_have_room(tmp_path: Path) -> None:
    rows = [{"prompt": f"ask {i}", "completion": f"answer {i}", "label": i % 4 != 0} for i in range(100)]
    given = {"data.train.files": [str(write_jsonl(tmp_path / "rows.jsonl", rows))], "task.loss": "kto"}
    recipe = load_recipe("preference", [from_mapping(given)]).recipe
    splits = read_splits(recipe)
    assert [sum(row.values["label"] for row in part) for part in (splits.train, splits.dev, splits.test)] == [60, 8, 7]
    assert [len(part) for part in (splits.train, splits.dev, splits.test)] == [80, 10, 10]
    assert recipe.train.max_length == 1024


def test_too_few_texts_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = str(write_jsonl(tmp_path / "rows.jsonl", [{"text": f"t {i % 2}", "label": "ab"[i % 2]} for i in range(40)]))
    assert run(["train", "classify", "--data", path, "--out", str(tmp_path / "out")]) == 2
    assert "data.holdout: 0.1 of 40 rows with 2 different texts leaves none to train on" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_data_is_the_data_of_the_command(rows: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_jsonl(tmp_path / "more.jsonl", [{"text": f"more {i}", "label": "pay"} for i in range(9)])
    both = ["--data", rows, "more.jsonl"]
    assert run(["sweep", "classify", *both, "--grid", "adapter.rank=1", "--seeds", "1", "--out", "sweep", *FAST]) == 0
    assert "--data names rows of your own" in capsys.readouterr().err
    recipe = load_recipe("sweep/recipe.resolved.yaml").recipe
    assert [Path(name).name for name in recipe.data.train.files] == [rows, "more.jsonl"] and recipe.data.holdout == 0.1
    small = ["--draws", "2", "--more", "5", "--train.max_length", "16"]
    assert run(["forecast", "classify", *both, *small, "--out", "forecast"]) == 0
    assert "--data names rows of your own" in capsys.readouterr().err
    for command in ("train", "sweep", "forecast", "plan"):
        assert run([command, "classify", "--data", rows, "--data.train.files", "more.jsonl", "--out", "none"]) == 2
        error = capsys.readouterr().err
        assert "--data rows.jsonl and --data.train.files more.jsonl contradict each other; keep one" in error
    assert not (tmp_path / "none").exists()


def test_a_target_is_set_apart_as_a_run_on_it_is(rows: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_jsonl(tmp_path / "pool.jsonl", [{"text": f"passage {i} of {i * 3}"} for i in range(30)])
    made = ["select", "--pool", "pool.jsonl", "--target", rows, "--budget", "5", "--method", "random", "--out"]
    assert run([*made, "picked"]) == 0
    assert "target: 12 of its 60 rows are set apart" in capsys.readouterr().err
    recipe = load_recipe("warmup", [from_mapping({"data.train.files": [rows], "data.train.limit": None})])
    taken = from_mapping({"data.train.files": [rows], "data.train.limit": None, "select": {"from": "picked"}})
    from flatshift.experiments.run.console import Console
    from flatshift.experiments.select.target import check_target, read_target

    check_target(load_recipe("warmup", [taken]).recipe, ())
    splits = read_splits(recipe.recipe)
    manifest = json.loads((tmp_path / "picked" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["target"]["apart"] == pytest.approx(0.2)
    selecting = load_recipe(str(tmp_path / "picked" / "recipe.resolved.yaml")).recipe
    found, apart = read_target(selecting, Console(quiet=True))
    assert {row.id for row in apart} == {row.id for row in (*splits.dev, *splits.test)} and len(found.rows) == 48
    assert run([*made, "whole", "--data.holdout", "0"]) == 0
    seen = from_mapping({"data.train.files": [rows], "data.train.limit": None, "select": {"from": "whole"}})
    with pytest.raises(flatshift.UserError, match="set apart for evaluation"):
        check_target(load_recipe("warmup", [seen]).recipe, ())
    own = [{"body": row["text"], "kind": row["label"]} for row in map(json.loads, Path(rows).read_text().splitlines())]
    write_jsonl(tmp_path / "own.jsonl", own)
    body, kind = ["--data.columns.text", "body"], ["--data.columns.label", "kind"]
    words, train = [*made[:4], "own.jsonl", *body, *made[5:]], ["train", "warmup", "--data", "own.jsonl", *body, *kind]
    assert run([*words, "blind"]) == 0
    assert (
        "a run whose label is in 'kind' sets other rows apart, so name it in --data.columns" in capsys.readouterr().err
    )
    assert run([*train, "--data.train.limit", "null", "--select.from", "blind", "--out", "none"]) == 2
    again = "select again with --target"
    said = capsys.readouterr().err.partition(again)[2].partition(", which")[0].split()
    assert said == ["own.jsonl", *body, *kind, "--data.holdout", "0.1"]
    assert run([*made[:3], "--target", *said, *made[5:], "told"]) == 0
    assert "without labels" not in capsys.readouterr().err
    named = {"data.train.files": ["own.jsonl"], "data.train.limit": None, "select": {"from": "told"}}
    named |= {"data.columns": {"text": "body", "label": "kind"}}
    check_target(load_recipe("warmup", [from_mapping(named)]).recipe, ())
    write_jsonl(tmp_path / "one.jsonl", [{"text": "a single text"}])
    assert run([*made[:4], "one.jsonl", *made[5:], "few"]) == 0, "a target too small to divide stays whole"


def test_rows_that_the_run_knows_are_warned_of(rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three training rows, one dev row and two others are evaluated: by one command, and beside another run."""
    assert run(["train", "classify", "--data", rows, *FAST, "--out", "run"]) == 0
    read = read_splits(resume_recipe(Path("run")).recipe)
    known = [row.record for row in (*read.train[:3], read.dev[0])]
    write_jsonl(tmp_path / "more.jsonl", [*known, *({"text": f"another {i}", "label": "pay"} for i in range(2))])
    capsys.readouterr()
    assert run(["eval", "run", "--data", "more.jsonl"]) == 0
    err = capsys.readouterr().err
    assert "warning: 3 of 6 rows were trained on, for example '0-0' (more.jsonl:1)" in err
    assert "warning: 1 of 6 rows are dev rows of the run, by which its best step was chosen, for example '0-3'" in err
    assert run(["eval", "run", "--data", "more.jsonl", "--out", "judged", "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert any(note.startswith("run: warning: 3 of 6 rows were trained on") for note in notes)
    page = Path("judged/report.html").read_text(encoding="utf-8")
    assert "3 of 6 rows were trained on" in page and "<dt>evaluated on</dt><dd>more.jsonl</dd>" in page
    page = Path("run/report.html").read_text(encoding="utf-8")
    assert f"<dt>test rows</dt><dd>held out of {tmp_path.resolve() / rows}</dd>" in page
    for split, predictions in read_predictions(Path("run")).items():
        assert all(row["text"].startswith("request ") for row in predictions.shown) and predictions.shown, split
    write_jsonl(tmp_path / "new.jsonl", [{"text": f"another {i}", "label": "pay"} for i in range(2)])
    assert run(["eval", "run", "--data", "new.jsonl"]) == 0
    assert "warning" not in capsys.readouterr().err
    Path(rows).unlink()
    assert run(["eval", "run", "--data", "new.jsonl"]) == 0
    assert "the rows are not compared with those of the run" in capsys.readouterr().err


def test_predictions_keep_the_text_that_a_tokenizer_lowers(rows: str, tmp_path: Path) -> None:
    encoder = tmp_path / "lowering"
    shutil.copytree(assets.backbone_directory("flatshift-encoder-3m"), encoder)
    tokenizer = json.loads((encoder / "tokenizer.json").read_text(encoding="utf-8"))
    (encoder / "tokenizer.json").write_text(json.dumps(tokenizer | {"normalizer": {"type": "Lowercase"}}))
    texts = [f"Where is my CARD {i}?" for i in range(20)]
    for name in ("train", "test"):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": t, "label": "ab"[i % 2]} for i, t in enumerate(texts)])
    files = ["--data.train.files", "train.jsonl", "--data.test.files", "test.jsonl", "--data.dev.files", "test.jsonl"]
    words = ["--backbone", str(encoder), *files, "--data.checks.copies", "off", *FAST]
    assert run(["train", "classify-encoder", *words, "--out", "run"]) == 0
    for split, found in read_predictions(tmp_path / "run").items():
        assert [row["text"] for row in found.shown] == texts, split
    assert run(["eval", "run", "--data", "test.jsonl", "--out", "judged"]) == 0
    assert [row["text"] for row in read_predictions(tmp_path / "judged")["data"].shown] == texts


def test_many_epochs_are_warned_of_with_the_steps_of_three(
    rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight rows in batches of four; a recipe for sweeps trains to the end on purpose."""
    few = ["--data", rows, "--data.train.limit", "8", *FAST]
    assert run(["train", "classify", *few, "--train.steps", "42", "--out", "many"]) == 0
    warning = "warning: 21 epochs mostly memorise the rows; 3 epochs are --train.steps 6"
    assert warning in capsys.readouterr().err.splitlines()
    page = Path("many/report.html").read_text(encoding="utf-8")
    assert "Share of the device&#39;s peak, all products" in page and "Hfu" not in page
    assert run(["train", "classify", *few, "--train.steps", "40", "--out", "twenty"]) == 0
    assert run(["train", "double-descent", *few, "--train.steps", "42", "--record", "null", "--out", "sweep"]) == 0
    assert "memorise" not in capsys.readouterr().err
