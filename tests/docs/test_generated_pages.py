"""Generated pages are fresh, and house rules that are easy to break are kept."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("flatshift", "experiments", "finetune", "selection", "regularizers", "benchmarks")


def load(path: Path):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_recipe_page_is_fresh() -> None:
    script = load(ROOT / "scripts" / "write_recipe_docs.py")
    assert script.PAGE.read_text(encoding="utf-8") == script.render_page(), "run: python scripts/write_recipe_docs.py"


def test_api_page_is_fresh() -> None:
    script = load(ROOT / "scripts" / "write_api_docs.py")
    assert script.PAGE.read_text(encoding="utf-8") == script.render_page(), "run: python scripts/write_api_docs.py"


def test_benchmark_page_is_fresh() -> None:
    from benchmarks import docs

    assert docs.PAGE.read_text(encoding="utf-8") == docs.page(), "run: python -m benchmarks.docs"


def test_equalities_page_is_fresh() -> None:
    from benchmarks import _equalities_page, docs

    if not (docs.RESULTS / "sharding_equalities.json").is_file():
        assert not docs.EQUALITIES.exists(), "a page without results"
        return
    assert docs.EQUALITIES.read_text(encoding="utf-8") == _equalities_page.page(), "run: python -m benchmarks.docs"


def test_every_setting_is_documented() -> None:
    script = load(ROOT / "scripts" / "write_recipe_docs.py")
    rows = script.render_page().splitlines()
    undocumented = [line for line in rows if line.startswith("| `") and line.endswith("|  |")]
    assert not undocumented


def test_no_pickle_and_no_remote_code() -> None:
    bad = re.compile(r"\bpickle\.load|torch\.load\(|trust_remote_code=True|allow_pickle=True|yaml\.load\(")
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            found = [m.group() for m in bad.finditer(path.read_text(encoding="utf-8"))]
            assert not found, f"{path}: {found}"


def test_no_path_of_one_machine() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    pattern = re.compile(r"(?<![\w.])/(work|home|root)/\w")
    for name in files:
        if name.endswith((".py", ".md", ".toml", ".yaml", ".json")) and (ROOT / name).is_file():
            text = (ROOT / name).read_text(encoding="utf-8", errors="replace")
            assert not pattern.search(text), f"{name} names a path of one machine"
