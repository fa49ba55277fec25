"""Losses and figures of the objectives against transformers, scikit-learn, scipy and NLTK."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics as sk
import torch
from nltk.translate.chrf_score import sentence_chrf
from transformers.trainer_pt_utils import LabelSmoother

from flatshift.finetune.adapters.adapter import attach_adapter, trainable
from flatshift.finetune.config import Adapter, Evaluate
from flatshift.finetune.data.batches import TrainingDataLoader
from flatshift.finetune.data.encoding import encode
from flatshift.finetune.data.eval_batching import EvalBatching
from flatshift.finetune.data.labels import Units
from flatshift.finetune.data.masking import Masking
from flatshift.finetune.evaluate.answers import generate_answers
from flatshift.finetune.evaluate.evaluator import evaluate
from flatshift.finetune.evaluate.prediction_metrics import (
    LabelSets,
    average_precision,
    f1_macro,
    f1_micro,
    mae,
    multilabel_metrics,
    pearson,
    regression_metrics,
    rmse,
    spearman,
)
from flatshift.finetune.evaluate.text_metrics import chrf
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.parallel.engine import Engine
from flatshift.finetune.tasks import Classify, MaskedLM, Regress, Seq2Seq
from tests.support.data_models import text_rows
from tests.support.objective_models import CLASSES, masked_tokenizer, numbered_rows, scatter, several_rows
from tests.support.seq2seq_models import TOKENIZER, save_encoder_decoder

WORDPIECE = masked_tokenizer()


def adapted(source, task, **names):
    return scatter(attach_adapter(load_backbone(source, task=task, **names), Adapter(rank=4), task=task, seed=0))


def update(model, batches, task):
    """Our loss of the first update, and its gradients."""
    micros = batches.at(0)
    model.zero_grad()
    engine = Engine.alone(model)
    head = engine.find_head(micros[0].inputs, task=task)
    loss = engine.forward_backward(
        micros, batches.supervised(0), task=task, head=head, context=lambda index: torch.enable_grad()
    )
    return loss.item(), {name: p.grad.clone() for name, p in trainable(model).items() if p.grad is not None}, micros


def compare(model, batches, task, their_loss):
    """Ours equal Σ their_loss(micro), a summed loss, ÷ the update's count, in value and gradients."""
    ours, grads, micros = update(model, batches, task)
    model.zero_grad()
    theirs = sum(their_loss(micro) for micro in micros) / batches.supervised(0)
    theirs.backward()
    assert ours == pytest.approx(theirs.item(), rel=1e-5)
    for name, grad in grads.items():
        expected = trainable(model)[name].grad
        assert (grad - expected).norm() <= 2e-5 * expected.norm(), name
        assert expected.norm() > 0 or "lora_" in name


def batches_of(rows, task, *, tokenizer=WORDPIECE, masking=None, **encoding):
    examples = encode(rows, task=task, tokenizer=tokenizer, max_length=64, **encoding).examples
    return TrainingDataLoader(
        examples, task=task, batch_size=4, accumulate=3, seed=0, max_length=64, pad_id=0, masking=masking
    )


def test_several_classes_are_transformers_multi_label_loss_times_the_classes(encoder):
    task = Classify(multi=True)
    model = adapted(encoder, task, label_names=CLASSES)
    assert model.config.problem_type == "multi_label_classification"
    batches = batches_of(several_rows(12), task, label_names=CLASSES)
    compare(
        model, batches, task,
        lambda m: model(**m.inputs, labels=m.labels).loss * m.samples * len(CLASSES),  # theirs: mean of B × C
    )  # fmt: skip


def test_regression_is_transformers_loss_of_standardised_targets(encoder):
    task = Regress()
    model = adapted(encoder, task)
    batches = batches_of(numbered_rows(12), task, units=Units(50.0, 50.0, 20.0, "classifier"))
    compare(model, batches, task, lambda m: model(**m.inputs, labels=m.labels).loss * m.samples)


@pytest.mark.parametrize("words", [False, True])
def test_masked_language_modelling_is_transformers_loss(encoder, words):
    task = MaskedLM(whole_words=words, share=0.3)
    model = adapted(encoder, task)
    batches = batches_of(text_rows(12, words=(5, 20)), task, masking=Masking.of(task, WORDPIECE))
    compare(model, batches, task, lambda m: model(**m.inputs, labels=m.labels).loss * m.supervised)


