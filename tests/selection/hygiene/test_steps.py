"""The whole of `clean`: causes, matches, order of the steps, independence of batches, settings out of range."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from flatshift.selection.errors import SelectionError
from flatshift.selection.hygiene import (
    Decontaminate,
    DropList,
    Hygiene,
    Language,
    LengthFilter,
    NearDuplicates,
    ReferenceTexts,
    Repetition,
    clean_pool,
)
from flatshift.selection.hygiene.store import GrowingArray

EVERY_STEP = Hygiene(
    length=LengthFilter(min_words=3),
    language=Language(),
    repetition=Repetition(min_words=10),
    exact=True,
    near=NearDuplicates(threshold=0.7),
    decontaminate=Decontaminate(min_chars=40, margin=10),
)
SHARED = "we show that the proposed method is better than all of the methods that came before it"
EVALUATION = [
    f"In this paper on quite a few other matters and on what they mean for everyone, {SHARED}.",
    "The quick brown fox jumped over the lazy dog and was never seen again.",
    "Tiny.",
]
TARGET = ["The target has a sentence that the pool repeats word for word, as it happens."]


def pool() -> tuple[list[str], list[tuple[str | None, str | None, int | None]]]:
    """Texts, and of each one: (cause, match_in, match), or Nones where it stays whole."""
    draw = random.Random(0)

    def fresh() -> str:
        return " ".join(
            f"{draw.choice('bcdfgklmn')}{draw.choice('aeiou')}{draw.choice('rstxz')}{draw.choice('aeo')}"
            for _ in range(25)
        )

    rows: list[tuple[str, tuple[str | None, str | None, int | None]]] = [
        (fresh(), (None, None, None)) for _ in range(20)
    ]
    keep = rows[3][0]
    rows += [
        ("", ("length", None, None)),
        ("Two words", ("length", None, None)),
        ("Der Hund ist nicht mit der Katze in dem Haus und auf der Straße.", ("language", None, None)),
        ("again and again " * 10, ("repetition", None, None)),
        (keep.upper() + "  ", ("exact-duplicate", "pool", 3)),
        (keep.replace(" ", "  ", 3) + "\n", ("exact-duplicate", "pool", 3)),
        (TARGET[0].lower(), ("exact-duplicate", "target", 0)),
        (keep + " xx", ("near-duplicate", "pool", 3)),
        (EVALUATION[1].replace("lazy", "sleepy"), ("near-duplicate", "eval", 1)),
        (f"Short, but {SHARED}", ("contaminated", "eval", 0)),
        (f"{fresh()}. {fresh()}. {SHARED} and so on. {fresh()}. {fresh()}.", ("cut", "eval", 0)),
        (fresh(), (None, None, None)),
    ]
    return [text for text, _ in rows], [told for _, told in rows]


def run(texts, settings: Hygiene = EVERY_STEP, **options):
    return clean_pool(
        texts, settings, references=[ReferenceTexts("target", TARGET), ReferenceTexts("eval", EVALUATION)], **options
    )


def test_every_drop_has_its_cause_and_the_id_of_its_match() -> None:
    texts, told = pool()
    cleaned = run(texts)
    ids = [f"p{row}" for row in range(len(texts))]
    named = {"target": ["t0"], "eval": ["e0", "e1", "e2"]}
    drops = {drop["id"]: drop for drop in cleaned.drops(ids, named)}
    assert list(drops) == [identity for identity, (cause, _, _) in zip(ids, told, strict=True) if cause], (
        "in file order"
    )
    for row, (cause, where, match) in enumerate(told):
        if cause is None:
            continue
        drop = drops[f"p{row}"]
        assert (drop["cause"], drop["match_in"]) == (cause, where), texts[row]
        assert drop["match"] == (None if match is None or where is None else f"{where[0]}{match}")
        assert drop["rule"] and ("pieces" in drop) == (cause == "cut")
    kept = [row for row, (cause, _, _) in enumerate(told) if cause in (None, "cut")]
    assert cleaned.kept.tolist() == kept
    assert cleaned.counts() == {
        "length": 2,
        "language": 1,
        "repetition": 1,
        "exact-duplicate": 3,
        "near-duplicate": 2,
        "contaminated": 1,
    }
    assert sum(cleaned.counts().values()) + len(kept) == len(texts)
    ((row, pieces),) = cleaned.pieces.items()
    assert len(pieces) == 2 and all(SHARED not in texts[row][low:high] for low, high in pieces)
    assert cleaned.diagnostics["decontaminate"]["too_short"] == 1
    near = next(drop for drop in drops.values() if drop["cause"] == "near-duplicate")
    assert 0.7 <= near["value"] < 1


@pytest.mark.parametrize("characters", [1, 150, 1000])
def test_the_result_does_not_depend_on_the_batches(characters: int) -> None:
    texts, _ = pool()
    whole, parts = run(texts), run(texts, batch_characters=characters)
    for name in ("rule", "value", "match"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(parts, name))
    assert (whole.rules, whole.pieces, whole.diagnostics) == (parts.rules, parts.pieces, parts.diagnostics)


def test_the_order_of_the_rows_decides_who_stays() -> None:
    texts = [
        "a first text that is here",
        "another one, quite different",
        "a first text that is here!",
        "A FIRST TEXT THAT IS HERE",
    ]
    settings = Hygiene(exact=True, near=NearDuplicates(threshold=0.6))
    assert clean_pool(texts, settings).kept.tolist() == [0, 1]
    assert clean_pool(texts[::-1], settings).kept.tolist() == [0, 2]
    assert clean_pool(texts[::-1], settings).match.tolist() == [-1, 0, -1, 0]


def test_steps_that_are_off_do_nothing_and_references_count_only_where_named() -> None:
    texts, _ = pool()
    assert not Hygiene().on and EVERY_STEP.on and Hygiene(exact=True).on
    assert run(texts, Hygiene()).kept.tolist() == list(range(len(texts)))
    only_eval = run(texts, Hygiene(exact=True, near=NearDuplicates(), against=("eval",)))
    assert TARGET[0].lower() in [texts[row] for row in only_eval.kept]
    alone = run(texts, Hygiene(exact=True, near=NearDuplicates(), against=()))
    assert set(alone.match.tolist()) == {-1, 4 + 3}
    drops = list(run(texts, Hygiene(exact=True)).drops([str(i) for i in range(len(texts))]))
    assert [drop["match"] for drop in drops] == ["3", "3", "0"], "places where no ids are given"


def test_whole_records_go_where_pieces_are_not_wanted() -> None:
    texts, told = pool()
    cleaned = run(texts, Hygiene(decontaminate=Decontaminate(action="drop", common=None)))
    gone = [row for row, (cause, _, _) in enumerate(told) if cause in ("contaminated", "cut")]
    # The near-duplicate of an evaluation text shares no 13 words with it.
    assert np.flatnonzero(cleaned.rule).tolist() == gone and not cleaned.pieces
    ((_, rule),) = {cleaned.rules[number] for number in cleaned.rule[gone]}
    assert rule == "13 words in a row shared with eval"


def test_too_many_pieces() -> None:
    unit = f"Here is one sentence of its own. Well, {SHARED}. And one more sentence of its own. "
    settings = Decontaminate(margin=0, min_chars=10, max_pieces=4, common=None)
    found = run([unit * 3, unit * 4], Hygiene(decontaminate=settings))
    assert [len(found.pieces.get(row, [])) for row in (0, 1)] == [4, 0]
    assert found.rules[found.rule[1]] == ("contaminated", "more than 4 pieces left") and found.value[1] == 5


def test_progress_counts_up_to_the_pool() -> None:
    texts, _ = pool()
    seen: dict[str, list[int]] = {}
    run(texts, batch_characters=300, progress=lambda what, done: seen.setdefault(what, []).append(done))
    assert list(seen) == ["filters and signatures", "pairs and n-grams", "cutting"]
    for counts in seen.values():
        assert counts == sorted(counts) and counts[0] >= 0 and counts[-1] == len(texts)


def test_texts_that_cannot_be_read_again() -> None:
    class Shrinking:
        def __init__(self) -> None:
            self.length = 5

        def __iter__(self) -> Iterator[str]:
            self.length -= 1
            return iter(["a text of some words"] * self.length)

    with pytest.raises(SelectionError, match="not a generator"):
        clean_pool(iter(["a"]), Hygiene(exact=True))
    with pytest.raises(SelectionError, match="had 4 texts when it was read first and 3 the second time"):
        clean_pool(Shrinking(), Hygiene(near=NearDuplicates()))
    with pytest.raises(SelectionError, match="no evaluation text"):
        clean_pool(["a"], Hygiene(decontaminate=Decontaminate()), references=[ReferenceTexts("target", ["b"])])


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: NearDuplicates(threshold=0), "threshold must be above 0"),
        (lambda: NearDuplicates(threshold=1.1), "threshold must be above 0 and at most 1, got 1.1"),
        (lambda: NearDuplicates(recall=1.0), "recall must be above 0 and below 1"),
        (lambda: NearDuplicates(size=0), "size must be at least 1 and at most 100, got 0"),
        (lambda: NearDuplicates(permutations=0), "permutations must be"),
        (lambda: Decontaminate(shortest=14), "shortest must be ≤ ngram 13, got 14"),
        (lambda: Decontaminate(common=1), "common must be at least 2"),
        (lambda: Decontaminate(margin=-1), "margin must be at least 0"),
        (lambda: LengthFilter(max_chars=5, min_chars=6), "max_chars must be ≥ min_chars 6, got 5"),
        (lambda: LengthFilter(max_words=5, min_words=6), "max_words must be ≥ min_words 6, got 5"),
        (lambda: Hygiene(memory_gib=0.1), "memory_gib must be at least 0.25, got 0.1"),
        (lambda: Language(keep=()), "keep must name at least one"),
        (lambda: Language(keep=("english",)), "keep must hold codes out of en, de, .* got 'english'"),
        (lambda: Repetition(lines=2), "lines must be at least 0 and at most 1"),
        (lambda: Repetition(top_ngrams=(0.1, 0.2, 0.3, 0.4)), "top_ngrams must be at most 3 shares"),
    ],
)
def test_settings_out_of_range_are_one_sentence(build, words: str) -> None:
    with pytest.raises(SelectionError, match=words) as caught:
        build()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("limit", [1 << 19, 64])
def test_what_another_tool_listed_goes_first_and_with_its_reason(limit: int, monkeypatch) -> None:
    monkeypatch.setattr(GrowingArray.__init__, "__defaults__", (limit,))
    draw = random.Random(4)
    names = [f"r{row}\u00e9" for row in range(500)]
    texts = ["", *(f"text number {row} of its own kind" for row in range(1, 499)), "text number 7 of its own kind"]
    gone = sorted(draw.sample(range(500), 60))
    entries = [(names[row], names[row - 1] if row % 2 else "", f"why {row}" if row % 3 else "") for row in gone]
    entries += [("elsewhere", "", ""), ("r7", "", "")]
    draw.shuffle(entries)
    listed = DropList(memory=1 << 16)
    for low in range(0, len(entries), 7):
        listed.add(*zip(*entries[low : low + 7], strict=True))
    listed.find(names)
    assert [entries[number][0] for number in listed.unknown] == [
        name for name, _, _ in entries if name in ("elsewhere", "r7")
    ]
    cleaned = clean_pool(texts, Hygiene(drops=("answer.csv",), length=LengthFilter(), exact=True), listed=listed)
    drops = list(cleaned.drops(names))
    told = [
        {
            "id": names[row],
            "cause": "listed",
            "rule": f"why {row}" if row % 3 else "listed in drops",
            "value": None,
            "match": names[row - 1] if row % 2 else None,
            "match_in": "pool" if row % 2 else None,
        }
        for row in gone
    ]
    assert [drop for drop in drops if drop["cause"] == "listed"] == told
    others = {drop["id"]: drop["cause"] for drop in drops if drop["cause"] != "listed"}
    expected = {names[0]: "length"} if 0 not in gone else {}
    expected |= {names[499]: "exact-duplicate"} if not {7, 499} & set(gone) else {}
    assert others == expected, "a listed record is charged to its list, and nothing repeats it"
    assert cleaned.counts()["listed"] == 60 and len(cleaned.kept) == 500 - 60 - len(expected)


def test_a_list_that_was_not_read_or_is_of_another_pool_is_refused() -> None:
    with pytest.raises(SelectionError, match=r"clean_pool reads no files.* pass it as listed"):
        clean_pool(["a"], Hygiene(drops=("answer.csv",)))
    listed = DropList(memory=1 << 16)
    listed.add(["a"], [""], [""])
    listed.find(["a", "b"])
    with pytest.raises(SelectionError, match="among 2 ids, and the pool has 1 texts"):
        clean_pool(["a"], Hygiene(drops=("answer.csv",)), listed=listed)
