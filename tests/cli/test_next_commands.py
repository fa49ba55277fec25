"""What a command prints under `next:` is what a user pastes: it runs, and on the same backbone and files."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import yaml

from flatshift.cli import run
from flatshift.finetune.models.backbone import open_backbone
from flatshift.outcome import NEW_ROWS, _push_command
from tests.support.data_models import byte_tokenizer, write_jsonl
from tests.support.finetune_models import save_backbone

pytestmark = pytest.mark.usefixtures("warm_checks")

LONG = [{"id": f"row {i}", "words": f"the cat {i} sat on the mat and the dog"} for i in range(8)]
ROWS = [{"text": f"is my card number {i} here", "label": ("card", "loss")[i % 2]} for i in range(12)]
STEP = [
    *("--train.steps", "1", "--train.batch_size", "2", "--train.precision", "fp32", "--train.threads", "1"),
    *("--train.max_length", "24", "--train.eval_every", "0", "--eval.bootstrap", "10", "--eval.cold", "0"),
]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory whose name has a blank, with a backbone that is not the default."""
    place = tmp_path / "my files"
    place.mkdir()
    save_backbone("llama", place / "own model", vocab_size=352)
    byte_tokenizer().save_pretrained(place / "own model")
    save_backbone("bert", place / "own encoder", vocab_size=352)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    tokenizer.save_pretrained(place / "own encoder")
    write_jsonl(place / "my pool.jsonl", LONG)
    write_jsonl(place / "my rows.jsonl", ROWS)
    monkeypatch.chdir(place)
    return place


def printed(text: str) -> list[list[str]]:
    """The commands under `next:`."""
    lines = text.splitlines()
    start = max(i for i, line in enumerate(lines) if line == "next:")
    return [shlex.split(line) for line in lines[start + 1 :] if line.startswith("  flatshift ")]


def recipe_of(run_directory: Path) -> dict:
    return yaml.safe_load((run_directory / "recipe.resolved.yaml").read_text(encoding="utf-8"))


def followed(commands: list[list[str]], *more: str, rows: Path | None = None) -> dict[str, list[str]]:
    """Run them all but uploads; by verb. more: smaller settings for those that train. rows: what a user puts in."""
    for _, *words in commands:
        words = [str(rows) if word == NEW_ROWS else word for word in words]
        if words[0] != "push":
            assert run([*words, *(more if words[0] == "train" else ())]) == 0, words
    return {words[1]: words for words in commands}


@pytest.mark.parametrize(
    ("name", "allowed"), [("erster  Lauf, ü", "erster-Lauf"), ("20261129-classify_1.5", None), ("ü", "NAME")]
)
def test_an_upload_gets_a_name_that_a_hub_takes(name: str, allowed: str | None) -> None:
    assert _push_command(Path("out"), Path(name))[-1] == f"ORGANISATION/{allowed or name}"


@pytest.mark.parametrize(("backbone", "kind"), [("own model", "language-model"), ("own encoder", "masked-lm")])
def test_a_selection_goes_on_with_its_backbone_and_columns(home: Path, capsys, backbone: str, kind: str) -> None:
    words = ["select", "--pool", "my pool.jsonl", "--target", "my pool.jsonl", "--budget", "4"]
    words += ["--text-column", "words", "--backbone", backbone, "--method", "dsir", "--out", "my choice"]
    assert run(words) == 0
    commands = printed(capsys.readouterr().err)
    assert {words[1] for words in commands} == {"train", "report"}
    followed(commands, *STEP, "--out", "trained")
    recipe = recipe_of(home / "trained")
    assert Path(recipe["backbone"]).name == backbone and recipe["task"]["kind"] == kind
    assert recipe["data"]["columns"]["text"] == "words"
    assert recipe["data"]["train"]["files"] == [str(home / "my choice" / "selected.jsonl")]


def test_a_selection_for_labelled_rows_goes_on_to_their_classifier(home: Path, capsys) -> None:
    with (home / "my rows.jsonl").open("a", encoding="utf-8") as stream:
        stream.write("{broken\n")
    words = ["select", "--pool", "my rows.jsonl", "--target", "my rows.jsonl", "--budget", "4", "--seed", "3"]
    words += ["--backbone", "own model", "--method", "random", "--bad-rows", "skip"]
    assert run([*words, "--data.holdout", "0", "--out", "whole"]) == 0
    assert [words[2] for words in printed(capsys.readouterr().err)] == ["language-model", "whole"], "no rows for dev"
    apart = ["--data.holdout", "0.2", "--data.holdout_splits", "[dev]"]
    assert run([*words, *apart, "--out", "my choice"]) == 0
    commands = printed(capsys.readouterr().err)
    assert [words[2] for words in commands] == ["warmup", "language-model", "my choice"]
    small = ["--warmup.steps", "1", "--warmup.batch_size", "2", "--out", "trained"]
    followed(commands[:1], *STEP, *small)
    recipe = recipe_of(home / "trained")
    assert Path(recipe["backbone"]).name == "own model" and recipe["train"]["seed"] == 3
    assert (recipe["data"]["holdout"], recipe["data"]["holdout_splits"]) == (0.2, ["dev"])
    assert recipe["data"]["bad_rows"] == "skip"
    assert [Path(name).name for name in recipe["data"]["train"]["files"]] == ["my rows.jsonl"]
    assert recipe["select"]["budget"] == 4 and Path(recipe["select"]["from"]).name == "my choice"


