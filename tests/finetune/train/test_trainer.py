"""The loop: it learns, keeps the backbone, judges on dev, stops early, refuses NaN, and says what it will hold."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from flatshift.finetune.adapters.adapter import attach_adapter, read_adapter, trainable
from flatshift.finetune.compute.numerics import uses_dropout
from flatshift.finetune.config import Adapter, Evaluate, Optimizer, Train
from flatshift.finetune.data.batches import TrainingDataLoader
from flatshift.finetune.data.example import Example
from flatshift.finetune.errors import Interrupted, UserError
from flatshift.finetune.models.anatomy import position_limit
from flatshift.finetune.models.fingerprint import checksum
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.planner.memory import memory_plan, plan_lines
from flatshift.finetune.run_directory import RunDirectory, read_metrics
from flatshift.finetune.tasks import Chat, Classify, LanguageModel, Preference
from flatshift.finetune.train.checkpointer import checkpoint_steps as saved_steps
from flatshift.finetune.train.divergence import Diverged
from flatshift.finetune.train.stage import TrainingStage, check_metric
from flatshift.finetune.train.trainer import Trainer
from flatshift.regularizers import GGPO, Plain, build
from tests.support.finetune_models import IGNORED, ListBatches, PadOnly, RandomBatches, save_backbone

LM = LanguageModel()


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return {kind: save_backbone(kind, tmp_path_factory.mktemp(kind)) for kind in ("llama", "gpt2-dropout", "bert")}


def model_of(source, *, task=LM, dropout=0.0, precision="fp32"):
    labels = ("a", "b") if isinstance(task, Classify) else None
    backbone = load_backbone(source, task=task, label_names=labels, precision=precision)
    return attach_adapter(backbone, Adapter(rank=4, dropout=dropout), task=task, seed=0)


PLAIN = Plain()


def fit(
    model,
    run,
    *,
    steps=20,
    task=LM,
    batches=None,
    dev=(),
    regularizer=PLAIN,
    lr=1e-2,
    on_step=None,
    stop=None,
    **train,
):
    return Trainer(
        model,
        PadOnly(),
        TrainingStage(
            name="fine-tune",
            task=task,
            batches=batches or RandomBatches(),
            dev=list(dev),
            optimizer=Optimizer(lr=lr, schedule="constant"),
            train=Train(steps=steps, **train),
            evaluate=Evaluate(batch_size=2),
            regularizer=build(regularizer),
            run=run,
            seed=0,
            on_step=on_step,
            stop=stop,
        ),
    ).fit()


def examples(count=6, length=9, seed=7):
    generator = torch.Generator().manual_seed(seed)
    rows = (torch.randint(3, 20, (length,), generator=generator).tolist() for _ in range(count))
    return [Example(input_ids=ids, labels=[IGNORED, *ids[1:]], id=str(i), where=f"f:{i}") for i, ids in enumerate(rows)]


@pytest.mark.parametrize("regularizer", [Plain(), GGPO(sigma=0.02)])
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.bf16)])
def test_it_learns_and_the_backbone_keeps_every_bit(regularizer, precision, sources, tmp_path):
    model = model_of(sources["llama"], precision=precision)
    before = checksum(model)
    state = torch.random.get_rng_state()
    run = RunDirectory.create(tmp_path / "run")
    result = fit(model, run, regularizer=regularizer, precision=precision)
    assert torch.equal(state, torch.random.get_rng_state()) and checksum(model) == before
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert {"stage", "attempt", "step", "split", "loss", "tokens", "lr", "time_s", "grad_norm"} <= lines[0].keys()
    assert lines[-1]["loss"] < 0.93 * lines[0]["loss"]
    counts = [RandomBatches().at(step)[0].supervised for step in range(20)]
    assert [line["tokens"] for line in lines] == [sum(counts[: k + 1]) for k in range(20)]
    assert result.steps == 20 and result.tokens == sum(counts) and result.best_step is None
    saved = read_adapter(tmp_path / "run" / "stages" / "fine-tune" / "adapter")
    assert all(torch.equal(saved[n], p) for n, p in trainable(model).items())
    if isinstance(regularizer, GGPO):
        assert lines[0]["sigma"] == 0.02


def test_the_best_on_dev_is_kept_and_patience_ends_the_stage(sources, tmp_path):
    model = model_of(sources["llama"])
    seen = {}

    def remember(line):
        seen[line["step"]] = {n: p.detach().clone() for n, p in trainable(model).items()}

    run = RunDirectory.create(tmp_path / "run")
    dev = examples()  # random rows: fitting the training rows makes them worse sooner or later
    result = fit(model, run, steps=200, dev=dev, eval_every=2, patience=3, lr=5e-2, on_step=remember)
    judged = {r["step"]: r["loss"] for r in read_metrics(run.path / "metrics.jsonl") if r["split"] == "dev"}
    assert result.stopped_early and result.steps < 200
    assert result.best_step == min(judged, key=judged.get) and result.best_dev_loss == min(judged.values())
    assert list(judged) == list(range(2, result.steps + 1, 2)) and result.steps == result.best_step + 6
    assert all(torch.equal(p, seen[result.best_step][n]) for n, p in trainable(model).items())
    done = json.loads((run.path / "stages" / "fine-tune" / "done.json").read_text())
    assert done["target_steps"] == 200 and done["best_step"] == result.best_step and done["stopped_early"] is True


def test_dev_loss_is_the_mean_over_supervised_tokens(sources, tmp_path):
    model = model_of(sources["llama"])
    dev = [*examples(3, 9), *examples(2, 4, seed=8)]
    result = fit(model, RunDirectory.create(tmp_path / "run"), steps=1, dev=dev)
    total, count = 0.0, 0
    with torch.no_grad():
        for example in dev:
            ids = torch.tensor(example.input_ids)
            logits = torch.log_softmax(model(input_ids=ids[None]).logits[0].double(), dim=-1)
            total -= logits[:-1].gather(1, ids[1:, None]).sum().item()
            count += len(ids) - 1
    assert result.best_dev_loss == pytest.approx(total / count, rel=1e-6) and result.best_step == 1


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_classification_learns_and_reports_accuracy(kind, sources, tmp_path):
    task = Classify()
    # class = which of two tokens appears; a head and LoRA can learn that
    rows = [
        Example(input_ids=[5, 9 + label, 6 + i % 3, 7], labels=label, id=f"{i}{label}", where="f:1")
        for i in range(8)
        for label in (0, 1)
    ]
    batches = TrainingDataLoader(rows, task=task, batch_size=8, accumulate=1, seed=0, max_length=8, pad_id=0)
    model = model_of(sources[kind], task=task)
    run = RunDirectory.create(tmp_path / "run")
    result = fit(model, run, steps=40, task=task, batches=batches, dev=rows, eval_every=10)
    judged = [r for r in read_metrics(run.path / "metrics.jsonl") if r["split"] == "dev"]
    assert judged[-1]["accuracy"] == result.best_accuracy == 1.0 and result.best_dev_loss < 0.3
    assert result.tokens == 40 * 8


def test_dropout_depends_on_seed_and_step_not_on_the_global_state(sources, tmp_path):
    def losses(name, noise):
        model = model_of(sources["gpt2-dropout"], dropout=0.2)
        assert uses_dropout(model)
        run = RunDirectory.create(tmp_path / name)
        fit(model, run, steps=4, accumulate=2, on_step=lambda line: torch.rand(noise))
        return [r["loss"] for r in read_metrics(run.path / "metrics.jsonl")]

    first = losses("a", 1)
    assert first == losses("b", 5) and len(set(first)) == 4
    assert not uses_dropout(model_of(sources["llama"]))
    assert uses_dropout(model_of(sources["llama"], dropout=0.1))


def test_a_nan_stops_before_anything_is_overwritten(sources, tmp_path):
    model = model_of(sources["llama"])
    run = RunDirectory.create(tmp_path / "run")

    def on_step(line):
        if line["step"] == 6:
            parameter = next(p for n, p in trainable(model).items() if "down_proj.lora_B" in n)
            with torch.no_grad():
                parameter.view(-1)[0] = math.nan

    with pytest.raises(Diverged, match=r"loss at step 7 .*checkpoint of step 5 is kept.*optimizer\.lr"):
        fit(model, run, steps=20, save_every=5, on_step=on_step)
    assert issubclass(Diverged, UserError) and saved_steps(run.state) == [5]
    assert not (run.path / "stages" / "fine-tune" / "adapter").exists()
    assert "step 7" in (run.path / "log.txt").read_text()


def test_stop_saves_and_a_finished_stage_is_only_read_back(sources, tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    asked = iter([False, False, True])
    with pytest.raises(Interrupted, match="after step 3 of 20"):
        fit(model_of(sources["llama"]), run, stop=lambda: next(asked))
    assert saved_steps(run.state) == [3]
    model = model_of(sources["llama"])
    result = fit(model, run)
    lines = read_metrics(run.path / "metrics.jsonl")
    assert [r["attempt"] for r in lines] == [1] * 3 + [2] * 17
    again = model_of(sources["llama"])
    assert fit(again, run, on_step=lambda line: pytest.fail("a finished stage trained")) == result
    assert all(torch.equal(p, trainable(again)[n]) for n, p in trainable(model).items())
    longer = fit(again, run, steps=25)
    assert longer.steps == 25 and read_metrics(run.path / "metrics.jsonl")[-1]["attempt"] == 3


def test_ctrl_c_inside_a_step_is_interrupted_and_the_regularizer_lets_go(sources, tmp_path):
    model = model_of(sources["llama"])
    run = RunDirectory.create(tmp_path / "run")

    def on_step(line):
        if line["step"] == 7:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="newest checkpoint"):
        fit(model, run, save_every=5, regularizer=GGPO(), on_step=on_step)
    assert saved_steps(run.state) == [5]
    result = fit(model_of(sources["llama"]), run, save_every=5, regularizer=GGPO())
    assert result.steps == 20


def test_the_checkpoint_of_another_stage_is_dropped_when_the_next_begins(sources, tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    model = model_of(sources["llama"])
    common = {"task": LM, "batches": RandomBatches(), "dev": [], "optimizer": Optimizer(), "evaluate": Evaluate()}
    for stage, count in (("warm-up", 6), ("fine-tune", 3)):
        common |= {"name": stage, "train": Train(steps=count), "regularizer": build(Plain())}
        Trainer(model, PadOnly(), TrainingStage(run=run, seed=1, **common)).fit()
    assert saved_steps(run.state) == [3]
    assert {r["stage"] for r in read_metrics(run.path / "metrics.jsonl")} == {"warm-up", "fine-tune"}


def test_a_micro_batch_without_supervision_adds_nothing(sources, tmp_path):
    micro = RandomBatches().at(0)[0]
    silent = dataclasses.replace(micro, labels=torch.full_like(micro.labels, IGNORED), supervised=0)
    results = []
    for name, micros in (("with", [micro, silent]), ("without", [micro])):
        model = model_of(sources["llama"])
        fit(model, RunDirectory.create(tmp_path / name), steps=3, batches=ListBatches(micros))
        results.append(trainable(model))
    assert all(torch.equal(p, results[1][n]) for n, p in results[0].items())


def test_no_clipping_is_a_choice(sources, tmp_path):
    norms = {}
    for clip in (None, 1e-3):
        model = model_of(sources["llama"])
        start = {n: p.detach().clone() for n, p in trainable(model).items()}
        Trainer(
            model,
            PadOnly(),
            TrainingStage(
                name="s",
                task=LM,
                batches=RandomBatches(),
                dev=[],
                # eps far above the gradient: the update is proportional to it
                optimizer=Optimizer(lr=1.0, eps=1e3, clip=clip, schedule="constant", warmup=0.0),
                train=Train(steps=1),
                evaluate=Evaluate(),
                regularizer=build(Plain()),
                run=RunDirectory.create(tmp_path / str(clip)),
                seed=0,
            ),
        ).fit()
        moved = sum((p - start[n]).square().sum().item() for n, p in trainable(model).items()) ** 0.5
        norms[clip] = moved * 1e3
    reported = read_metrics(tmp_path / "None" / "metrics.jsonl")[0]["grad_norm"]
    assert norms[None] == pytest.approx(reported, rel=1e-2) and norms[1e-3] == pytest.approx(1e-3, rel=1e-2)


def test_rows_longer_than_the_learned_positions_are_refused(sources, tmp_path):
    model = model_of(sources["gpt2-dropout"])
    common = {"task": LM, "batch_size": 1, "seed": 0, "pad_id": 0}
    for length, fits in ((64, True), (65, False)):
        batches = TrainingDataLoader(examples(), max_length=length, **common)
        run = RunDirectory.create(tmp_path / str(length))
        if fits:
            assert fit(model, run, steps=1, batches=batches).steps == 1
        else:
            with pytest.raises(UserError, match=r"train\.max_length: 65 .* 64 positions"):
                fit(model, run, steps=1, batches=batches)
    assert position_limit(model_of(sources["llama"])) is None
    assert position_limit(model_of(sources["bert"], task=Classify())) == 64


def test_threads_are_set_for_the_stage_and_a_change_is_written_down(sources, tmp_path):
    outside = torch.get_num_threads()
    run = RunDirectory.create(tmp_path / "run")
    seen = []
    with pytest.raises(Interrupted):
        fit(
            model_of(sources["llama"]),
            run,
            threads=2,
            on_step=lambda line: seen.append(torch.get_num_threads()),
            stop=lambda: True,
        )
    assert seen == [2] and torch.get_num_threads() == outside
    fit(model_of(sources["llama"]), run, threads=1)
    assert "not the same bits" in (run.path / "log.txt").read_text()


def test_the_plan_counts_exactly_and_measures_activations(sources):
    model = model_of(sources["llama"])
    train = Train(batch_size=3, max_length=40)
    plan = memory_plan(model, train=train)
    counted = sum(p.numel() for p in trainable(model).values())
    assert plan.adapter == plan.gradients == 4 * counted and plan.optimizer == 8 * counted
    assert plan.backbone >= 4 * sum(p.numel() for p in model.parameters() if not p.requires_grad)
    ids = torch.zeros(3, 40, dtype=torch.long)
    held = {}
    weights = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        output = model(input_ids=ids, attention_mask=torch.ones_like(ids))
    assert plan.activations == pytest.approx(sum(held.values()), rel=0.1) and output is not None
    text = "\n".join(plan_lines(model, train=train, optimizer=Optimizer()))
    assert all(cause in text for cause in ("backbone", "adapter", "gradients", "optimizer", "activations", "together"))


@pytest.mark.parametrize("best", ["auto", "accuracy", "loss"])
def test_classification_keeps_the_most_accurate_or_the_least_surprised(best, sources, tmp_path):
    task = Classify()
    rows = [Example([5, 9 + i % 2, 6 + i % 3, 7], i % 2, f"{i}", "f:1") for i in range(16)]
    generator = torch.Generator().manual_seed(3)
    dev = [  # half of the labels are noise: fitting the training rows raises the loss, not always the error
        Example([5, 9 + i % 2, 6, 7], int(torch.randint(2, (1,), generator=generator)) if i % 2 else 0, f"d{i}", "f:1")
        for i in range(24)
    ]
    batches = TrainingDataLoader(rows, task=task, batch_size=8, accumulate=1, seed=0, max_length=8, pad_id=0)
    run = RunDirectory.create(tmp_path / "run")
    result = fit(
        model_of(sources["llama"], task=task),
        run,
        steps=30,
        task=task,
        batches=batches,
        dev=dev,
        eval_every=3,
        best=best,
    )
    judged = [r for r in read_metrics(run.path / "metrics.jsonl") if r["split"] == "dev"]
    key = (lambda r: (r["loss"],)) if best == "loss" else (lambda r: (-r["accuracy"], r["loss"]))
    assert result.best_step == min(judged, key=key)["step"]


def test_accuracy_cannot_choose_a_language_model(sources, tmp_path):
    with pytest.raises(UserError, match="classification"):
        fit(model_of(sources["llama"]), RunDirectory.create(tmp_path / "run"), dev=examples(), best="accuracy")
    for task, metric, said in (
        (Preference(loss="kto"), "preference_accuracy", "is of pairs, and dev rows are single answers"),
        (Chat(score="generate"), "exact_match", "train.max_length cuts off that of every dev row"),
    ):
        check_metric(metric, task, "train.best")
        with pytest.raises(UserError, match=f"train.best: {metric} .*{said}"):
            check_metric(metric, task, "train.best", examples())
