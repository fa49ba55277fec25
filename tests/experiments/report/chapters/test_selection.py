"""The report's page of a selection's checks says what manifest.json says, and nothing where there was no check."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import numpy as np
import pytest

from flatshift.experiments.report.page import build_report
from flatshift.selection.checks.check import check_selection
from tests.support.report_runs import selection

COVERAGE = {
    "looked_at": 40,
    "of": 40,
    "limit": 0.5,
    "unserved": 1,
    "worst": [
        {
            "id": "t-9",
            "g": 1.25,
            "unserved": True,
            "cost": 2.5,
            "text": "How do I <b>freeze</b> my card?",
            "nearest": "p-1",
            "nearest_text": "A graphics card",
        },
        {"id": "t-3", "g": 0.5, "unserved": False, "cost": 0.25, "text": "", "nearest": "p-2", "nearest_text": ""},
    ],
}


@pytest.fixture
def checks() -> dict:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((60, 3)), rng.standard_normal((40, 3)) + 1.0
    found = check_selection(x, y, rng.permutation(60), budget=6, refit=lambda *_: np.arange(6), splits=2)
    warned = found.warnings()
    assert warned, "a random permutation is no selection"
    return {**found.summary(), "of_targets": 40, "warnings": warned, "coverage": COVERAGE}


def page(folder: Path, checks: dict | None, hygiene: dict | None = None, **about: object) -> str:
    """The words of the page of a selection with these checks and further entries."""
    selection(folder)
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    manifest["selection"] |= about
    if checks is not None:
        manifest["selection"]["checks"] = checks
    if hygiene is not None:
        manifest["hygiene"] = hygiene
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    text = build_report([folder], out=folder / "report.html", plots=True).read_text(encoding="utf-8")
    assert "<b>freeze</b>" not in text, "texts of users are escaped"
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).split())


def test_every_figure_is_a_share_of_the_distance(tmp_path: Path, checks: dict) -> None:
    words = page(tmp_path / "run", checks)
    assert "Does the selection bring the pool nearer to the target?" in words
    assert "Measured on the whole pool and target." in words
    assert "≥ " in words and "≈" not in words and "(a bound)" in words
    for place, share in enumerate(checks["shares"]):
        own = checks["fitted"]["selection"][place]
        for value in (own["predicted"], own["realised"], own["realised"] - own["gap"], own["debiased"]):
            assert f"{100 * value / checks['distance']:+.1f} %".replace("-", "−") in words, (share, value)
        unseen = np.array(checks["held_out"]["random"])[:, place] / np.array(checks["held_distance"])
        assert f"{100 * unseen.mean():+.1f} % (".replace("-", "−") in words
    for sentence in checks["warnings"]:
        assert sentence[1:] in words
    assert (tmp_path / "run" / "plots" / "selection-checks.svg").is_file()


def test_targets_that_cannot_be_served_are_named(tmp_path: Path, checks: dict) -> None:
    words = page(tmp_path / "run", checks)
    assert "1 of 40 targets have no record of the pool as near" in words
    assert "How do I <b>freeze</b> my card? t-9 +1.25 2.50 no A graphics card" in words
    assert "(no text) t-3 +0.500 0.250 yes p-2" in words
    checks["coverage"] = {**COVERAGE, "limit": None, "unserved": 0}
    assert "Fewer than ten targets differ" in page(tmp_path / "few", checks)


def test_samples_and_small_targets_are_said(tmp_path: Path, checks: dict) -> None:
    words = page(tmp_path / "run", {**checks, "of": 1_000_000, "budget_rows": 3, "held_out": None, "held_distance": []})
    assert "Measured on 60 of 1,000,000 records" in words and "3 stand for the selection" in words
    assert "≈ " in words and "≥" not in words and "an estimate from the sample" in words
    assert "too few rows to hold half of them out" in words and "Unseen:" not in words


@pytest.mark.parametrize(
    ("about", "said", "not_said"),
    [
        ({"method": "domains", "short": ["news"]}, "domains with fewer records than their share", "below the minimum"),
        ({"method": "round-robin", "taken": 7}, "records taken in turn 7", "looked for"),
        ({"method": "cynical", "taken": 7, "short": 2}, "records below the minimum 2", "in turn"),
    ],
)
def test_a_diagnostic_is_named_as_its_method_means_it(tmp_path: Path, about: dict, said: str, not_said: str) -> None:
    words = page(tmp_path / "run", None, **about)
    assert said in words and not_said not in words


def test_counts_are_of_what_they_say(tmp_path: Path) -> None:
    hygiene = {"records": 10, "kept": 7, "dropped": {"exact-duplicate": 3}, "cut": 0, "pieces": 0}
    side = {"words": [1.0, 2.0, 3.0], "repeats": 0.0}
    profile = {name: side | {"texts": n} for name, n in (("selection", 1), ("target", 13), ("pool", 2000))}
    words = page(tmp_path / "run", None, hygiene, profile=profile | {"warnings": []})
    assert "10 records were read, 7 remained after these steps." in words and "took part" not in words
    assert "Texts compared: 1 of the selection, 13 of the target, 2,000 of the pool." in words


def test_no_check_no_section(tmp_path: Path) -> None:
    words = page(tmp_path / "run", None)
    assert "bring the pool nearer" not in words and "cannot serve" not in words


def test_warnings_of_a_profile_keep_their_names(tmp_path: Path) -> None:
    page(tmp_path / "run", None)
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text(encoding="utf-8"))
    sides = {side: {"words": [1, 2, 3], "repeats": 0.0, "texts": 9} for side in ("selection", "target", "pool")}
    manifest["selection"]["profile"] = {**sides, "warnings": ["most target texts are in Cyrillic script"]}
    (tmp_path / "run" / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    text = build_report([tmp_path / "run"], out=tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Most target texts are in Cyrillic script" in text
