"""Settings of `flatshift select` that cannot be, alone or together: told by their flags before anything is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from flatshift.cli import run

WORDS = ["select", "--target", "target.jsonl", "--out", "out"]


@pytest.fixture
def started(monkeypatch, tmp_path: Path) -> list[int]:
    """One entry for each selection that was begun; none of them reads anything."""
    begun: list[int] = []
    monkeypatch.chdir(tmp_path)
    for name in ("pool.jsonl", "target.jsonl"):
        (tmp_path / name).touch()
    monkeypatch.setattr("flatshift.experiments.select.select.select", lambda *_, **__: begun.append(1))
    monkeypatch.setattr("flatshift.outcome.print_selection_outcome", lambda *_: None)
    return begun


METHOD = "--select.method"


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--method", "gotd", "--epsilon", "0"), "--epsilon: select.method.epsilon must be above 0, got 0"),
        (
            ("--method", "gotd", "--epsilon", "inf"),
            "--epsilon must be a finite number, got inf",
        ),
        (("--method", "gotd", "--memory", "-1"), "--memory: select.method.memory_gib must be at least 0.001, got -1"),
        (
            ("--method", "gotd", "--memory", "1e-9"),
            "--memory: select.method.memory_gib must be at least 0.001, got 1e-09",
        ),
        (
            ("--method", "gotd", f"{METHOD}.tolerance", "0"),
            f"{METHOD}.tolerance: select.method.tolerance must be between 0 and 2",
        ),
        (
            ("--method", "gotd", f"{METHOD}.rounds", "0"),
            f"{METHOD}.rounds: select.method.rounds must be at least 1, got 0",
        ),
        (("--method", "gotd", f"{METHOD}.mixture", "0"), "select.method.mixture must be above 0 and at most 1, got 0"),
        (
            ("--method", "gotd", f"{METHOD}.holdout", "1"),
            "select.method.holdout must be at least 0 and at most 0.9, got 1",
        ),
        (("--method", "gotd", f"{METHOD}.self_sample", "0"), "select.method.self_sample must be at least 1"),
        (
            ("--method", "gotd", f"{METHOD}.self_sample", "7"),
            "self_sample has no effect without debiased: true; leave it out, or set debiased: true",
        ),
        (("--method", "gotd", f"{METHOD}.mixture", "0.1"), "mixture has no effect without rounds above 1; leave it"),
        (("--method", "gotd", f"{METHOD}.holdout", "0"), "holdout has no effect without rounds above 1; leave it out"),
        (("--method", "gotd-contrast", "--epsilon", "-1"), "--epsilon: select.method.epsilon must be above 0"),
        (
            ("--method", "gotd-contrast", f"{METHOD}.attract", "0", f"{METHOD}.repel", "0"),
            "repel and attract are both 0",
        ),
        (("--method", "tsds", f"{METHOD}.neighbours", "0"), "select.method.neighbours must be at least 1"),
        (
            ("--method", "dsir", f"{METHOD}.smoothing", "0"),
            f"{METHOD}.smoothing: select.method.smoothing and floor are",
        ),
        (("--method", "less", f"{METHOD}.checkpoint_weights", "[1, -1]"), "checkpoint_weights must all be above 0"),
        (("--method", "perplexity", f"{METHOD}.max_length", "0"), "select.method.max_length must be at least 8, got 0"),
        (("--method", "domains", f"{METHOD}.shares.a", "-1"), "select.method.shares must be at least 0"),
        (
            ("--method", "domains", f"{METHOD}.inside.kind", "gotd", f"{METHOD}.inside.rounds", "3"),
            f"{METHOD}.inside.rounds: select.method.inside cannot be gotd in 3 rounds; set its rounds to 1",
        ),
        (("--select.eval.limit", "3"), "eval.limit has no effect without eval.files; name files, or leave it out"),
        (("--select.hygiene.against", "[eval]"), "against has no effect without exact or near; turn one on, or leave"),
        (("--select.embedder.dim", "0"), "--select.embedder.dim: select.embedder.dim must be at least 1, got 0"),
        (("--select.embedder.buckets", "1"), "select.embedder.buckets must be at least 2"),
        (("--select.embedder.fit_rows", "1"), "select.embedder.fit_rows must be at least 2"),
        (
            ("--embedder", "backbone", "--select.embedder.max_length", "-3"),
            "select.embedder.max_length must be at least 1",
        ),
        (("--embedder", "some/encoder", "--select.embedder.max_length", "0"), "embedder.max_length must be at least 1"),
        (
            ("--embedder", "static:v", "--select.embedder.max_length", "0"),
            "select.embedder.max_length must be at least 1",
        ),
    ],
)
def test_settings_out_of_range_are_refused_before_anything_is_read(capsys, started: list, more, told: str) -> None:
    assert run([*WORDS, "--pool", "pool.jsonl", "--budget", "4", *more]) == 2 and not started
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("short", "dotted", "same"),
    [
        (("--budget", "5"), ("--select.budget", "9"), "5"),
        (("--method", "knn"), ("--select.method.kind", "tsds"), "knn"),
        (("--method", "knn"), ("--select.method", "tsds"), "knn"),
        (("--text-column", "text"), ("--select.columns.text", "id"), "text"),
        (("--domain-column", "id"), ("--select.domain_column", "text"), "id"),
        (("--pool", "pool.jsonl"), ("--select.pool.files", "[pool.jsonl, more.jsonl]"), "[pool.jsonl]"),
        (("--seed", "1"), ("--train.seed", "2"), "1.0"),
        (("--train.max_length", "64"), ("--train.max-length", "32"), "64.0"),
    ],
    ids=lambda value: value[0],
)
def test_flags_that_contradict_each_other(capsys, started: list, short, dotted, same: str) -> None:
    base = {"--pool": "pool.jsonl", "--budget": "4"}
    words = [*WORDS, *(word for flag, value in base.items() if flag != short[0] for word in (flag, value))]
    assert run([*words, *short, *dotted]) == 2
    told = capsys.readouterr().err
    assert "contradict each other; keep one" in told
    for flag, value in (short, dotted):
        assert f"{flag} {value.strip('[]').replace(',', '')}" in told
    assert not started and run([*words, *short, dotted[0], same]) == 0 and started


def test_a_budget_of_zero_is_given(capsys, started: list) -> None:
    assert run([*WORDS, "--pool", "pool.jsonl", "--budget", "0"]) == 2 and not started
    assert "--budget: select.budget must be" in capsys.readouterr().err