@pytest.mark.parametrize("kind", ["t5", "t5-gated", "bart"])
def test_label_smoothing_is_transformers_label_smoother(kind, tmp_path):
    """On the sliced path (T5) and on whole logits (BART, whose head has a bias of its own)."""
    task = Seq2Seq(label_smoothing=0.2)
    source = save_encoder_decoder(kind, tmp_path)
    model = adapted(source, task)
    batches = batches_of(text_rows(12), task, tokenizer=TOKENIZER, decoder_start=open_backbone(source).decoder_start)
    smoother = LabelSmoother(epsilon=0.2)
    compare(
        model, batches, task,
        lambda m: smoother({"logits": model(**m.inputs).logits}, m.labels, num_items_in_batch=1),
    )  # fmt: skip
    plain, _, _ = update(model, batches, Seq2Seq())
    smoothed, _, _ = update(model, batches, task)
    assert abs(plain - smoothed) > 1e-3


# Figures


def drawn_sets(n: int, classes: int, seed: int, *, ties: bool = False):
    rng = np.random.default_rng(seed)
    true = rng.random((n, classes)) < rng.uniform(0.05, 0.6, classes)
    logits = rng.normal(size=(n, classes)) + 1.5 * true - 0.7
    return true, np.round(logits) if ties else logits


def macro_precision(true, scores):
    present = true.any(0)
    return sk.average_precision_score(true[:, present], scores[:, present], average="macro")


@pytest.mark.filterwarnings("ignore:.*ill-defined")
@pytest.mark.parametrize(("n", "classes"), [(1, 2), (7, 3), (200, 5), (150, 40)])
@pytest.mark.parametrize("ties", [False, True])
def test_figures_of_sets_are_scikit_learns(n, classes, ties):
    for seed in range(3):
        true, logits = drawn_sets(n, classes, seed, ties=ties)
        said = logits > 0
        found = multilabel_metrics(true, logits, resamples=5, confidence=0.95, seed=0)
        expected = {
            "accuracy": sk.accuracy_score(true, said),
            "f1_micro": sk.f1_score(true, said, average="micro", zero_division=0),
            "f1_macro": sk.f1_score(true, said, average="macro", zero_division=np.nan),
            "average_precision": macro_precision(true, logits) if true.any() else 0.0,
        }
        for name, value in expected.items():
            assert found[name]["value"] == pytest.approx(0.0 if np.isnan(value) else value, abs=1e-12), name
        rows = [tuple(r) for r in true.tolist()]
        assert found["majority_floor"]["value"] == pytest.approx(max(map(rows.count, rows)) / n)


def test_resamples_of_sets_are_what_scikit_learn_says_of_them():
    true, logits = drawn_sets(40, 4, 0, ties=True)
    sets = LabelSets(true, logits)
    rng = np.random.default_rng(1)
    index = rng.integers(0, 40, size=(30, 40))
    weights = np.stack([np.bincount(row, minlength=40) for row in index]).astype(float)
    ours = {
        "micro": f1_micro(sets, weights),
        "macro": f1_macro(sets, weights),
        "precision": average_precision(sets, weights),
    }
    for k, row in enumerate(index):
        t, s = true[row], logits[row]
        assert ours["micro"][k] == pytest.approx(sk.f1_score(t, s > 0, average="micro"))
        assert ours["macro"][k] == pytest.approx(sk.f1_score(t, s > 0, average="macro", zero_division=np.nan))
        assert ours["precision"][k] == pytest.approx(macro_precision(t, s))


def test_the_f1_floor_is_the_best_constant_answer():
    for seed in range(5):
        true, logits = drawn_sets(60, 4, seed)
        found = multilabel_metrics(true, logits, resamples=3, confidence=0.95, seed=0)["f1_floor"]["value"]
        every = [np.array([bool(mask >> k & 1) for k in range(4)]) for mask in range(1, 16)]
        best = max(sk.f1_score(true, np.tile(said, (60, 1)), average="micro") for said in every)
        assert found == pytest.approx(best)


