"""A process opens a backbone once: one look for its directory, one read of its configuration, one tokenizer; and what
a stage trained in is what it is judged in, so that a run loads its weights once."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import transformers

from flatshift.experiments.data.splits import prepare_data
from flatshift.experiments.recipe import Resolved, load_recipe
from flatshift.experiments.results.cells import read_result
from flatshift.experiments.run.console import Console
from flatshift.experiments.studies.cell import make_cell, run_cell
from flatshift.experiments.studies.compare.comparison_plan import ComparisonProbe
from flatshift.experiments.workflows.build import evaluate_splits, load_model
from flatshift.experiments.workflows.train import train
from flatshift.finetune.errors import UserError
from flatshift.finetune.models import backbone as module
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.parallel import build
from tests.support.finetune_models import save_backbone

RECIPE = """
backbone: flatshift-5m
task: {kind: classify, labels: [odd, even]}
data:
  train: {files: [rows.jsonl]}
  holdout: 0.2
adapter: {rank: 2}
train: {steps: 2, batch_size: 4, max_length: 16, max_cut: 1, eval_every: 1, device: cpu, precision: fp32,
  peak_tflops: 1}
"""


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    found: Counter[str] = Counter()

    def counted(owner: object, name: str, what: str) -> None:
        plain = getattr(owner, name)

        def call(*args: object, **options: object) -> object:
            found[what] += 1
            return plain(*args, **options)

        monkeypatch.setattr(owner, name, call)

    monkeypatch.setattr(module, "_opened", {})
    counted(module, "_resolve_directory", "directory")
    counted(transformers.AutoConfig, "from_pretrained", "config")
    counted(transformers.AutoTokenizer, "from_pretrained", "tokenizer")
    counted(build, "load_backbone", "weights")
    return found


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Resolved:
    monkeypatch.chdir(tmp_path)
    rows = ({"text": f"row {i} of them", "label": ("even", "odd")[i % 2]} for i in range(24))
    Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    Path("recipe.yaml").write_text(RECIPE)
    return load_recipe("recipe.yaml")


def test_one_train_opens_its_backbone_once(counts: Counter[str], recipe: Resolved, tmp_path: Path) -> None:
    found = train(recipe, tmp_path / "run", quiet=True)
    assert counts == {"directory": 1, "config": 1, "tokenizer": 1, "weights": 1}
    train(recipe, tmp_path / "another", quiet=True)
    assert counts == {"directory": 1, "config": 1, "tokenizer": 1, "weights": 2}
    prepared = prepare_data(recipe.recipe)
    anew = load_model(recipe.recipe, recipe.recipe.task, prepared.label_names, adapter=tmp_path / "run" / "adapter")
    console = Console(quiet=True)
    assert evaluate_splits(recipe.recipe, *anew, prepared, console, watch=console.evaluating) == found


def test_a_cell_of_a_comparison_loads_its_backbone_once(counts: Counter[str], recipe: Resolved, tmp_path: Path) -> None:
    probe = partial(ComparisonProbe, final=True, sharpness=0.01)
    cell = dataclasses.replace(make_cell(recipe, point={}, seed=0), probe=probe)
    run_cell(tmp_path / "cell", cell, 1)
    result = read_result(tmp_path / "cell")
    assert result["status"] == "done" and set(result["figures"]["items"]) <= {"0", "1"}
    assert counts["weights"] == 1


def test_only_what_is_asked_for_is_read(counts: Counter[str]) -> None:
    backbone = open_backbone("flatshift-5m")
    assert backbone.where == "backbone 'flatshift-5m'" and counts == {"directory": 1}
    assert not backbone.has_both_sides and counts == {"directory": 1, "config": 1}
    assert open_backbone("flatshift-5m") is open_backbone(backbone) is backbone


def test_a_directory_that_changed_is_opened_again(counts: Counter[str], tmp_path: Path) -> None:
    source = save_backbone("llama", tmp_path)
    before = open_backbone(source)
    config = json.loads((Path(source) / "config.json").read_text())
    (Path(source) / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True, "rms_norm_eps": 1e-3}))
    after = open_backbone(source)
    assert counts["directory"] == 2 and after is not before and after.config.rms_norm_eps == 1e-3
    (Path(source) / "model.safetensors").unlink()
    with pytest.raises(UserError, match="has no weights"):
        open_backbone(source)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "of five classes"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_labels": 1, "problem_type": "regression"},
        {"num_labels": 3, "id2label": {0: "a", 1: "b", 2: "c"}, "label2id": {"a": 0, "b": 1, "c": 2}},
    ],
)
def test_a_models_own_configuration_is_what_transformers_would_read(kind: str, settings: dict, tmp_path: Path) -> None:
    source = save_backbone("bert" if kind == "of five classes" else kind, tmp_path)
    if kind == "of five classes":
        config = transformers.AutoConfig.from_pretrained(
            source, num_labels=5, problem_type="single_label_classification"
        )
        config.save_pretrained(source)
    backbone = open_backbone(source)
    mine, theirs = backbone.own_config(settings), transformers.AutoConfig.from_pretrained(source, **settings)
    assert type(mine) is type(theirs) and mine.to_dict() == theirs.to_dict()
    mine.pad_token_id = 7
    assert backbone.config is not mine and backbone.own_config({}).to_dict() == backbone.config.to_dict()


def test_what_is_changed_and_saved_is_read_anew(counts: Counter[str]) -> None:
    backbone = open_backbone("flatshift-5m")
    backbone.own_tokenizer().chat_template = "{{ messages }}"
    assert backbone.tokenizer.chat_template != "{{ messages }}" and counts["tokenizer"] == 2
