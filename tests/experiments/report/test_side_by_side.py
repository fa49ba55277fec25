"""Runs beside each other: paired differences against a plain bootstrap, what the page and `flatshift runs` say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flatshift.cli import run as flatshift
from flatshift.experiments.report.page import build_report
from flatshift.experiments.report.side_by_side import side_by_side_chapter
from flatshift.experiments.results.predictions import Predictions, RunEvaluation, metric_differences
from flatshift.experiments.results.run import find_runs, list_directories
from flatshift.finetune.errors import UserError

RECIPE = """backbone: flatshift-5m
task: {{kind: classify}}
data: {{test: {{files: [{data}]}}}}
adapter: {{rank: {rank}}}
train: {{steps: 4}}
"""


def make_run(path: Path, predicted: list[str], *, rank: int, keep: bool = True, data: str = "test.jsonl") -> Path:
    """A run directory of a classification with six test rows, a to f."""
    labels = ["x", "x", "y", "y", "y", "x"]
    path.mkdir(parents=True)
    (path / "recipe.resolved.yaml").write_text(RECIPE.format(rank=rank, data=data))
    inputs = [{"path": data, "sha256": f"of {data}", "rows": 6}]
    (path / "manifest.json").write_text(json.dumps({"inputs": inputs, "created": f"2026-01-0{rank}T00:00:00+00:00"}))
    right = np.mean([a == b for a, b in zip(labels, predicted, strict=True)])
    cell = {"value": float(right), "low": max(0.0, right - 0.3), "high": min(1.0, right + 0.3), "n": 6}
    floor = {"value": 0.5, "low": 0.5, "high": 0.5, "n": 6}
    (path / "eval.json").write_text(json.dumps({"test": {"accuracy": cell, "majority_floor": floor}}))
    lines = [{"stage": "fine-tune", "step": s, "split": "train", "loss": 2.0 / s / rank} for s in (1, 2, 3, 4)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if keep:
        rows = {
            "split": ["test"] * 6,
            "row": [f"{data}:{i}" for i in range(6)],
            "label": labels,
            "text": [f"text {i}" for i in "abcdef"],
        }
        pq.write_table(
            pa.table({**rows, "predicted": predicted, "probability": [0.9] * 6}), path / "predictions.parquet"
        )
    return path


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [
        make_run(tmp_path / "one", ["x", "y", "x", "x", "y", "x"], rank=1),
        make_run(tmp_path / "two", ["x", "x", "y", "y", "y", "y"], rank=2),
        make_run(tmp_path / "old", ["x", "x", "y", "y", "y", "x"], rank=3, keep=False),
    ]


def test_differences_of_the_same_rows_are_paired(runs: list[Path]) -> None:
    one, two, old = find_runs(runs)
    found = metric_differences(two.split_evaluation("test"), one.split_evaluation("test"))["accuracy"]
    right = np.array([[True, False, False, False, True, True], [True, True, True, True, True, False]])
    assert found.paired and found.n == 6 and found.value == pytest.approx(right[1].mean() - right[0].mean())
    rng = np.random.default_rng(0)  # a plain bootstrap of the same statistic
    drawn = rng.integers(0, 6, size=(20_000, 6))
    naive = np.quantile(right[1][drawn].mean(1) - right[0][drawn].mean(1), [0.025, 0.975])
    assert (found.low, found.high) == pytest.approx(tuple(naive), abs=0.17)  # a step of six rows
    apart = metric_differences(old.split_evaluation("test"), one.split_evaluation("test"))["accuracy"]
    assert not apart.paired and apart.value == 0.5 and apart.high - apart.low == pytest.approx(np.hypot(0.3, 0.3) + 0.3)
    assert "majority_floor" not in metric_differences(old.split_evaluation("test"), one.split_evaluation("test"))


def test_other_files_or_other_rows_are_not_paired(runs: list[Path], tmp_path: Path) -> None:
    one = find_runs(runs[:1])[0].split_evaluation("test")
    elsewhere = find_runs([make_run(tmp_path / "w", ["x"] * 6, rank=4, data="w.jsonl")])[0].split_evaluation("test")
    assert not metric_differences(elsewhere, one)["accuracy"].paired
    few = {"row": ["test.jsonl:0", "test.jsonl:9"], "label": ["x", "x"], "predicted": ["x", "y"]}
    assert not metric_differences(RunEvaluation(one.metrics, Predictions(pa.table(few)), one.digest), one)[
        "accuracy"
    ].paired


def test_sums_over_counts_are_paired_as_ratios() -> None:
    """Nats of tokens: Σ over Σ, and the exponential of that."""
    rng = np.random.default_rng(1)
    tokens, nats = rng.integers(3, 30, 40).astype(float), rng.gamma(4.0, 5.0, (2, 40))
    rows = [f"f:{i}" for i in range(40)]
    sides = [Predictions(pa.table({"row": rows, "loss": n, "loss.count": tokens})) for n in nats]
    metrics = {name: {"value": 1.0} for name in ("loss", "perplexity")}
    found = metric_differences(RunEvaluation(metrics, sides[0], "d"), RunEvaluation(metrics, sides[1], "d"))
    means = nats.sum(1) / tokens.sum()
    assert found["loss"].value == pytest.approx(means[0] - means[1])
    assert found["perplexity"].value == pytest.approx(np.exp(means[0]) - np.exp(means[1]))
    assert found["loss"].low < found["loss"].value < found["loss"].high


def test_the_page_puts_them_side_by_side(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = side_by_side_chapter(find_runs(runs))
    assert made is not None and "old" in made.finding and made.sections[0].title == "Settings that differ"
    settings = {row[0]: list(row[1:]) for row in made.sections[0].blocks[0].rows}
    assert settings == {"adapter.rank": ["1", "2", "3"]}
    rows = [list(row) for row in made.sections[1].blocks[0].rows]
    assert [row[1] for row in rows] == ["one", "two", "old"] and rows[0][3] == "" and rows[2][3].endswith("†")
    assert "the same 6 rows" in made.sections[1].blocks[0].caption
    assert side_by_side_chapter(find_runs(runs[:1])) is None
    assert flatshift(["report", *map(str, runs), "--out", str(tmp_path / "page.html")]) == 0
    said = capsys.readouterr()
    assert said.out.strip() == str(tmp_path / "page.html") and "minus one" in said.err
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "3 runs" in page and "Train loss during fine-tune" in page and page.count('id="run') == 4
    assert build_report(runs, out=tmp_path / "page.html") and page == (tmp_path / "page.html").read_text(
        encoding="utf-8"
    )


def test_runs_of_folders_with_equal_names_are_kept_apart(tmp_path: Path) -> None:
    folders = ("first/seed0/run", "second/seed0/run", "third/.again.0123abcd.tmp", "third/.again.4567abcd.tmp")
    paths = [make_run(tmp_path / folder, ["x"] * 6, rank=rank) for rank, folder in enumerate(folders, 1)]
    made = side_by_side_chapter(find_runs(paths))
    names = ["first/seed0/run", "second/seed0/run"]
    names += [f"{'/'.join(tmp_path.parts[1:])}/third/again ({place})" for place in (3, 4)]
    assert made is not None and made.sections[0].blocks[0].columns == ["key", *names]
    assert [row[1] for row in made.sections[1].blocks[0].rows] == names
    assert made.sections[0].blocks[0].rows == [["adapter.rank", "1", "2", "3", "4"]]
    assert "Train loss during fine-tune" in [chart.title for chart in made.sections[2].blocks[0].charts]


def test_runs_are_listed(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    make_run(tmp_path / "deep" / "er" / "torn", ["x"] * 6, rank=5)
    (tmp_path / "deep" / "er" / "torn" / "eval.json").write_text("{")
    for name in ("cells.parquet", "evaluation.json", "tokenizers.json"):  # a benchmark's results, made by no command
        (tmp_path / "results").mkdir(exist_ok=True)
        (tmp_path / "results" / name).write_text("{}")
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "tokenizers.json").write_text('{"tokenizers": ["a"]}')
    (tmp_path / "words" / "report.html").write_text("")
    found = {one.path: one for one in list_directories(tmp_path)}
    assert found.pop("words").kind == "tokenizers"
    assert list(found) == ["one", "two", "old", "deep/er/torn"], "oldest first"
    assert (found["one"].kind, found["one"].status, found["one"].steps, found["one"].of) == (
        "training",
        "unfinished",
        4,
        4,
    )
    assert (found["two"].metric, found["two"].value) == ("test accuracy", pytest.approx(5 / 6))
    assert found["deep/er/torn"].status.startswith("broken: ")
    assert flatshift(["runs", str(tmp_path), "--json"]) == 0
    assert [one["path"] for one in json.loads(capsys.readouterr().out)] == [*found, "words"]
    assert flatshift(["runs", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and "4 / 4" in lines[1] and "2026-01-01" in lines[1]
    with pytest.raises(UserError, match="is no directory"):
        list_directories(tmp_path / "nowhere")


def test_losses_of_different_tasks_are_not_subtracted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A squared loss and a cross entropy: the page and the terminal show both, and subtract only accuracies."""
    directories = [make_run(tmp_path / name, ["x"] * 6, rank=rank) for rank, name in enumerate(("plain", "squared"), 1)]
    for directory, value in zip(directories, (0.7, 0.2), strict=True):
        figures = json.loads((directory / "eval.json").read_text())
        figures["test"]["loss"] = {"value": value, "low": value - 0.01, "high": value + 0.01, "n": 6}
        (directory / "eval.json").write_text(json.dumps(figures))
    arguments = ["report", *map(str, directories), "--out", str(tmp_path / "page.html")]
    assert flatshift(arguments) == 0
    assert "−0.5" in capsys.readouterr().err, "of one task they are"
    recipe = directories[1] / "recipe.resolved.yaml"
    recipe.write_text(recipe.read_text().replace("kind: classify", "kind: classify, loss: squared"))
    assert flatshift(arguments) == 0
    err = capsys.readouterr().err
    (line,) = [line for line in err.splitlines() if line.split()[:2] == ["squared", "0.200"]]
    assert line.rstrip().endswith("–") and "−0.5" not in err and "are not subtracted" in err
    assert "are not subtracted" in (tmp_path / "page.html").read_text(encoding="utf-8")
