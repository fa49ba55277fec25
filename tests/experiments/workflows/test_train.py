"""Parts of the training workflow by themselves: the own texts of a warm-up, and what is said of a run that failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from flatshift.experiments.recipe import from_mapping, load_recipe
from flatshift.experiments.run.console import Console
from flatshift.experiments.workflows.run_parts import discard_failed_run
from flatshift.experiments.workflows.train import _read_own_texts
from flatshift.finetune.errors import OutOfMemory, UserError
from tests.support.data_models import write_jsonl


@pytest.mark.parametrize("named", [False, True])
def test_blank_own_texts_are_left_out_and_counted(tmp_path: Path, capsys, named: bool) -> None:
    rows = [{"text": text, "label": "a"} for text in ("some words", "  ", "more words", "")]
    file = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    keys = {"data.train.files": [file], "data.train.limit": None, "data.holdout": 0.0, "warmup.own": 1, "select": None}
    keys |= {"data.dev.files": [], "data.test.files": []}
    if named:
        keys = {name: value for name, value in keys.items() if name != "select"}
        keys |= {"select": {"target": {"files": [file]}}}
    recipe = load_recipe("warmup", [from_mapping(keys)]).recipe
    assert [row.values["text"] for row in _read_own_texts(recipe, Console())] == ["some words", "more words"]
    assert "warm-up: 2 blank texts of the target are left out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "continues"),
    [
        (UserError("selected.jsonl:3: the text is blank"), False),
        (UserError("mesh.dp: 2 data ranks; take a multiple of them"), True),
        (OutOfMemory("too little memory", resumable=False), True),
    ],
)
def test_a_kept_selection_is_continued_where_another_mesh_or_device_would_help(
    tmp_path: Path, capsys, error: Exception, continues: bool
) -> None:
    (tmp_path / "selection").mkdir()
    (tmp_path / "selection" / "manifest.json").write_text("{}", encoding="utf-8")
    discard_failed_run(tmp_path, Console(), error)
    said = capsys.readouterr().err
    assert "the selection is finished and kept" in said and ("--resume" in said) == continues


def test_of_a_failed_run_nothing_stays_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    discard_failed_run(tmp_path / "out", Console(), UserError("adapter.targets: no layer of that name"))
    assert not (tmp_path / "disk").exists()
