"""Encoder-decoders: rows to both sides, batches, the sliced loss, judging, and mistakes in one sentence."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers import NllbTokenizer

from flatshift.experiments.data.splits import prepare_data, prepare_eval_data
from flatshift.experiments.recipe import from_override, load_recipe
from flatshift.finetune.adapters.adapter import attach_adapter, trainable
from flatshift.finetune.compute.loss import batch_loss, find_head
from flatshift.finetune.config import Adapter, Evaluate, Train
from flatshift.finetune.data.batches import TrainingDataLoader
from flatshift.finetune.data.encoding import encode
from flatshift.finetune.data.eval_batching import EvalBatching
from flatshift.finetune.data.panel import format_first_batch
from flatshift.finetune.errors import UserError
from flatshift.finetune.evaluate.answers import generate_answers
from flatshift.finetune.evaluate.evaluator import evaluate
from flatshift.finetune.evaluate.perplexity import document_nats
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.planner.memory import memory_plan
from flatshift.finetune.tasks import Classify, LanguageModel, Regress, Seq2Seq
from tests.support.data_models import bert_tokenizer, row, text_rows, write_jsonl
from tests.support.seq2seq_models import TOKENIZER, save_encoder_decoder

TASK = Seq2Seq(prompt="say: {text}", target="{label}")
PAD, EOS = 0, 2


def encoded(rows, *, task=TASK, max_length=64, start=PAD, **more):
    return encode(rows, task=task, tokenizer=TOKENIZER, max_length=max_length, decoder_start=start, **more)


def adapted(kind, directory):
    model = attach_adapter(
        load_backbone(save_encoder_decoder(kind, directory), task=TASK), Adapter(rank=4), task=TASK, seed=0
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainable(model).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def batch_of(rows, *, start=PAD):
    (micro,) = EvalBatching(len(rows), PAD).batches(encoded(rows, start=start).examples, TASK)
    return micro


def test_both_sides_of_a_row():
    (example,) = encoded([row(text="the cat", label="größe")], start=7).examples
    assert TASK.columns() == ("text", "label")
    assert example.input_ids == TOKENIZER("say: the cat")["input_ids"]  # no <bos>: this tokenizer adds none itself
    assert example.labels == [*TOKENIZER("größe")["input_ids"], EOS]
    assert example.decoder_ids == [7, *example.labels[:-1]]
    assert example.bytes == len("größe".encode()) and example.answer is None


def test_the_tokenizers_own_template_stands_on_both_sides():
    tokenizer = bert_tokenizer()
    rows = [row(text="cat", label="dog")]
    (example,) = encode(rows, task=TASK, tokenizer=tokenizer, max_length=64, decoder_start=9).examples
    assert example.input_ids == tokenizer("say: cat")["input_ids"]
    assert example.labels == tokenizer("dog")["input_ids"]


def test_a_tokenizer_for_translation_writes_targets_in_their_language():
    tokenizer = NllbTokenizer(src_lang="eng_Latn", tgt_lang="deu_Latn")
    rows = [row(text="cat", label="dog")]
    (example,) = encode(rows, task=TASK, tokenizer=tokenizer, max_length=64, decoder_start=9).examples
    assert example.input_ids == tokenizer("say: cat")["input_ids"]
    assert example.labels == tokenizer(text_target="dog")["input_ids"] != tokenizer("dog")["input_ids"]


def test_each_side_is_cut_on_its_own_and_counted():
    long = " ".join(["cat"] * 40)
    rows = [row(0, text=long, label="good"), row(1, text="cat", label=long), row(2, text="cat", label="good")]
    made = encoded(rows, max_length=12)
    assert made.truncated == 2
    first, second, third = made.examples
    assert first.input_ids == TOKENIZER("say: " + long)["input_ids"][:12]
    assert second.labels == [*TOKENIZER(long)["input_ids"][:11], EOS] and len(second.decoder_ids) == 12
    assert second.bytes == len(TOKENIZER.decode(second.labels[:-1]).encode()) < len(long)
    assert third.labels[-1] == EOS


def test_an_empty_target_is_refused_or_skipped_and_the_start_token_is_needed():
    rows = [row(0, text="cat", label=""), row(1, text="cat", label="good")]
    with pytest.raises(UserError, match=r"rows.jsonl:1: the target is empty"):
        encoded(rows)
    assert len(encoded(rows, bad_rows="skip").examples) == 1
    with pytest.raises(ValueError, match="decoder_start"):
        encoded(rows, start=None)


def test_batches_hold_both_sides_and_count_the_target():
    examples = encoded(text_rows(23)).examples
    batches = TrainingDataLoader(examples, task=TASK, batch_size=4, accumulate=2, seed=0, max_length=64, pad_id=PAD)
    assert not batches.packed
    for step in range(3):
        micros = batches.at(step)
        assert batches.supervised(step) == sum(int((m.labels != -100).sum()) for m in micros)
        for micro in micros:
            assert micro.inputs.keys() == {"input_ids", "attention_mask", "decoder_input_ids"}
            for r, (index,) in enumerate(micro.rows):
                n, m = len(examples[index].input_ids), len(examples[index].labels)
                assert micro.inputs["input_ids"][r, :n].tolist() == examples[index].input_ids
                assert micro.inputs["decoder_input_ids"][r, :m].tolist() == examples[index].decoder_ids
                assert micro.labels[r, :m].tolist() == examples[index].labels
                assert (micro.labels[r, m:] == -100).all() and (micro.inputs["decoder_input_ids"][r, m:] == PAD).all()
    with pytest.raises(UserError, match=r"do not fit train.max_length"):
        TrainingDataLoader(
            [replace(examples[0], labels=[5] * 70, decoder_ids=[0] * 70)],
            task=TASK, batch_size=1, seed=0, max_length=64, pad_id=PAD,
        )  # fmt: skip


def test_evaluation_batches_bound_the_tokens_of_both_sides():
    examples = encoded(text_rows(30)).examples
    micros = list(EvalBatching(30, PAD).batches(examples, TASK, max_tokens=100))
    assert sorted(i for micro in micros for (i,) in micro.rows) == list(range(30)) and len(micros) > 3
    assert all(micro.labels.numel() + micro.inputs["input_ids"].numel() <= 200 for micro in micros)
    assert all(micro.labels.numel() <= 100 for micro in micros)


def test_the_panel_shows_both_sides():
    panel = format_first_batch(batch_of([row(text="the cat", label="good")]), TOKENIZER, TASK)
    assert "say: the cat → ⟦good<eos>⟧" in panel
    read, written = len(TOKENIZER("say: the cat")["input_ids"]), len(TOKENIZER("good")["input_ids"]) + 1
    assert f"{read + written} tokens, {written} tokens supervised" in panel


@pytest.mark.parametrize(("kind", "plain"), [("t5", True), ("t5-gated", True), ("bart", False)])
def test_sliced_and_whole_loss_agree(kind, plain, tmp_path):
    """BART adds a bias behind its head, zero here: its loss must come from its own logits."""
    model, micro = adapted(kind, tmp_path), batch_of(text_rows(6))
    head = find_head(model, micro.inputs, task=TASK)
    assert (head is not None) == plain
    logits = model(**micro.inputs).logits
    naive = F.cross_entropy(logits.flatten(0, 1), micro.labels.flatten(), reduction="sum")
    naive.backward()
    expected = {name: p.grad.clone() for name, p in trainable(model).items()}
    for route in {head, None}:
        model.zero_grad()
        loss = batch_loss(model, micro, task=TASK, head=route)
        assert abs(loss.item() / naive.item() - 1) < 1e-6
        loss.backward()
        for name, parameter in trainable(model).items():
            assert (parameter.grad - expected[name]).norm() <= 1e-5 * expected[name].norm(), name


@torch.no_grad()
def test_surprise_of_each_document(tmp_path):
    model, examples = adapted("t5", tmp_path).eval(), encoded(text_rows(9)).examples
    nats, tokens = document_nats(model, examples, EvalBatching(4, PAD), task=TASK)
    for i, example in enumerate(examples):
        inputs = {"input_ids": example.input_ids, "decoder_input_ids": example.decoder_ids}
        logits = model(**{name: torch.tensor([ids]) for name, ids in inputs.items()}).logits[0]
        alone = F.cross_entropy(logits, torch.tensor(example.labels), reduction="sum").item()
        assert nats[i] == pytest.approx(alone, rel=1e-5) and tokens[i] == len(example.labels)


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_greedy_answers_are_those_of_each_row_alone(kind, tmp_path):
    task = replace(TASK, score="generate")
    model = adapted(kind, tmp_path).eval()
    examples = encoded(text_rows(7), task=task, start=open_backbone(tmp_path).decoder_start).examples
    answers = generate_answers(model, TOKENIZER, examples, EvalBatching.of(TOKENIZER, batch_size=3), max_new_tokens=5)
    for example, answer in zip(examples, answers, strict=True):
        said = [example.decoder_ids[0]]
        while len(said) < 6 and said[1:][-1:] != [EOS]:
            with torch.no_grad():
                logits = model(
                    input_ids=torch.tensor([example.input_ids]), decoder_input_ids=torch.tensor([said])
                ).logits
            said.append(int(logits[0, -1].argmax()))
        assert answer == TOKENIZER.decode(said[1:], skip_special_tokens=True).strip()
    told = [replace(example, answer=answer) for example, answer in zip(examples, answers, strict=True)]
    figures = evaluate(model, TOKENIZER, told, task=replace(task, max_new_tokens=5), config=Evaluate(bootstrap=10))
    assert figures.keys() == {"loss", "perplexity", "bits_per_byte", "exact_match", "chrf"}
    assert figures["exact_match"]["value"] == 1.0


def test_mistakes_are_told(tmp_path):
    source = save_encoder_decoder("t5", tmp_path)
    assert open_backbone(source).decoder_start == 0
    with pytest.raises(UserError, match=r"no decoder_start_token_id.*task.kind: completion"):
        assert open_backbone("flatshift-5m").decoder_start
    with pytest.raises(UserError, match=r"no causal language modelling class.*task.kind: seq2seq"):
        load_backbone(source, task=LanguageModel())
    with pytest.raises(UserError, match="no encoder-decoder class"):
        load_backbone("flatshift-5m", task=TASK)
    with pytest.raises(ValueError, match="max_new_tokens"):
        Seq2Seq(max_new_tokens=0)


def test_a_prefix_stands_before_every_prompt_and_outlasts_a_cut():
    task = replace(TASK, prefix="sort {it}: ")
    rows = [row(0, text="cat", label="good"), row(1, text="cat " * 40, label="good")]
    short, long = encoded(rows, task=task, max_length=24).examples
    assert short.input_ids == TOKENIZER("sort {it}: say: cat")["input_ids"]
    assert long.input_ids == TOKENIZER("sort {it}: say: " + "cat " * 40)["input_ids"][:24]


def test_smoothing_is_for_training_alone(tmp_path):
    """Judged is the likelihood; a setting that would do nothing is refused."""
    model, examples = adapted("t5", tmp_path).eval(), encoded(text_rows(9)).examples
    figures = [
        evaluate(model, TOKENIZER, examples, task=replace(TASK, label_smoothing=e), config=Evaluate(bootstrap=2))
        for e in (None, 0.3)
    ]
    assert figures[0] == figures[1]
    with pytest.raises(ValueError, match="num_beams is for `score: generate`"):
        Seq2Seq(num_beams=4)
    with pytest.raises(ValueError, match="label_smoothing"):
        Seq2Seq(label_smoothing=1.0)


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_memory_of_a_head_over_an_encoder_decoder_is_planned(kind, tmp_path):
    """The probe ends with the token at which transformers' head judges a row."""
    for task, names in ((Classify(), ("a", "b")), (Regress(), None)):
        model = load_backbone(save_encoder_decoder(kind, tmp_path), task=task, label_names=names)
        model = attach_adapter(model, Adapter(rank=2), task=task, seed=0)
        assert memory_plan(model, train=Train(max_length=24)).activations > 0


