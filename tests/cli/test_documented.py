"""Each form that a page names goes through the command once: kinds of task, losses, rows, sources, commands and flags
(`tests.support.documented_forms`); and a form that a page names and this suite lacks fails."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import io
import itertools
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flatshift.cli import run
from flatshift.command_line import data_override, parse_flags, split_overrides
from flatshift.commands import train
from flatshift.experiments.recipe import load_recipe
from flatshift.experiments.recipe.resolve import shipped_recipes
from flatshift.experiments.recipe.schema import Recipe
from flatshift.finetune.errors import SENTENCE
from flatshift.finetune.tasks import KINDS
from tests.support.documented_forms import FORMS, ROWS, RUNS, SOURCES, Datasets, Form, Found, prepare

pytestmark = pytest.mark.usefixtures("warm_checks")

Runner = Callable[[Form], Found]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A user's directory, in which every command is given."""
    place = tmp_path_factory.mktemp("documented")
    prepare(place)
    import fsspec

    store = fsspec.filesystem("memory")
    store.pipe_file("/documented/source.jsonl", (place / "source.jsonl").read_bytes())
    patch = pytest.MonkeyPatch()
    patch.chdir(place)
    patch.setenv("FLATSHIFT_CACHE", str(place / "cache"))
    patch.setitem(sys.modules, "datasets", Datasets())
    yield place
    patch.undo()
    store.rm("/documented", recursive=True)


@pytest.fixture(scope="module")
def runner(home: Path) -> Runner:
    """Runs a form in this process, after the runs that it names."""
    made: dict[str, Found] = {}
    numbers = itertools.count()

    def do(form: Form) -> Found:
        if form.name in made and RUNS.get(form.name) is form:
            return made[form.name]
        own = RUNS.get(form.name) is form
        out = home / "runs" / form.name if own else home / "out" / str(next(numbers))
        out.parent.mkdir(exist_ok=True)
        words = shlex.split(form.command)
        for i, word in enumerate(words):
            for name in [name for name in RUNS if f"{{run:{name}}}" in word]:
                done = do(RUNS[name])
                assert done.code == 0, f"{name}: {done.stderr}"
                word = word.replace(f"{{run:{name}}}", f"runs/{name}")
            words[i] = word.replace("{out}", str(out)).replace("{home}", str(home)).replace("{name}", out.name)
        suffix = next((Path(word).suffix for word in words if word.startswith(f"{out}.")), "")
        said, printed = io.StringIO(), io.StringIO()
        before = sys.stdin
        sys.stdin = io.StringIO(form.stdin or "")
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(printed):
                code = run(words)
        except SystemExit as end:  # --help
            code = int(end.code or 0)
        finally:
            sys.stdin = before
        found = Found(code, printed.getvalue(), said.getvalue(), Path(f"{out}{suffix}"))
        if own:
            made[form.name] = found
        return found

    return do


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(form, id=form.name, marks=[pytest.mark.slow] if form.slow else [])
        for form in (*RUNS.values(), *FORMS)
    ],
)
def test_the_form(runner: Runner, form: Form) -> None:
    found = runner(form)
    told = found.stderr.strip().splitlines()[-30:]
    assert found.code == form.code, f"{form.command}\n" + "\n".join(told)
    if found.code == 2:
        assert told[-1].startswith("flatshift: error: ") and len(told[-1]) <= SENTENCE + 40, told
    for check in form.checks:
        assert check(found), f"{form.command}\n{found.stdout[-2000:]}\n" + "\n".join(told)


# ------------------------------------------------------------------------------------ what pages name is in the suite