def test_figures_of_numbers_are_scipys_and_scikit_learns():
    rng = np.random.default_rng(0)
    for n in (3, 50, 400):
        true = np.round(rng.normal(3, 2, n), 1)  # ties
        predicted = np.round(0.5 * true + rng.normal(0, 1, n), 1)
        found = regression_metrics(true, predicted, mean=2.5, resamples=50, confidence=0.95, seed=0)
        expected = {
            "pearson": scipy.stats.pearsonr(true, predicted).statistic,
            "spearman": scipy.stats.spearmanr(true, predicted).statistic,
            "rmse": sk.root_mean_squared_error(true, predicted),
            "mae": sk.mean_absolute_error(true, predicted),
            "mean_floor": sk.root_mean_squared_error(true, np.full(n, 2.5)),
        }
        for name, value in expected.items():
            assert found[name]["value"] == pytest.approx(value, abs=1e-12), name
    alike = regression_metrics([1.0, 1.0], [0.5, 2.0], mean=1.0, resamples=5, confidence=0.95, seed=0)
    assert alike["pearson"]["value"] is None and alike["spearman"]["value"] is None and alike["rmse"]["value"]
    index = rng.integers(0, 400, size=(20, 400))
    for ours, theirs in (
        (pearson, lambda a, b: scipy.stats.pearsonr(a, b).statistic),
        (spearman, lambda a, b: scipy.stats.spearmanr(a, b).statistic),
        (rmse, sk.root_mean_squared_error),
        (mae, sk.mean_absolute_error),
    ):
        found = ours(true[index], predicted[index])
        np.testing.assert_allclose(found, [theirs(true[row], predicted[row]) for row in index], atol=1e-12)


def test_evaluate_judges_numbers_in_their_own_units(encoder):
    task, rows = Regress(), numbered_rows(9)
    model = adapted(encoder, task).eval()
    examples = encode(rows, task=task, tokenizer=WORDPIECE, max_length=64, units=Units(48.0, 50.0, 20.0)).examples
    found = evaluate(model, WORDPIECE, examples, task=task, config=Evaluate(bootstrap=5, batch_size=4))
    with torch.no_grad():
        said = [
            float(model(**micro.inputs).logits) for e in examples for micro in EvalBatching(1, 0).batches([e], task)
        ]
    true = np.array([r.values["label"] for r in rows])
    assert found["rmse"]["value"] == pytest.approx(sk.root_mean_squared_error(true, said), rel=1e-5)
    assert found["loss"]["value"] == pytest.approx(np.mean((true - said) ** 2) / 400, rel=1e-5)
    assert found["mean_floor"]["value"] == pytest.approx(sk.root_mean_squared_error(true, [48.0] * 9))


def test_chrf_is_nltks_where_texts_are_long_enough():
    rng = np.random.default_rng(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "größe", "naïve", "positive", "negative"]
    for _ in range(200):
        given, said = ("on mat " + " ".join(rng.choice(words, size=rng.integers(1, 12))) for _ in range(2))
        assert chrf(said, given) == pytest.approx(sentence_chrf(given, said, beta=2), abs=1e-12)
    assert chrf("yes", "yes") == 1.0 and chrf("", "yes") == 0.0 and chrf("no", "yes") == 0.0
    assert chrf("ab", "abcdef") == pytest.approx(0.5 * (5 * 1 * (2 / 6) / (4 + 2 / 6) + 5 * 1 * (1 / 5) / (4 + 1 / 5)))


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_beam_search_is_transformers_own_of_each_row_alone(kind, tmp_path):
    task = Seq2Seq(score="generate", num_beams=3, max_new_tokens=6)
    source = save_encoder_decoder(kind, tmp_path)
    model = adapted(source, task).eval()
    start = open_backbone(source).decoder_start
    examples = encode(text_rows(7), task=task, tokenizer=TOKENIZER, max_length=64, decoder_start=start).examples
    answers = generate_answers(
        model, TOKENIZER, examples, EvalBatching.of(TOKENIZER, batch_size=3), max_new_tokens=6, num_beams=3
    )
    greedy = generate_answers(model, TOKENIZER, examples, EvalBatching.of(TOKENIZER, batch_size=3), max_new_tokens=6)
    for example, answer in zip(examples, answers, strict=True):
        out = model.generate(
            input_ids=torch.tensor([example.input_ids]), num_beams=3, do_sample=False, max_new_tokens=6,
            decoder_start_token_id=start, pad_token_id=0, eos_token_id=2, length_penalty=1.0, early_stopping=False,
        )  # fmt: skip
        assert answer == TOKENIZER.decode(out[0, 1:], skip_special_tokens=True).strip()
    assert answers != greedy
    found = evaluate(model, TOKENIZER, examples, task=task, config=Evaluate(bootstrap=5))
    assert found.keys() == {"loss", "perplexity", "bits_per_byte", "exact_match", "chrf"}
