"""What a release needs says the same everywhere: version, interpreters, lanes, and where pages stand."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import yaml

import flatshift
from scripts import docs_site

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = SETTINGS["project"]


def _yaml(name: str) -> dict:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_one_version() -> None:
    newest = re.search(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.M)
    assert newest and newest[1] == PROJECT["version"] == _yaml("CITATION.cff")["version"] == flatshift.__version__


def test_workflows_run_what_a_user_runs() -> None:
    workflow = _yaml(".github/workflows/ci.yml")["jobs"]["test"]
    matrix = workflow["strategy"]["matrix"]
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    lanes = {*matrix["lane"], *(entry["lane"] for entry in matrix["include"])}
    for lane in lanes:
        assert re.search(rf"^\s*[\w| ]*\b{lane}\b[\w| ]*\)", script, flags=re.M), f".ci/run knows no lane {lane}"
    assert f">={min(matrix['python'])}" == PROJECT["requires-python"]
    release = _yaml(".github/workflows/release.yml")["jobs"]
    assert release["publish"]["permissions"] == {"id-token": "write"}, "published without a kept token"
    assert {"test", "build"} <= set(release["publish"]["needs"]), "what is published was tested"
    tested = [step.get("run", "") for step in release["test"]["steps"]]
    assert ".ci/run" in tested and any("is-ancestor" in step and "main" in step for step in tested)
    weekly = _yaml(".github/workflows/weekly.yml")["jobs"]["slow"]["steps"]
    assert weekly[-1]["run"] == "make slow" and "test,test-remote,quant,harness" in weekly[-2]["run"]
    steps = [step.get("run", "") for step in release["build"]["steps"]]
    assert any(step.startswith("make release") for step in steps), "what is published was tried"
    assert not any("-m build" in step for step in steps), "the files that were tried are published, no others"
    named = {f"Programming Language :: Python :: {python}" for python in matrix["python"]}
    assert named == {line for line in PROJECT["classifiers"] if line.startswith("Programming Language")}


def test_pages_and_container_name_the_range_of_torch() -> None:
    (torch,) = (line for line in PROJECT["dependencies"] if line.startswith("torch"))
    lowest, above = re.findall(r"2\.(\d+)", torch)
    assert f'"{torch}"' in (ROOT / "Containerfile").read_text(encoding="utf-8")
    for page in ("CHANGELOG.md", "docs/first-model.md"):
        assert f"torch 2.{lowest} to 2.{int(above) - 1}" in (ROOT / page).read_text(encoding="utf-8"), page


def test_templates_and_container_hold() -> None:
    for name in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        assert {"name", "description", "body"} <= _yaml(str(name.relative_to(ROOT))).keys()
    copied = re.findall(r"^COPY (.+) (\S+)$", (ROOT / "Containerfile").read_text(encoding="utf-8"), flags=re.M)
    held = set()
    for words, into in copied:
        for word in words.split():
            assert (ROOT / word).exists(), f"Containerfile copies {word}, which is not there"
            assert into in (word, "./"), f"Containerfile copies {word} to another place, {into}"
            held.add(word)
    hatch = SETTINGS["tool"]["hatch"]
    hooks = [hook["path"] for hook in hatch["metadata"]["hooks"].values()]
    readme = PROJECT.get("readme", "README.md")  # which the hook reads
    rooms = [*hatch["build"]["targets"]["wheel"]["packages"], *hatch["build"]["targets"]["sdist"]["force-include"]]
    for name in ("pyproject.toml", *hooks, readme, *PROJECT["license-files"], *rooms):
        above = {name, *(parent.as_posix() for parent in Path(name).parents)}
        assert above & held, f"Containerfile does not copy {name}, which pyproject.toml asks for"


def test_the_site_has_every_page_once() -> None:
    listed = [page for rows in docs_site.read_sections().values() for row in rows for _, page in row]
    assert len(listed) == len(set(listed))
    docs = ROOT / "docs"
    pages = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")} - {"index.md"}
    assert pages <= set(listed)
    assert all((ROOT / "docs" / page).is_file() for page in listed)


def test_the_whole_package_is_every_feature() -> None:
    extras = PROJECT["optional-dependencies"]
    features = set(extras) - {"all", "test", "real", "test-remote", "demo", "docs", "bench"}
    (line,) = extras["all"]
    assert set(line.removeprefix("flatshift[").removesuffix("]").split(",")) == features


def test_links_out_of_docs_come_along() -> None:
    beside = docs_site.find_linked_files()
    assert beside["index.md"] == ROOT / "README.md" and "NOTICE.md" in beside


def test_navigation_has_titles_and_groups() -> None:
    nav = docs_site.on_config(SimpleNamespace()).nav
    assert nav[0] == {"Start": [{"Flatshift": "index.md"}, {"All pages by question": "documentation.md"}]}
    (reference,) = [entries for tab in nav for heading, entries in tab.items() if heading == "Reference"]
    assert {"Python API": "api.md"} in reference
    (recipes,) = [entry["Recipes"] for entry in reference if "Recipes" in entry]
    assert recipes[:2] == [{"Overview": "recipes.md"}, {"task": "recipes/task.md"}]


def test_links_of_the_readme_are_those_of_the_site() -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    shown = docs_site.on_page_markdown((ROOT / "README.md").read_text(encoding="utf-8"), page, None, None)
    assert "[all pages by question](documentation.md)" in shown and "](pictures/run.png)" in shown
    assert "](docs/" not in shown


def test_the_site_asks_no_server() -> None:
    settings = _yaml("mkdocs.yml")
    assert settings["theme"]["font"] is False and "offline" in settings["plugins"]
    assert not [key for key in ("extra_css", "extra_javascript") if key in settings]
    (script,) = settings["extra"]["polyfills"]
    assert "iframe-worker" in script and (ROOT / "docs" / script).is_file()  # any other name lets `offline` add its own
