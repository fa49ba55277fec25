"""A backbone that was overwritten in place is refused by every command that lays a run's adapter on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from flatshift.experiments.recipe import resume_recipe
from flatshift.experiments.workflows import export, train
from flatshift.experiments.workflows.evaluate import evaluate_run
from flatshift.experiments.workflows.generate import generate_from_run
from flatshift.experiments.workflows.run_parts import check_backbone
from flatshift.experiments.workflows.sharpness import measure_run_sharpness
from flatshift.finetune.errors import UserError
from flatshift.finetune.models.backbone import open_backbone
from tests.support.data_models import byte_tokenizer
from tests.support.finetune_models import save_backbone


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """As much of a run directory as is looked at before its backbone is laid out."""
    source = save_backbone("llama", tmp_path / "source", vocab_size=352)
    byte_tokenizer().save_pretrained(source)
    run = tmp_path / "run"
    (run / "adapter").mkdir(parents=True)
    for name in ("eval.json", "environment.json", "command.txt"):
        (run / name).write_text("{}", encoding="utf-8")
    (run / "done.json").write_text('{"files": {}}', encoding="utf-8")
    (run / "recipe.resolved.yaml").write_text(
        f"backbone: {source}\ntask: language-model\ndata: {{train: {{files: [rows.jsonl]}}}}\n", encoding="utf-8"
    )
    record = open_backbone(resume_recipe(run).recipe.backbone).record
    (run / "manifest.json").write_text(json.dumps({"inputs": [], "backbone": record}), encoding="utf-8")
    return run


def overwrite(run: Path) -> None:
    file = run.parent / "source" / "model.safetensors"
    save_file({name: tensor + 0.01 for name, tensor in load_file(file).items()}, file, {"format": "pt"})


def flip_tokenizer(source: Path) -> None:
    file = source / "tokenizer.json"
    file.write_bytes(file.read_bytes() + b" ")


def other_norm(source: Path) -> None:
    file = source / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": 0.5}))


BESIDE = {
    "tokenizer.json of its backbone .* is another one": flip_tokenizer,
    "config.json of its backbone .* is another one": other_norm,
    "tokenizer_config.json of its backbone .* is gone": lambda source: (source / "tokenizer_config.json").unlink(),
    "chat_template.jinja of its backbone .* is new": lambda source: (source / "chat_template.jinja").write_text(
        "{{1}}"
    ),
    "generation_config.json of its backbone .* is ": lambda source: (source / "generation_config.json").write_text(
        "{}"
    ),
}


COMMANDS = {
    "resume": lambda run, out: train.resume(run, quiet=True),
    "eval": lambda run, out: evaluate_run(run, quiet=True),
    "sharpness": lambda run, out: measure_run_sharpness(run, quiet=True),
    "generate": lambda run, out: generate_from_run(run, prompts=["the cat"], quiet=True),
    "merge": export.merge_run,
    "export": export.export_run,
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_refuses_it(name: str, finished: Path) -> None:
    overwrite(finished)
    with pytest.raises(
        UserError, match=rf"^{finished}: its backbone '.*source' has other weights than the run trained"
    ):
        COMMANDS[name](finished, finished.parent / "out")
    assert not (finished.parent / "out").exists()


@pytest.mark.parametrize("said", BESIDE)
def test_what_lies_beside_the_weights_counts_too(said: str, finished: Path) -> None:
    recipe = resume_recipe(finished).recipe
    BESIDE[said](finished.parent / "source")
    with pytest.raises(UserError, match=rf"^{finished}: {said}"):
        check_backbone(finished, recipe)
    manifest = json.loads((finished / "manifest.json").read_text(encoding="utf-8"))
    del manifest["backbone"]["files"]  # as runs noted it before
    (finished / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    check_backbone(finished, recipe)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_refuses_another_tokenizer(name: str, finished: Path) -> None:
    flip_tokenizer(finished.parent / "source")
    with pytest.raises(UserError, match=r"tokenizer\.json of its backbone .* is another one since the run was trained"):
        COMMANDS[name](finished, finished.parent / "out")
    assert not (finished.parent / "out").exists()


def test_a_file_that_no_model_is_read_from_may_change(finished: Path) -> None:
    (finished.parent / "source" / "README.txt").write_text("about")
    (finished.parent / "source" / "model.safetensors.index.json.orig").write_text("{}")
    check_backbone(finished, resume_recipe(finished).recipe)


def test_what_it_was_passes_and_so_does_a_run_that_noted_nothing(finished: Path) -> None:
    recipe = resume_recipe(finished).recipe
    check_backbone(finished, recipe)
    overwrite(finished)
    (finished / "manifest.json").write_text(json.dumps({"inputs": []}), encoding="utf-8")
    check_backbone(finished, recipe)
    (finished / "manifest.json").unlink()
    check_backbone(finished, recipe)
