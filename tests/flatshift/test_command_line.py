"""Every setting of a recipe and every number of a command line, at values that mean nothing: refused by their name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks.faults.bad_settings import MEANT, NUMBERS, Setting, numbers_of_commands, settings
from flatshift import commands
from flatshift.command_line import parse_flags, split_overrides
from flatshift.experiments.recipe import from_override, load_recipe
from flatshift.experiments.recipe.rules import check_recipe
from flatshift.experiments.studies.compare.tuning import TrialSetting
from flatshift.finetune.errors import UserError
from flatshift.regularizers.config import RegularizerError
from flatshift.selection.errors import SelectionError

MISTAKES = (UserError, RegularizerError, SelectionError)


def asked(one: Setting, value: str) -> str | None:
    """What is said of a recipe with this value; None: it is taken."""
    overrides = [from_override(key, kind, f"--{key}") for key, kind in one.kinds]
    base = "warmup" if one.key.startswith("select.") else "classify"  # a selection is of a warm-up
    try:
        check_recipe(load_recipe(base, [*overrides, from_override(one.key, value, f"--{one.key}")]).recipe)
    except MISTAKES as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["--regularizer.sigma", "0.2", "--regularizer.kind", "flat-lora"], "regularizer.sigma", 0.2),
        (["--regularizer.sigma", "0.2", "--regularizer", "flat-lora"], "regularizer.sigma", 0.2),
        (["--task.prompt", "{text}!", "--task.kind", "completion"], "task.prompt", "{text}!"),
        (["--optimizer.lr", "5e-4", "--optimizer.kind", "lora-muon"], "optimizer.lr", 5e-4),
    ],
)
def test_the_order_of_flags_does_not_matter(words: list[str], key: str, value: object) -> None:
    from flatshift.commands.train import Flags

    for flags in (words, words[2:] + words[:2]):
        recipe: object = load_recipe("classify", split_overrides(flags, Flags)[1]).recipe
        for name in key.split("."):
            recipe = getattr(recipe, name)
        assert recipe == value


def test_the_order_of_a_methods_settings_does_not_matter(tmp_path: Path) -> None:
    from flatshift.experiments.studies.compare.comparison_plan import ComparisonPlan
    from tests.support.comparison_study import make_study

    recipe = make_study(tmp_path)
    text = recipe.read_text(encoding="utf-8")
    own = "ggpo: {confirmatory: true, set: {regularizer.sigma: 0.2, regularizer.kind: flat-lora}"
    recipe.write_text(text.replace("ggpo: {confirmatory: true, set: {regularizer.kind: ggpo}", own), encoding="utf-8")
    plan = ComparisonPlan(str(recipe), [], data=tmp_path)
    found = plan.run("final", "ggpo", "easy", 0, TrialSetting(1e-2)).cell.resolved.recipe.regularizer
    assert (found.kind, found.sigma) == ("flat-lora", 0.2)


def test_the_kinds_of_an_optimizer_share_their_settings(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("optimizer: {kind: paged-adamw, lr: 2e-4, schedule: linear, clip: null}\n", encoding="utf-8")
    for flag in ("optimizer.kind", "optimizer"):
        optimizer = load_recipe(str(own), [from_override(flag, "adamw")]).recipe.optimizer
        assert (optimizer.kind, optimizer.lr, optimizer.schedule, optimizer.clip) == ("adamw", 2e-4, "linear", None)


def test_no_setting_takes_what_means_nothing() -> None:
    wrong = []
    for one in settings():
        for value in one.values():
            told = asked(one, value)
            if told is None or one.key.rpartition(".")[2] not in told:
                wrong.append(f"{one.key} ({dict(one.kinds)}) {value!r}: {told or 'is taken'}")
    assert not wrong, "\n".join(wrong)


def test_what_is_meant_is_taken() -> None:
    there: dict[str, list[Setting]] = {}
    for one in settings():
        there.setdefault(one.key, []).append(one)
    for value, keys in MEANT.items():
        for key in sorted(keys):
            assert any(asked(one, value) is None for one in there[key]), f"{key} {value!r}"


def _flags() -> Iterator[tuple[str, str, str]]:
    for command, flag, kind in numbers_of_commands():
        for value in (*NUMBERS, "x") if kind is float else ("-1", "1.5", "x", ""):
            yield command, flag, value


TAKEN = {
    "0": "--temperature --tokens --price --nvlink --ib --epsilon --memory --noise --sharpness-sigmas --sharpness-rhos "
    "--every --top-p",
    "-1": "--tokens --price --nvlink --ib --epsilon --memory --noise --sharpness-sigmas --sharpness-rhos "
    "--seeds --points --ranks --budget --port --sharpness-draws",
}
"""What the parser leaves to the command, which knows of what it is (`benchmarks.faults.bad_settings` runs those)."""


def test_no_flag_takes_what_is_no_number() -> None:
    import importlib

    begin = {"sweep": ["r.yaml"], "forecast": ["r.yaml"], "compare": ["r.yaml"], "predict": ["d"]}
    begin |= {"eval": ["d"], "chat": ["d"], "serve": ["d"], "generate": ["d"]}
    wrong = []
    for command, flag, value in _flags():
        flags = importlib.import_module(f"flatshift.commands.{command}").Flags
        assert dataclasses.is_dataclass(flags) and command in commands.SUMMARIES
        try:
            parse_flags(flags, command, [*begin.get(command, []), f"{flag}={value}"])
        except UserError as error:
            if flag not in str(error):
                wrong.append(f"{command} {flag} {value}: {error}")
        else:
            if flag not in TAKEN.get(value, "").split() and (value, flag) != (str(2**64), flag):
                wrong.append(f"{command} {flag} {value!r}: is taken")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("argv", [[""], ["run", "--out", ""], ["run", "--out="], ["run", "--data", "a", ""]])
def test_an_empty_word_is_refused_but_where_it_is_a_text(argv: list[str]) -> None:
    from flatshift.commands.generate import Flags

    with pytest.raises(UserError, match=r"^(an argument|--out|--data) is empty \(''\)"):
        parse_flags(Flags, "generate", argv)
    assert parse_flags(Flags, "generate", ["run", "--prompt", ""]).prompt == ("",)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("sweep", ["classify", "--grid", "adapter.rank=1,2", "--grid", "train.steps=3"]),
        ("select", ["--pool", "a.jsonl", "--target", "b.jsonl", "--pool=c.jsonl"]),
    ],
)
def test_a_list_that_is_given_twice_is_refused(
    command: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The parser would take the last alone."""
    from flatshift.cli import run

    assert run([command, *words, "--out", str(tmp_path / "never")]) == 2
    assert "is given twice, and only the last would count; write all values after one --" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "words", "left"),
    [
        ("train", ["--like", "r", "--adapter.targets", "q_proj", "v_proj"], ["--like", "r"]),
        ("train", ["--adapter.targets", "q_proj", "v_proj", "--resume=r"], ["--resume=r"]),
        ("train", ["--adapter.targets", "q_proj", "v_proj", "own"], ["own"]),
        ("plan", ["--adapter.targets", "q_proj", "v_proj", "--gpus", "here"], ["--gpus", "here"]),
        ("plan", ["--adapter.targets", "q_proj", "v_proj", "chat"], ["chat"]),
        ("plan", ["--adapter.targets", "q_proj", "v_proj", "qwen3-8b-chat-24gb"], ["qwen3-8b-chat-24gb"]),
        ("plan", ["--adapter.targets", "q_proj", "v_proj", "own.yaml"], ["own.yaml"]),
        ("sweep", ["--adapter.targets", "q_proj", "v_proj", "own"], ["own"]),
    ],
)
def test_the_last_word_of_a_list_is_the_recipe_only_if_it_can_be(
    command: str, words: list[str], left: list[str]
) -> None:
    rest, overrides = split_overrides(words, import_module(f"flatshift.commands.{command}").Flags)
    assert rest == left and load_recipe(None, overrides).recipe.adapter.targets == ("q_proj", "v_proj")


