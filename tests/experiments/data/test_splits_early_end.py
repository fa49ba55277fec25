"""Rows that are over before they should be: one sentence, or a count that is said; read at once or as a stream."""

from __future__ import annotations

import json
import sys
import types

import pytest

from flatshift.experiments.data import encode
from flatshift.experiments.data.splits import prepare_data
from flatshift.experiments.recipe import from_override, load_recipe
from flatshift.finetune.data.mixture import Mixture
from flatshift.finetune.data.rows import read_rows
from flatshift.finetune.errors import UserError
from tests.support.data_models import write_jsonl

BASE = """
backbone: flatshift-5m
task: {kind: TASK}
data:
  train: TRAIN
  cache: null
train: {max_length: 48, steps: 6, batch_size: 4}
"""
STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["read", "streamed"])


@pytest.fixture
def recipe_of(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "rows.jsonl", [{"text": f"word {i}", "label": "ab"[i % 2]} for i in range(12)])
    write_jsonl(tmp_path / "blank.jsonl", [{"text": "", "label": "a"} for _ in range(3)])

    def made(train, *, task="language-model", streamed=False, **overrides):
        if streamed:
            monkeypatch.setattr(encode, "IN_MEMORY", 0)
        path = tmp_path / "recipe.yaml"
        path.write_text(BASE.replace("TRAIN", train).replace("DIR", str(tmp_path)).replace("TASK", task))
        typed = [from_override(k, v if isinstance(v, str) else json.dumps(v)) for k, v in overrides.items()]
        return load_recipe(str(path), typed).recipe

    return made


class Hub:
    """A data set that is streamed: so many records in each pass, then over, or broken off where `fails`."""

    def __init__(self, *passes: int, fails: bool = False) -> None:
        self.passes, self.fails = list(passes), fails

    def __iter__(self):
        for i in range(self.passes.pop(0) if len(self.passes) > 1 else self.passes[0]):
            yield {"text": f"word {i}", "label": "ab"[i % 2]}
        if self.fails:
            raise ConnectionError("the hub went away\nand more")


@pytest.fixture
def hub(monkeypatch):
    def serve(source):
        module = types.ModuleType("datasets")
        module.load_dataset = lambda *_, **__: source
        monkeypatch.setitem(sys.modules, "datasets", module)

    return serve


@STREAMED
@pytest.mark.parametrize(
    ("train", "words"),
    [
        ("{files: [DIR/rows.jsonl], first: 13}", r"data\.train\.first: 13 rows are asked for, .* ends after 12"),
        ("{files: [DIR/rows.jsonl], limit: 13}", r"data\.train\.limit: 13 is above the 12 rows"),
        ("{sources: {a: {files: [DIR/rows.jsonl]}, b: {files: [DIR/rows.jsonl], first: 13}}}", r"b\.first: 13 rows"),
    ],
)
def test_fewer_rows_than_are_asked_for(train, words, streamed, recipe_of):
    with pytest.raises(UserError, match=words):
        prepare_data(recipe_of(train, streamed=streamed))


@STREAMED
def test_rows_of_which_none_is_usable_end_a_run_before_it_trains(streamed, recipe_of):
    skip = {"data.bad_rows": "skip", "streamed": streamed}
    with pytest.raises(UserError, match=r"^no train row is left: 3 were skipped, the first for .*blank\.jsonl:1: "):
        prepare_data(recipe_of("{files: [DIR/blank.jsonl]}", **skip))
    both = "{sources: {a: {files: [DIR/rows.jsonl]}, b: {files: [DIR/blank.jsonl]}}}"
    with pytest.raises(UserError, match=r"data\.train\.sources\.b has no usable row; give it rows, or weight 0"):
        prepare_data(recipe_of(both, **skip))
    with pytest.raises(UserError, match=r"^no dev row is left: 3 were skipped"):
        prepare_data(recipe_of("{files: [DIR/rows.jsonl]}\n  dev: {files: [DIR/blank.jsonl]}", **skip))
    kept = prepare_data(recipe_of("{files: [DIR/rows.jsonl, DIR/blank.jsonl]}", **skip))
    assert len(kept.train) == 12 and len(kept.skipped) == 3


def test_a_mixture_has_a_sample_of_each_source():
    with pytest.raises(UserError, match=r"sources\.b has no usable row"):
        Mixture(("a", "b"), (1.0, 1.0), (3, 0))


@pytest.mark.parametrize(("second", "words"), [(9, r"only 9 came"), (14, r"more came")])
def test_a_stream_that_has_other_rows_when_it_is_read_again(second, words, hub, recipe_of):
    """Classes are counted first: the second pass must be of the same rows, or what was set apart is not."""
    hub(Hub(12, second))
    with pytest.raises(UserError, match=rf"data\.train: 12 rows were counted and {words} when .* ended early"):
        prepare_data(recipe_of('{files: ["hub:a/b:train"]}', task="classify"))
    hub(Hub(12))
    assert len(prepare_data(recipe_of('{files: ["hub:a/b:train"]}', task="classify")).train) == 12


def test_a_stream_that_breaks_off_names_the_record(hub, recipe_of):
    hub(Hub(7, fails=True))
    with pytest.raises(UserError, match=r"hub:a/b:train: the data set breaks off at record 8 \(the hub went away\)$"):
        prepare_data(recipe_of('{files: ["hub:a/b:train"]}'))


def test_a_saved_data_set_that_is_cut_short_is_named(tmp_path, monkeypatch):
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "state.json").write_text("{}")
    module = types.ModuleType("datasets")

    def load_from_disk(path):
        raise ValueError(f"Expected to read 1024 metadata bytes\nfrom {path}")

    module.load_from_disk = load_from_disk
    monkeypatch.setitem(sys.modules, "datasets", module)
    with pytest.raises(UserError, match=r"saved: this saved data set cannot be read \(Expected .* bytes\); save it"):
        list(read_rows([str(saved)]))


def test_a_last_line_that_is_cut_off_is_a_bad_row(tmp_path):
    path = tmp_path / "cut.jsonl"
    path.write_text('{"text": "one"}\n{"text": "tw')
    with pytest.raises(UserError, match=r"cut\.jsonl:2: not valid JSON"):
        list(read_rows([str(path)]))
    skipped: list[str] = []
    assert len(list(read_rows([str(path)], bad_rows="skip", skipped=skipped))) == 1 == len(skipped)
    table = tmp_path / "cut.csv"
    table.write_text('text\none\n"tw')
    with pytest.raises(UserError, match=r"cut\.csv:3: not valid CSV \(unexpected end of data\)"):
        list(read_rows([str(table)]))
