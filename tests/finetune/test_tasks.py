"""Every kind of task keeps the contract of `Objective`, nobody asks which kind one is, and a new kind is one file."""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import pytest
import torch

import flatshift.finetune.tasks
from flatshift.experiments.recipe import from_override
from flatshift.experiments.recipe.build import build_settings
from flatshift.experiments.workflows.model_card import usage_example
from flatshift.experiments.workflows.run_parts import check_generative
from flatshift.finetune.adapters.adapter import attach_adapter, trainable
from flatshift.finetune.compute.loss import batch_loss, find_head
from flatshift.finetune.compute.protocols import TaskTraits
from flatshift.finetune.config import Adapter, Evaluate, Mesh, Train
from flatshift.finetune.data.batches import TrainingDataLoader
from flatshift.finetune.data.chat.template import read_template
from flatshift.finetune.data.encoding import encode
from flatshift.finetune.data.eval_batching import EvalBatching
from flatshift.finetune.data.labels import fit_units
from flatshift.finetune.data.panel import format_first_batch
from flatshift.finetune.data.rows import Row
from flatshift.finetune.errors import UserError
from flatshift.finetune.evaluate.evaluator import evaluate
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.planner.rules import RuleSettings, check_settings
from flatshift.finetune.tasks import Chat, Classify, Completion, LanguageModel, Preference, Seq2Seq, Task
from flatshift.finetune.tasks.base import SequenceLevelTask
from flatshift.finetune.tasks.regress import standardised_layer
from tests.support.data_models import byte_tokenizer
from tests.support.finetune_models import save_backbone
from tests.support.objective_models import save_encoder
from tests.support.seq2seq_models import save_encoder_decoder

ROOT = Path(__file__).resolve().parents[2]
KINDS = {kind.__name__: kind for kind in typing.get_args(Task)}
CONFIG = Evaluate(bootstrap=20, batch_size=4)


@dataclass(frozen=True, kw_only=True)
class Hinge(SequenceLevelTask):
    """A kind that does not ship: a class of two by a margin. This class is all that there is of it."""

    kind: Literal["hinge"] = "hinge"
    margin: float = 1.0
    """Below it an answer costs."""

    traits: ClassVar[TaskTraits] = dataclasses.replace(SequenceLevelTask.traits, has_accuracy=True)
    has_classes: ClassVar[bool] = True

    def encode(self, rows, encoder):
        from flatshift.finetune.data.labels import class_indices

        encoded, names = encoder.wholes(rows), encoder.label_names
        return encoder.labelled(encoded, class_indices([row for row, _, _ in encoded], names)), tuple(names)

    def head_settings(self, *, num_labels, label_names):
        return {"num_labels": 1}

    def example_losses(self, logits, labels):
        return (self.margin - logits.float()[:, 0] * (2 * labels - 1)).clamp_min(0)

    def answered_right(self, logits, labels):
        return (logits[:, 0] > 0) == (labels > 0)

    def format_label(self, label, *, label_names, units):
        return label_names[int(label)]

    def evaluate(self, evaluator, examples):
        return {"loss": evaluator.record_mean("loss", evaluator.head_scores(examples)[0])}


TASKS = [
    *(kind() for kind in KINDS.values()),
    Classify(multi=True),
    Completion(score="rank"),
    Completion(score="generate", max_new_tokens=3),
    Chat(score="generate", max_new_tokens=3),
    Seq2Seq(score="generate", max_new_tokens=3, label_smoothing=0.1),
    *(Preference(loss=loss) for loss in ("kto", "orpo")),
    Hinge(),
]


def _called(task) -> str:
    own = {field.name: getattr(task, field.name) for field in dataclasses.fields(task) if field.name != "kind"}
    return (
        f"{task.kind} {' '.join(f'{name}={own[name]}' for name in ('multi', 'score', 'loss') if own.get(name))}".strip()
    )


each_task = pytest.mark.parametrize("task", TASKS, ids=_called)


