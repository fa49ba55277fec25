"""What stands in the blocks of the pages: every command is one of ours as it is written, and the commands and Python of
the pages that no other test follows are run."""

from __future__ import annotations

import gzip
import importlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flatshift.cli import run
from flatshift.command_line import parse_flags, split_overrides
from flatshift.experiments.recipe import from_override, load_recipe

ROOT = Path(__file__).resolve().parents[2]
PAGES = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))}
TINY = "--train.steps 1 --train.batch_size 2 --train.max_length 32 --train.max_cut 1 --train.precision fp32 "
TINY += "--train.eval_every 0 --eval.bootstrap 10 --eval.cold 0 --data.dev.files [] --data.test.files []"


def blocks(page: str, *languages: str) -> list[str]:
    """Fenced blocks of these languages, in order; none: of any."""
    found = re.findall(r"(?ms)^```(\w*)\n(.*?)^```", PAGES[page])
    return [text for language, text in found if not languages or language in languages]


def commands(page: str, *languages: str) -> list[str]:
    """The `flatshift` commands of a page, each in one line."""
    lines = "".join(blocks(page, *languages)).replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ") for line in lines if re.match(r"(\$ )?flatshift [a-z]", line)]


def is_file(recipe: str) -> bool:
    """True of what a command would look for on the disk."""
    return "/" in recipe or recipe.endswith((".yaml", ".yml"))


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_ours(page: str) -> None:
    for command in commands(page):
        _, verb, *words = shlex.split(command.replace(" … ", " "), comments=True)
        module = importlib.import_module(f"flatshift.commands.{verb}")
        if verb in ("recipes", "tokenizer"):  # with verbs of their own
            continue
        if "--select.from" in words:  # which reads a selection that is there
            at = words.index("--select.from")
            del words[at : at + 2]
        own, overrides = split_overrides(words, module.Flags)
        flags = parse_flags(module.Flags, verb, own)
        recipe = getattr(flags, "recipe", None)
        if verb == "select" and flags.method is not None:
            overrides.append(from_override("select.method.kind", flags.method))
        if recipe is not None and (is_file(recipe) or recipe.isupper()):  # a reader's own file, or a word for a name
            recipe = None
        load_recipe(recipe, overrides)


def rows(name: str, texts: list[str], **columns: list[Any]) -> None:
    """A JSONL file of texts; columns: more of a row."""
    records = [{"id": str(i), "text": text, **{k: v[i] for k, v in columns.items()}} for i, text in enumerate(texts)]
    data = "".join(json.dumps(record) + "\n" for record in records).encode()
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the files that the pages name."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    words = ["grey", "robin", "sings", "tree", "river", "stone", "cloud", "bill", "send", "morning", "evening", "road"]
    birds = [" ".join(rng.choice(words, 12)) for _ in range(40)]
    talk = [f"please send the {what} of {n} days ago" for n in range(5) for what in ("bill", "letter")]
    sources = ["wiki" if i % 4 else "news" for i in range(len(birds))]
    for name in ("pool.jsonl", "comments.jsonl", "corpus/a.jsonl.gz", "pool/a.jsonl"):
        rows(name, birds, domain=sources)
    for name in ("target.jsonl", "task-train.jsonl", "clean.jsonl", "texts.jsonl"):
        rows(name, talk)
    rows("rows.jsonl", talk, label=["bill", "letter"] * 5)
    rows("test.jsonl", ["a robin in a tree sings of the letter"])
    Path("removed.jsonl").write_text('{"id": "3", "match": "1", "why": "minhash"}\n', encoding="utf-8")
    rows("toxic.jsonl", ["you stupid wren", "stupid red robin"])
    rows("tones.jsonl", [*talk, *(f"stupid {text}" for text in talk)], label=["fine"] * 10 + ["toxic"] * 10)
    rows("prompts.jsonl", ["you stupid"])
    for name, count in (
        ("pool", len(birds)),
        ("target", len(talk)),
        ("pool-grads", len(birds)),
        ("task-grads", len(talk)),
    ):
        np.save(f"{name}.npy", rng.normal(size=(count, 4)).astype(np.float32))
    return tmp_path