ROOT = Path(__file__).resolve().parents[2]
PAGES = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))}
TABLE = [*RUNS.values(), *FORMS]
WORDS = [shlex.split(form.command) for form in TABLE]
ELSEWHERE = {
    "--mesh.auto": "tests/experiments/recipe/test_auto.py",
    "--mesh.replicate": "tests/distributed/test_launch.py",
    "--mesh.sequence_parallel": "tests/finetune/planner/test_rules.py",
    "--mesh.": "tests/cli/test_mesh_contract.py",
    "--on": "tests/experiments/studies/executors/test_ray.py",
    "--cpus": "tests/experiments/studies/executors/test_ray.py",
    "--retries": "tests/experiments/studies/executors/test_ray.py",
    "--time": "tests/experiments/studies/executors/test_slurm.py",
    "--gpus": "tests/experiments/studies/executors/test_ranks.py",
    "--nodes": "tests/experiments/studies/executors/test_ranks.py",
    "--processes": "tests/cli/test_select_ranks.py",
    "--merge": "tests/cli/test_sweep_command.py",
    "--bisect": "tests/cli/test_sweep_command.py",
    "--calibrate": "tests/finetune/test_planner.py",
    "--programs": "tests/cli/test_eval_samples.py",
    "--unsafe-programs": "tests/cli/test_eval_samples.py",
    "--pass_at": "tests/cli/test_eval_samples.py",
    "--prompt_language": "tests/cli/test_eval_side_by_side.py",
    "--train.compile": "tests/cli/test_mesh_settings.py",
    "--select.cache": "tests/cli/test_select_remote_features.py",
    "--select.relevance.keep": "tests/cli/test_select_features.py",
    "--harness_include": "tests/cli/test_harness.py",
    "--llama_cpp": "tests/cli/test_hand_over.py",
    "--outtype": "tests/cli/test_hand_over.py",
    "--public": "tests/cli/test_hand_over.py",
    "--bytes": "tests/cli/test_tokenizer_command.py",
    "--held_out": "tests/cli/test_tokenizer_command.py",
    "--hidden": "tests/cli/test_tokenizer_command.py",
    "--layers": "tests/cli/test_tokenizer_command.py",
}
"""Flags that want several processes, a store, minutes or namespaces: where they are followed. A beginning of a flag."""


def commands(text: str) -> Iterator[list[str]]:
    """The `flatshift` commands in the fenced blocks of a page."""
    for _, block in re.findall(r"(?ms)^ *```(\w*)\n(.*?)^ *```", text):
        for line in block.replace("\\\n", " ").splitlines():
            if re.match(r"\s*(\$ )?(srun )?flatshift [a-z]", line):
                words = shlex.split(line.strip().removeprefix("$ ").removeprefix("srun "), comments=True)
                yield [word for word in words[1:] if word != "…"]


def flags(words: list[str]) -> set[tuple[str, str]]:
    """(command, flag) of a command line."""
    return {(words[0], _flag(word.partition("=")[0])) for word in words if re.match("--[a-z]", word)}


def _flag(written: str) -> str:
    """`_` and `-` are one inside of a flag."""
    return "--" + written.removeprefix("--").replace("-", "_")


@pytest.mark.parametrize("name", PAGES)
def test_commands_and_flags_of_the_page_are_in_the_suite(name: str) -> None:
    lacking = sorted(f"{verb} {flag}" for verb, flag in unknown(name) if not followed(flag))
    assert not lacking, f"{name} names {', '.join(lacking)}: add a form to tests/support/documented_forms.py"


def unknown(name: str) -> set[tuple[str, str]]:
    """(command, flag) that a page names and no form of the suite has; of flags in its text the command is empty."""
    ours = {flag for words in WORDS for flag in flags(words)}
    anywhere = {flag for _, flag in ours}  # a recipe key is one in every command
    found = set()
    for words in commands(PAGES[name]):
        assert words[0] in {verb for verb, *_ in WORDS}, words
        found |= {(verb, flag) for verb, flag in flags(words) if "." not in flag or flag not in anywhere}
    text = re.sub(r"(?ms)^ *```.*?^ *```", "", PAGES[name])
    inside = (flag for code in re.findall(r"`([^`]+)`", text) for flag in re.findall(r"--[a-z][\w.-]*\w", code))
    return (found - ours) | {("", flag) for flag in map(_flag, inside) if is_ours(flag) and flag not in anywhere}