def test_rows_with_and_without_a_second_text_are_refused_under_a_head_over_an_encoder_decoder(tmp_path):
    pairs = [{"text": "the cat", "text2": "sat", "label": "a"}, {"text": "the dog", "text2": "on", "label": "b"}] * 4
    file = tmp_path / "rows.jsonl"
    settings = {"backbone": "flatshift-t5-3m", "task.kind": "classify", "data.train.files": f"[{file}]"}
    recipe = load_recipe(None, [from_override(key, value) for key, value in settings.items()]).recipe
    write_jsonl(file, pairs)
    assert len(prepare_data(recipe).train) == 8
    write_jsonl(file, [*pairs, {"text": "the cat", "label": "a"}])
    with pytest.raises(
        UserError, match=rf"{file}:1: this row has 2 end-of-sequence tokens and {file}:9 has 1, .*text2"
    ):
        prepare_data(recipe)
    noted = {"inputs": [], "label_names": ["a", "b"], "units": None}
    (tmp_path / "manifest.json").write_text(json.dumps(noted), encoding="utf-8")
    with pytest.raises(UserError, match="takes no such rows together"):
        prepare_eval_data(recipe, [str(file)], run=tmp_path)
    bare = save_encoder_decoder("t5", tmp_path / "bare")  # its tokenizer closes nothing
    write_jsonl(file, [{"text": one["text"], "label": one["label"]} for one in pairs])
    with pytest.raises(UserError, match=rf"{file}:1: this row ends without the end-of-sequence token"):
        prepare_data(replace(recipe, backbone=str(bare)))
