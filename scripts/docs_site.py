"""mkdocs hooks: make the README the home of the site, build its tabs from the headings of docs/index.md, make pages of
notebooks, and add linked files outside docs/, and llms.txt, the index for programs.

make docs        # builds site/ from docs/, strictly: a broken link fails it
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
HOME = {"README.md": "index.md", "index.md": "documentation.md"}
"""README and docs/index.md → their paths in the site."""
_LINK = re.compile(r"(?:\[(?P<title>[^][]*))?\]\((?P<target>[^)#\s:]+)(?P<anchor>#[^)\s]*)?\)")


def read_sections() -> dict[str, list[list[tuple[str, str]]]]:
    """Return heading of docs/index.md → the rows of its table, each a list of (title, page); a page is a path from
    docs/."""
    results: dict[str, list[list[tuple[str, str]]]] = {}
    for line in (DOCS / "index.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            results[line[3:]] = []
        elif results and line.startswith("| ") and "](" in line:
            results[next(reversed(results))].append(
                [(match["title"], match["target"]) for match in _LINK.finditer(line)]
            )
    return results


def find_linked_files() -> dict[str, Path]:
    """Return the files outside docs/ that its pages or one another link to: path in the site → file."""
    results: dict[str, Path] = {}
    queue = sorted(DOCS.rglob("*.md"))
    while queue:
        page = queue.pop()
        for match in _LINK.finditer(page.read_text(encoding="utf-8")):
            target = (page.parent / match["target"]).resolve()
            if target.is_file() and not target.is_relative_to(DOCS) and target.is_relative_to(ROOT):
                name = _site_path(target)
                if name not in results:
                    results[name] = target
                    queue += [target] if target.suffix == ".md" else []
    return results


def _site_path(path: Path) -> str:
    """Return the path in the site of a repository file; the README of a folder does not become its index, a
    notebook becomes a page."""
    inside = path.relative_to(DOCS if path.is_relative_to(DOCS) else ROOT).as_posix()
    if inside in HOME:
        return HOME[inside]
    if path.name == "README.md":
        return inside.removesuffix("/README.md") + ".md"
    if path.suffix == ".ipynb":
        return inside.removesuffix(".ipynb") + ".md"
    return inside if path.suffix else inside + ".md"


def on_config(config: Any) -> Any:
    """Set the navigation: a tab for each heading, an entry for each page, a group for pages in a folder."""
    config.nav = [{"Start": [{"Flatshift": "index.md"}, {"All pages by question": "documentation.md"}]}]
    for heading, rows in read_sections().items():
        entries: list[dict[str, Any]] = []
        for row in rows:
            pages = [{title: _site_path((DOCS / page).resolve())} for title, page in row]
            title, page = row[0]
            if len(row) > 1 and (DOCS / page).with_suffix("").is_dir():
                entries.append({title: [{"Overview": pages[0][title]}, *pages[1:]]})
            else:
                entries += pages
        config.nav.append({heading: entries})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add notebooks, the files outside docs/ that the pages link to, and docs/index.md under its path in the site."""
    from mkdocs.structure.files import File

    files.remove(files.get_file_from_path("index.md"))
    for name, path in _added_files().items():
        files.append(File.generated(config, name, content=path.read_text(encoding="utf-8")))
    for notebook in sorted(DOCS.rglob("*.ipynb")):
        for name, content in notebook_files(notebook).items():
            files.append(File.generated(config, name, content=content))
    addresses = {file.src_uri: file.url for file in files.documentation_pages()}
    files.append(File.generated(config, "llms.txt", content=llms_text(addresses)))
    return files


def notebook_files(notebook: Path) -> dict[str, str | bytes]:
    """Return the page of a notebook and its pictures: path in the site → content."""
    from nbconvert import MarkdownExporter

    page = Path(_site_path(notebook))
    names = {"unique_key": page.stem, "output_files_dir": page.stem}
    text, resources = MarkdownExporter().from_filename(str(notebook), resources=names)
    pictures = {(page.parent / name).as_posix(): content for name, content in resources["outputs"].items()}
    return {page.as_posix(): text, **pictures}


def llms_text(addresses: Mapping[str, str]) -> str:
    """Return the index of the site for programs (llmstxt.org): AGENTS.md, then all pages by heading of docs/index.md.

    addresses: path in the site → address of the page.
    """

    def with_address(match: re.Match[str]) -> str:
        address = addresses.get(_site_path((ROOT / match["target"]).resolve()))
        return str(match["title"]) if address is None else f"[{match['title']}]({address})"

    lines = [_LINK.sub(with_address, (ROOT / "AGENTS.md").read_text(encoding="utf-8"))]
    for heading, rows in read_sections().items():
        pages = [(title, _site_path((DOCS / page).resolve())) for row in rows for title, page in row]
        lines += [f"## {heading}\n", *(f"- [{title}]({addresses[page]})" for title, page in pages), ""]
    return "\n".join(lines)


def _added_files() -> dict[str, Path]:
    return {HOME["index.md"]: DOCS / "index.md", **find_linked_files()}


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Convert links that are valid in the repository to links of the site."""
    here = _added_files().get(page.file.src_uri, DOCS / page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        target = (here.parent / match["target"]).resolve()
        if not target.is_file() or not target.is_relative_to(ROOT):
            return match[0]
        link = os.path.relpath(_site_path(target), Path(page.file.src_uri).parent)
        return f"{match[0][: match.start('target') - match.start()]}{link}{match['anchor'] or ''})"

    return _LINK.sub(moved, markdown)