def test_several_words_are_the_files_of_a_source_with_any_name(tmp_path: Path) -> None:
    from flatshift.commands.train import Flags

    words = ["--data.train.sources.my-set.files", "a", "b", "--data.train.sources.my-set.when-over", "refuse"]
    sources = load_recipe(None, split_overrides(["own.yaml", *words], Flags)[1]).recipe.data.train.sources
    assert sources is not None and [Path(name).name for name in sources["my-set"].files] == ["a", "b"]


@pytest.mark.parametrize("turn", [1, -1])
def test_a_block_and_a_key_of_it_may_not_contradict_each_other(turn: int) -> None:
    from flatshift.commands.train import Flags

    flags = [["--train.seed", "7"], ["--train", "{seed: 5, steps: 3}"]][::turn]
    with pytest.raises(UserError, match=r"^--train\S* .* and --train\S* .* contradict each other; keep one$"):
        split_overrides([*flags[0], *flags[1]], Flags)
    same = [word for flag in flags for word in flag if word != "7"]
    same.insert(same.index("--train.seed") + 1, "5")
    assert load_recipe("chat", split_overrides(same, Flags)[1]).recipe.train.seed == 5


def test_help_names_what_is_given_by_position_and_shows_no_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    forms = {"train": " [RECIPE]", "eval": " SUBJECTS...", "recipes": " [NAME] [TO]", "push": " FOLDER DESTINATION"}
    for name in sorted(commands.SUMMARIES):
        shown = _help_of(name, capsys)
        assert "None" not in shown and "(default: )" not in shown, shown
        assert forms.get(name, "") in shown.partition("\n")[0], shown
    shown = _help_of("generate", capsys)
    assert "--prompt STR " in shown and "--data STR..." in shown


def _help_of(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        commands.run(name, ["--help"])
    assert not stop.value.code
    return capsys.readouterr().out
