"""The notebooks run from top to bottom, and a fresh run prints the figures that are stored in them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.patience import HANG_S

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
NUMBER = re.compile(r"\d+(?:\.(?P<decimals>\d+))?(?:e[-+]\d+)?")

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def source(cell: Any) -> str:
    return "".join(cell["source"])


def printed(cell: Any) -> str:
    """What the cell printed, without the warnings of libraries."""
    return "".join("".join(output["text"]) for output in cell["outputs"] if output.get("name") == "stdout")


def pictures(cell: Any) -> list[str]:
    """Media types of the cell's pictures."""
    shown = [media for output in cell["outputs"] for media in output.get("data", {})]
    return [media for media in shown if media.startswith("image/")]


def check_figures(stored: str, fresh: str) -> None:
    """Compare two texts: words and whole numbers are equal, other numbers nearly.

    Training is not the same to the bit on all CPUs, so a number may differ by a tenth, or by five in its last digit.
    """
    assert NUMBER.sub("#", stored) == NUMBER.sub("#", fresh)
    for old, new in zip(NUMBER.finditer(stored), NUMBER.finditer(fresh), strict=True):
        if old["decimals"] is None and new["decimals"] is None:
            assert old[0] == new[0], fresh
        else:
            digit = 10.0 ** -len(old["decimals"] or "")
            assert float(new[0]) == pytest.approx(float(old[0]), rel=0.1, abs=5 * digit), fresh


def test_figures_that_differ_are_seen() -> None:
    check_figures("accuracy 0.92 at rank 16", "accuracy 0.90 at rank 16")
    for other in ("accuracy 0.80 at rank 16", "accuracy 0.92 at rank 32", "loss 0.92 at rank 16", "accuracy 0.92"):
        with pytest.raises(AssertionError):
            check_figures("accuracy 0.92 at rank 16", other)


def test_there_are_four() -> None:
    assert {path.stem for path in NOTEBOOKS} == {"select-train", "sweep-verdict", "trainer-ggpo", "own-features"}


@each_notebook
def test_the_first_cell_installs_and_outputs_are_stored(path: Path) -> None:
    install, *cells = code_cells(json.loads(path.read_text(encoding="utf-8")))
    assert re.fullmatch(r'%pip install -q ("flatshift\[\w+\]"|flatshift)', source(install))
    assert install["metadata"]["tags"] == ["skip-execution"], "installed already where the outputs are made"
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), "run `make notebooks`"
    assert not [output for cell in cells for output in cell["outputs"] if output["output_type"] == "error"]
    assert any(printed(cell) for cell in cells) and any(pictures(cell) for cell in cells)
    assert path.stat().st_size <= 300_000
    assert str(ROOT.parent) not in path.read_text(encoding="utf-8")


@pytest.mark.slow
@each_notebook
def test_a_fresh_run_has_the_stored_figures(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    stored, fresh = nbformat.read(path, as_version=4), nbformat.read(path, as_version=4)
    for cell in code_cells(fresh):
        cell["outputs"] = []
    NotebookClient(fresh, timeout=HANG_S, resources={"metadata": {"path": str(tmp_path)}}).execute()
    for old, new in zip(code_cells(stored), code_cells(fresh), strict=True):
        check_figures(printed(old), printed(new))
        assert pictures(old) == pictures(new), source(old)
