"""Parts of a study of selectors, each by itself: its settings, its draws and its rows."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from benchmarks.studies.selection_quality.choosing import matched_draw
from benchmarks.studies.selection_quality.pool import StoredPool
from benchmarks.studies.selection_quality.settings import Quality, QualityArm, QualityTarget
from benchmarks.studies.selection_quality.texts import packed_rows
from flatshift.finetune.errors import UserError

# --------------------------------------------------------------------------------------------- settings


def study(**changes: object) -> Quality:
    settings = {
        "pool": "pool.jsonl",
        "targets": {"a": QualityTarget(file="a.jsonl")},
        "arms": {"random": QualityArm(), "gotd": QualityArm(), "none": QualityArm(source="none")},
        **changes,
    }
    return Quality(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"baseline": "none"}, "baseline is 'none', which is no arm with a selector"),
        ({"focus": "dsir"}, "focus is 'dsir'"),
        ({"budgets": (5000, 1000)}, "budgets must be rising"),
        ({"primary_budget": 7}, "primary_budget 7 is none of the budgets of target a"),
        ({"lr": (1e-3,)}, "lr must be rising numbers above 0, at least 2"),
        ({"tuning_seed": 3}, "also the seed of a final run"),
        ({"arms": {"random": QualityArm(), "gotd": QualityArm(), "m": QualityArm(source="matched", like="x")}}, "m is"),
        ({"arms": {"random": QualityArm(), "gotd": QualityArm(like="random")}}, "gotd is like 'random'"),
    ],
)
def test_a_study_that_cannot_be_is_refused(changes: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        study(**changes)


def test_more_labels_than_texts_are_refused() -> None:
    with pytest.raises(ValueError, match="labels: 300 labelled rows are more than the 200 texts"):
        QualityTarget(file="a.jsonl", texts=200)


# --------------------------------------------------------------------------------------------- draws and rows


def test_a_matched_draw_has_the_domains_and_lengths_of_what_it_follows_at_every_budget() -> None:
    rng = np.random.default_rng(0)
    n = 3000
    domains = np.array(["abc"[i] for i in rng.integers(0, 3, n)], dtype=object)
    words = rng.integers(1, 200, n)
    pool = StoredPool([f"p{i}" for i in range(n)], [""] * n, domains, words)
    followed = np.flatnonzero((domains == "b") & (words > 60))[:200]
    order = matched_draw(pool, followed, (50, 200), seed=1)
    edges = np.quantile(words, np.arange(1, 10) / 10)
    tenth = np.searchsorted(edges, words, side="right")
    for budget in (50, 200):
        drawn, wanted = order[:budget], followed[:budget]
        assert len(set(drawn.tolist())) == budget
        assert Counter(zip(domains[drawn], tenth[drawn], strict=True)) == Counter(
            zip(domains[wanted], tenth[wanted], strict=True)
        )
    assert np.isin(order, followed).mean() < 0.6  # a draw, not the selection itself
    assert not np.array_equal(order, matched_draw(pool, followed, (50, 200), seed=2))


def test_rows_of_a_warm_up_are_the_passages_end_to_end_and_equally_many_for_all(tmp_path: Path) -> None:
    from tests.support.data_models import byte_tokenizer

    tokenizer = byte_tokenizer()
    texts = [f"text number {i} " + "ab " * i for i in range(6)]
    found = packed_rows(texts, tokenizer, rows=7, length=16, seed=3)
    flat = [token for example in found.examples for token in example.input_ids]
    assert [len(example.input_ids) for example in found.examples] == [16] * 7
    documents = [[tokenizer.bos_token_id, *tokenizer(t)["input_ids"], tokenizer.eos_token_id] for t in texts]
    total = sum(map(len, documents))
    starts = [i for i, token in enumerate(flat) if token == tokenizer.bos_token_id]
    read = [flat[a:b] for a, b in itertools.pairwise(starts)]
    assert all(document in documents for document in read)
    if total <= 7 * 16:
        assert found.passages == 6 and found.tokens == total and found.epochs == pytest.approx(7 * 16 / total)
    again = packed_rows(texts, tokenizer, rows=7, length=16, seed=3)
    other = packed_rows(texts, tokenizer, rows=7, length=16, seed=4)
    assert again.examples == found.examples and other.examples != found.examples
    many = packed_rows(texts, tokenizer, rows=60, length=16, seed=3)
    assert many.passages == 6 and many.tokens == total and many.epochs == pytest.approx(60 * 16 / total)
    few = packed_rows(texts, tokenizer, rows=1, length=16, seed=3)
    assert few.passages < 6 and few.tokens == 16 and few.epochs == 1.0
    twice = packed_rows([*texts, texts[2]], tokenizer, rows=60, length=16, seed=3)
    assert twice.passages == 6 and twice.tokens == total, "a text that is there twice is one, read again"
    empty = byte_tokenizer(bos=False)
    empty.eos_token = None
    with pytest.raises(UserError, match="hold no token"):
        packed_rows(["", ""], empty, rows=1, length=8, seed=0)
