"""`flatshift eval --data`: other rows are judged by the classes and units of the rows that the run trained on."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest

from flatshift.experiments.data import encode
from flatshift.experiments.data.splits import build_label_record, prepare_data, prepare_eval_data
from flatshift.experiments.recipe import from_override, load_recipe
from flatshift.experiments.run.console import Console
from flatshift.experiments.workflows import evaluate, sharpness
from flatshift.finetune.data.files import describe_files
from flatshift.finetune.errors import UserError
from flatshift.finetune.parallel.mesh import ProcessMesh
from tests.support.data_models import write_jsonl
from tests.support.objective_models import numbered_rows

RECIPE = """
backbone: BACKBONE
task: regress
data: {train: {files: [DIR/train.jsonl]}, cache: null}
train: {max_length: 48, steps: 4, batch_size: 4}
"""


@pytest.fixture
def folder(tmp_path):
    records = [{"text": row.values["text"], "label": row.values["label"] ** 2} for row in numbered_rows(60)]
    for name, some in (("train", records), ("dev", records[:8]), ("test", records[8:16]), ("more", records[:5])):
        write_jsonl(tmp_path / f"{name}.jsonl", some)
    return tmp_path


def recipe_of(folder, encoder, **overrides):
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.replace("DIR", str(folder)).replace("BACKBONE", str(encoder)), encoding="utf-8")
    typed = [from_override(k, v if isinstance(v, str) else json.dumps(v)) for k, v in overrides.items()]
    return load_recipe(str(path), typed).recipe


def noted(folder, recipe, learnt):
    """The manifest of a run: what it read, and what it learnt of that beside its weights."""
    manifest = {"inputs": describe_files(recipe.data.train.all_files), **learnt}
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


@pytest.fixture
def judged(monkeypatch, tmp_path):
    """The examples that `eval --data FILE` judges, with their classes."""

    def of(recipe, *files):
        told = SimpleNamespace(said=[])

        def judge(_recipe, _engine, _tokenizer, examples, *, label_names, **_):
            told.examples, told.names = examples, label_names
            return {}

        monkeypatch.setattr(evaluate.build, "load_model", lambda *_, **__: (None, None))
        monkeypatch.setattr(evaluate.build, "evaluate_split", judge)
        console = Console(quiet=True, log=told.said.append)
        evaluate._evaluate_run(tmp_path, recipe, files, console, ProcessMesh.alone("cpu"))
        return told

    return of


def test_classes_are_those_of_all_training_rows_and_no_row_is_read_where_none_teaches(folder, encoder, judged):
    recipe = recipe_of(folder, encoder, **{"data.holdout": 0.3, "data.train.limit": 3, "task": "classify"})
    trained = prepare_data(recipe)
    noted(folder, recipe, build_label_record(trained))
    told = judged(recipe, str(folder / "more.jsonl"))
    assert told.names == trained.label_names and len(told.names) > 3
    given = dataclasses.replace(recipe, task=dataclasses.replace(recipe.task, labels=trained.label_names))
    (folder / "train.jsonl").unlink()
    assert judged(given, str(folder / "more.jsonl")).examples == told.examples


def test_bad_rows_are_refused_or_left_out_and_said(folder, encoder, judged):
    bad = folder / "bad.jsonl"
    bad.write_text('{"text": "cat", "label": 1}\n{"text": "dog"}\n{"text": "the cat", "label": 2}\n')
    recipe = recipe_of(folder, encoder)
    noted(folder, recipe, build_label_record(prepare_data(recipe)))
    with pytest.raises(UserError, match=rf"{bad}:2: no column 'label'"):
        judged(recipe, str(bad))
    told = judged(recipe_of(folder, encoder, **{"data.bad_rows": "skip"}), str(bad))
    assert [example.labels for example in told.examples] == [1.0, 2.0]
    assert told.said[-1].startswith(f"skipped 1 bad rows, first {bad}:2: ")
    empty = folder / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(UserError, match=rf"no --data rows: {empty} is empty"):
        judged(recipe, str(empty))
    blank = write_jsonl(folder / "blank.jsonl", [{"text": ""}] * 2)
    model = recipe_of(folder, encoder, backbone="flatshift-5m", task="language-model", **{"data.bad_rows": "skip"})
    with pytest.raises(UserError, match=rf"^no --data row is left: 2 were skipped, the first for {blank}:1: the text"):
        judged(model, str(blank))


def test_what_was_cut_is_said(folder, encoder, judged):
    recipe = recipe_of(folder, encoder, backbone="flatshift-5m", task="language-model", **{"train.max_length": 16})
    long = write_jsonl(folder / "long.jsonl", [{"text": "the cat sat " * 20}] * 3 + [{"text": "the cat"}])
    assert judged(recipe, str(long)).said[-2:] == [
        "data: 4 examples",
        "--data: 3 of 4 samples (75 %) are cut to train.max_length = 16 tokens; 63 tokens would hold 99 % of them "
        "whole",
    ]
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "the cat sat"}]
    chats = write_jsonl(folder / "chats.jsonl", [{"messages": turns}] * 3 + [{"messages": turns[:1]}])
    chat = {"task": "{kind: chat, template: plain, max_unsupervised: 0.5}", "data.bad_rows": "skip"}
    prepared = prepare_eval_data(recipe_of(folder, encoder, backbone="flatshift-5m", **chat), [str(chats)], run=folder)
    assert len(prepared.test) == 3
    assert prepared.notes[0].startswith("--data: ") and "1 bad rows (left out)" in prepared.notes[0]


@pytest.mark.parametrize("streamed", [False, True], ids=["read", "streamed"])
def test_one_class_is_none(streamed, folder, encoder, monkeypatch):
    write_jsonl(folder / "train.jsonl", [{"text": "the cat", "label": "x"}] * 4)
    if streamed:
        monkeypatch.setattr(encode, "IN_MEMORY", 0)
    for task in ("classify", "{kind: completion, score: rank}"):
        recipe = recipe_of(folder, encoder, task=task, backbone="flatshift-5m")
        with pytest.raises(
            UserError, match=r"two classes or more, and there is only 'x'; data\.columns\.label .*'label'"
        ):
            prepare_data(recipe)
    given = recipe_of(folder, encoder, task="{kind: classify, labels: [x]}")
    with pytest.raises(UserError, match=r"there is only 'x'.*task\.labels"):
        prepare_data(given)
    assert prepare_data(recipe_of(folder, encoder, task="{kind: classify, multi: true}")).label_names == ("x",)


RANK = {"task": "{kind: completion, score: rank}", "backbone": "flatshift-5m"}


@pytest.mark.parametrize("settings", [{"task": "classify"}, RANK, {}], ids=["classify", "rank", "regress"])
def test_training_files_that_changed_change_no_class_and_no_unit(settings, folder, encoder, judged):
    recipe = recipe_of(folder, encoder, **settings)
    trained = prepare_data(recipe)
    noted(folder, recipe, build_label_record(trained))
    write_jsonl(folder / "train.jsonl", [{"text": "the cat", "label": 7 + i} for i in range(9)])
    other = prepare_data(recipe)
    assert (other.label_names, other.units) != (trained.label_names, trained.units)
    told = judged(recipe, str(folder / "more.jsonl"))
    assert told.names == trained.label_names and {example.units for example in told.examples} == {trained.units}


def test_sharpness_on_other_rows_reads_no_training_file_either(folder, encoder, monkeypatch):
    recipe = recipe_of(folder, encoder, task="classify")
    trained = prepare_data(recipe)
    noted(folder, recipe, build_label_record(trained))

    def lay_out(recipe, task, names, **_):
        assert names == trained.label_names
        raise InterruptedError

    monkeypatch.setattr(sharpness, "load_model", lay_out)
    (folder / "adapter").mkdir()
    text = (folder / "recipe.yaml").read_text(encoding="utf-8").replace("task: regress", "task: classify")
    (folder / "recipe.resolved.yaml").write_text(text, encoding="utf-8")
    (folder / "train.jsonl").unlink()
    with pytest.raises(InterruptedError):
        sharpness.measure_run_sharpness(folder, data=[str(folder / "more.jsonl")], quiet=True)


def test_they_are_not_worked_out_anew(folder, encoder, judged):
    recipe = recipe_of(folder, encoder)
    with pytest.raises(UserError, match=r"manifest\.json is missing, which tells the run's classes or units; copy it"):
        judged(recipe, str(folder / "more.jsonl"))
    noted(folder, recipe, {"label_names": None})
    with pytest.raises(UserError, match=r"manifest\.json: has no 'units'"):
        judged(recipe, str(folder / "more.jsonl"))


def test_a_window_of_a_backbone_without_a_limit_may_be_longer_than_the_default():
    recipe = SimpleNamespace(backbone="endless")
    for positions, asked, width in (({}, None, 1024), ({}, 4096, 4096), ({"n_positions": 96}, None, 96)):
        assert evaluate._window_size(SimpleNamespace(config=positions), recipe, asked) == width
    with pytest.raises(UserError, match="--window: 97 is not from 2 to 96, the positions of endless"):
        evaluate._window_size(SimpleNamespace(config={"n_positions": 96}), recipe, 97)
