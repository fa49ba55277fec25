"""From a recipe to examples: several sources, the stream of large inputs, the cache; what is refused."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import pytest

from flatshift.experiments.data import encode as tokens
from flatshift.experiments.data import splits
from flatshift.experiments.data.sources import count_source_epochs, format_source_epochs, sample_train_for_eval
from flatshift.experiments.data.splits import prepare_data, read_splits
from flatshift.experiments.recipe import from_override, list_input_files, load_recipe, recipe_key, resume_recipe
from flatshift.experiments.recipe.rules import check_recipe
from flatshift.experiments.studies.cell import make_cell
from flatshift.finetune.data.batches import TrainingDataLoader
from flatshift.finetune.data.columns import ColumnarExamples
from flatshift.finetune.data.encoding import encode
from flatshift.finetune.data.files import describe_files
from flatshift.finetune.data.rows import read_rows
from flatshift.finetune.errors import UserError
from flatshift.finetune.models.backbone import open_backbone
from tests.support.data_models import byte_tokenizer, write_jsonl
from tests.support.finetune_models import save_backbone

BASE = """
backbone: flatshift-5m
train: {max_length: 48, steps: 6, batch_size: 4}
"""


@pytest.fixture
def folder(tmp_path):
    for name, count in (("code", 40), ("talk", 24), ("dev", 6)):
        records = [
            {"text": f"{name} {'word ' * (i % 9)}{i}", "label": "ab"[i % 2], "answer": f"{i}"} for i in range(count)
        ]
        write_jsonl(tmp_path / f"{name}.jsonl", records)
    return tmp_path


def test_a_token_beyond_the_embedding_is_refused_with_its_line(folder):
    tokenizer = byte_tokenizer()
    backbone = save_backbone("llama", folder / "llama", vocab_size=len(tokenizer))
    tokenizer.add_tokens(["<image>"])
    tokenizer.save_pretrained(backbone)
    write_jsonl(folder / "rows.jsonl", [{"text": "the cat"}, {"text": "the <image>"}])
    recipe = recipe_of(folder, "task: language-model\ndata: {train: {files: [DIR/rows.jsonl]}}", backbone=str(backbone))
    with pytest.raises(UserError, match=r"rows\.jsonl:2: the tokenizer of .* has a token .*; leave the row out"):
        prepare_data(recipe)
    (folder / "manifest.json").write_text(json.dumps({"inputs": [], "label_names": None, "units": None}))
    with pytest.raises(UserError, match=r"rows\.jsonl:2: the tokenizer of"):
        splits.prepare_eval_data(recipe, [str(folder / "rows.jsonl")], run=folder)


def recipe_of(folder, text, **overrides):
    path = folder / "recipe.yaml"
    path.write_text(BASE + text.replace("DIR", str(folder)), encoding="utf-8")
    typed = {key: value if isinstance(value, str) else json.dumps(value) for key, value in overrides.items()}
    return load_recipe(str(path), [from_override(key, value) for key, value in typed.items()]).recipe


MIXED = """
task: {kind: completion, prompt: "{text} =>", completion: " {label}", pack: false, score: rank}
data:
  train:
    sources:
      code: {files: [DIR/code.jsonl], weight: 3, limit: 30}
      talk: {files: [DIR/talk.jsonl], weight: 1, columns: {label: answer}}
      off: {files: [DIR/nowhere.jsonl], weight: 0}
  holdout: 0.1