@functools.cache
def _backbone(side: str, tmp: Path) -> Path:
    directory = tmp / side
    if side == "both":
        return save_encoder_decoder("t5", directory)
    if side == "encoder":
        return save_encoder(directory)
    tokenizer = byte_tokenizer()
    save_backbone("llama", directory, vocab_size=len(tokenizer), pad_token_id=0, bos_token_id=1, eos_token_id=2)
    tokenizer.chat_template = read_template("plain")
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def backbones(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("backbones")

    def of(task) -> Path:
        side = "both" if task.traits.encoder_decoder else "decoder" if task.traits.backbone == "decoder" else "encoder"
        return _backbone(side, tmp)

    return of


def _rows(task, count: int = 6) -> list[Row]:
    said = ["the cat sat on the mat", "the dog sat on the log", "good and bad"]
    rows = []
    for i in range(count):
        turns = [{"role": "user", "content": said[i % 3]}, {"role": "assistant", "content": "good"}]
        values = {"text": f"{said[i % 3]} {i}", "label": task.read_label(str(i % 2)), "messages": turns}
        values |= {"prompt": said[i % 3], "chosen": " good" * (1 + i % 2), "rejected": f" bad {i}"}
        rows.append(Row(values, str(i), f"rows.jsonl:{i + 1}", dict(values)))
    return rows


@each_task
def test_a_recipe_gives_back_the_task(task):
    holder = dataclasses.make_dataclass("Holder", [("task", Task | Hinge)], frozen=True)
    settings = {name: value for name, value in dataclasses.asdict(task).items() if value is not None}
    assert build_settings(holder, from_override("task", json.dumps(settings))).task == task
    hint = typing.get_type_hints(type(task))["kind"]
    assert typing.get_args(hint) == (task.kind,)
    assert all(field.kw_only for field in dataclasses.fields(task))
    with pytest.raises(dataclasses.FrozenInstanceError):
        task.kind = "other"


@each_task
def test_rows_are_encoded_learnt_and_judged(task, backbones):
    directory = backbones(task)
    tokenizer = open_backbone(directory).tokenizer
    rows = _rows(task)
    assert set(task.columns()) <= rows[0].values.keys()
    names = task.class_names(rows)
    assert (names is not None) == task.has_classes
    units = None
    if task.traits.has_targets:
        units = fit_units([row.values["label"] for row in rows], standardised_layer(task, directory))
    encoded = encode(
        rows,
        task=task,
        tokenizer=tokenizer,
        max_length=48,
        label_names=names,
        decoder_start=open_backbone(directory).decoder_start if task.traits.encoder_decoder else None,
        units=units,
    )
    assert len(encoded.examples) == len(rows) and not encoded.truncated and not encoded.skipped
    masking = task.masking(tokenizer)
    assert (masking is not None) == task.traits.masks_tokens
    how = {"batch_size": 2, "pad_id": tokenizer.pad_token_id}
    batches = TrainingDataLoader(encoded.examples, task=task, seed=0, max_length=48, masking=masking, **how)
    micro = batches.at(0)[0]
    assert batches.packed == task.pack and micro.supervised == batches.supervised(0) > 0
    panel = format_first_batch(micro, tokenizer, task, label_names=names, units=units)
    assert ("examples" in panel.splitlines()[0]) == task.traits.is_sequence_level and "⟦" in panel

    model = load_backbone(directory, task=task, label_names=names if task.traits.is_sequence_level else None)
    model = attach_adapter(model, Adapter(rank=2), task=task, seed=0)
    loss = batch_loss(model, micro, task=task)
    loss.backward()
    assert loss.dtype == torch.float32 and loss.ndim == 0 and 0 < float(loss.detach()) < 1e5
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in trainable(model).values())
    head = find_head(model, micro.inputs, task=task)
    assert (head is None) == task.traits.is_sequence_level or task.traits.masks_tokens
    assert float(batch_loss(model, micro, task=task, head=head).detach()) == pytest.approx(
        float(loss.detach()), rel=1e-4
    )

    figures = evaluate(model, tokenizer, encoded.examples, task=task, config=CONFIG, label_names=names)
    assert figures["loss"]["n"] == len(rows) and all(
        figure.keys() == {"value", "low", "high", "n"} for figure in figures.values()
    )
    if not task.traits.has_targets:  # which a folded head answers in the user's own units
        with torch.no_grad():
            all_of_them = list(EvalBatching(**how).batches(encoded.examples, task))
            total = sum(float(batch_loss(model.eval(), batch, task=task.for_evaluation())) for batch in all_of_them)
        count = sum(batch.supervised for batch in all_of_them)
        assert figures["loss"]["value"] == pytest.approx(total / count, rel=1e-4)
    if task.traits.is_sequence_level:
        count = len(micro.labels)
        assert task.example_losses(torch.zeros(count, model.config.num_labels), micro.labels).shape == (count,)


