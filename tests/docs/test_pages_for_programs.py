"""What programs read: docs/json.md against the commands and what they print, AGENTS.md, and llms.txt of the site."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from flatshift import commands
from flatshift.cli import run
from flatshift.command_line import parse_flags, split_overrides
from flatshift.experiments.recipe import load_recipe
from scripts import docs_site
from tests.support.data_models import write_jsonl

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| `flatshift ([^`]+) --json` \| (.+) \|$", PAGE, flags=re.M))
WITHOUT = {"demo", "chat", "serve", "schema"}
"""For people, for OpenAI's clients, and one that prints nothing else."""
TINY = (
    "--train.steps 2 --train.batch_size 2 --train.max_length 24 --train.max_cut 1 --train.precision fp32 "
    "--train.threads 1 --train.eval_every 0 --train.peak_tflops 1 --eval.bootstrap 10 --eval.cold 0"
)


def has_json(name: str) -> bool:
    module = importlib.import_module(f"flatshift.commands.{name}")
    flags = getattr(module, "TrainFlags", module.Flags)  # of `tokenizer train`
    return "json" in {field.name for field in dataclasses.fields(flags)}


def test_every_command_that_a_program_may_read_has_it_and_a_row() -> None:
    assert {name for name in commands.SUMMARIES if not has_json(name)} == WITHOUT
    assert {name.split()[0] for name in ROWS} == commands.SUMMARIES.keys() - WITHOUT


def test_exit_codes_are_those_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE, flags=re.M)}
    from flatshift import cli

    assert codes == {
        int(code) for code in re.findall(r"\b(0|1|2|3|70)\b", (cli.__doc__ or "").partition("Exit codes")[2])
    }
    assert all(re.search(rf"\b{code}\b", (ROOT / "AGENTS.md").read_text(encoding="utf-8")) for code in codes)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with rows and a run."""
    place = tmp_path_factory.mktemp("programs")
    texts = [{"text": f"{i} grey robins sing in a tree by the river", "label": ("a", "b")[i % 2]} for i in range(24)]
    write_jsonl(place / "rows.jsonl", texts)
    (place / "axolotl.yaml").write_text("base_model: flatshift-5m\nsave_safetensors: true\n", encoding="utf-8")
    assert (
        run(["train", "completion", "--data", str(place / "rows.jsonl"), "--out", str(place / "run"), *TINY.split()])
        == 0
    )
    return place


def keys(form: str) -> set[str]:
    """Names in the first braces of a form; those of a placeholder level are left out."""
    inside = re.search(r"`\[?\{([^{}]*)", form)
    return {name for name in re.split(r"[\s,:…]+", inside[1]) if name} - {"split", "name"} if inside else set()


@pytest.mark.parametrize(
    ("row", "command", "code"),
    [
        ("train", f"train completion --data rows.jsonl --out trained {TINY}", 0),
        ("eval", "eval run --data rows.jsonl", 0),
        ("predict", "predict run --data rows.jsonl --out labels.jsonl --max-new-tokens 2", 0),
        ("generate", "generate run --prompt robins --max-new-tokens 2", 0),
        ("select", "select --pool rows.jsonl --target rows.jsonl --budget 3 --method random --out chosen", 0),
        (
            "sweep",
            f"sweep completion --data rows.jsonl --grid adapter.rank=1,2 --seeds 1 --jobs 1 --out sweep {TINY}",
            0,
        ),
        ("forecast", "forecast classify --data rows.jsonl --draws 2 --more 5 --train.max_length 16 --out cast", 0),
        ("plan", "plan qwen3-8b-chat-24gb", 0),
        ("tokenizer", "tokenizer flatshift-5m --data rows.jsonl --out cut", 0),
        ("runs", "runs .", 0),
        ("report", "report run --out page.html", 0),
        ("merge", "merge run --out merged", 0),
        ("export", "export run --out exported", 0),
        ("push", "push run memory:///programs/run", 0),
        ("recipes", "recipes list qwen", 0),
        ("recipes from FILE", "recipes from axolotl.yaml", 1),
        ("doctor", "doctor", 0),
    ],
)
def test_it_prints_one_document_of_the_documented_form(
    row: str, command: str, code: int, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(home)
    assert run([*shlex.split(command), "--json"]) == code
    document: Any = json.loads(capsys.readouterr().out)
    if row in ("train", "eval"):
        assert row == "train" or ROWS[row].startswith("the same;")
        (inner,) = re.findall(r"`\{split: \{metric: \{([\w, ]+)\}\}\}`", ROWS["train"])
        figures = [metric for metrics in document.values() for metric in metrics.values()]
        assert figures and all(set(inner.split(", ")) == figure.keys() for figure in figures)
        assert row == "eval" or document == json.loads(Path("trained/eval.json").read_text(encoding="utf-8"))
        return
    if row in ("tokenizer", "forecast"):
        (name,) = re.findall(r"the content of `([\w.]+)`", ROWS[row])
        assert document == json.loads((Path(command.split()[-1]) / name).read_text(encoding="utf-8")) and document
        return
    wanted = keys(ROWS[row])
    if row == "recipes":
        document, wanted = (
            next(iter(document.values())),
            {"summary", *re.findall(r"\w+", ROWS[row].split("summary, ")[1])[:5]},
        )
    if row == "push":
        wanted = {"address", "sent", "bytes", "present"}
    records = document if isinstance(document, list) else [document]
    assert wanted and records and all(wanted <= record.keys() for record in records)


def test_commands_for_agents_are_ours() -> None:
    block = re.search(r"```bash\n(.*?)```", (ROOT / "AGENTS.md").read_text(encoding="utf-8"), flags=re.S)
    assert block is not None
    for line in block[1].splitlines():
        _, verb, *words = shlex.split(line, comments=True)
        module = importlib.import_module(f"flatshift.commands.{verb}")
        own, overrides = split_overrides(words, module.Flags)
        recipe = getattr(parse_flags(module.Flags, verb, own), "recipe", None)
        name = words[1] if verb == "recipes" and words[:1] == ["show"] else recipe
        load_recipe(None if name == "RECIPE" else name, overrides)


def test_links_for_agents_lead_somewhere_and_llms_txt_has_every_page() -> None:
    text = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links and all((ROOT / link).is_file() for link in links)
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")} - {"index.md"}
    pages |= {f"notebooks/{notebook.stem}.md" for notebook in (ROOT / "docs" / "notebooks").glob("*.ipynb")}
    index = docs_site.llms_text({page: f"at/{page}" for page in (*pages, *docs_site.find_linked_files())})
    assert all(f"](at/{page})" in index for page in pages) and "](docs/" not in index
    assert "[docs/json.md](at/json.md)" in index