def do(commands: list[str], out: str = "") -> None:
    """Run them, with few rows and steps."""
    for number, command in enumerate(commands):
        words = shlex.split(command, comments=True)[1:]
        if "…" in words:
            place = words.index("…")
            words[place : place + 1] = shlex.split("--pool pool.jsonl --target target.jsonl --budget 9")
            if words[0] == "train":
                own = "--data rows.jsonl --data.train.limit null --data.holdout 0.4"
                pool = [] if "--select" in words else ["--select.pool.files", "pool.jsonl"]
                words = [*words[:place], *shlex.split(own), *pool]
            words += ["--out", f"{out}-{number}"]
        if "--budget" in words:
            words[words.index("--budget") + 1] = "9"
        if words[0] == "select":
            words += ["--select.checks", "false"]
        if words[0] == "train":
            words += TINY.split()
            chooses = any(word.startswith("--select.") for word in words) and "--select.from" not in words
            words += ["--select.budget", "9"] if chooses and "--select" not in words else []
        if "--samples" in words:
            words[words.index("--samples") + 1] = "1"
        assert run(words) == 0, command


@pytest.mark.slow
def test_the_page_on_selection(home: Path) -> None:
    lines = [line for line in commands("selection.md") if "slurm" not in line and "ray:" not in line]
    assert len(lines) == 16
    lines = [line.replace("--out picked", f"--out picked-{n}") for n, line in enumerate(lines)]
    lines = [line.replace("--select.from picked", "--select.from picked-0 --warmup.steps 1") for line in lines]
    do(lines, "one")


def test_the_page_on_hygiene(home: Path) -> None:
    do(commands("hygiene.md"))
    texts = ["a red robin", "a red robin", "the letter was sent five days ago from here"]
    names: dict[str, Any] = {"texts": texts, "test_texts": ["nothing of the kind"]}
    exec(compile(blocks("hygiene.md", "python")[0], "hygiene.md", "exec"), names)
    assert names["kept"] == [texts[0], texts[2]]


def test_the_page_on_feature_shards(home: Path) -> None:
    Path("features").mkdir()
    whole = np.load("pool.npy")
    for part, at in enumerate((slice(0, 25), slice(25, 40))):
        np.save(f"features/part-{part:05}.npy", whole[at])
        names = [str(i) for i in range(40)[at]]
        Path(f"features/part-{part:05}.ids").write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    python, *_ = blocks("feature-shards.md", "python")  # the others: test_shards_page
    exec(compile(python, "feature-shards.md", "exec"), {})
    here, pushed, there = commands("feature-shards.md")
    do([here])
    assert Path("selection/selected.jsonl").is_file()
    fsspec = pytest.importorskip("fsspec")
    store, bucket = fsspec.filesystem("memory"), f"memory:///{home.name}"
    for name in ("pool/a.jsonl", "target.npy"):
        store.pipe_file(f"{bucket}/{name}", Path(name).read_bytes())
    do([command.replace("s3://bucket", bucket).replace("/scratch", "scratch") for command in (pushed, there)])
    assert Path("chosen/scores.parquet").read_bytes() == Path("selection/scores.parquet").read_bytes()
    store.rm(bucket, recursive=True)


def test_the_python_of_the_page_on_double_descent() -> None:
    from flatshift.experiments.statistics import Curve

    noise = np.random.default_rng(0).normal(0, 0.01, (5, 6))
    ranks, peak = [1, 2, 4, 8, 16, 32], np.array([0.5, 0.4, 0.45, 0.7, 0.4, 0.3])
    names: dict[str, Any] = {"ranks": ranks, "errors": peak + noise, "losses": 1 - 0.1 * np.arange(6) + noise}
    names["fitted"] = np.clip(np.array([0.3, 0.25, 0.2, 0.1, 0.02, 0.0]) + noise, 0, 1)
    names["plain_curve"] = Curve(axis="rank", values=ranks, test=peak + noise)
    names["flat_curve"] = Curve(axis="rank", values=ranks, test=peak - 0.1 + noise)
    for block in blocks("double-descent.md", "python"):
        exec(compile(block, "double-descent.md", "exec"), names)
    assert names["verdict"].kind == "double descent" and names["found"].mean.value == pytest.approx(-0.1)
