"""What a selection says of itself: what spoke for the first choices, and warnings of flukes, repeats and sources."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from flatshift.cli import run
from flatshift.experiments.select import selection_checks


def select(folder: Path, pool: list[dict], target: list[str], *more: str, budget: int = 10) -> dict:
    for name, rows in (("pool", pool), ("target", [{"text": text} for text in target])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    words = [
        "select",
        "--pool",
        str(folder / "pool.jsonl"),
        "--data.holdout",
        "0",
        "--target",
        str(folder / "target.jsonl"),
    ]
    out = folder / "out"
    assert run([*words, "--budget", str(budget), "--out", str(out), *more]) == 0
    return json.loads((out / "manifest.json").read_text())["selection"]["profile"]


def sentences(words: list[str], count: int, length: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(words, length)) for _ in range(count)]


CATS, CARS = ["cat", "kitten", "paw", "purring", "whiskers"], ["car", "engine", "wheel", "brake", "diesel"]


@pytest.mark.parametrize("method", ["cynical", "moore-lewis", "classifier", "dsir"])
def test_words_that_spoke_are_the_targets_words(tmp_path: Path, method: str, capsys) -> None:
    pool = [{"text": text} for text in sentences(CARS, 40, 12) + sentences(CATS, 20, 12, 1)]
    found = select(tmp_path, pool, sentences(CATS, 20, 12, 2), "--method", method)
    assert found["warnings"] == [] and "warning" not in capsys.readouterr().err
    assert len(found["first"]) == 10
    told = " ".join(word for one in found["first"] for word in one["words"])
    assert any(word in told for word in CATS) and not any(word in told for word in CARS)
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "spoke for it" in page and "What was chosen" in page and "negative score" not in page
    assert ("the tokens that added most to its score" in page) == (method != "dsir")


def test_flukes_repeats_one_source_and_the_target_itself_are_warned_of(tmp_path: Path, capsys) -> None:
    target = sentences(CATS, 8, 12, 2)
    pool = [{"text": text, "domain": "roads"} for text in sentences(CARS, 80, 12)]
    pool += [{"text": f"cat {i}", "domain": "tags"} for i in range(9)] + [{"text": target[0], "domain": "tags"}]
    found = select(tmp_path, pool, target, "--method", "dsir", "--select.method.resample", "false")
    told = capsys.readouterr().err
    for part in (
        "the target has 8 texts, which is little to choose by",
        "the chosen records are short: half have at most 2 words",
        "repeat another but for numbers and marks",
        "1 chosen records are texts of the target itself",
        "of one source, 'tags', ",
    ):
        assert part in told or part in str(found), part


def test_texts_of_the_target_are_those_that_the_advice_drops(tmp_path: Path, capsys, monkeypatch) -> None:
    """Texts that differ in a number or a mark are others, as they are for `select.hygiene.exact`; all are counted."""
    monkeypatch.setattr(selection_checks, "_MAX_PROFILED", 3)
    target = [f"please send {i} dollars to my account" for i in range(100, 120)]
    pool = [{"text": f"Please send {i} dollars to my account!"} for i in range(30)]
    found = select(tmp_path, pool, target, "--method", "random")
    assert found["selection"]["also_in_target"] == 0 and "of the target itself" not in capsys.readouterr().err
    (tmp_path / "same").mkdir()
    same = [{"text": text.upper()} for text in target]
    assert select(tmp_path / "same", same, target, "--method", "random")["selection"]["also_in_target"] == 10
    assert "10 chosen records are texts of the target itself; set select.hygiene.exact" in capsys.readouterr().err


def test_another_script_than_the_targets_is_warned_of(tmp_path: Path, capsys) -> None:
    pool = [{"text": text} for text in sentences(CARS, 40, 12)]
    (tmp_path / "numbers").mkdir()
    select(tmp_path / "numbers", pool, [f"{i} + 7" for i in range(12)], "--method", "random")
    assert "none script" not in capsys.readouterr().err, "numbers are in no script"
    select(tmp_path, pool, sentences(["кот", "лапа", "усы"], 12, 12), "--method", "random")
    assert "most target texts are in cyrillic script, and 0% of the chosen records are" in capsys.readouterr().err
    assert "spoke for" not in (tmp_path / "out" / "report.html").read_text(encoding="utf-8"), "a draw has no reasons"


def test_a_choice_by_form_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Target: abstracts with spaced marks. Pool: cars in that form, cats in another; the choice goes by the form."""
    spaced = [text.replace(" ", " , ") for text in sentences(CARS, 60, 12)]
    plain = [text.upper().replace(" ", "--") for text in sentences(CATS, 60, 12, 1)]
    target = [text.replace(" ", " , ") for text in sentences(["protein", "enzyme", "paw", "inhibitor"], 30, 12, 2)]
    found = select(tmp_path, [{"text": text} for text in spaced + plain], target, "--method", "cynical")
    assert found["selection"]["form"] > found["pool"]["form"]
    assert found["selection"]["words_alike"] <= found["pool"]["words_alike"]
    assert "like the target in form (case, marks and spacing" in capsys.readouterr().err
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "form like the target" in page and "words like the target" in page