def test_a_sample_as_the_target_is_evaluated_by_its_own_rows(home: Path, capsys) -> None:
    words = ["select", "--pool", "my rows.jsonl", "--target", "sample:banking/train", "--budget", "4"]
    assert run([*words, "--method", "random", "--out", "my choice"]) == 0
    first = printed(capsys.readouterr().err)[0]
    assert first == ["flatshift", "train", "warmup", "--select.from", "my choice", "--data", "sample:banking/train"]


def test_a_selection_of_a_recipe_goes_on_under_the_same_keys(home: Path, capsys) -> None:
    words = ["--data.train.files", "my rows.jsonl", "--data.train.limit", "null"]
    words += ["--data.dev.files", "[]", "--data.test.files", "[]", "--data.holdout=0.25", "--backbone", "own model"]
    select = ["--select.pool.files", "my pool.jsonl", "--select.budget", "4", "--select.columns.text", "words"]
    assert run(["select", "warmup", *words, *select, "--seed", "3", "--out", "my choice"]) == 0
    commands = [words for words in printed(capsys.readouterr().err) if words[2] == "warmup"]
    followed(commands, *STEP, "--warmup.steps", "1", "--warmup.batch_size", "2", "--out", "trained")
    recipe = recipe_of(home / "trained")
    assert Path(recipe["backbone"]).name == "own model" and recipe["train"]["seed"] == 3
    assert recipe["data"]["holdout"] == 0.25 and Path(recipe["data"]["train"]["files"][0]).name == "my rows.jsonl"
    assert recipe["select"]["budget"] == 4


def test_a_run_and_what_comes_after_it(home: Path, capsys) -> None:
    words = ["train", "classify", "--backbone", "own model", "--data.train.files", "my rows.jsonl"]
    words += ["--data.train.limit", "null", "--data.dev.files", "[]", "--data.test.files", "[]"]
    assert run([*words, *STEP, "--out", "my run"]) == 0
    commands = printed(capsys.readouterr().err)
    assert [words[1] for words in commands] == ["predict", "merge", "export"]
    assert commands[0][commands[0].index("--data") + 1] == NEW_ROWS, "it was trained on the only rows that it has"
    made = followed(commands, rows=home / "my rows.jsonl")
    said = (home / made["predict"][made["predict"].index("--out") + 1]).read_text(encoding="utf-8")
    assert len(said.splitlines()) == 1 + len(ROWS)
    assert (home / "my run" / "merged" / "config.json").is_file()

    capsys.readouterr()
    assert run(["predict", "my run", "--data", "my rows.jsonl", "--out", "said.jsonl"]) == 0
    commands = printed(capsys.readouterr().err)
    assert commands[0] == ["flatshift", "eval", "my run", "--data", "my rows.jsonl"]
    followed(commands[:2])
    unlabelled = write_jsonl(home / "new.jsonl", [{"text": "is it here"}])
    capsys.readouterr()
    assert run(["predict", "my run", "--data", str(unlabelled), "--out", "new said.jsonl"]) == 0
    assert "eval" not in [words[1] for words in printed(capsys.readouterr().err)], "its rows have no labels"


def test_what_an_adapter_cannot_do_is_not_proposed(home: Path, capsys) -> None:
    words = ["train", "language-model", "--backbone", "own model", "--data", "my pool.jsonl", "--data.columns.text"]
    words += [
        "words",
        "--data.holdout",
        "0",
        *STEP,
        "--adapter.soft_tokens",
        "2",
        "--task.pack",
        "false",
        "--out",
        "my run",
    ]
    assert run(words) == 0
    commands = printed(capsys.readouterr().err)
    assert [words[1] for words in commands] == ["predict", "export"], "soft tokens cannot be merged"
    config = home / "own model" / "config.json"
    assert not open_backbone("own model").is_quantised
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {"quant_method": "gptq"}}))
    assert open_backbone("own model").is_quantised


def test_a_sweep_that_is_undecided_goes_on_with_more_seeds(home: Path, capsys) -> None:
    words = ["sweep", "classify", "--backbone", "own model", "--data", "my rows.jsonl", *STEP, "--jobs", "1"]
    assert run([*words, "--grid", "adapter.rank=1,2,3", "--seeds=2", "--out", "my sweep"]) == 0
    commands = printed(capsys.readouterr().err)
    assert [words[1] for words in commands] == ["sweep", "report"]
    again = commands[0]
    assert again.count("--seeds") == 1 and not [word for word in again if word.startswith("--seeds=")]
    assert int(again[again.index("--seeds") + 1]) > 2 and again[again.index("--backbone") + 1] == "own model"
    again[again.index("--seeds") + 1] = "3"
    assert run(again[1:]) == 0
    seeds = {json.loads(file.read_text())["seed"] for file in (home / "my sweep" / "cells").glob("*/result.json")}
    assert len(seeds) == 3
