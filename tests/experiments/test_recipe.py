"""Recipes: YAML 1.2 scalars, strict keys with file:line, merge order, overrides, round trip."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from flatshift.experiments.recipe import from_mapping, from_override, load_recipe, resume_recipe, shipped_recipes
from flatshift.experiments.recipe.resolve import is_given, resolve_object, resolve_tree
from flatshift.experiments.recipe.schema import Recipe, Select, dotted_keys, list_keys, split_key
from flatshift.experiments.recipe.tree import Leaf, parse
from flatshift.experiments.studies.sweep.sweep_plan import SweepBase
from flatshift.finetune.config import Train
from flatshift.finetune.data.config import Data, Files, TrainFiles
from flatshift.finetune.errors import UserError
from flatshift.finetune.tasks import Chat, Classify
from flatshift.regularizers.config import GGPO, Plain
from flatshift.selection.config import Cynical, GotD


@pytest.fixture
def write(tmp_path: Path):
    def _write(text: str, name: str = "r.yaml") -> str:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return _write


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5e-4", 5e-4),
        ("no", "no"),
        ("yes", "yes"),
        ("on", "on"),
        ("true", True),
        ("0x1F", 31),
        ("0o17", 15),
        ("017", 17),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        (".inf", float("inf")),
        ("~", None),
        ("2024-01-01", "2024-01-01"),
        ("'5'", "5"),
    ],
)
def test_scalars_follow_the_yaml_1_2_core_schema(text: str, value: object) -> None:
    leaf = parse(text, "f")
    assert isinstance(leaf, Leaf)
    assert leaf.value == value and type(leaf.value) is type(value)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("trian: {}", 1, "'train'"),
        ("train:\n  stps: 3", 2, "'train.steps'"),
        ("train:\n  steps: x", 2, "whole number"),
        ("train:\n  steps: 1.5", 2, "whole number"),
        ("train:\n  steps: true", 2, "whole number"),
        ("\ntrain:\n  steps: -1", 3, "≥ 1"),
        ("data: {holdout: 0.2, dev: {files: [d]}, test: {files: [t]}}", 1, "set nothing apart"),
        ("optimizer: {lr: fast}", 1, "a number"),
        ("regularizer: ggop", 1, "'ggpo'"),
        ("task:\n  kind: classify\n  pack: true", 3, "task.pack"),
        ("train:\n  steps: 1\n  steps: 2", 3, "already given"),
        ("backbone: !!python/object:os.system x", 1, "plain values"),
        ("adapter: [1]", 1, "mapping"),
        ("backbone: {a: 1}", 1, "single value"),
        ("optimizer: {schedule: cosin}", 1, "'cosine'"),
        ("optimizer: {betas: [0.9]}", 1, "2 values"),
        ("a: [", 1, "YAML"),
        ("mesh: {zero: true}", 1, "mesh.zero cannot be True; known: 1, 2, 3"),
        ("task: {kind: chat, metrics: [numeric_match]}", 1, ": task.metrics evaluates generated text"),
        ("extends: ''", 1, "extends cannot be ''"),
        ("data: {label_noise: 2}", 1, "between 0 and 1"),
    ],
)
def test_mistakes_name_place_and_fix(write, text: str, line: int, words: str) -> None:
    path = write(text)
    with pytest.raises(UserError) as caught:
        load_recipe(path)
    assert str(caught.value).startswith(f"{path}:{line}:")
    assert words in str(caught.value)


def test_order_is_defaults_extends_file_flags(write) -> None:
    write("train: {steps: 1, batch_size: 2, seed: 3}\nadapter: {rank: 4}", "base.yaml")
    path = write("extends: base.yaml\ntrain: {batch_size: 5, seed: 6}")
    resolved = load_recipe(path, [from_override("train.seed", "7")])
    train = resolved.recipe.train
    assert (train.steps, train.batch_size, train.seed) == (1, 5, 7)
    assert train.accumulate == Recipe().train.accumulate
    assert resolved.origins["train.steps"].endswith("base.yaml:1")
    assert resolved.origins["train.batch_size"].endswith("r.yaml:2")
    assert resolved.origins["train.seed"] == "--train.seed"
    assert "train.accumulate" not in resolved.origins


def test_circular_extends_is_refused(write) -> None:
    write("extends: r.yaml", "other.yaml")
    with pytest.raises(UserError, match="circle"):
        load_recipe(write("extends: other.yaml"))


def test_changing_a_kind_drops_the_other_kinds_settings(write) -> None:
    path = write("regularizer: {kind: ggpo, sigma: 0.1}")
    assert load_recipe(path, [from_override("regularizer.kind", "plain")]).recipe.regularizer == Plain()
    assert load_recipe(path, [from_override("regularizer.beta", "2")]).recipe.regularizer == GGPO(sigma=0.1, beta=2.0)


def test_bare_kind_stands_for_its_mapping(write) -> None:
    path = write("regularizer: ggpo\ntask: classify")
    recipe = load_recipe(path, [from_override("regularizer.sigma", "0.2")]).recipe
    assert recipe.regularizer == GGPO(sigma=0.2)
    assert recipe.task == Classify()
    own = write("regularizer: {kind: ggpo, sigma: 0.15, beta: 0.0}", "own.yaml")
    kept = load_recipe(own, [from_override("regularizer", "ggpo", "--grid regularizer")])
    assert kept.recipe.regularizer == GGPO(sigma=0.15, beta=0.0)
    assert kept.origins["regularizer.kind"] == "--grid regularizer"
    assert kept.origins["regularizer.sigma"].endswith("own.yaml:1")
    assert load_recipe(own, [from_override("regularizer", "plain")]).recipe.regularizer == Plain()
    again = [from_override("regularizer", "plain"), from_override("regularizer", "ggpo")]
    assert load_recipe(own, again).recipe.regularizer == GGPO(), "another kind lay between: its defaults"


def test_dashes_and_underscores_are_equal_in_flags() -> None:
    assert load_recipe(None, [from_override("train.batch-size", "3")]).recipe.train.batch_size == 3


def test_names_of_ones_own_are_taken_as_they_are(write) -> None:
    """Also as one of several words, `--data.train.sources.my-set.files a b`."""
    path = write("data: {train: {sources: {my-set: {files: [a], weight: 2}, other_set: {files: [b]}}}}")
    for override in (
        from_override("data.train.sources.my-set.weight", "5"),
        from_mapping({"data.train.sources.my-set.weight": 5}),
    ):
        sources = load_recipe(path, [override]).recipe.data.train.sources
        assert {name: source.weight for name, source in sources.items()} == {"my-set": 5, "other_set": 1}
    ranks = load_recipe(None, [from_override("adapter.ranks.q-proj", "3"), from_override("train.batch-size", "2")])
    assert (ranks.recipe.adapter.ranks, ranks.recipe.train.batch_size) == ({"q-proj": 3}, 2)
    assert split_key("data.train.sources.my-set.when-over") == (
        ["data", "train", "sources", "my-set", "when_over"],
        "data.train.sources.NAME.when_over",
    )
    assert "data.train.sources.NAME.files" in list_keys() and "comparison.tasks.NAME.file" in dotted_keys()


def test_only_a_file_extends(write) -> None:
    for override in (from_override("extends", "chat"), from_mapping({"extends": "chat"})):
        with pytest.raises(UserError, match=r"^(--extends|overrides): `extends` is for recipe files; name that recipe"):
            load_recipe("classify", [override])
        with pytest.raises(UserError, match="`extends` is for recipe files"):
            SweepBase.of("double-descent", [override])
    assert load_recipe(write("extends: chat")).recipe.task.kind == "chat"


def test_text_fields_take_flags_as_typed() -> None:
    for typed in ("1", "no", "{text} =>", " {label}", "a: b", "[x", "'quoted'"):
        assert load_recipe(None, [from_override("data.columns.label", typed)]).recipe.data.columns.label == typed
    over = load_recipe("preference", [from_override("task.answer", "{answer}")])
    assert over.recipe.task.answer == "{answer}", "also where the recipe says another text"


def test_relative_inputs_become_absolute_and_samples_stay(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    override = from_override("data.train.files", ("rows.jsonl", "sample:scicite/train"))
    assert load_recipe(None, [override]).recipe.data.train.files == (
        str(tmp_path / "rows.jsonl"),
        "sample:scicite/train",
    )
    (tmp_path / "here").mkdir()
    for kind, path, found in (
        ("encoder", "here", str(tmp_path / "here")),
        ("encoder", "hub/name", "hub/name"),
        ("static", "./here", str(tmp_path / "here")),
    ):
        vectors = [from_override("select.embedder.kind", kind), from_override("select.embedder.path", path)]
        assert load_recipe("warmup", vectors).recipe.select.embedder.path == found


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_resolved_yaml_loads_to_the_same_recipe(name: str, write) -> None:
    resolved = load_recipe(name)
    again = load_recipe(write(resolved.to_yaml()))
    whole = dataclasses.replace(resolved.recipe, extends=None)  # what it extends is in it
    assert dataclasses.asdict(again.recipe) == dataclasses.asdict(whole)


def test_the_four_promised_recipes_ship() -> None:
    assert {"warmup", "language-model", "classify", "double-descent"} <= shipped_recipes().keys()


def test_resume_may_change_steps_and_mesh_only(tmp_path: Path) -> None:
    (tmp_path / "recipe.resolved.yaml").write_text(load_recipe("classify").to_yaml(), encoding="utf-8")
    assert resume_recipe(tmp_path, [from_override("train.steps", "999")]).recipe.train.steps == 999
    with pytest.raises(UserError, match=r"--optimizer\.lr"):
        resume_recipe(tmp_path, [from_override("optimizer.lr", "0.5")])
    with pytest.raises(UserError, match="not a run directory"):
        resume_recipe(tmp_path / "nowhere")


def test_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(UserError, match="'warmup'"):
        load_recipe("wamup")


def test_keys_that_later_versions_add_rename_no_finished_run() -> None:
    """What `recipe_key` was at 0.1.0, before sources, trackers, compiled blocks and other optimizers came, before the
    machine chose the precision, which the recipes named, and when training rows were evaluated too."""
    from flatshift.experiments.recipe import from_override, load_recipe, recipe_key

    bf16 = [from_override("train.precision", "bf16"), from_override("eval.train_limit", "1000")]

    before = {
        "classify": "6b6154076e4aa60b",
        "double-descent": "4a2ce05d5a6f5f7d",
        "flat-comparison": "9826379f05a18d2f",
        "language-model": "0337a8c0cfb2730b",
        "warmup": "ccbe761224e21445",
    }
    first = {"select.method": "gotd", "select.embedder.dim": 128}  # what the recipe `warmup` named then
    warm = [from_override(key, value) for key, value in first.items()]
    steps = {"classify": 200, "language-model": 150}  # and how long these two were
    then = {
        name: [from_override(f"train.{key}", value) for key, value in (("steps", count), ("eval_every", 50))]
        for name, count in steps.items()
    }
    then["language-model"].append(from_override("train.overlong", "null"))
    then["warmup"] = warm
    read = {name: load_recipe(name, [*bf16, *then.get(name, ())]) for name in before}
    assert {name: recipe_key(resolved.recipe, []) for name, resolved in read.items()} == before
    changed = {"seq2seq": "5c5ff5185db78236", "completion": "4f54fcaab7d0201e"}
    for kind, key in changed.items():
        laid = [*bf16, *then["language-model"], from_override("task.kind", kind)]
        assert recipe_key(load_recipe("language-model", laid).recipe, []) == key
    watched = [
        *bf16,
        *then["classify"],
        from_override("tracker.kinds", "tensorboard"),
        from_override("train.peak_tflops", "1"),
    ]
    assert recipe_key(load_recipe("classify", watched).recipe, []) == before["classify"]
    other = [*bf16, from_override("optimizer.kind", "adamw-8bit")]
    assert recipe_key(load_recipe("classify", other).recipe, []) != before["classify"]


@pytest.mark.parametrize(
    ("text", "kind", "origin"),
    [
        ("select: {budget: 3}", "cynical", None),
        ("select: {embedder: backbone}", "gotd", "r.yaml:1"),
        ("select: {embedder: {kind: tfidf, dim: 16}, method: {epsilon: 0.1}}", "gotd", "r.yaml:1"),
        ("select: {embedder: tfidf, method: {kind: knn}}", "knn", "r.yaml:1"),
        ("select: {embedder: tfidf, method: dsir}", "dsir", "r.yaml:1"),
    ],
)
def test_a_selection_without_a_method_goes_by_whether_an_embedder_is_named(write, text, kind, origin) -> None:
    resolved = load_recipe(write(text))
    assert resolved.recipe.select.method.kind == kind
    assert resolved.origins.get("select.method.kind", "").endswith(origin or "")
    again = load_recipe(write(resolved.to_yaml(), "again.yaml"))
    assert again.recipe.select.method == resolved.recipe.select.method


def test_a_setting_of_another_method_than_the_default_names_those_that_have_it(write) -> None:
    with pytest.raises(
        UserError, match=r"r\.yaml:1: without select\.method\.kind there is no 'epsilon'; name .*\(gotd, gotd-c"
    ):
        load_recipe(write("select: {method: {epsilon: 0.1}}"))
    with pytest.raises(
        UserError,
        match=r"1: unknown key 'select\.method\.mixture': select\.method is moore-lewis, and mixture is a setting of "
        r"cynical, gotd; known: kind, memory_gib, minimum, prior, share",
    ):
        load_recipe(write("select: {method: {kind: moore-lewis, mixture: 0.5}}"))


def test_a_resumed_run_says_where_its_values_came_from_in_the_first_place(tmp_path):
    first = load_recipe("warmup", [from_override("train.steps", 7, "--train.steps")])
    (tmp_path / "recipe.resolved.yaml").write_text(first.to_yaml(), encoding="utf-8")
    assert resume_recipe(tmp_path).to_yaml() == first.to_yaml()
    again = resume_recipe(tmp_path, [from_override("train.steps", 9, "--train.steps now")])
    changed = set(again.to_yaml().splitlines()) - set(first.to_yaml().splitlines())
    assert changed == {"  steps: 9  # --train.steps now"}
    by_hand = first.to_yaml().replace("rank: 8  #", "rank: 4  #")
    (tmp_path / "recipe.resolved.yaml").write_text(by_hand, encoding="utf-8")
    assert "rank: 4" in resume_recipe(tmp_path).to_yaml()


def test_an_embedder_chooses_the_method_over_a_resolved_recipe_too(write) -> None:
    plain, given = load_recipe(write("select: {budget: 3}")), [from_override("select.embedder", "tfidf")]
    for resolved in (plain, resolve_object(Recipe(select=Select(budget=3)))):
        assert resolved.recipe.select.method.kind == "cynical"
        assert resolve_tree(resolved.tree(), (), name="r").recipe.select == resolved.recipe.select
        again = resolve_tree(resolved.tree(), given, name="r")
        assert again.recipe.select.method == GotD() and again.origins["select.method.kind"] == "--select.embedder"
        more = resolve_tree(resolved.tree(), [*given, from_override("select.method.epsilon", "0.1")], name="r")
        assert more.recipe.select.method == GotD(epsilon=0.1)
    named = load_recipe(write("select: {method: cynical}"))
    assert resolve_tree(named.tree(), given, name="r").recipe.select.method == Cynical()


def test_what_a_recipe_made_in_python_leaves_at_its_default_is_not_given() -> None:
    resolved = resolve_object(Recipe(task=Chat(turns="last"), train=Train(epochs=2)))
    assert resolved.origins == dict.fromkeys(("task.kind", "task.turns", "train.epochs"), "Recipe")
    assert not is_given(resolved, "task.pack") and resolved.recipe.task == Chat(turns="last")
    for name in shipped_recipes():
        assert resolve_object(load_recipe(name).recipe).recipe == load_recipe(name).recipe, name


def test_own_rows_take_the_place_of_an_objects_samples() -> None:
    shipped = resolve_object(load_recipe("classify").recipe)
    mine = [from_mapping({"data.train.files": ["mine.jsonl"]})]
    data = resolve_tree(shipped.tree(), mine, name="r").recipe.data
    assert (data.dev.files, data.test.files, data.holdout) == ((), (), 0.1)
    theirs = resolve_tree(shipped.tree(), [from_mapping({"data.train.files": ["sample:snli/train"]})], name="r")
    assert theirs.recipe.data.dev == shipped.recipe.data.dev, "a sample beside a sample"
    both = Data(train=TrainFiles(files=("mine.jsonl",)), test=Files(files=("sample:banking/test",)))
    assert resolve_object(Recipe(data=both)).recipe.data.test == both.test, "what the object itself says"
