"""Callbacks of the Trainer hear what happens, and what they ask for is done."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import EarlyStoppingCallback, TrainerCallback

from flatshift.finetune.adapters.adapter import attach_adapter
from flatshift.finetune.config import Adapter, Evaluate, Optimizer, Train
from flatshift.finetune.data.example import Example
from flatshift.finetune.errors import Interrupted, UserError
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.run_directory import RunDirectory, read_metrics
from flatshift.finetune.tasks import Classify, LanguageModel
from flatshift.finetune.train.callbacks import Callbacks
from flatshift.finetune.train.checkpointer import checkpoint_steps as saved_steps
from flatshift.finetune.train.stage import TrainingStage
from flatshift.finetune.train.trainer import Trainer
from flatshift.regularizers import Plain, build
from tests.support.finetune_models import IGNORED, PadOnly, RandomBatches

LM = LanguageModel()


def examples(count=6):
    generator = torch.Generator().manual_seed(7)
    rows = (torch.randint(3, 20, (9,), generator=generator).tolist() for _ in range(count))
    return [Example(input_ids=ids, labels=[IGNORED, *ids[1:]], id=str(i), where=f"f:{i}") for i, ids in enumerate(rows)]


def fit(source, directory, callbacks, *, steps=6, dev=(), lr=1e-2, stop_at=None, **train):
    model = attach_adapter(load_backbone(source, task=LM), Adapter(rank=4), task=LM, seed=0)
    run = RunDirectory.open(directory) if directory.exists() else RunDirectory.create(directory)
    seen = [0]
    return Trainer(
        model,
        PadOnly(),
        TrainingStage(
            name="s",
            task=LM,
            batches=RandomBatches(),
            dev=list(dev),
            optimizer=Optimizer(lr=lr, schedule="constant"),
            train=Train(steps=steps, **train),
            evaluate=Evaluate(),
            regularizer=build(Plain()),
            run=run,
            seed=0,
            callbacks=callbacks,
            on_step=lambda line: seen.append(line["step"]),
            stop=lambda: seen[-1] == stop_at,
        ),
    ).fit()


class Listener(TrainerCallback):
    def __init__(self):
        self.heard = []
        self.logs = []

    def _hear(self, event, state):
        self.heard.append((event, state.global_step))

    def on_train_begin(self, args, state, control, **kwargs):
        self._hear("begin", state)
        assert args.max_steps == state.max_steps == 6 and args.eval_strategy == "steps" and state.is_world_process_zero
        with pytest.raises(AttributeError, match=r"no TrainingArguments\.fsdp"):
            _ = args.fsdp

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self._hear("step", state)

    def on_pre_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
        grads = [p.grad for p in model.parameters() if p.requires_grad]
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
        assert norm <= args.max_grad_norm * (1 + 1e-5) and isinstance(optimizer, torch.optim.AdamW)

    def on_step_end(self, args, state, control, **kwargs):
        self._hear("end", state)

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append((state.global_step, dict(logs)))

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self._hear(f"evaluate {metrics['eval_loss']:.6f}", state)

    def on_save(self, args, state, control, **kwargs):
        self._hear("save", state)

    def on_train_end(self, args, state, control, **kwargs):
        self._hear("done", state)


def test_every_event_comes_in_the_trainers_order(source, tmp_path):
    listener = Listener()
    fit(source, tmp_path / "run", [listener], dev=examples(), eval_every=4, save_every=3)
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    dev = {r["step"]: r["loss"] for r in lines if r["split"] == "dev"}
    expected = [("begin", 0)]
    for step in range(1, 7):
        expected += [("step", step - 1), ("end", step)]
        expected += [(f"evaluate {dev[step]:.6f}", step)] if step in dev else []
        expected += [("save", step)] if step in (3, 6) else []
    assert listener.heard == [*expected, ("done", 6)]
    told = [logs for _, logs in listener.logs if "loss" in logs]
    train = [r for r in lines if r["split"] == "train"]
    assert [t["loss"] for t in told] == [r["loss"] for r in train]
    assert [t["learning_rate"] for t in told] == [r["lr"] for r in train]
    assert [logs for _, logs in listener.logs if "eval_loss" in logs] == [{"eval_loss": loss} for loss in dev.values()]


class Asking(TrainerCallback):
    """Asks for things at some steps."""

    def __init__(self, **wishes):
        self.wishes = wishes

    def on_step_end(self, args, state, control, **kwargs):
        for wish, step in self.wishes.items():
            setattr(control, wish, getattr(control, wish) or state.global_step == step)
        return control


def test_what_is_asked_for_is_done_once(source, tmp_path):
    result = fit(
        source,
        tmp_path / "run",
        [Asking(should_save=2, should_evaluate=3, should_training_stop=5)],
        dev=examples(),
        save_every=0,
        keep=9,
    )
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert saved_steps(tmp_path / "run" / "state") == [5, 2]
    assert [r["step"] for r in lines if r["split"] == "dev"] == [3]
    assert result.steps == 5 and result.stopped_early
    assert fit(source, tmp_path / "run", []) == result  # done


def test_early_stopping_of_transformers_is_our_patience_and_survives_a_resume(source, tmp_path):
    how = {"steps": 60, "dev": examples(), "eval_every": 2, "lr": 5e-2, "save_every": 4}
    ours = fit(source, tmp_path / "ours", [], patience=3, **how)
    theirs = fit(source, tmp_path / "theirs", [EarlyStoppingCallback(early_stopping_patience=3)], **how)
    assert ours.stopped_early and ours == theirs
    stop_at = ours.best_step + 3  # after one dev evaluation that was no better
    with pytest.raises(Interrupted):
        fit(source, tmp_path / "run", [EarlyStoppingCallback(early_stopping_patience=3)], stop_at=stop_at, **how)
    assert fit(source, tmp_path / "run", [EarlyStoppingCallback(early_stopping_patience=3)], **how) == theirs


@pytest.mark.parametrize(
    ("step", "then"), [(2, "step 0, as there is no checkpoint yet"), (5, "step 3, the newest checkpoint")]
)
def test_a_cut_step_says_where_resuming_goes_on(source, tmp_path, step, then):
    class Cut(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == step - 1:
                raise KeyboardInterrupt

    with pytest.raises(Interrupted, match=f"stopped inside step {step}; resuming continues from {then}"):
        fit(source, tmp_path / "run", [Cut()], save_every=3)


def test_every_dev_metric_is_reported_so_that_early_stopping_finds_that_of_train_best():
    stage = TrainingStage(
        **dict.fromkeys(("name", "batches", "evaluate", "regularizer", "seed")), task=Classify(), dev=examples(1),
        optimizer=Optimizer(), train=Train(best="f1_macro"), run=RunDirectory("run"), callbacks=[heard := Heard()],
    )  # fmt: skip
    row = {"split": "dev", "attempt": 1, "step": 3, "loss": 1.0, "f1_macro": 0.5, "tokens": 9, "time_s": 1.0}
    Callbacks(stage, is_main=True, objects={}).report(row)
    assert heard.told == [("eval_f1_macro", {"eval_loss": 1.0, "eval_f1_macro": 0.5})]


class Heard(TrainerCallback):
    def __init__(self):
        self.told = []

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self.told.append((args.metric_for_best_model, metrics))


class StopsAfterEvaluation(TrainerCallback):
    def on_evaluate(self, args, state, control, **kwargs):
        control.should_training_stop = True


def test_a_stage_that_resumes_in_a_dev_evaluation_ends_where_it_would_have_ended(source, tmp_path):
    dev, run = examples(), tmp_path / "run"
    whole = fit(source, tmp_path / "whole", [StopsAfterEvaluation()], dev=dev, eval_every=2)
    with pytest.raises(Interrupted, match="dev evaluation after step 2"):
        fit(source, run, [StopsAfterEvaluation()], dev=dev, eval_every=2, stop_at=2)
    assert fit(source, run, [StopsAfterEvaluation()], dev=dev, eval_every=2) == whole and whole.steps == 2
    with pytest.raises(Interrupted, match="after step 3 of 6"):
        fit(source, tmp_path / "short", [], dev=dev, stop_at=3)
    ended = fit(source, tmp_path / "short", [], steps=3, dev=dev)  # fewer steps: those that it has made
    assert ended.best_step == ended.steps == 3 and ended.best_dev_loss is not None


def test_what_has_no_meaning_is_said(source, tmp_path):
    class Epochs(TrainerCallback):
        def on_epoch_end(self, args, state, control, **kwargs):
            raise AssertionError

    with pytest.warns(UserWarning, match=r"Epochs listens to on_epoch_end, which never comes"):
        fit(source, tmp_path / "run", [Epochs()], steps=1)
    assert "on_epoch_end" in (tmp_path / "run" / "log.txt").read_text()
    with pytest.raises(UserError, match="should_epoch_stop has no meaning"):
        fit(source, tmp_path / "stop", [Asking(should_epoch_stop=1)], steps=2)
    with pytest.raises(UserError, match=r"callbacks: object is no transformers\.TrainerCallback"):
        fit(source, tmp_path / "odd", [object()], steps=2)
