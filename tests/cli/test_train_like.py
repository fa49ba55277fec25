"""`flatshift train --like RUN`: a new run with the recipe of a run; flags override it."""

from __future__ import annotations

from pathlib import Path

import pytest

import flatshift
from flatshift.cli import run
from flatshift.experiments.recipe import from_override, load_recipe, recipe_like, resume_recipe
from flatshift.experiments.recipe.resolve import resolve_tree
from tests.support.commands import flags
from tests.support.data_models import write_jsonl

QUICK = {
    **{"train.batch_size": 4, "train.max_length": 16, "train.max_cut": 1, "train.threads": 1, "train.seed": 5},
    **{"train.precision": "fp32", "train.eval_every": 0, "train.peak_tflops": 1, "eval.bootstrap": 10, "eval.cold": 0},
    **{"data.train.limit": 20, "data.dev.limit": 4, "data.test.limit": 4, "adapter.rank": 3},
}
ROWS = [{"text": f"row {i} of a file of one's own", "label": "ab"[i % 2]} for i in range(40)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One epoch over 20 of the shipped rows."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    assert run(["train", "completion", "--out", str(out), *flags(QUICK)]) == 0
    return out


def adapter(directory: Path) -> bytes:
    return (directory / "adapter" / "adapter_model.safetensors").read_bytes()


def test_the_same_recipe_gives_the_same_adapter(finished: Path, tmp_path: Path) -> None:
    assert run(["train", "--like", str(finished), "--out", str(tmp_path / "again")]) == 0
    assert resume_recipe(tmp_path / "again").recipe == resume_recipe(finished).recipe
    assert adapter(tmp_path / "again") == adapter(finished)


def test_flags_override_it(finished: Path, tmp_path: Path) -> None:
    words = ["train", "--like", str(finished), "--adapter.rank", "2", "--train.steps", "1"]
    assert run([*words, "--out", str(tmp_path / "other")]) == 0
    before, after = resume_recipe(finished).recipe, resume_recipe(tmp_path / "other").recipe
    assert (after.adapter.rank, after.train.steps, after.train.seed) == (2, 1, 5)
    assert after.data == before.data and after.optimizer == before.optimizer
    assert adapter(tmp_path / "other") != adapter(finished)


def test_epochs_are_counted_anew_for_other_rows(finished: Path, tmp_path: Path) -> None:
    assert resume_recipe(finished).recipe.train.epochs is None  # counted as steps
    resolved = recipe_like(finished, [from_override("data.train.files", "[mine.jsonl]", "--data")])
    assert resolved.recipe.train.epochs == 1 and resolved.name == "finished"
    data = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    more = [
        "--data.train.limit",
        "null",
        "--data.dev.limit",
        "null",
        "--data.test.limit",
        "null",
        "--task.pack",
        "false",
    ]
    words = ["train", "--like", str(finished), "--data", str(data), *more]
    assert run([*words, "--out", str(tmp_path / "mine")]) == 0
    recipe = resume_recipe(tmp_path / "mine").recipe
    assert (
        recipe.train.steps == 8
    )  # 32 rows in batches of 4, as the shipped dev and test rows gave way to held-out ones
    assert recipe.data.holdout == 0.1 and recipe.data.dev.files == () == recipe.data.test.files


def test_a_run_like_it_can_be_resumed(finished: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "short")
    assert run(["train", "--like", str(finished), "--train.steps", "1", "--out", out]) == 0
    assert run(["train", "--resume", out, "--train.steps", "2"]) == 0
    assert resume_recipe(tmp_path / "short").recipe.train.steps == 2


def test_the_template_of_the_run_is_kept(tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    turn = "{{ m.role }}: {{ m.content }}{{ eos_token }}\n"
    template.write_text("{% for m in messages %}" + turn + "{% endfor %}", encoding="utf-8")
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": f"b {i}"}]} for i in range(24)
    ]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    first, second = tmp_path / "first", tmp_path / "second"
    settings = flags({key: value for key, value in QUICK.items() if not key.startswith("data.")})
    words = ["train", "chat", "--data", str(data), "--task.template", str(template), "--train.steps", "1", *settings]
    assert run([*words, "--out", str(first)]) == 0
    template.unlink()
    assert run(["train", "--like", str(first), "--out", str(second)]) == 0
    assert (second / "template.jinja").read_bytes() == (first / "template.jinja").read_bytes()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--like", "RUNS/nowhere"], "nowhere is not a run directory: it has no recipe.resolved.yaml"),
        (["--like", "BROKEN"], "recipe.resolved.yaml:3: not valid YAML"),
        (["--like", "EMPTY"], "recipe.resolved.yaml is empty"),
        (["--like", "STRANGE"], "unknown key 'trian'; did you mean 'train'?"),
        (
            ["completion", "--like", "RUN"],
            "one of RECIPE (see `flatshift recipes`), --resume RUN_DIR and --like RUN_DIR",
        ),
        (["--like", "RUN", "--resume", "RUN"], "one of RECIPE"),
        ([], "one of RECIPE"),
        (["--like", "RUN", "--out", "RUN"], "RUN"),
        (["--like", "RUN", "--train.stepz", "3"], "did you mean 'train.steps'"),
    ],
)
def test_a_wrong_run_is_one_sentence(
    finished: Path, tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = {"BROKEN": "train:\n  steps: [1\n", "EMPTY": "", "STRANGE": "trian: {steps: 1}\n"}
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.resolved.yaml").write_text(text, encoding="utf-8")
    places = {name: str(tmp_path / name) for name in texts} | {"RUN": str(finished), "RUNS/nowhere": "nowhere"}
    assert run(["train", *(places.get(word, word) for word in words)]) == 2
    error = capsys.readouterr().err.strip()
    assert message.replace("RUN", str(finished)) in error if message == "RUN" else message in error
    assert len(error.splitlines()) == 1


def test_a_home_directory_is_meant_wherever_a_path_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in `--out=~/x`, where a shell leaves the `~`."""
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    assert run(["recipes", "copy", "completion", "~/base.yaml"]) == 0
    (home / "mine.yaml").write_text("extends: ~/base.yaml\n", encoding="utf-8")
    settings = flags(QUICK | {"train.steps": 1, "train.epochs": "null"})
    assert run(["train", "~/mine.yaml", "--out=~/first", *settings]) == 0
    assert run(["train", "--resume=~/first"]) == 0 and "is finished: nothing to do" in capsys.readouterr().err
    assert run(["train", "--like=~/nowhere", "--out=~/second"]) == 2
    assert f"{home}/nowhere is not a run directory" in capsys.readouterr().err
    assert flatshift.Run("~/first").finished and not list(here.iterdir())


def test_rows_that_were_held_out_by_themselves_are_not_a_setting(tmp_path: Path) -> None:
    """A layer over a resolved recipe says what it would say in the command that made it."""
    first = load_recipe("classify", [from_override("data.train.files", "a.jsonl", "--data")])
    (tmp_path / "recipe.resolved.yaml").write_text(first.to_yaml(), encoding="utf-8")
    assert first.recipe.data.holdout == 0.1 == recipe_like(tmp_path).recipe.data.holdout
    for keys in (["dev"], ["test"], ["dev", "test"]):
        more = [from_override(f"data.{key}.files", f"{key}.jsonl") for key in keys]
        expected = load_recipe("classify", [from_override("data.train.files", "a.jsonl", "--data"), *more]).recipe.data
        assert recipe_like(tmp_path, more).recipe.data == expected and expected.holdout == 0
        assert resolve_tree(first.tree(), more, name="again").recipe.data == expected
    other = recipe_like(tmp_path, [from_override("data.train.files", "b.jsonl", "--data")])
    assert other.recipe.data.holdout == 0.1 and other.origins["data.holdout"] == "--data names rows of your own"
