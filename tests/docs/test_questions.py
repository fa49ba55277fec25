"""Ten questions of a newcomer: one search over the docs puts the page that answers first, and its block runs.

The search is what a documentation site does, small and deterministic: words less their endings, Okapi BM25 with lunr's
constants over title, headings and body, each with a weight. It knows no synonyms, so a page has to say the plain word.
One run goes through the commands for an Alpaca file, a power cut and new text; the blocks of comparing, Python and
shipping run in the tests of their own pages. Qwen, chat and the sweep are parsed here, not run.
"""

from __future__ import annotations

import ast
import json
import math
import re
import shlex
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from flatshift.cli import run
from flatshift.commands import SUMMARIES

DOCS = Path(__file__).resolve().parents[2] / "docs"
WEIGHTS = {"title": 10.0, "headings": 5.0, "body": 1.0}
K1, B = 1.2, 0.75
SMALL = frozenset(
    re.findall(r"\w+", "a an and are at by can do for from has how i in is it my of on one or the to was what")
)

# What is typed → the page that answers, and the start of a line there that does it.
QUESTIONS = {
    "label new text": ("predict.md", "flatshift predict "),
    "chat with my model": ("chat.md", "flatshift chat "),
    "train Qwen on one GPU": ("real-models.md", "flatshift train "),
    "export GGUF": ("out.md", "flatshift export "),
    "Alpaca file": ("data.md", "flatshift train "),
    "compare two runs": ("runs.md", "flatshift report "),
    "use it from Python": ("python.md", "run = flatshift.train("),
    "more data or more rank": ("double-descent.md", "flatshift sweep "),
    "resume after a power cut": ("training.md", "flatshift train --resume "),
    "which rows were wrong": ("runs.md", "wrong = [row for row in rows"),
}


def stems(text: str) -> list[str]:
    """Words in small letters, less the commonest endings of English; small words are left out."""
    words = (word for word in re.findall(r"[a-z0-9]+", text.lower()) if word not in SMALL)
    return [re.sub(r"(?<=\w{3})(ings?|ed|es|e|s)$", "", word) for word in words]


def fields(markdown: str) -> dict[str, list[str]]:
    """Stems of the title, of the headings under it and of all else; `#` in a block of code is no heading."""
    text = re.sub(r"(?ms)^```.*?^```", lambda block: re.sub(r"(?m)^#", " #", block[0]), markdown)
    title, *headings = re.findall(r"(?m)^#+ (.*)", text)
    return {
        "title": stems(title),
        "headings": stems(" ".join(headings)),
        "body": stems(re.sub(r"(?m)^#+ .*", "", text)),
    }


def ranked(query: str, pages: dict[str, dict[str, list[str]]]) -> list[str]:
    """Names of the pages that have a word of `query`, best first; equals by name."""
    scores: Counter[str] = Counter()
    for name, weight in WEIGHTS.items():
        mean = sum(len(page[name]) for page in pages.values()) / len(pages)
        counts = {page: Counter(found[name]) for page, found in pages.items()}
        for word in dict.fromkeys(stems(query)):
            having = sum(word in page for page in pages_of(pages))
            rarity = math.log(1 + (len(pages) - having + 0.5) / (having + 0.5))
            for page, found in counts.items():
                if often := found[word]:
                    spread = K1 * (1 - B + B * len(pages[page][name]) / mean)
                    scores[page] += weight * rarity * often * (K1 + 1) / (often + spread)  # type: ignore[assignment]
    return sorted(scores, key=lambda page: (-scores[page], page))


def pages_of(pages: dict[str, dict[str, list[str]]]) -> list[set[str]]:
    """The stems of each page, of all fields."""
    return [set().union(*page.values()) for page in pages.values()]


@cache
def site() -> dict[str, dict[str, list[str]]]:
    """The fields of every page of the site."""
    return {path.name: fields(path.read_text(encoding="utf-8")) for path in sorted(DOCS.glob("*.md"))}


def test_a_word_of_the_title_outweighs_one_of_the_body_and_code_has_no_headings() -> None:
    pages = {
        "a.md": fields("# Apples\n\npears and plums\n"),
        "b.md": fields("# Fruit\n\n## Pears\n\nround\n"),
        "c.md": fields("# Pear\n\nround\n"),
        "d.md": fields("# Nuts\n\n```bash\n# apples here\n```\n"),
    }
    assert ranked("pear", pages) == ["c.md", "b.md", "a.md"]
    assert ranked("the apple", pages) == ["a.md", "d.md"] and pages["d.md"]["headings"] == []
    assert ranked("what is it", pages) == []


@pytest.mark.parametrize("question", QUESTIONS)
def test_one_search_finds_the_page(question: str) -> None:
    page, _ = QUESTIONS[question]
    assert ranked(question, site())[0] == page, ranked(question, site())[:4]


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_page_has_a_block_that_answers(question: str) -> None:
    page, start = QUESTIONS[question]
    blocks = re.findall(r"(?ms)^```(bash|console|python)\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"))
    answering = [(kind, text) for kind, text in blocks if re.search(rf"(?m)^(\$ )?{re.escape(start)}", text)]
    assert answering, f"{page} has no block with a line that begins {start!r}"
    for kind, text in answering:
        if kind == "python":
            ast.parse(text)
            continue
        for line in re.sub(r"\\\n\s*", " ", text).splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True) if line.startswith(("$", "flatshift")) else []
            assert words[1:2] == [] or words[0] != "flatshift" or words[1] in SUMMARIES, line


def commands(page: str, start: str) -> list[list[str]]:
    """The commands of the page's blocks that begin so, as the shell would split them, less the program's name."""
    lines = re.findall(rf"(?m)^{re.escape(start)}.*", (DOCS / page).read_text(encoding="utf-8"))
    return [shlex.split(line, comments=True)[1:] for line in lines]


def test_the_commands_on_the_pages_run_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (shown,) = re.findall(r"(?s)```json\n(\[.*?)```", (DOCS / "data.md").read_text(encoding="utf-8"))
    rows = [{**row, "instruction": f"{row['instruction']} {i}"} for i in range(10) for row in json.loads(shown)]
    (tmp_path / "alpaca.json").write_text(json.dumps(rows), encoding="utf-8")
    small = ["--train.steps", "1", "--eval.cold", "0", "--task.max_new_tokens", "2", "--train.batch_size", "2"]
    (train,) = commands("data.md", "flatshift train instruction")
    assert run([*train, *small]) == 0, capsys.readouterr().err
    assert "Alpaca" in capsys.readouterr().err

    made = Path(train[train.index("--out") + 1])
    kept = (made / "metrics.jsonl").read_text(encoding="utf-8")
    resume, longer, evaluated = commands("training.md", "flatshift train --resume RUN")
    for words in ([*resume, "--train.steps", "2"], longer, evaluated):
        assert run([{"RUN": str(made), "400": "3"}.get(word, word) for word in words]) == 0, capsys.readouterr().err
    assert {"train", "dev", "test"} >= set(json.loads((made / "eval.json").read_text(encoding="utf-8"))) > {"test"}
    now = (made / "metrics.jsonl").read_text(encoding="utf-8")
    assert now.startswith(kept.splitlines()[0]) and len(now) > len(kept)

    (tmp_path / "new.jsonl").write_text('{"instruction": "Name a river.", "input": ""}\n', encoding="utf-8")
    (predict,) = commands("predict.md", "flatshift predict first")
    assert run([str(made) if word == "first" else word for word in predict]) == 0, capsys.readouterr().err
    assert len((tmp_path / "labels.csv").read_text(encoding="utf-8").splitlines()) >= 2
