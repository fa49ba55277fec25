"""What docs/python.md shows runs as it stands, top to bottom; the answers are what they say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
SHORT = (
    '{"data.train.limit": 24, "data.dev.limit": 8, "data.test.limit": 12, "eval": {"train_limit": 8, "bootstrap": 20}, '
    '"train": {"steps": 4, "precision": "fp32", "max_length": 32, "max_cut": 1, "threads": 1'
)


def run_python(blocks: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that the blocks leave, run in order in one namespace, in `folder`."""
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {"__name__": "page"}
    for number, block in enumerate(blocks):
        exec(compile(block, f"block {number}", "exec"), names)
    return names


def blocks_of_the_page() -> list[str]:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "python.md").read_text(encoding="utf-8"), flags=re.S)
    short = [block.replace('{"train": {"steps": 40', SHORT) for block in blocks]
    assert short != blocks
    return short


def test_the_page_runs_up_to_its_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_python([block for block in blocks_of_the_page() if "sweep(" not in block], tmp_path, monkeypatch)
    assert sorted(found["picked"].indices) == [0, 2] and sorted(found["selector"].select(2)) == [0, 2]
    assert found["run"].finished and found["run"].recipe.train.steps == 4
    assert found["run"].metrics["test"] == found["run"].evaluate()["test"], "the adapter is another one"
    from flatshift.experiments.results.run import read_run

    kept = read_run(Path("runs/first")).predictions["test"]
    again = found["run"].predict([row["text"] for row in kept.shown[:3]])
    assert [row["label"] for row in again] == [row["predicted"] for row in kept.shown[:3]], (
        "as the run itself said of these rows"
    )
    assert [row["probability"] for row in again] == pytest.approx(
        [row["probability"] for row in kept.shown[:3]], abs=1e-5
    )
    assert len(found["predictions"]) == 2 and all(0 < row["probability"] <= 1 for row in found["predictions"])
    assert "lora" in "".join(name for name, _ in found["model"].named_parameters())
    assert "overrides: unknown key 'train.stepz'; did you mean 'train.steps'?" in capsys.readouterr().out


@pytest.mark.slow
def test_the_whole_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = run_python(blocks_of_the_page(), tmp_path, monkeypatch)["ranks"]
    assert len(ranks.cells) == 4 and not ranks.verdicts
    assert "lowest at rank" in ranks.finding or "ties with" in ranks.finding
