"""Processes that race for one path, by the campaign of `benchmarks.faults.races`: a few of each kind."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from benchmarks.faults.races import KINDS, Field, Kind, field_of

pytestmark = pytest.mark.slow  # `test_owner` and `test_lock` hold each promise; this looks for what nobody thought of


@pytest.fixture(scope="module")
def field() -> Iterator[Field]:
    with field_of() as made:
        yield made


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_races(field: Field, kind: Kind) -> None:
    for number in range(3):
        assert field.race(kind, random.Random(number)).wrong == []
