"""A backbone that was overwritten in place is refused by every command that lays a run's adapter on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from experiments.recipe import resume_recipe
from experiments.workflows import export, merge, train
from experiments.workflows.evaluate import evaluate_run
from experiments.workflows.generate import generate_from_run
from experiments.workflows.initial_adapter import backbone_record, check_backbone
from experiments.workflows.sharpness import measure_run
from finetune.errors import UserError
from tests.data_models import byte_tokenizer
from tests.finetune_models import save_backbone


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """As much of a run directory as is looked at before its backbone is laid out."""
    source = save_backbone("llama", tmp_path / "source", vocab_size=352)
    byte_tokenizer().save_pretrained(source)
    run = tmp_path / "run"
    (run / "adapter").mkdir(parents=True)
    for name in ("eval.json", "environment.json", "command.txt"):
        (run / name).write_text("{}", encoding="utf-8")
    (run / "recipe.resolved.yaml").write_text(
        f"backbone: {source}\ntask: language-model\ndata: {{train: {{files: [rows.jsonl]}}}}\n", encoding="utf-8"
    )
    record = backbone_record(resume_recipe(run).recipe)
    (run / "manifest.json").write_text(json.dumps({"inputs": [], "backbone": record}), encoding="utf-8")
    return run


def overwrite(run: Path) -> None:
    file = run.parent / "source" / "model.safetensors"
    save_file({name: tensor + 0.01 for name, tensor in load_file(file).items()}, file, {"format": "pt"})


COMMANDS = {
    "resume": lambda run, out: train.resume(run, quiet=True),
    "eval": lambda run, out: evaluate_run(run, quiet=True),
    "sharpness": lambda run, out: measure_run(run, quiet=True),
    "generate": lambda run, out: generate_from_run(run, prompts=["the cat"], quiet=True),
    "merge": merge.merge,
    "export": export.export,
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_refuses_it(name: str, finished: Path) -> None:
    overwrite(finished)
    with pytest.raises(
        UserError, match=rf"^{finished}: its backbone '.*source' has other weights than the run trained"
    ):
        COMMANDS[name](finished, finished.parent / "out")
    assert not (finished.parent / "out").exists()


def test_what_it_was_passes_and_so_does_a_run_that_noted_nothing(finished: Path) -> None:
    recipe = resume_recipe(finished).recipe
    check_backbone(finished, recipe)
    overwrite(finished)
    (finished / "manifest.json").write_text(json.dumps({"inputs": []}), encoding="utf-8")
    check_backbone(finished, recipe)
    (finished / "manifest.json").unlink()
    check_backbone(finished, recipe)
