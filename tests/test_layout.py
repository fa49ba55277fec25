"""Tests mirror the product: `tests/<room>/<folder>/test_<module>.py`, or `test_<module>_<aspect>.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import house

TESTS = Path(__file__).resolve().parent
FOLDERS = frozenset({"benchmarks", "cli", "distributed", "docs", "parity"})
"""Folders of tests that are about no single module of a room."""


def mirrors_a_module(test: str) -> bool:
    """Return whether the room has a module or package, in the same folder, after which the test file is named."""
    path = house.ROOT / test
    about = path.stem.removeprefix("test_")
    modules = {file.stem for file in path.parent.glob("*.py")} | {
        file.parent.name for file in path.parent.glob("*/__init__.py")
    }
    return any(f"{about}_".startswith(f"{module}_") for module in modules)


def test_every_test_is_named_after_its_module() -> None:
    tests = [file.relative_to(TESTS).as_posix() for room in house.ROOMS for file in (TESTS / room).rglob("test_*.py")]
    assert len(tests) > 100 and [test for test in tests if not mirrors_a_module(test)] == []


def test_no_test_lies_elsewhere() -> None:
    folders = {file.relative_to(TESTS).parts[0] for file in TESTS.rglob("test_*.py")} - {Path(__file__).name}
    assert folders <= FOLDERS | set(house.ROOMS)
    assert {file.name for file in TESTS.glob("*.py")} == {"conftest.py", Path(__file__).name}


@pytest.mark.parametrize(
    ("test", "mirrored"),
    [
        ("finetune/train/test_trainer.py", True),
        ("finetune/train/test_trainer_tasks.py", True),
        ("finetune/test_train_tasks.py", True),
        ("finetune/train/test_train.py", False),
        ("finetune/test_trainer.py", False),
        ("finetune/train/test_train_er.py", False),
        ("unit/test_trainer.py", False),
    ],
)
def test_the_rule_can_fail(test: str, mirrored: bool) -> None:
    assert mirrors_a_module(test) == mirrored