@functools.cache
def own_flags() -> set[str]:
    """The flags of every command's own."""
    found = set()
    for verb in {verb for verb, *_ in WORDS}:
        module = importlib.import_module(f"flatshift.commands.{verb}")
        for made in (module.Flags, getattr(module, "TrainFlags", module.Flags)):
            found |= {f"--{field.name}" for field in dataclasses.fields(made)}
    return found


def is_ours(flag: str) -> bool:
    """True of a flag of a command, or a key of recipes: pages name those of other tools too."""
    head, dot, _ = flag.removeprefix("--").partition(".")
    return head in {field.name for field in dataclasses.fields(Recipe)} if dot else flag in own_flags()


def followed(flag: str) -> bool:
    """True if the files that `ELSEWHERE` names for the flag have it: as `--flag`, or a recipe's key alone in quotes."""
    begins = next((begins for begins in ELSEWHERE if flag.startswith(_flag(begins))), None)
    if begins is None:
        return False
    place = ROOT / ELSEWHERE[begins]
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
    word = flag.removeprefix("--").replace(".", r"\.").replace("_", "[_-]")
    used = rf"--{word}(?![\w.-])" + (rf"|([\"']){word}\1" if "." in flag else "")
    return any(re.search(used, file.read_text(encoding="utf-8")) for file in files)


def test_what_is_followed_elsewhere_is_documented_and_not_in_the_suite() -> None:
    lacking = {flag for name in PAGES for _, flag in unknown(name)}
    stale = [begins for begins in ELSEWHERE if not any(flag.startswith(_flag(begins)) for flag in lacking)]
    assert not stale, f"no page needs {', '.join(stale)}: take it out of ELSEWHERE"


def first_column(page: str, header: str) -> set[str]:
    """What stands as code in the first column of the table with this header."""
    table = PAGES[page].split(header, 1)[1].split("\n\n", 1)[0]
    rows = [line for line in table.splitlines()[2:] if line.startswith("|")]
    assert rows, f"{page} has no table {header}"
    return {code for line in rows for code in re.findall(r"`([^`]+)`", line.split("|")[1])}


def given(flag: str) -> set[str]:
    """The values that the suite gives a flag."""
    found = (words[i + 1] for words in WORDS for i, word in enumerate(words[:-1]) if word == flag)
    return {value for text in found for value in re.findall(r"[\w./-]+", text)}


def test_every_kind_of_task_and_loss_is_trained() -> None:
    kinds, losses = set(), set()
    for form in RUNS.values():
        verb, *words = shlex.split(form.command)
        if verb != "train":
            continue
        own, overrides = split_overrides(words, train.Flags)
        flags: train.Flags = parse_flags(train.Flags, "train", own)
        if flags.recipe in shipped_recipes():
            task = load_recipe(flags.recipe, data_override(flags.data, overrides)).recipe.task
            kinds.add(task.kind)
            losses |= {(task.loss, task.chat)} if task.kind == "preference" else set()
    table = PAGES["objectives.md"].split("| you have |", 1)[1].split("\n\n", 1)[0]
    named = {re.findall(r"`([^`]+)`", line.split("|")[2])[0] for line in table.splitlines()[2:]}
    assert named | set(KINDS) <= kinds
    assert set(itertools.product(first_column("preference.md", "| `task.loss` |"), (True, False))) <= losses


def columns_of(*recipes: str) -> list[set[str]]:
    """The keys of the rows that each run of these recipes reads, inside lists too, and the roles of turns."""

    def names(value: Any) -> set[str]:
        if isinstance(value, list):
            return set().union(*map(names, value)) if value else set()
        if isinstance(value, dict):
            roles = {value[key] for key in ("role", "from") if key in value}
            return set(value).union(roles, *map(names, value.values()))
        return set()

    found = []
    for form in RUNS.values():
        words = shlex.split(form.command)
        if words[0] == "train" and words[1] in recipes and "--data" in words:
            name = Path(words[words.index("--data") + 1]).stem
            found.append(names(ROWS.get(name, [])))
    return found


