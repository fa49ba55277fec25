"""Generated pages are fresh, and house rules that are easy to break are kept."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from flatshift.experiments.recipe.schema import dotted_keys

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("flatshift", "experiments", "finetune", "selection", "regularizers", "benchmarks")


def load(path: Path):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def written(name: str) -> dict[str, str]:
    """The page `name` of docs/ and those in the folder of that name, by path."""
    docs = ROOT / "docs"
    files = [docs / f"{name}.md", *(docs / name).iterdir()]
    return {path.relative_to(docs).as_posix(): path.read_text(encoding="utf-8") for path in files}


def test_recipe_pages_are_fresh() -> None:
    script = load(ROOT / "scripts" / "write_recipe_docs.py")
    assert written("recipes") == script.render_pages(), "run: python scripts/write_recipe_docs.py"


def test_recipe_pages_have_every_key() -> None:
    pages = "".join(written("recipes").values())
    inside = "select.method.inside."  # a method like any other: its page has no second copy of them all
    keys = [key.replace(inside, "select.method.") for key in dotted_keys()]
    assert not [key for key in keys if f"`{key}`" not in pages and not key.endswith(".kind")]
    assert "`select.method.kind: gotd`" in pages and "`optimizer.kind`" in pages


def test_api_page_is_fresh() -> None:
    script = load(ROOT / "scripts" / "write_api_docs.py")
    assert script.PAGE.read_text(encoding="utf-8") == script.render_page(), "run: python scripts/write_api_docs.py"


def test_benchmark_pages_are_fresh() -> None:
    from benchmarks import docs

    assert written("benchmarks") == docs.pages(), "run: python -m benchmarks.docs"


def test_every_benchmark_has_one_topic() -> None:
    from benchmarks import docs

    listed = [name for _, benchmarks in docs.TOPICS.values() for name in benchmarks]
    assert len(listed) == len(set(listed)) and docs.HEADLINES.keys() <= set(listed)


def test_a_benchmark_without_topic_or_result_is_named(tmp_path: Path) -> None:
    from benchmarks import docs

    shutil.copytree(docs.RESULTS, tmp_path / "results", ignore=lambda _, names: {n for n in names if "." not in n})
    (tmp_path / "results" / "dedup.json").rename(tmp_path / "results" / "unknown.json")
    with pytest.raises(ValueError, match="dedup, unknown: TOPICS"):
        docs.pages(tmp_path / "results")


def test_a_headline_is_a_measured_row() -> None:
    from benchmarks import docs

    row = {"peer": None, "peer_name": "", "unit": "s", "holds": None}
    rows = [{**row, "what": "a", "ours": None}, {**row, "what": "b", "ours": 2.0}, {**row, "what": "c", "ours": 3.0}]
    assert docs.headline({"name": "dedup", "rows": rows}) == "b: 2 s"
    assert docs.headline({"name": "dedup", "rows": [*rows, {**rows[2], "what": "d", "holds": True}]}) == "d: 3 s"
    assert docs.headline({"name": "dedup", "rows": rows[:1]}) == "not measured yet"
    with pytest.raises(ValueError, match="detox: no row starts with"):
        docs.headline({"name": "detox", "rows": rows})


def test_equalities_page_is_fresh() -> None:
    from benchmarks import _equalities_page, docs

    if not (docs.RESULTS / "sharding_equalities.json").is_file():
        assert not docs.EQUALITIES.exists(), "a page without results"
        return
    assert docs.EQUALITIES.read_text(encoding="utf-8") == _equalities_page.page(), "run: python -m benchmarks.docs"


def test_every_setting_is_documented() -> None:
    script = load(ROOT / "scripts" / "write_recipe_docs.py")
    rows = "\n".join(script.render_pages().values()).splitlines()
    settings = [line for line in rows if line.startswith(("| `", "| **`"))]
    assert any(line.startswith("| **`") for line in settings)  # the settings that have settings of their own
    assert not [line for line in settings if line.endswith("|  |")]


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