@each_task
def test_prompts_and_the_cards_lines(task, backbones):
    tokenizer = open_backbone(backbones(task)).tokenizer
    use = usage_example(task, tokenizer, ("0", "1"))
    ast.parse("\n".join((*use.before, *use.ask, use.text, use.answer)))
    if not task.traits.is_generative:
        with pytest.raises(UserError, match=rf"task.kind: {task.kind} trains a model that writes no text"):
            check_generative(task)
        return
    check_generative(task)
    (asked,) = task.input_format.build_text_prompts(["why"], tokenizer)
    assert asked.id == "prompt-1" and asked.ids
    rows = _rows(task)
    questions, left_out = task.input_format.build_prompts(rows, tokenizer)
    assert [question.id for question in questions] == [row.id for row in rows] and not left_out
    assert set(task.input_format.columns()) <= set(task.columns())


@each_task
def test_what_a_task_refuses_is_one_sentence(task):
    for what, sentence in task.traits.refusals.items():
        with pytest.raises(UserError) as refused:
            task.traits.refuse(what)
        assert str(refused.value) == sentence and len(sentence) <= 300 and "; " in sentence
    task.traits.refuse("nothing of that name")
    for axis in ("dp", "tp", "pp", "cp"):
        settings = RuleSettings(Mesh(**{axis: 2}), Train(batch_size=4), Adapter(), task.for_evaluation())
        if axis not in task.no_axes:
            check_settings(settings)
        else:
            with pytest.raises(UserError, match=rf"mesh.{axis} > 1 does not go with task.kind: .*{task.no_axes[axis]}"):
                check_settings(settings)


def test_settings_that_a_kind_has_not_answer_as_if_nobody_had_set_them():
    plain = LanguageModel()
    assert (plain.score, plain.multi, plain.labels, plain.template, plain.smoothing) == (
        "perplexity",
        None,
        None,
        "auto",
        0,
    )
    assert (
        plain.for_evaluation() is plain
        and plain.without_limits() is plain
        and plain.input_format.template_record() is None
    )


# ---------------------------------------------------------------------------------------- nobody asks which kind it is


def _product() -> list[Path]:
    rooms = ("flatshift", "experiments", "finetune", "benchmarks", "scripts")
    files = [file for room in rooms for file in sorted((ROOT / room).rglob("*.py"))]
    return [file for file in files if file.parent != ROOT / "finetune" / "tasks"]


def _tells_kinds_apart(node: ast.AST) -> bool:
    """`isinstance(…, Classify | …)`, `type(task)`, or `task.kind` compared or looked up."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id in ("isinstance", "issubclass"):
            names = {each.id for each in ast.walk(node.args[1]) if isinstance(each, ast.Name)}
            names |= {each.attr for each in ast.walk(node.args[1]) if isinstance(each, ast.Attribute)}
            return bool(names & {*KINDS, "Task", "BaseTask", "ByExample", "Templated"})
        return node.func.id == "type" and ast.unparse(node.args[0]).endswith("task")
    if isinstance(node, ast.Compare):
        return any(ast.unparse(each).endswith("task.kind") for each in (node.left, *node.comparators))
    return False


def test_nobody_but_the_tasks_asks_which_kind_a_task_is():
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for file in _product()
        if any(word in (text := file.read_text(encoding="utf-8")) for word in (*KINDS, "BaseTask", "task"))
        for node in ast.walk(ast.parse(text))
        if _tells_kinds_apart(node)
    ]
    assert not found, "ask the task (finetune/tasks/base.py), not which kind it is"


def test_one_file_a_kind_and_one_table():
    assert {kind.__module__ for kind in KINDS.values()} == {
        f"flatshift.finetune.tasks.{file.stem}"
        for file in (ROOT / "finetune" / "tasks").glob("*.py")
        if file.stem not in ("__init__", "base")
    }
    assert flatshift.finetune.tasks.KINDS.keys() == {kind().kind for kind in KINDS.values()}


def test_neither_answer_is_preferred_at_a_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    from flatshift.finetune.evaluate import preference

    rewards = np.array([[0.5, 0.5], [1.0, 0.0], [0.0, 1.0]])
    scores = preference.PreferenceScores(rewards, np.zeros(3), np.array([[1, -1]] * 3), 1, None)
    monkeypatch.setattr(preference, "answer_scores", lambda evaluator, examples: scores)
    assert Preference().predict(None, ())["preferred"] == [None, "chosen", "rejected"]  # type: ignore[arg-type]