"""


def same(a, b) -> bool:
    names = (
        "train",
        "dev",
        "test",
        "label_names",
        "truncated",
        "skipped",
        "flipped",
        "true_labels",
        "dropped",
        "mixture",
    )
    return all(getattr(a, name) == getattr(b, name) for name in names)


def test_sources_lie_one_behind_another_with_their_own_columns_and_limits(folder):
    recipe = recipe_of(folder, MIXED)
    prepared = prepare_data(recipe)
    mixture = prepared.mixture
    assert mixture.names == ("code", "talk") and mixture.weights == (3, 1)
    names = [example.id.split("/")[0] for example in prepared.train]
    assert names == ["code"] * mixture.sizes[0] + ["talk"] * mixture.sizes[1]
    assert mixture.sizes[0] == 30 and len(prepared.dev) == len(prepared.test) == 6  # a tenth of 64
    everyone = [e.id for split in (prepared.train, prepared.dev, prepared.test) for e in split]
    assert len(set(everyone)) == len(everyone)
    assert set(prepared.label_names) == {"a", "b", *map(str, range(24))}
    code = list(read_rows([str(folder / "code.jsonl")]))
    by_id = {f"code/{row.id}": row.values["text"] for row in code}
    assert all(example.where.startswith(str(folder / "code.jsonl:")) for example in prepared.train[:30])
    assert {example.id for example in prepared.train[:30]} <= set(by_id)
    files = [entry["path"] for entry in describe_files(list_input_files(recipe))]
    assert files == [str(folder / "code.jsonl"), str(folder / "talk.jsonl")]


@pytest.mark.parametrize("streamed", [False, True], ids=["read", "streamed"])
def test_a_second_text_or_an_id_under_a_name_that_no_row_has_is_refused(streamed, folder, monkeypatch):
    if streamed:
        monkeypatch.setattr(tokens, "IN_MEMORY", 0)
    text = "task: {kind: TASK}\ndata: {train: {files: [DIR/code.jsonl]}, dev: {files: [DIR/dev.jsonl]}}"
    pairs = text.replace("TASK", "classify")
    with pytest.raises(UserError, match=r"code\.jsonl: no column 'anwser'; did you mean 'answer'\? .*columns\.text2\)"):
        prepare_data(recipe_of(folder, pairs, **{"data.columns.text2": "anwser"}))
    write_jsonl(folder / "dev.jsonl", [{"text": "dev", "label": "a"}])
    with pytest.raises(UserError, match=r"dev\.jsonl: no column 'answer'"):
        prepare_data(recipe_of(folder, pairs, **{"data.columns.text2": "answer"}))
    plain = text.replace("TASK", "language-model")
    assert prepare_data(recipe_of(folder, plain, **{"data.columns.text2": "anwser"})).train  # which has no second text
    with pytest.raises(UserError, match=r"code\.jsonl: no column 'uid'.*columns\.id\)"):
        prepare_data(recipe_of(folder, plain, **{"data.columns.id": "uid"}))
    assert prepare_data(recipe_of(folder, plain, **{"data.columns.id": "answer"})).dev[0].id == "0-0"


PLAIN = """
task: {kind: TASK}
data: {train: {files: [DIR/code.jsonl], limit: 20}, dev: {files: [DIR/dev.jsonl], limit: 4}, holdout: 0.2}
"""
MORE = [
    ("mixed", MIXED, {}),
    ("classify", PLAIN.replace("TASK", "classify"), {}),
    ("language-model", PLAIN.replace("TASK", "language-model"), {"train.max_length": 8, "train.max_cut": 0.9}),
    ("without a survey", "task: {kind: language-model}\ndata: {train: {files: [DIR/code.jsonl], first: 13}}", {}),
    ("given classes", "task: {kind: classify, labels: [b, a]}\ndata: {train: {files: [DIR/code.jsonl]}}", {}),
    (
        "dropped",
        PLAIN.replace("TASK", "language-model"),
        {"train.max_length": 9, "train.overlong": "drop", "train.max_dropped": 1},
    ),
]


@pytest.mark.parametrize(("text", "more"), [case[1:] for case in MORE], ids=[case[0] for case in MORE])
def test_streamed_and_cached_examples_are_those_of_rows_in_memory(text, more, folder, monkeypatch):
    recipe = recipe_of(folder, text, **more)
    plain = prepare_data(recipe)
    kept = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, cache=str(folder / "cache")))
    assert same(prepare_data(kept), plain)
    monkeypatch.setattr(splits, "encode_rows", None)  # the second time, nothing is encoded
    again = prepare_data(kept)
    assert same(again, plain) and "read from" in again.notes[0]
    monkeypatch.undo()

    def refuse(*_):
        raise AssertionError("a large input is not read into memory")

    monkeypatch.setattr(tokens, "IN_MEMORY", 0)
    monkeypatch.setattr(splits, "read_splits", refuse)
    streamed = prepare_data(recipe)
    assert same(streamed, plain) and isinstance(streamed.train, ColumnarExamples)
    assert (plain.dropped > 0) == ("train.overlong" in more)
    if plain.dropped:
        assert len(plain.dev) == 4 and len(plain.train) + plain.dropped == 20
    if "first: 13" in text:
        assert len(plain.train) == 13


def test_examples_are_those_of_encode_on_the_rows(folder):
    recipe = recipe_of(folder, PLAIN.replace("TASK", "classify"))

    rows = read_splits(recipe)
    settings = {"task": recipe.task, "tokenizer": open_backbone("flatshift-5m").tokenizer, "max_length": 48}
    prepared = prepare_data(recipe)
    for split in ("train", "dev", "test"):
        naive = encode(getattr(rows, split), label_names=rows.label_names, **settings).examples
        assert getattr(prepared, split) == naive and len(naive) > 0


@pytest.mark.parametrize("task", ["classify", "language-model", "completion"])
def test_label_noise_goes_through_the_cache(task, folder):
    recipe = recipe_of(folder, PLAIN.replace("TASK", task), **{"data.label_noise": 0.5})
    plain = prepare_data(recipe)
    kept = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, cache=str(folder / "cache")))
    first, again = prepare_data(kept), prepare_data(kept)
    assert 0 < len(plain.flipped) < 20 and same(first, plain) and same(again, plain)
    assert (task == "classify") == bool(again.true_labels)


@pytest.mark.parametrize("task", ["classify", "language-model", "completion", "multi"])
def test_label_noise_is_shared_along_rates_and_limits(task, folder):
    text = PLAIN.replace("kind: TASK", "kind: classify, multi: true") if task == "multi" else PLAIN
    text = text.replace("TASK", task)

    def noisy(rate: float, limit: int | None):
        prepared = prepare_data(recipe_of(folder, text, **{"data.label_noise": rate, "data.train.limit": limit}))
        return {e.id: (e.input_ids, e.labels) for e in prepared.train}, set(prepared.flipped)

    rows, wrong = noisy(0.4, None)
    assert len(wrong) == int(0.4 * len(rows) + 0.5)  # exact where all rows are used
    fewer, less = noisy(0.2, None)
    assert less < wrong and all(fewer[name] == rows[name] for name in less)
    for limit in (10, 20):
        part, some = noisy(0.4, limit)
        assert some == wrong & part.keys() and len(part) == limit
        assert all(part[name] == rows[name] for name in part), "a row has another label under another limit"


def test_train_rows_are_judged_whatever_the_files_order(folder):
    records = [{"text": f"t{i}", "label": "abcd"[i // 50]} for i in range(200)]
    write_jsonl(folder / "code.jsonl", records)  # sorted by class

    text = PLAIN.replace("TASK", "classify")
    prepared = prepare_data(recipe_of(folder, text, **{"data.train.limit": None}))

    def judged(limit: int | None, seed: int = 0) -> list[str]:
        recipe = recipe_of(folder, text, **{"eval.train_limit": limit, "train.seed": seed})
        return [example.id for example in sample_train_for_eval(recipe, prepared.train)]

    label = {example.id: example.labels for example in prepared.train}
    some = judged(60)
    assert len(some) == 60 and len({label[name] for name in some}) == 4
    assert set(judged(20)) < set(some) and judged(60) == some != judged(60, seed=1)
    assert judged(None) == judged(0) == [] and judged(1000) == [example.id for example in prepared.train]


def test_a_cell_judges_training_rows_unless_its_recipe_says_otherwise():
    for given, found in ((None, 1000), (0, 0), (7, 7)):
        resolved = load_recipe("classify", [from_override("eval.train_limit", given)])
        assert make_cell(resolved, point={}, seed=0).resolved.recipe.eval.train_limit == found
    assert load_recipe("classify").recipe.eval.train_limit is None


def test_what_changes_the_tokens_changes_the_entry_and_nothing_else_does(folder):
    plain = PLAIN.replace("TASK", "classify")

    def key(text=plain, **overrides):
        overrides = {"data.cache": str(folder / "cache"), **overrides}
        return tokens.open_token_cache(recipe_of(folder, text, **overrides))[1]

    base = key()
    assert key(**{"train.steps": 9, "train.batch_size": 2, "optimizer.lr": 0.1, "adapter.rank": 2}) == base
    other = {"train.max_length": 9}, {"train.truncation": "left"}, {"data.train.limit": 7}, {"data.holdout": 0.3}
    more = {"train.seed": 1}, {"data.columns.text": "label"}, {"data.bad_rows": "skip"}, {"train.overlong": "drop"}
    keys = [key(**override) for override in (*other, *more)]
    assert len({base, *keys}) == 9
    unlimited = "task: {kind: classify}\ndata: {train: {files: [DIR/code.jsonl]}}"
    assert key(unlimited) == key(unlimited, **{"train.seed": 1})  # no draw by seed
    (folder / "code.jsonl").rename(folder / "moved.jsonl")
    assert key(plain.replace("code", "moved")) == base
    with (folder / "moved.jsonl").open("a") as file:
        file.write('{"text": "more", "label": "a"}\n')
    assert key(plain.replace("code", "moved")) != base
    moved = prepare_data(recipe_of(folder, plain.replace("code", "moved")))
    assert str(folder / "moved.jsonl:") in moved.train[0].where


def test_which_inputs_are_kept_by_themselves(folder, monkeypatch):
    recipe = recipe_of(folder, PLAIN.replace("TASK", "classify"))
    monkeypatch.setenv("FLATSHIFT_CACHE", str(folder / "own"))
    assert tokens.open_token_cache(recipe) is None and not (folder / "own").exists()
    monkeypatch.setattr(tokens, "WORTH_KEEPING", 100)
    prepare_data(recipe)
    assert len(list((folder / "own").glob("tokens-*"))) == 1
    off = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, cache=None))
    assert tokens.open_token_cache(off) is None
    hub = dataclasses.replace(recipe.data.train, files=("hub:a/b@main:train",), limit=None)
    note = tokens.open_token_cache(dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, train=hub)))
    assert "hub:a/b@main:train names no commit" in note
    commit = dataclasses.replace(hub, files=(f"hub:a/b@{'0' * 40}:train",))
    assert tokens.open_token_cache(dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, train=commit)))[1]
    blocked = folder / "file"
    blocked.write_text("")
    named = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, cache=str(blocked / "x")))
    with pytest.raises(UserError, match=r"data\.cache: .*Not a directory; name a directory"):
        prepare_data(named)
    monkeypatch.setenv("FLATSHIFT_CACHE", str(blocked / "x"))
    spared = prepare_data(recipe)
    assert "not used" in spared.notes[0] and spared.train == prepare_data(off).train


def test_relative_sources_become_absolute_and_where_things_are_kept_names_no_result(folder, monkeypatch):
    monkeypatch.chdir(folder)
    recipe = recipe_of(folder, MIXED.replace("DIR/", ""), **{"data.cache": "kept"})
    assert recipe.data.train.sources["code"].files == (str(folder / "code.jsonl"),)
    assert recipe.data.cache == str(folder / "kept")
    other = recipe_of(folder, MIXED, **{"data.cache": None})
    assert recipe_key(recipe, []) == recipe_key(other, [])
    path = folder / "run"
    path.mkdir()
    resolved = load_recipe(str(folder / "recipe.yaml"))
    (path / "recipe.resolved.yaml").write_text(resolved.to_yaml(), encoding="utf-8")
    assert resume_recipe(path).recipe == resolved.recipe
    assert resume_recipe(path, [from_override("data.cache", "elsewhere")]).recipe.data.cache == "elsewhere"
    with pytest.raises(UserError, match=r"--data\.train\.sources\.code\.weight: a run keeps all but mesh"):
        resume_recipe(path, [from_override("data.train.sources.code.weight", "2")])


def batches_of(prepared, recipe) -> TrainingDataLoader:
    settings = {"batch_size": 4, "seed": 0, "max_length": 48, "pad_id": 0}
    return TrainingDataLoader(prepared.train, task=recipe.task, mixture=prepared.mixture, **settings)


def test_how_far_the_sources_go_is_told_and_a_strict_one_refused(folder):
    recipe = recipe_of(folder, MIXED, **{"data.train.sources.talk.when_over": "refuse"})
    prepared = prepare_data(recipe)
    made = batches_of(prepared, recipe)
    size = prepared.mixture.sizes[1]
    told = count_source_epochs(made, prepared.mixture, size)  # 4 samples a step, one of them from `talk`
    assert [one["drawn"] for one in told] == [3 * size, size] and told[1]["epochs"] == 1
    drawn = Counter(i >= 30 for step in range(size) for micro in made.rows_at(step) for (i,) in micro)
    assert drawn == {False: 3 * size, True: size}
    lines = format_source_epochs(told, size, approximate=False)
    assert lines[1] == f"source talk: 25.0% of samples, {size} samples, 1.00 epochs in {size} steps"
    with pytest.raises(UserError, match=r"sources\.talk: its \d+ samples are over before .* or set when_over: repeat"):
        count_source_epochs(made, prepared.mixture, size + 1)


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ("{sources: {a: {files: [x.jsonl], weight: 0}, b: {files: [y.jsonl], weight: 0}}}", r"no weight above 0"),
        ("{sources: {}}", r"no weight above 0"),
        ("{sources: {a: {files: [x.jsonl], weight: -1}}}", r"sources\.a\.weight must be .*got -1"),
        ("{sources: {a: {files: []}}}", r"sources\.a\.files is empty"),
        ("{sources: {a: {file: [x.jsonl]}}}", r"unknown key .*did you mean 'data.train.sources.a.files'"),
        ("{files: [x.jsonl], sources: {a: {files: [x.jsonl]}}}", r"sources and data\.train\.files cannot both be set"),
        ("{limit: 3, sources: {a: {files: [x.jsonl]}}}", r"limit is of data\.train\.files alone"),
        ("{sources: {a: {files: [x.jsonl], when_over: stop}}}", r"when_over cannot be 'stop'"),
    ],
)
def test_sources_that_cannot_be_mixed(train, words, folder):
    with pytest.raises(UserError, match=words) as error:
        recipe_of(folder, f"data:\n  train: {train}\n")
    assert "recipe.yaml:" in str(error.value)


def test_rows_that_end_early_or_are_none(folder):
    write_jsonl(folder / "empty.jsonl", [])
    for text, words in (
        ("{files: [DIR/code.jsonl], first: 99}", r"data\.train\.first: 99 rows are asked for, .* ends after 40"),
        ("{sources: {a: {files: [DIR/code.jsonl], first: 41}}}", r"sources\.a\.first: 41 rows"),
        ("{sources: {a: {files: [DIR/code.jsonl]}, b: {files: [DIR/empty.jsonl]}}}", r"no b rows: .* is empty"),
        ("{sources: {a: {files: [DIR/code.jsonl], limit: 50}}}", r"data\.train\.sources\.a\.limit: 50 is above the 40"),
        ("{sources: {a: {files: [DIR/none.jsonl]}}}", r"none\.jsonl: no such file"),
    ):
        with pytest.raises(UserError, match=words):
            prepare_data(recipe_of(folder, f"task: {{kind: language-model}}\ndata:\n  train: {text}\n"))
    with pytest.raises(UserError, match=r"train\.overlong: drop leaves no training row, as all 40"):
        long = {"train.overlong": "drop", "train.max_length": 4}
        prepare_data(
            recipe_of(folder, "task: {kind: language-model}\ndata: {train: {files: [DIR/code.jsonl]}}", **long)
        )
    with pytest.raises(UserError, match=r"train\.group: length has no use with task\.pack: true"):
        check_recipe(recipe_of(folder, "task: {kind: language-model}", **{"train.group": "length"}))


@pytest.mark.parametrize("streamed", [False, True])
def test_losses_are_shares_of_all_rows_of_a_split_or_source(streamed, folder, monkeypatch):
    monkeypatch.setattr(tokens, "_CHUNK", 2)  # in the first chunk one row of two is cut
    if streamed:
        monkeypatch.setattr(tokens, "IN_MEMORY", 0)
    rows = [{"text": "word " * (1 if i else 60), "label": "no " * (60 if i == 1 else 1)} for i in range(12)]
    write_jsonl(folder / "long.jsonl", rows)
    text = "task: {kind: TASK}\ndata: {train: {sources: {a: {files: [DIR/long.jsonl]}}}}"
    completion, plain = text.replace("TASK", "completion"), text.replace("TASK", "language-model")
    told = "2 of 12 samples (17 %) are cut to train.max_length = 24 tokens, 1 of them in their answer, 1 to no prompt"
    told += " at all; 66 tokens would hold 99 % of them whole"
    made = prepare_data(recipe_of(folder, completion, **{"train.max_length": 24, "train.max_cut": 0.2}))
    assert made.truncated == 2 and f"train (a): {told}" in made.notes
    with pytest.raises(
        UserError, match=r"train \(a\): 1 of 12 samples lose their whole prompt .* train\.max_cut \(0\)"
    ):
        prepare_data(recipe_of(folder, completion, **{"train.max_length": 24}))
    few = {"train.max_length": 24, "task.max_truncated": 0.05}
    with pytest.raises(
        UserError, match=r"train \(a\): 1 of 12 samples have an answer that is cut at train\.max_length"
    ):
        prepare_data(recipe_of(folder, completion, **few))
    recipe = recipe_of(folder, completion, **few)
    judged = (("test", 0, row) for row in read_rows([str(folder / "long.jsonl")]))
    how = {"task": recipe.task, "labels": None, "paths": [str(folder / "long.jsonl")], "name": "--data"}
    judged = tokens.encode_rows(recipe, judged, **how)
    assert len(judged.splits["test"]) == 12 and judged.notes == [f"--data: {told}"]
    drop = {"train.max_length": 24, "train.overlong": "drop"}
    assert prepare_data(recipe_of(folder, plain, **drop)).dropped == 1
    with pytest.raises(
        UserError, match=r"train \(a\): 1 of 12 samples are longer than .* train\.max_dropped \(0\.05\)"
    ):
        prepare_data(recipe_of(folder, plain, **drop, **{"train.max_dropped": 0.05}))


ANSWERED = """
task: {kind: completion, prompt: "{text}", completion: " {label}", pack: false, score: generate, max_new_tokens: 8}
data: {train: {files: [DIR/code.jsonl]}, test: {files: [DIR/long.jsonl]}, cache: null}
eval: {train_limit: 0}
"""


@pytest.mark.parametrize("split", ["train", "dev", "test"])
def test_a_judged_prompt_without_room_for_its_answer_is_refused_before_training(folder, split):
    write_jsonl(folder / "long.jsonl", [{"text": "alpha beta " * 600, "label": "a"}])
    files = {f"data.{name}.files": str(folder / "dev.jsonl") for name in ("train", "dev", "test")}
    files |= {f"data.{split}.files": str(folder / "long.jsonl")}
    how = {"train.max_length": 1024, "train.max_cut": 1}
    with pytest.raises(UserError, match=r"long\.jsonl:1: a prompt of .* do not fit the backbone's 1024 positions"):
        prepare_data(recipe_of(folder, ANSWERED, **files, **how, **{"eval.train_limit": 1}))
    if split == "train":
        prepare_data(recipe_of(folder, ANSWERED, **files, **how))  # not judged


def test_samples_beyond_the_positions_of_a_rotary_backbone_are_said(folder):
    write_jsonl(folder / "long.jsonl", [{"text": "alpha beta " * 600, "label": "a"}])
    files = {"data.train.files": str(folder / "long.jsonl"), "data.test.files": "[]", "task": "language-model"}

    def notes(length):
        how = {"train.max_length": length, "train.max_cut": 1}
        return list(prepare_data(recipe_of(folder, ANSWERED, **files, **how)).notes)

    cut, said = notes(1025)
    assert cut.startswith("train: 1 of 1 samples (100 %) are cut") and said.startswith(
        "the longest sample has 1,025 tokens, and this backbone was made for 1,024 positions"
    )
    assert len(notes(1024)) == 1
