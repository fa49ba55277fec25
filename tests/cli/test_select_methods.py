"""`flatshift select --method …` for every method: the contract's columns, and what each refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from flatshift.cli import run
from flatshift.experiments.data.splits import read_splits
from flatshift.experiments.recipe import resume_recipe
from tests.support.data_models import write_jsonl

CATS = ["cat", "kitten", "purr", "whisker", "paw", "feline", "tabby", "mouse"]
CARS = ["car", "engine", "wheel", "brake", "clutch", "diesel", "gear", "road"]
ROWS = 36


def text(rng: np.random.Generator, words: list[str]) -> str:
    return " ".join(rng.choice(words, rng.integers(5, 12)))


@pytest.fixture
def base(tmp_path: Path) -> list[str]:
    """A pool of cats and cars (domains a and b), a target about cats, and features to match."""
    rng = np.random.default_rng(0)
    pool = [{"text": text(rng, CARS if i % 2 else CATS), "domain": "ab"[i % 2]} for i in range(ROWS)]
    target = [{"text": text(rng, CATS), "domain": "a" if i < 6 else "b"} for i in range(8)]
    np.save(tmp_path / "x.npy", rng.standard_normal((ROWS, 6)) + 3 * np.eye(6)[[i % 2 for i in range(ROWS)]])
    np.save(tmp_path / "y.npy", rng.standard_normal((8, 6)) + 3 * np.eye(6)[[0] * 8])
    np.save(tmp_path / "z.npy", rng.standard_normal((5, 6)) + 3 * np.eye(6)[[1] * 5])
    return [
        *("select", "--pool", str(write_jsonl(tmp_path / "pool.jsonl", pool))),
        *("--data.holdout", "0", "--target", str(write_jsonl(tmp_path / "target.jsonl", target)), "--budget", "12"),
        *("--out", str(tmp_path / "out")),
        *("--select.embedder.dim", "8"),
    ]


def own(tmp_path: Path, *names: str) -> list[str]:
    flags = {"x": "--pool-features", "y": "--target-features", "z": "--negative-features"}
    return [word for name in names for word in (flags[name], str(tmp_path / f"{name}.npy"))]


def result(tmp_path: Path) -> tuple[dict, dict]:
    out = tmp_path / "out"
    return pq.read_table(out / "scores.parquet").to_pydict(), json.loads((out / "manifest.json").read_text())


def check(columns: dict, budget: int = 12) -> None:
    """budget: of distinct records."""
    assert sorted(columns["rank"]) == list(range(1, ROWS + 1))
    assert columns["selected"] == [rank <= budget for rank in columns["rank"]]
    scores = np.array(columns["score"])[np.argsort(columns["rank"])]
    assert np.isfinite(scores).all() and (np.diff(scores) >= 0).all()


@pytest.mark.parametrize(
    "more",
    [
        ["--method", "gotd", "--select.method.rounds", "3"],
        ["--method", "gotd", "--select.method.debiased", "true"],
        ["--method", "tsds", "--select.method.sigma", "0.3", "--select.method.neighbours", "6"],
        ["--method", "length", "--select.method.prefer", "short"],
        ["--method", "dsir", "--select.method.hashing", "sha256"],
        ["--method", "cynical", "--select.method.mixture", "0.5", "--select.method.repeats", "8"],
        ["--method", "cynical"],
        ["--method", "moore-lewis", "--select.method.share", "0.6"],
        ["--method", "classifier", "--select.method.buckets", "4096"],
    ],
    ids=lambda more: "-".join(more[1:4:2]),
)
def test_every_method_writes_the_contract(base: list[str], tmp_path: Path, more: list[str]) -> None:
    given = base if more[1] in ("gotd", "tsds") else base[:-2]  # the others make no vectors
    assert run([*given, *more]) == 0
    columns, manifest = result(tmp_path)
    about = manifest["selection"]
    check(columns, about.get("distinct", 12))
    assert about["method"] == more[1] and ("helpful" in about) == (more[1] == "gotd"), "other scores have no zero"
    if more[1] in ("gotd", "tsds", "dsir", "cynical", "moore-lewis", "classifier"):
        chosen = [domain for domain, taken in zip(columns["domain"], columns["selected"], strict=True) if taken]
        assert chosen.count("a") >= len(chosen) - 1, "the target is about what domain a is about"


def test_a_record_that_is_read_again_has_a_line_each_time(base: list[str], tmp_path: Path, capsys) -> None:
    assert run([*base[:-2], "--method", "cynical", "--select.method.repeats", "5"]) == 0
    columns, manifest = result(tmp_path)
    about = manifest["selection"]
    said = capsys.readouterr().err
    assert f"counts readings: {about['distinct']} records, {about['again']} of them to be read more than once" in said
    lines = [json.loads(line) for line in (tmp_path / "out" / "selected.jsonl").read_text().splitlines()]
    assert len(lines) == len({line["id"] for line in lines}) == 12
    record = [line.get("repeat_of", line["id"]) for line in lines]
    assert len(set(record)) == about["distinct"] < 12 and 1 < max(map(record.count, record)) == about["most_times"] <= 5
    rank = dict(zip(columns["id"], columns["rank"], strict=True))
    texts = {name: line["text"] for name, line in zip(record, lines, strict=True)}
    for name, line in zip(record, lines, strict=True):
        assert line["rank"] == rank[name] and line["text"] == texts[name]
    assert {name for name, taken in zip(columns["id"], columns["selected"], strict=True) if taken} == set(record)
    assert all(record.count(name) == times for name, times in zip(columns["id"], columns["times"], strict=True))
    assert run(["report", str(tmp_path / "out"), "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "The budget of 12 counts readings: " in page and f"{about['most_times']} times" in page
    trained = ["train", "language-model", "--data", str(tmp_path / "out" / "selected.jsonl"), "--train.steps", "1"]
    assert run([*trained, "--out", str(tmp_path / "run")]) == 0, "the lines have names of their own"
    splits = read_splits(resume_recipe(tmp_path / "run").recipe)
    sides = [{row.values["text"] for row in rows} for rows in (splits.train, splits.dev, splits.test)]
    assert all(sides) and not (sides[0] & sides[1] or sides[0] & sides[2] or sides[1] & sides[2])


def test_repeats_keep_the_users_own_columns(base: list[str], tmp_path: Path) -> None:
    pool = Path(base[2])
    rows = [json.loads(line) for line in pool.read_text(encoding="utf-8").splitlines()]
    write_jsonl(pool, [{"uid": f"u{i}", "repeat_of": "mine", "rank": -1, **row} for i, row in enumerate(rows)])
    again = ["--method", "cynical", "--select.method.repeats", "8"]
    assert run([*base[:-2], *again, "--select.columns.id", "uid"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "out" / "selected.jsonl").read_text().splitlines()]
    assert all(line["source"]["repeat_of"] == "mine" and line["source"]["rank"] == -1 for line in lines)
    assert len({line["uid"] for line in lines}) == 12 and "repeat_of" not in lines[0]
    assert {line["id"] == line["uid"] for line in lines} == {True} and any("repeat_of" in line for line in lines)
    assert run(["report", str(tmp_path / "out"), "--out", str(tmp_path / "page.html")]) == 0
    assert "First choices" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_selection_that_lives_on_repeats_is_warned_of(base: list[str], tmp_path: Path, capsys) -> None:
    words = [*base[:7], "--budget", "36", "--out", str(tmp_path / "out"), "--method", "cynical"]
    assert run([*words, "--select.method.repeats", "50"]) == 0
    assert "records make up 36 readings, as the pool has few that are like the target" in capsys.readouterr().err


def test_a_name_that_another_record_has_is_not_given_to_a_repeat(base: list[str], tmp_path: Path) -> None:
    def lines(out: str) -> list[dict]:
        words = [*base[:9], "--method", "cynical", "--select.method.repeats", "3", "--out", str(tmp_path / out)]
        assert run(words) == 0
        return [json.loads(line) for line in (tmp_path / out / "selected.jsonl").read_text().splitlines()]

    (again, *_) = (line for line in lines("out") if "repeat_of" in line)
    rows = [json.loads(line) for line in Path(base[2]).read_text(encoding="utf-8").splitlines()]
    write_jsonl(
        Path(base[2]), [{"id": "a" if r["text"] == again["text"] else f"a ({i})", **r} for i, r in enumerate(rows)]
    )
    found = lines("named")
    assert len({line["id"] for line in found}) == 12
    assert {line["id"] for line in found if line.get("repeat_of") == "a"}


def test_rounds_that_end_in_one_step_say_so(base: list[str], tmp_path: Path, capsys, monkeypatch) -> None:
    from flatshift.selection.methods.rounds import RoundsResult

    told = RoundsResult.diagnostics
    monkeypatch.setattr(RoundsResult, "diagnostics", lambda self: told(self) | {"rounds": [12]})
    words = [*base, "--method", "gotd", "--select.method.rounds", "4", "--select.checks", "false"]
    assert run(words) == 0
    assert "of 4 rounds the first alone counts: by the target that was held out" in capsys.readouterr().err
    assert run([*words, "--select.method.holdout", "0", "--out", str(tmp_path / "unchecked")]) == 0
    assert "held out" not in capsys.readouterr().err


def test_contrast_moves_away_from_the_negatives(base: list[str], tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    negative = str(write_jsonl(tmp_path / "negative.jsonl", [{"text": text(rng, CATS)} for _ in range(5)]))
    # Target and negatives speak of the same here, and repulsion is the stronger: cars are what remains.
    weights = ["--select.method.attract", "0.5", "--select.method.repel", "2"]
    assert run([*base, "--method", "gotd-contrast", "--negative", negative, *weights]) == 0
    columns, manifest = result(tmp_path)
    check(columns)
    assert {d for d, taken in zip(columns["domain"], columns["selected"], strict=True) if taken} == {"b"}
    assert [entry["rows"] for entry in manifest["inputs"]] == [ROWS, 8, 5]


def test_contrast_on_own_features(base: list[str], tmp_path: Path) -> None:
    negative = str(write_jsonl(tmp_path / "negative.jsonl", [{"text": "x"}] * 5))
    words = base[:-2] + own(tmp_path, "x", "y", "z")
    assert run([*words, "--method", "gotd-contrast", "--negative", negative]) == 0
    columns, _ = result(tmp_path)
    assert {d for d, taken in zip(columns["domain"], columns["selected"], strict=True) if taken} == {"a"}


def test_domains_take_the_targets_mix(base: list[str], tmp_path: Path) -> None:
    assert run([*base, "--method", "domains", "--select.method.inside.kind", "knn"]) == 0
    columns, manifest = result(tmp_path)
    check(columns)
    chosen = [d for d, taken in zip(columns["domain"], columns["selected"], strict=True) if taken]
    assert (chosen.count("a"), chosen.count("b")) == (9, 3)
    assert manifest["selection"]["quotas"] == {"a": 9, "b": 3}


def test_domains_by_given_shares(base: list[str], tmp_path: Path) -> None:
    assert run([*base, "--method", "domains", "--select.method.shares.a", "1", "--select.method.shares.b", "3"]) == 0
    chosen = [d for d, taken in zip(*(result(tmp_path)[0][k] for k in ("domain", "selected")), strict=True) if taken]
    assert (chosen.count("a"), chosen.count("b")) == (3, 9)


def test_less_on_gradients(base: list[str], tmp_path: Path) -> None:
    words = base[:-2] + own(tmp_path, "x", "y")
    assert run([*words, "--method", "less", "--select.method.checkpoint_weights", "[2, 1]"]) == 0
    columns, manifest = result(tmp_path)
    check(columns)
    assert manifest["selection"]["subsets"] == 2 and manifest["selection"]["checkpoints"] == 2
    assert [d for d, taken in zip(columns["domain"], columns["selected"], strict=True) if taken].count("a") >= 10


def test_the_subsets_of_less_are_a_column_of_the_target(base: list[str], tmp_path: Path, capsys) -> None:
    target = [{"text": f"cat {i}", "task": "ab"[i % 2]} for i in range(8)]
    write_jsonl(tmp_path / "target.jsonl", target)
    words = [*base[:-2], *own(tmp_path, "x", "y"), "--method", "less", "--domain-column"]
    assert run([*words, "taks"]) == 2 and "target.jsonl: no column 'taks'" in capsys.readouterr().err
    assert run([*words, "task"]) == 0
    assert result(tmp_path)[1]["selection"]["subsets"] == 2


def option(base: list[str], tmp_path: Path, method: str, key: str, value: object) -> tuple[dict, dict]:
    """Result of a method with one setting, unchecked."""
    out = tmp_path / f"{method}-{key}-{value}"
    words = [*base, f"--select.method.{key}", str(value), "--select.checks", "false", "--out", str(out)]
    assert run([*words, "--method", method]) == 0
    return pq.read_table(out / "scores.parquet").to_pydict(), json.loads((out / "manifest.json").read_text())


def test_short_texts_come_last(base: list[str], tmp_path: Path) -> None:
    behind = set()
    for method in ("cynical", "moore-lewis", "classifier"):
        assert option(base[:-2], tmp_path, method, "minimum", 1)[1]["selection"]["short"] == 0
        columns, manifest = option(base[:-2], tmp_path, method, "minimum", 14)
        short = manifest["selection"]["short"]
        assert 0 < short < ROWS
        last = zip(columns["id"], columns["rank"], strict=True)
        behind.add(frozenset(name for name, rank in last if rank > ROWS - short))
    assert len(behind) == 1, "the same for all"


@pytest.mark.parametrize("method", ["cynical", "moore-lewis"])
def test_a_larger_prior_favours_long_texts(base: list[str], tmp_path: Path, method: str) -> None:
    texts = [json.loads(line)["text"] for line in (tmp_path / "pool.jsonl").read_text(encoding="utf-8").splitlines()]
    none, much = (option(base[:-2], tmp_path, method, "prior", prior)[0]["selected"] for prior in (0, 500))
    words = [np.mean([len(text.split()) for text, taken in zip(texts, side, strict=True) if taken])
             for side in (none, much)]  # fmt: skip
    assert words[0] < words[1]


def test_a_high_floor_levels_the_weights(base: list[str], tmp_path: Path) -> None:
    spread = [np.ptp(option(base[:-2], tmp_path, "dsir", "floor", floor)[0]["score"]) for floor in (0, 1e6)]
    assert spread[1] < 1e-3 * spread[0]


def test_a_larger_scale_spreads_the_mass(base: list[str], tmp_path: Path) -> None:
    words = base[:-2] + own(tmp_path, "x", "y")
    support = [option(words, tmp_path, "tsds", "scale", scale)[1]["selection"]["support"] for scale in (0.01, 5)]
    assert 1 <= support[0] < support[1]


def test_inner_products_favour_long_gradients(base: list[str], tmp_path: Path) -> None:
    columns, _ = option(base[:-2] + own(tmp_path, "x", "y"), tmp_path, "less", "similarity", "inner")
    products = np.load(tmp_path / "x.npy") @ np.load(tmp_path / "y.npy").T
    expected = -np.maximum(products[:, :6].mean(1), products[:, 6:].mean(1))  # domains a and b of the target
    np.testing.assert_allclose(columns["score"], expected, rtol=1e-5)


def test_length_in_characters(base: list[str], tmp_path: Path) -> None:
    words = [*base[:-2], "--select.method.prefer", "long"]
    columns, _ = option(words, tmp_path, "length", "unit", "characters")
    texts = [json.loads(line)["text"] for line in (tmp_path / "pool.jsonl").read_text(encoding="utf-8").splitlines()]
    assert columns["score"] == [-len(text) for text in texts]


def test_perplexity_of_the_backbone(base: list[str], tmp_path: Path) -> None:
    assert run([*base[:-2], "--method", "perplexity", "--select.method.keep", "low"]) == 0
    columns, manifest = result(tmp_path)
    check(columns)
    assert 1 < manifest["selection"]["mean_loss"] < 12
    assert np.mean(columns["score"]) == pytest.approx(manifest["selection"]["mean_loss"])


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--method", "less"], "--pool-features"),
        (["--method", "gotd-contrast"], "select.negative.files"),
        (
            ["--method", "domains", "--select.method.inside.kind", "gotd-contrast"],
            ": gotd-contrast inside domains moves",
        ),
        (["--method", "domains", "--select.method.inside.kind", "less"], ": less inside domains compares gradients"),
        (["--method", "knn", "--negative", "POOL"], "no use for negative examples"),
        (["--method", "tsds", "--select.method.alpha", "1.5"], "alpha must be above 0 and at most 1"),
        (["--method", "dsir", "--select.method.buckets", "0"], "buckets must be"),
        (["--method", "domains", "--select.method.shares.c", "1"], "no domain 'c'"),
        (["--method", "gotd", "--select.method.rounds", "2", "--select.method.debiased", "true"], "rounds cannot be 2"),
        (["--method", "length", "--select.method.prefer", "tall"], "prefer"),
        (["--method", "tsd"], "did you mean 'tsds'"),
    ],
)
def test_mistakes_are_one_sentence(base: list[str], tmp_path: Path, capsys, more: list[str], told: str) -> None:
    given = base[:-2] if more[1] in ("dsir", "length") else base
    assert run([*given, *(str(tmp_path / "pool.jsonl") if word == "POOL" else word for word in more)]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["cynical", "knn", "gotd", "random", "domains"])
def test_no_text_is_chosen_twice(base: list[str], tmp_path: Path, method: str, capsys) -> None:
    """Of a pool in which every text stands thrice, in other case and blanks; fewer than the budget: copies fill up."""
    pool = Path(base[2])
    rows = [json.loads(line) for line in pool.read_text(encoding="utf-8").splitlines()]
    copies = [{**row, "text": form(row["text"])} for row in rows for form in (str, str.upper, "  {}".format)]
    write_jsonl(pool, copies)
    words = [*base[:-2], "--method", method, "--select.method.shares", "{a: 1, b: 1}"][
        : -2 if method != "domains" else None
    ]
    vectors = ["--select.embedder.dim", "8"] if method in ("knn", "gotd") else []
    assert run([*words, *vectors]) == 0
    lines = [json.loads(line) for line in (tmp_path / "out" / "selected.jsonl").read_text().splitlines()]
    assert len({" ".join(line["text"].lower().split()) for line in lines}) == len({line["id"] for line in lines}) == 12
    if method == "domains":
        assert sorted(line["domain"] for line in lines) == ["a"] * 6 + ["b"] * 6
    if method == "gotd":  # checked is what was written
        columns, manifest = result(tmp_path)
        reading = manifest["selection"]["checks"]["fitted"]["selection"][0]
        scores = np.array(columns["score"])[columns["selected"]]
        assert reading["predicted"] == pytest.approx(0.1 * scores.mean(), rel=1e-5)
    if method == "knn":
        assert "said the same as one before" in capsys.readouterr().err
        write_jsonl(pool, copies[:9] + copies[9:12] * 4)
        again = [str(tmp_path / "few") if word == str(tmp_path / "out") else word for word in [*words, *vectors]]
        assert run(again) == 0
        assert "warning: 8 of the chosen say the same as another" in capsys.readouterr().err
