"""docs/architecture.md is the tree as it is: every folder explained, every path there, nothing loose, no circle."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts import house

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
GROUND = frozenset(re.findall(r"^\| `finetune/(\w+\.py)` \|", PAGE, re.M))
"""The loose files of finetune/ that the page explains."""


def folders() -> set[str]:
    """Every folder of the five rooms that holds modules, as the page writes it."""
    return {file.parent.relative_to(ROOT).as_posix() + "/" for file in house.product_modules().values()}


def test_every_folder_is_explained_in_two_sentences() -> None:
    rows = dict(re.findall(r"^\| `([\w/]+/)` \| (.+?) \|$", PAGE, re.M))
    rooms = {folder for folder in rows if folder.split("/")[0] in house.ROOMS}
    assert rooms == folders()
    for folder, words in rows.items():
        assert 1 <= len(re.findall(r"[.!?](?:\s|$)", words)) <= 2, f"{folder}: two sentences, no more"


def test_every_path_that_the_page_names_exists() -> None:
    named = re.findall(r"`((?:\w+/)+(?:\w+\.\w+)?)`", PAGE)
    missing = [path for path in named if not (ROOT / path).exists() and "NAME" not in path]
    assert not missing


def test_nothing_lies_loose() -> None:
    loose = {room: {file.name for file in (ROOT / room).glob("*.py")} - {"__init__.py"} for room in house.ROOMS}
    assert loose["experiments"] == set()
    assert loose["finetune"] == GROUND and len(GROUND) <= 12


def test_no_import_circle() -> None:
    assert house.import_cycles(house.import_graph(house.product_modules())) == []


@pytest.mark.parametrize(
    ("graph", "found"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"c"}, "c": {"b"}}, [["b", "c"]]),
        ({"a": {"b"}, "b": {"a", "c"}, "c": {"d"}, "d": {"c"}}, [["a", "b"], ["c", "d"]]),
    ],
)
def test_circles_are_seen(graph: dict[str, set[str]], found: list[list[str]]) -> None:
    assert sorted(house.import_cycles(graph)) == found


def test_lazy_imports_and_those_of_types_count(tmp_path: Path) -> None:
    for room in house.ROOMS:
        (tmp_path / room).mkdir()
    (tmp_path / "selection" / "one.py").write_text("def f():\n    from .two import g\n")
    (tmp_path / "selection" / "two.py").write_text("if TYPE_CHECKING:\n    from .one import f\ng = 1\n")
    known = house.product_modules(tmp_path)
    assert house.import_graph(known) == {
        "flatshift.selection.one": {"flatshift.selection.two"},
        "flatshift.selection.two": {"flatshift.selection.one"},
    }


def test_the_tree_is_below_the_ceilings() -> None:
    assert house.list_excesses(house.product_modules()) == []


def test_every_excess_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for room in house.ROOMS:
        (tmp_path / room).mkdir()
    wide = "class Wide:\n    a, b = 1, 2\n    c: int = 3\n\n    def d(self):\n        return 1\n"
    (tmp_path / "selection" / "one.py").write_text(f"{wide}\n\nclass Flags:\n    pass\n")
    (tmp_path / "selection" / "two.py").write_text("class Wide:\n    pass\n\n\nclass Flags:\n    pass\n")
    known = house.product_modules(tmp_path)
    assert house.list_excesses(known) == ["class Wide in flatshift.selection.one and flatshift.selection.two"]
    for ceiling, value in (("LINES", 15), ("MODULES", 1), ("MEMBERS", 3), ("FUNCTION_LINES", 1)):
        monkeypatch.setattr(house, f"MAX_{ceiling}", value)
    assert house.list_excesses(known)[:-1] == [
        "16 product lines, ceiling 15",
        "2 modules, ceiling 1",
        "flatshift.selection.one.Wide: 4 members, ceiling 3",
        "flatshift.selection.one.d: 2 lines, ceiling 1",
    ]


def test_an_excess_ends_the_check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["house.py", "--check"])
    assert house.main() == 0
    monkeypatch.setattr(house, "MAX_MODULES", 1)
    assert house.main() == 1 and "ceiling 1" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["house.py"])
    assert house.main() == 0
