"""Recording a stage: the same bits with and without it, the right lines after a kill, and the figures of a recipe."""

from __future__ import annotations

import json
import math

import pytest
import torch

from flatshift.experiments.data.splits import prepare_data
from flatshift.experiments.recipe import from_override, load_recipe
from flatshift.experiments.recipe.rules import check_recipe
from flatshift.experiments.workflows.context import LABEL_NOISE
from flatshift.experiments.workflows.train import train
from flatshift.finetune.adapters.adapter import attach_adapter, trainable
from flatshift.finetune.config import Adapter, Evaluate, Optimizer, TraceRecording, Train
from flatshift.finetune.data.example import Example
from flatshift.finetune.errors import Interrupted, UserError
from flatshift.finetune.models.fingerprint import checksum
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.run_directory import RunDirectory, read_metrics
from flatshift.finetune.tasks import LanguageModel
from flatshift.finetune.train.checkpointer import latest_checkpoint, select_group
from flatshift.finetune.train.stage import TrainingStage
from flatshift.finetune.train.trace.examples import Recording
from flatshift.finetune.train.trace.files import read_trace
from flatshift.finetune.train.trainer import Trainer
from flatshift.regularizers import GGPO, SAM, BiLora, NEFTune, Plain, build
from tests.support.finetune_models import IGNORED, PadOnly, RandomBatches, save_backbone

LM = LanguageModel()
STEPS = 8
ALWAYS = {"stage", "attempt", "step", "tokens", "lr", "time_s", "record_s"}
DYNAMICS = {"scale", "update.ratio", "balance", "stable_rank", "participation", "effective_params"}
OF_UPDATE = {"grad.a", "grad.b", "update.relative"}
CURVATURE = {"sharpness.lambda_max", "sharpness.trace", "sharpness.preconditioned"}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return save_backbone("gpt2-dropout", tmp_path_factory.mktemp("backbone"))


def texts(count, seed=5):
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(3, 20, (5 + i % 4,), generator=generator).tolist() for i in range(count)]
    return [Example(ids, [IGNORED, *ids[1:]], f"{seed}-{i}", "f") for i, ids in enumerate(rows)]


def recording(record):
    return Recording.choose(record, train=texts(6), dev=texts(3, 6), test=texts(4, 7), seed=0, flipped=["5-1", "5-4"])


def fit(source, run, record, *, regularizer=None, stop=None, precision="fp32", dev=(), **settings):
    """A short stage with dropout everywhere; returns the adapter's tensors."""
    model = attach_adapter(
        load_backbone(source, task=LM, precision=precision), Adapter(rank=3, dropout=0.2), task=LM, seed=0
    )
    before = checksum(model)
    Trainer(
        model,
        PadOnly(),
        TrainingStage(
            name="fine-tune",
            task=LM,
            batches=RandomBatches(accumulate=2),
            dev=list(dev),
            optimizer=Optimizer(lr=1e-2, clip=0.05),
            train=Train(steps=STEPS, save_every=3, precision=precision, **settings),
            evaluate=Evaluate(batch_size=2),
            regularizer=build(regularizer or Plain()),
            run=run,
            seed=0,
            stop=stop,
            recording=None if record is None else recording(record),
        ),
    ).fit()
    assert checksum(model) == before
    return {name: parameter.detach().clone() for name, parameter in trainable(model).items()}


def course(run):
    return [
        {k: v for k, v in line.items() if k not in {"time_s", "attempt"}}
        for line in read_metrics(run.path / "metrics.jsonl")
    ]


@pytest.mark.parametrize(
    ("regularizer", "precision"),
    [
        (Plain(), "fp32"),
        pytest.param(Plain(), "bf16", marks=[pytest.mark.bf16, pytest.mark.slow]),
        (GGPO(sigma=0.05), "fp32"),
        pytest.param(SAM(), "fp32", marks=pytest.mark.slow),
        pytest.param(BiLora(), "fp32", marks=pytest.mark.slow),
        pytest.param(NEFTune(), "bf16", marks=pytest.mark.bf16),
    ],
    ids=lambda value: getattr(value, "kind", value),
)
def test_recording_changes_no_bit(regularizer, precision, source, tmp_path):
    state = torch.random.get_rng_state()
    plain, recorded = RunDirectory.create(tmp_path / "plain"), RunDirectory.create(tmp_path / "recorded")
    without = fit(source, plain, None, regularizer=regularizer, precision=precision)
    record = TraceRecording(steps=(1, 2, 5), sharpness=(0, 5) if isinstance(regularizer, Plain | GGPO) else ())
    within = fit(source, recorded, record, regularizer=regularizer, precision=precision)
    assert all(torch.equal(without[name], tensor) for name, tensor in within.items())
    assert course(plain) == course(recorded)
    assert torch.equal(state, torch.random.get_rng_state())
    assert not (plain.path / "trace.jsonl").exists() and not (plain.path / "trace.json").exists()
    assert [line["step"] for line in read_trace(recorded.path)] == [0, 1, 2, 5, 8]