def test_auto_shows_its_table_and_takes_a_winner(tmp_path: Path, capsys) -> None:
    pool = [{"text": text} for text in sentences(CARS, 90, 12) + sentences(CATS, 40, 12, 1)]
    tried = ("--select.method.tried", '["moore-lewis", "gotd"]', "--select.embedder.dim", "4")
    select(tmp_path, pool, sentences(CATS, 24, 12, 2), "--method", "auto", *tried, budget=20)
    told = capsys.readouterr().err
    assert "±: two standard errors, paired by text; *: taken" in told
    assert "auto: nats per token of 6 held-out target texts" in told and "moore-lewis  " in told and "gotd  " in told
    solver = json.loads((tmp_path / "out" / "manifest.json").read_text())["selection"]
    table = {line["method"]: line for line in solver["table"]}
    assert solver["chosen"] == min(table, key=lambda name: table[name]["nats"]) in ("moore-lewis", "gotd")
    assert table["random"]["difference"] == 0.0 and all(table[n]["difference"] < 0 for n in ("moore-lewis", "gotd"))
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert ("Auto (Cross-entropy difference)" if solver["chosen"] == "moore-lewis" else "Auto (GOT-D)") in page
    assert "Methods that were tried" in page and f"{solver['chosen']} (taken)" in page and "&#34;nats&#34;" not in page
    rows = [json.loads(line)["text"] for line in (tmp_path / "out" / "selected.jsonl").read_text().splitlines()]
    assert all(set(text.split()) <= set(CATS) for text in rows)


def test_auto_says_when_nothing_beats_a_random_draw(tmp_path: Path, capsys) -> None:
    pool = [{"text": text} for text in sentences(CARS, 130, 12)]
    tried = ("--select.method.tried", '["dsir"]', "--select.embedder.dim", "4")
    select(tmp_path, pool, sentences(CATS, 24, 12, 2), "--method", "auto", *tried, budget=20)
    assert "no method that was tried beats a random draw on held-out target texts" in capsys.readouterr().err


def test_auto_leaves_out_what_cannot_serve(tmp_path: Path, capsys) -> None:
    pool = [{"text": text} for text in sentences(CARS, 30, 12) + sentences(CATS, 30, 12, 1)]
    tried = ("--select.method.tried", '["knn", "dsir"]', "--select.method.pairs", "5", "--select.embedder.dim", "4")
    select(tmp_path, pool, sentences(CATS, 24, 12, 2), "--method", "auto", *tried)
    assert "knn          60 x 24 pairs are more than 5" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["gotd", "knn"])
def test_the_embedder_of_tokens_serves_methods_that_work_on_features(tmp_path: Path, method: str) -> None:
    pool = [{"text": text} for text in sentences(CARS, 60, 12) + sentences(CATS, 30, 12, 1)]
    select(tmp_path, pool, sentences(CATS, 20, 12, 2), "--method", method, "--embedder", "tokens")
    rows = [json.loads(line)["text"] for line in (tmp_path / "out" / "selected.jsonl").read_text().splitlines()]
    assert all(set(text.split()) <= set(CATS) for text in rows)
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["selection"]["embedder"] == "tokens"


@pytest.mark.parametrize(
    "more",
    [
        ("--method", "less", "--embedder", "gradients", "--select.embedder.dim", "128"),
        pytest.param(
            ("--method", "round-robin", "--embedder", "gradients", "--select.embedder.dim", "128"),
            marks=pytest.mark.slow,
        ),
        ("--method", "loss-gap", "--select.method.steps", "8", "--select.method.max_length", "48"),
        pytest.param(
            ("--method", "loss-gap", "--select.method.normalised", "true", "--select.method.max_length", "48"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda more: f"{more[1]} {more[2].rpartition('.')[2]}",
)
def test_methods_that_ask_the_backbone_itself(tmp_path: Path, more: tuple[str, ...]) -> None:
    pool = [{"text": text} for text in sentences(CARS, 24, 12) + sentences(CATS, 12, 12, 1)]
    select(tmp_path, pool, sentences(CATS, 12, 12, 2), *more, budget=8)
    rows = [json.loads(line)["text"] for line in (tmp_path / "out" / "selected.jsonl").read_text().splitlines()]
    assert sum(set(text.split()) <= set(CATS) for text in rows) >= 7