def test_every_form_of_rows_is_trained_on() -> None:
    pairs = columns_of("preference")
    table = PAGES["preference.md"].split("| columns |", 1)[1].split("\n\n", 1)[0]
    for line in table.splitlines()[2:]:
        wanted = set(re.findall(r"`([^`]+)`", line.split("|")[1]))
        assert any(wanted <= there for there in pairs), f"preference.md: {wanted}"
    said = PAGES["data.md"].split("Recognised columns:", 1)[1].split("; the run prints which", 1)[0]
    answers = set().union(*columns_of("completion"))
    assert set(re.findall(r"`(\w+)`", said)) <= answers
    talks = set().union(*columns_of("chat", "instruction"))
    forms = PAGES["supervised.md"].split("## Conversations", 1)[1].split("### The template", 1)[0]
    forms = forms.split("- Roles", 1)[1]
    named = set(re.findall(r"`([a-z_]+)`", forms)) - {"reasoning_content", "tool_call_id"}
    assert named <= talks, f"supervised.md: {named - talks}"
    everything = set().union(*(row for rows in ROWS.values() for row in map(set, rows)))
    assert first_column("data.md", "| column | flag |") <= everything


def test_every_kind_of_source_is_read_by_every_command() -> None:
    named = first_column("data.md", "| format | suffix |") | set(
        re.findall(r"`(\.\w+)`", PAGES["data.md"].split("may be compressed:", 1)[1].split("Files are read", 1)[0])
    )
    table = PAGES["data.md"].split("| format | suffix |", 1)[1].split("\n\n", 1)[0]
    suffixes = {code for line in table.splitlines()[2:] for code in re.findall(r"`([^`]+)`", line.split("|")[2])}
    read = {"hub:NAME[CONFIG]@REVISION:SPLIT": "hub:owner/name[small]@abc:train", "sample:NAME": "sample:banking/train"}
    known = " ".join(form.command for form in TABLE)
    for suffix in (named | suffixes) - {"datasets", "s3://bucket/pool/*.jsonl.gz"}:
        assert read.get(suffix, suffix) in known, f"data.md names {suffix}"
    for kind in SOURCES:
        for verb in ("train", "predict", "eval", "select", "generate", "tokenizer"):
            assert f"{verb}: {kind}" in {form.name for form in TABLE}


@pytest.mark.parametrize(
    ("page", "header", "flag"),
    [
        ("selection.md", "| method | score |", "--method"),
        ("few-shot.md", "| `--score` |", "--score"),
        ("few-shot.md", "| metric | of |", "--task.metrics"),
        ("which-regularizer.md", "| kind | what the gradient", "--regularizer.kind"),
        ("adapters.md", "| `adapter.init` | A and B", "--adapter.init"),
        ("data.md", "| `data.checks.` |", "--data.checks."),
    ],
)
def test_every_value_of_a_table_is_given_once(page: str, header: str, flag: str) -> None:
    values = given(flag)
    if flag.endswith("."):
        values = {word.removeprefix(flag) for words in WORDS for word in words if word.startswith(flag)}
    settings = {"rounds: 5", "debiased: true", "default", "loftq", "corda"}  # loftq: 4 bits, corda: a package
    named = {code for code in first_column(page, header) if code not in settings and not code.startswith("form: ")}
    assert named <= values, f"{page}: {named - values}; add a form with {flag} to tests/support/documented_forms.py"


def test_templates_and_recipes_that_ship_are_trained() -> None:
    from flatshift.finetune.data.chat.template import list_shipped_templates

    assert set(list_shipped_templates()) <= given("--task.template")
    trained = {words[1] for words in WORDS if words[0] in ("train", "sweep", "compare")}
    assert set(shipped_recipes()) <= trained


def test_the_suite_is_large_enough() -> None:
    assert len(TABLE) >= 250 and len({form.name for form in TABLE}) == len(TABLE)
