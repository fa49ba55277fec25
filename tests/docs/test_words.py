"""Words of the product: how its docstrings open, which words they leave out, and one class for one name."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from scripts import house

ROOT = Path(__file__).resolve().parents[2]
OPENING = re.compile(r"(What|Whether|Where|Who|Whom|Whose|How|By|Of|As|That|Those|Which|Why|When)\b")
MOST_OPENINGS = 0.04
"""Largest share of docstrings that open with a relative word."""
BANNED = re.compile(r"\b(told|tells of|anew|judg(?:e|es|ed|ing)|goes on|by heart|at hand|under way|laid out|says so)\b")
SHARED_NAMES = {"Flags", "Handler"}
"""Class names that several modules have: the flags of each command, the handler of each server."""


@cache
def trees() -> dict[str, ast.Module]:
    """The product's modules by path."""
    return {
        file.relative_to(ROOT).as_posix(): ast.parse(file.read_text(encoding="utf-8"))
        for file in house.product_modules().values()
    }


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of each docstring: of modules, classes, functions and attributes."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for each in body if isinstance(body, list) else []:
            match each:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield each.lineno, text.strip()


def banned(text: str) -> list[str]:
    """The banned words of a docstring outside of its code."""
    return BANNED.findall(re.sub(r"``.*?``|`[^`]*`", "", text, flags=re.S))


def classes(tree: ast.Module) -> list[str]:
    """The public classes of a module's own."""
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]


def test_docstrings_open_with_a_verb_or_a_noun() -> None:
    texts = [(f"{path}:{line}", text) for path, tree in trees().items() for line, text in docstrings(tree)]
    opened = [place for place, text in texts if OPENING.match(text)]
    assert len(opened) <= MOST_OPENINGS * len(texts), f"{len(opened)} of {len(texts)}: {', '.join(opened)}"


def test_docstrings_have_no_banned_word() -> None:
    found = {
        f"{path}:{line}": words
        for path, tree in trees().items()
        for line, text in docstrings(tree)
        if (words := banned(text))
    }
    assert not found


def test_a_class_name_is_of_one_class() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees().items():
        for name in classes(tree):
            places[name].append(path)
    assert not {name: found for name, found in places.items() if len(found) > 1 and name not in SHARED_NAMES}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Return the value that `judge` has.", []),
        ("Rows judged by ``told``.", ["judged"]),
        ("It goes on\n    anew.", ["goes on", "anew"]),
        ("A judgement of begun things.", []),
    ],
)
def test_banned_words_are_seen(text: str, found: list[str]) -> None:
    assert banned(text) == found


def test_docstrings_of_attributes_are_read() -> None:
    tree = ast.parse(
        '"""Module."""\nx = 1\n"""What it is."""\n\n\nclass A:\n    """Class."""\n    b: int\n    """Of it."""\n'
    )
    texts = [text for _, text in docstrings(tree)]
    assert texts == ["Module.", "What it is.", "Class.", "Of it."]
    assert [bool(OPENING.match(text)) for text in texts] == [False, True, False, True]
