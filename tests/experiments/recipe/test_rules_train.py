"""What a recipe says of the loop is read strictly, and refused in a sentence where it cannot be done."""

from __future__ import annotations

import dataclasses
import importlib.util
from functools import partial
from pathlib import Path

import pytest

from benchmarks.studies.selection_quality.settings import refuse_in_study
from flatshift.experiments.recipe import from_override, load_recipe
from flatshift.experiments.recipe.rules import CELL_RULES, check_recipe, check_rules
from flatshift.experiments.recipe.schema import Recipe
from flatshift.experiments.results.run import read_metrics
from flatshift.finetune.config import Adapter, Mesh, Optimizer, Projector, SpikeRecovery, TraceRecording, Tracker, Train
from flatshift.finetune.errors import UserError
from flatshift.finetune.run_directory import SPIKE, RunDirectory
from flatshift.finetune.tasks import Classify, LanguageModel

TEXT = """
task: language-model
optimizer: {kind: adamw-8bit}
train: {save_every: 50, skip_nonfinite: 2, spikes: {window: 32, back: 60}}
tracker: {kinds: [tensorboard, wandb], online: false}
"""


def test_blocks_are_read_from_yaml_and_flags(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(TEXT)
    recipe = load_recipe(str(tmp_path / "r.yaml"), [from_override("train.spikes.skip", "300")]).recipe
    assert recipe.optimizer == Optimizer(kind="adamw-8bit") and recipe.train.skip_nonfinite == 2
    assert recipe.train.spikes == SpikeRecovery(window=32, back=60, skip=300)
    assert recipe.tracker == Tracker(kinds=("tensorboard", "wandb"))
    only = load_recipe(None, [from_override("tracker.kinds", "trackio")]).recipe
    assert only.tracker.kinds == ("trackio",)
    assert load_recipe(None).recipe == Recipe()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("train: {spikes: {windw: 3}}", r"r\.yaml:1: unknown key 'train\.spikes\.windw'; .* 'train\.spikes\.window'"),
        ("train: {lr: 1e-3}", r"r\.yaml:1: unknown key 'train\.lr'; did you mean 'optimizer\.lr'"),
        ("train: {spikes: {window: 2}}", r"r\.yaml:1: train\.spikes\.window must be ≥ 4"),
        ("train:\n  save_every: 0\n  spikes: {}", r"r\.yaml:3: train\.spikes need checkpoints .*train\.save_every"),
        (
            "optimizer: {kind: adamw8bit}",
            r"r\.yaml:1: optimizer\.kind cannot be 'adamw8bit'; did you mean 'adamw-8bit'",
        ),
        (
            "adapter: {soft_tokens: 1, projector: {inject: 8}}",
            r"adapter\.projector\.inject cannot be 8; known: first, or a list, as \[8\]$",
        ),
        ("adapter: {soft_tokens: 1, projector: {inject: frist}}", r"inject cannot be 'frist'; did you mean 'first'\?$"),
        ("optimizer: {schedule: cosine_with_restarts}", r"cannot be 'cosine_with_restarts'; did you mean 'cosine'\?$"),
        ("tracker: {kinds: [tensorbord]}", r"r\.yaml:1: tracker\.kinds\[0\] cannot be 'tensorbord'"),
    ],
)
def test_a_slip_is_named_with_its_place(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(UserError, match=says):
        load_recipe(str(tmp_path / "r.yaml"))


def test_what_cannot_be_done_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    base = Recipe(task=LanguageModel(), train=Train(device="cpu"))

    def refused(says: str, **changes: object) -> None:
        with pytest.raises(UserError, match=says):
            check_recipe(dataclasses.replace(base, **changes))  # type: ignore[arg-type]

    check_recipe(base)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    refused(r"this is cpu; take adamw-8bit", optimizer=Optimizer(kind="paged-adamw-8bit"))
    refused(r"optimizer\.kind: .* needs one rank", optimizer=Optimizer(kind="adamw-8bit"), mesh=Mesh(dp=2))
    refused(r"leave mesh\.auto off", optimizer=Optimizer(kind="adamw-8bit"), mesh=Mesh(auto=True))
    compiled = Train(device="cpu", compile=True)
    check_recipe(dataclasses.replace(base, train=compiled, mesh=Mesh(dp=2, ep=2)))
    packed = dataclasses.replace(compiled, compile=False, quantization="nf4")
    refused(r"mesh\.ep > 1 does not go with train\.quantization", train=packed, mesh=Mesh(dp=2, ep=2))
    accurate = Train(device="cpu", best="accuracy")
    refused(r"train\.best: accuracy .* not for language-model; take loss", train=accurate)
    check_recipe(dataclasses.replace(base, train=accurate, task=Classify()))
    refused(r"train\.compile does not go with record", train=compiled, record=TraceRecording())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused(r"tracker\.kinds: wandb needs", tracker=Tracker(kinds=("wandb",)))
    tracked = dataclasses.replace(base, tracker=Tracker(kinds=("wandb",)))
    for check in (partial(check_rules, rules=CELL_RULES), refuse_in_study):
        check(base)
        with pytest.raises(UserError, match=r"cells of a sweep or study are not tracked"):
            check(tracked)
    with pytest.raises(UserError, match=r"too short to be compiled"):
        refuse_in_study(dataclasses.replace(base, train=compiled))
    with pytest.raises(UserError, match=r"adapter\.projector: a study's cells encode their rows without features"):
        refuse_in_study(dataclasses.replace(base, adapter=Adapter(soft_tokens=1, projector=Projector())))


def test_both_readers_forget_what_a_spike_undid(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run")
    for step in range(1, 9):
        run.log_metrics("s", attempt=1, step=step, split="train", loss=1.0)
    run.log_metrics("other", attempt=1, step=9, split="train", loss=1.0)
    run.log_metrics("s", attempt=1, step=6, split="dev", loss=1.0)
    run.log_metrics("s", attempt=1, step=9, split=SPIKE, loss=9.0, rewound_to=4)
    run.log_metrics("s", attempt=2, step=5, split="train", loss=2.0)  # and stopped early: 6 to 8 never come again
    from flatshift.finetune.run_directory import read_metrics as read

    wanted = [("s", "train", n) for n in (1, 2, 3, 4)] + [("other", "train", 9), ("s", "spike", 9), ("s", "train", 5)]
    assert [(r["stage"], r["split"], r["step"]) for r in read(run.path / "metrics.jsonl")] == wanted
    lines = read_metrics(run.path / "metrics.jsonl").lines
    assert [(r["stage"], r["split"], r["step"]) for r in lines] == wanted
