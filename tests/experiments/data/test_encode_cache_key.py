"""Which of our own source names an entry of the token cache: all that says what an encoded row is."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

import flatshift.finetune.data
import flatshift.finetune.models.backbone
import flatshift.finetune.seeds
import flatshift.finetune.tasks
from flatshift.experiments.data import encode

ROOT = Path(encode.__file__).resolve().parents[2]
APART = {
    "flatshift.experiments.recipe.schema": "settings: their values are in the key",
    "flatshift.finetune.config": "settings: their values are in the key",
    "flatshift.finetune.adapters.settings": "which layer answers a regression: the layer is in the key",
    "flatshift.finetune.models.meta": "which layer answers a regression: the layer is in the key",
    "flatshift.finetune.evaluate.bootstrap": "what a model is judged by, once rows are made",
    "flatshift.finetune.evaluate.metrics": "what a model is judged by, once rows are made",
    "flatshift.finetune.evaluate.evaluator": "what a model is judged by, once rows are made",
    "flatshift.finetune.evaluate.prediction_metrics": "what a model is judged by, once rows are made",
    "flatshift.finetune.evaluate.preference": "what a model is judged by, once rows are made",
    "flatshift.finetune.assets": "where files lie: their content is in the key",
    "flatshift.finetune.atomic": "how an entry is written",
    "flatshift.finetune.cache_directory": "where entries lie",
    "flatshift.finetune.errors": "sentences",
    "flatshift.finetune.redaction": "addresses as they are written: rows come from the whole ones",
    "flatshift.finetune.compute.limited_process": "how long a template may take, not what it renders",
    "flatshift.experiments.data.lengths": "a refusal and a note, of rows as they come from the cache too",
    "flatshift.finetune.train.trace.examples": "which rows a run looks at",
    "flatshift.finetune.compute.micro_batch": "how rows that are made already come to a device",
    "flatshift.finetune.compute.numerics": "how a model reads rows that are made already",
    "flatshift.finetune.compute.precision": "how a model reads rows that are made already",
    "flatshift.experiments.recipe.resolve": "how many updates rows that are made already are for",
}
"""What the digested source imports, and why another version of it makes no other rows."""


def imported(file: Path) -> set[str]:
    """Our own modules that a file imports, anywhere in it."""
    parts = ("flatshift", *file.relative_to(ROOT).with_suffix("").parts)
    package = parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1], *([node.module] if node.module else [])]
            name = ".".join(base) if node.level else str(node.module)
            found |= {name, *(f"{name}.{alias.name}" for alias in node.names)}
    return {name for name in found if source(name) is not None}


def source(name: str) -> Path | None:
    top, _, rest = name.partition(".")
    if top != "flatshift" or rest.partition(".")[0] not in ("finetune", "experiments"):
        return None
    plain = ROOT.joinpath(*rest.split("."))
    return next((file for file in (plain.with_suffix(".py"), plain / "__init__.py") if file.is_file()), None)


def test_every_import_of_the_digested_source_is_digested_or_known_to_say_nothing():
    digested = {file.resolve() for file in encode._code_files()}
    roots = [
        file for file in digested if file != Path(flatshift.finetune.models.backbone.__file__).resolve()
    ]  # of it: the tokenizer
    names = set().union(*map(imported, roots))
    outside = {name for name in names if source(name) not in digested and name not in APART}
    assert not outside, f"say in APART why {sorted(outside)} changes no row, or digest it in experiments/data/encode.py"
    assert names >= APART.keys()
    assert all(importlib.util.find_spec(name) for name in APART)


@pytest.mark.parametrize(
    "module",
    [flatshift.finetune.seeds, flatshift.finetune.models.backbone, flatshift.finetune.data, flatshift.finetune.tasks],
    ids=lambda m: m.__name__,
)
def test_another_version_of_it_is_another_entry(module, tmp_path, monkeypatch):
    before = encode._code_digest()
    other = tmp_path / "changed.py"
    other.write_bytes(Path(module.__file__).read_bytes() + b"\n# changed\n")
    monkeypatch.setattr(module, "__file__", str(other))
    encode._code_digest.cache_clear()
    try:
        assert encode._code_digest() != before
    finally:
        monkeypatch.undo()
        encode._code_digest.cache_clear()
    assert encode._code_digest() == before