def test_what_a_line_holds(source, tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    last = fit(source, run, TraceRecording(steps=(2, 5), sharpness=(5,)))
    lines = {line["step"]: line for line in read_trace(run.path)}
    splits = {f"{split}.{name}" for split in ("train", "dev", "test") for name in ("loss", "error", "exact_error")}
    noise = {f"train.{name}" for name in ("error_clean", "error_noisy", "memorised", "recovered")}
    always = ALWAYS | splits | noise | DYNAMICS
    assert {step: line.keys() - always for step, line in lines.items()} == {
        0: set(),
        2: OF_UPDATE,
        5: OF_UPDATE | CURVATURE,
        8: OF_UPDATE,
    }
    assert all(always <= line.keys() for line in lines.values())
    assert lines[0]["lr"] is None and lines[0]["tokens"] == 0 and lines[0]["update.ratio"] == 0
    assert lines[5]["sharpness.preconditioned"] > 0
    metrics = {line["step"]: line for line in read_metrics(run.path / "metrics.jsonl")}
    for step in (2, 5, 8):
        assert lines[step]["lr"] == metrics[step]["lr"] and lines[step]["tokens"] == metrics[step]["tokens"]
        both = math.hypot(lines[step]["grad.a"], lines[step]["grad.b"])
        assert both == pytest.approx(metrics[step]["grad_norm"], rel=1e-5) and both > 0.05  # before clipping
    squares = {
        part: sum(float(t.double().square().sum()) for n, t in last.items() if part in n) for part in ("_A", "_B")
    }
    assert lines[8]["balance"] == pytest.approx(squares["_A"] - squares["_B"], rel=1e-6)
    about = json.loads((run.path / "trace.json").read_text())
    assert about["steps"] == [0, 2, 5, 8] and about["rows"] == {"train": 6, "dev": 3, "test": 4} and about["noisy"] == 2
    assert about["stability_threshold"] == pytest.approx(38)


def test_the_relative_update_is_that_of_the_factors(source, tmp_path):
    runs = [RunDirectory.create(tmp_path / name) for name in ("a", "b")]
    seen = {}

    def stop_at(step):
        asked = iter(range(1, STEPS + 1))
        return lambda: next(asked) == step

    for step, run in zip((4, 5), runs, strict=True):
        with pytest.raises(Interrupted):
            fit(source, run, TraceRecording(steps=(5,)), stop=stop_at(step))
        found = latest_checkpoint(run.state, stage="fine-tune", warn=pytest.fail)
        assert found is not None and found.step == step
        seen[step] = {n: t.double() for n, t in select_group(found.tensors, "adapter").items()}
    moved = sum(float((seen[5][n] - seen[4][n]).square().sum()) for n in seen[4])
    whole = sum(float(t.square().sum()) for t in seen[4].values())
    (line,) = [line for line in read_trace(runs[1].path) if line["step"] == 5]
    assert line["update.relative"] == pytest.approx(math.sqrt(moved / whole), rel=1e-4)


def test_after_a_kill_every_step_has_one_line_and_the_same_figures(source, tmp_path):
    whole, broken = RunDirectory.create(tmp_path / "whole"), RunDirectory.create(tmp_path / "broken")
    record = TraceRecording(per_doubling=4)
    wanted = fit(source, whole, record)

    class Killed(BaseException):
        pass

    asked = iter(range(1, STEPS + 1))

    def kill():
        if next(asked) == 5:
            raise Killed  # the newest checkpoint is of step 3
        return False

    with pytest.raises(Killed):
        fit(source, broken, record, stop=kill)
    with (broken.path / "trace.jsonl").open("a") as handle:
        handle.write('{"stage": "fine-tune", "step": 6, "tor')
    again = RunDirectory.open(broken.path)
    assert all(torch.equal(wanted[name], tensor) for name, tensor in fit(source, again, record).items())
    lines, others = read_trace(whole.path), read_trace(broken.path)
    aside = {"attempt", "time_s", "record_s"}
    assert [{k: v for k, v in line.items() if k not in aside} for line in lines] == [
        {k: v for k, v in line.items() if k not in aside} for line in others
    ]
    assert [line["attempt"] for line in others] == [1] * 4 + [2] * 5
    written = (broken.path / "trace.jsonl").read_text().splitlines()
    assert len(written) == len(lines) + 2  # steps 4 and 5 were written twice


def test_a_stage_that_stops_early_records_its_last_step(source, tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    fit(source, run, TraceRecording(steps=()), dev=texts(2), eval_every=1, patience=1, best="loss")
    metrics = read_metrics(run.path / "metrics.jsonl")
    done = json.loads((run.path / "stages" / "fine-tune" / "done.json").read_text())
    assert [line["step"] for line in read_trace(run.path)] == sorted({0, done["steps"]})
    assert max(line["step"] for line in metrics) == done["steps"]


# ---------------------------------------------------------------------------------------------------------- recipes


def recipe_of(tmp_path, **settings):
    """A tiny run on the shipped backbone over files made here."""
    for name, count in (("train", 12), ("test", 6)):
        lines = [
            {"text": f"the {word} number {i}", "label": "ab"[i % 2], "answer": f"it is {word}"}
            for i, word in zip(range(count), ["red", "green", "blue"] * 4, strict=False)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = {
        "data.train.files": f"[{tmp_path / 'train.jsonl'}]",
        "data.test.files": f"[{tmp_path / 'test.jsonl'}]",
        "data.label_noise": "0.25",
        "data.checks.copies": "off",
        "adapter.rank": "2",
        "train.steps": "2",
        "train.batch_size": "2",
        "train.max_length": "24",
        "train.max_cut": "1",
        "eval.bootstrap": "5",
        "eval.train_limit": "12",
        **settings,
    }
    return load_recipe(None, [from_override(key, value) for key, value in given.items()])


TASKS = {
    "classify": {"task": "classify"},
    "language-model": {"task": "language-model"},
    "completion": {"task": "completion", "task.completion": "' {answer}'", "task.prompt": "'{text}:'"},
}


@pytest.mark.parametrize("task", TASKS)
def test_noise_of_every_task_is_in_the_data_and_written_down(task, tmp_path):
    resolved = recipe_of(tmp_path, **TASKS[task], **{"record.train_rows": "null", "train.precision": "fp32"})
    clean = prepare_data(recipe_of(tmp_path, **TASKS[task], **{"data.label_noise": "0"}).recipe)
    noisy = prepare_data(resolved.recipe)
    changed = [
        b.id
        for a, b in zip(clean.train, noisy.train, strict=True)
        if (a.input_ids, a.labels) != (b.input_ids, b.labels)
    ]
    assert sorted(noisy.flipped) == sorted(changed) and len(changed) == 3 and clean.flipped == []
    assert clean.test == noisy.test
    run = tmp_path / "run"
    train(resolved, run, quiet=True)
    written = json.loads((run / LABEL_NOISE).read_text())
    assert written["ids"] == noisy.flipped and written["rate"] == 0.25 and written["rows"] == 12
    last = read_trace(run)[-1]
    assert last["step"] == 2 and last["train.memorised"] is not None and last["test.loss"] > 0
    if task == "classify":
        own = {example.id: clean.label_names[example.labels] for example in clean.train}
        assert written["true"] == {name: own[name] for name in noisy.flipped}
        assert last["train.memorised"] + last["train.recovered"] == pytest.approx(1)  # of two classes
        assert "train.exact_error" not in last
    else:
        assert last["train.recovered"] is None and last["train.exact_error"] >= last["train.error"] > 0
    judged = json.loads((run / "eval.json").read_text())
    for split in ("train", "test"):
        assert judged[split]["loss"]["value"] == pytest.approx(last[f"{split}.loss"], rel=1e-5)
        if task == "classify":
            assert judged[split]["accuracy"]["value"] == pytest.approx(1 - last[f"{split}.error"])


def test_a_mesh_is_refused(tmp_path):
    resolved = recipe_of(tmp_path, **{"record.train_rows": "4", "mesh.dp": "2"})
    with pytest.raises(UserError, match=r"record: a run on a mesh is not recorded; leave every axis of mesh at 1"):
        check_recipe(resolved.recipe)
