"""The control that sees form alone."""

from __future__ import annotations

from benchmarks.studies.selection_quality.texts import SIZE, shapes
from flatshift.selection import MooreLewisSelector, Pool


def test_words_count_for_nothing_and_form_for_all() -> None:
    one, other, spaced = shapes(["The cat sat (3 times).", "Any dog ran (7 hours).", "the cat sat ( 3 times ) ."])
    assert one.tolist() == other.tolist() != spaced.tolist()
    assert max(one) < SIZE and len(set(shapes(["a AB Aa aA 1 a1 . ("])[0].tolist())) == 8
    assert not len(shapes([""])[0])


def test_a_selector_on_shapes_finds_texts_of_the_targets_form() -> None:
    plain = [f"w{'ord'[: i % 3]} speaks of it at length and ends" for i in range(60)]
    marked = [f"<< it >> is {'very ' * (i % 4)}near to [[ that ]] ." for i in range(20)]
    pool = Pool(texts=[*plain, *marked], tokens=shapes([*plain, *marked]))
    target = Pool(tokens=shapes(["<< other >> words stand in [[ here ]] and there ."] * 5))
    chosen = MooreLewisSelector().fit(pool, target).select(20)
    assert set(chosen.tolist()) == set(range(60, 80))
