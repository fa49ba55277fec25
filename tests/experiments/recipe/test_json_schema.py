"""The JSON schema of recipes: every recipe that ships validates, wrong ones do not, and every key has its meaning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flatshift.cli import run
from flatshift.experiments.recipe import gallery_recipes, load_recipe, read_shipped_recipe, shipped_recipes
from flatshift.experiments.recipe.build import to_python
from flatshift.experiments.recipe.json_schema import recipe_schema
from flatshift.experiments.recipe.schema import list_keys
from flatshift.experiments.recipe.tree import parse
from flatshift.finetune.errors import UserError

NAMES = [*shipped_recipes(), *gallery_recipes()]


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return recipe_schema()


def unknown_keys(schema: dict[str, Any], value: Any, path: str = "") -> list[str]:
    """Keys of mappings that no branch of the schema has; enough where jsonschema is not installed."""

    def properties(part: dict[str, Any]) -> dict[str, Any] | None:
        if "$ref" in part:
            return properties(schema["definitions"][part["$ref"].rpartition("/")[2]])
        branches = [properties(each) for each in (*part.get("anyOf", ()), *part.get("allOf", ()))]
        known = {key: child for branch in branches if branch for key, child in branch.items()}
        if part.get("type") == "object" and part.get("additionalProperties") is not False:
            return None
        return known | part.get("properties", {})

    def visit(part: dict[str, Any], value: Any, path: str) -> list[str]:
        known = properties(part)
        if not isinstance(value, dict) or not known:
            return []
        wrong = [f"{path}{key}" for key in value if key not in known]
        return wrong + [
            w for key in value.keys() & known.keys() for w in visit(known[key], value[key], f"{path}{key}.")
        ]

    return visit(schema, value, path)


def is_valid(schema: dict[str, Any], text: str) -> bool:
    value = to_python(parse(text, "recipe"))
    try:
        import jsonschema
    except ImportError:
        return not unknown_keys(schema, value)
    return bool(jsonschema.Draft7Validator(schema).is_valid(value))


def test_every_shipped_recipe_validates_and_so_does_what_a_run_writes(schema: dict[str, Any]) -> None:
    for name in NAMES:
        text = read_shipped_recipe(name)
        assert unknown_keys(schema, to_python(parse(text, name))) == [], name
        assert is_valid(schema, text), name
    for name in shipped_recipes():
        assert is_valid(schema, load_recipe(name).to_yaml()), name


@pytest.mark.parametrize(
    ("text", "needs_types"),
    [
        ("trian: {steps: 1}", False),
        ("train: {stepz: 1}", False),
        ("select: {hygiene: {dropz: []}}", False),
        ("task: {kind: chat, labels: [a]}", True),
        ("train: {steps: many}", True),
        ("train: {checkpointing: sometimes}", True),
        ("regularizer: gggpo", True),
        ("adapter: {layers: [first]}", True),
        ("optimizer: {betas: [0.9]}", True),
        ("backbone: 5", True),
        ("comparison: {tasks: {a: {train: 3}}}", True),
        ("record: {steps: 3}", True),
        ("adapter: {soft_tokens: 1, projector: {inject: 3}}", True),
        ("sweep: {grid: {regularizer: [{kind: ggpo}]}}", True),
    ],
)
def test_a_wrong_recipe_does_not(schema: dict[str, Any], text: str, needs_types: bool) -> None:
    if needs_types:
        pytest.importorskip("jsonschema")
    assert not is_valid(schema, text)


@pytest.mark.parametrize(
    "text",
    [
        *("task: chat", "task: {turns: last}", "adapter: {targets: q_proj}", "adapter: {targets: [q_proj]}"),
        *("regularizer: {sigma: 0.1}", "train: {epochs: null, eval_every: 0.5}", "select: {from: runs/one}", "{}"),
        *("data: {train: {sources: {a: {files: x.jsonl, weight: 2}}}}", "adapter: {alpha: rank}"),
        *(
            "extends: flat-comparison\ncomparison: {tasks: {trec: {train: 3}}}",
            "adapter: {layers: 1}",
            "comparison: null",
            "adapter: {layers: 1}",
        ),
        *("record: {steps: [3]}", "record: {steps: log}", "sweep: {grid: {adapter.rank: 4, train.seed: [1, 2]}}"),
    ],
)
def test_short_forms_validate(schema: dict[str, Any], text: str) -> None:
    assert is_valid(schema, text)


def test_an_optimizer_is_named_by_its_kind_alone(schema: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("optimizer: lora-muon")
    assert load_recipe(str(tmp_path / "mine.yaml")).recipe.optimizer.kind == "lora-muon"
    assert is_valid(schema, "optimizer: lora-muon")
    with pytest.raises(UserError, match=r"mine.yaml:1: optimizer.kind cannot be 'adam'; did you mean 'adamw'"):
        (tmp_path / "mine.yaml").write_text("optimizer: adam")
        load_recipe(str(tmp_path / "mine.yaml"))


def test_keys_choices_defaults_and_meanings_are_those_of_the_dataclasses(schema: dict[str, Any]) -> None:
    train = schema["definitions"]["Train"]["properties"]
    assert train["checkpointing"]["enum"] == ["none", "selective", "full"]
    assert train["checkpointing"]["description"].startswith("Recompute activations in the backward pass")
    assert train["steps"] == {"description": "Optimizer steps.", "type": "integer", "default": 200}
    assert {key.split(".")[1] for key in list_keys() if key.startswith("train.")} <= train.keys()
    without = [
        f"{name}.{key}"
        for name, part in schema["definitions"].items()
        for key, value in part["properties"].items()
        if not value["description"] and key != "kind" and not value.get("enum")
    ]
    assert len(without) <= 40, without


def test_the_command_prints_it_without_torch(schema: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(schema))
