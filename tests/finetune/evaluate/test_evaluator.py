"""`evaluate` against arithmetic spelled out one sample at a time; it leaves no trace."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from flatshift.finetune.config import Evaluate
from flatshift.finetune.data.encoding import encode
from flatshift.finetune.data.eval_batching import EvalBatching
from flatshift.finetune.errors import UserError
from flatshift.finetune.evaluate import ranking
from flatshift.finetune.evaluate.answers import generate_answers
from flatshift.finetune.evaluate.evaluator import evaluate
from flatshift.finetune.evaluate.perplexity import document_nats, token_nats
from flatshift.finetune.evaluate.ranking import rank_choices
from flatshift.finetune.tasks import Classify, Completion, LanguageModel
from tests.support.data_models import bert_tokenizer, byte_tokenizer, row, text_rows, tiny_model

TOKENIZER = byte_tokenizer()
CONFIG = Evaluate(batch_size=8, bootstrap=50)
FLOORED = {"loss", "accuracy", "f1_macro", "matthews", "majority_floor"}


def encoded(task, count=25, max_length=48):
    return encode(text_rows(count), task=task, tokenizer=TOKENIZER, max_length=max_length)


def by_hand(model, example) -> float:
    """−Σ log p of the supervised tokens, one position at a time in float64."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([example.input_ids])).logits[0].double().log_softmax(-1)
    return -sum(float(logits[t - 1, label]) for t, label in enumerate(example.labels) if t and label != -100)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom"])
@pytest.mark.parametrize("task", [LanguageModel(), Completion()], ids=lambda task: task.kind)
def test_perplexity_is_the_sum_over_documents(kind, task):
    model = tiny_model(kind, len(TOKENIZER))
    examples = encoded(task).examples
    nats = np.array([by_hand(model, example) for example in examples])
    tokens = sum(label != -100 for example in examples for label in example.labels)
    ours, counted = document_nats(model, examples, EvalBatching(7, 0), task=task)
    np.testing.assert_allclose(ours, nats, rtol=1e-5)
    assert counted.sum() == tokens
    figures = evaluate(model, TOKENIZER, examples, task=task, config=CONFIG)
    assert figures.keys() == {"loss", "perplexity", "bits_per_byte"}
    assert figures["loss"]["value"] == pytest.approx(nats.sum() / tokens, rel=1e-5)
    assert figures["perplexity"]["value"] == pytest.approx(math.exp(nats.sum() / tokens), rel=1e-4)
    size = sum(example.bytes for example in examples)
    assert figures["bits_per_byte"]["value"] == pytest.approx(nats.sum() / math.log(2) / size, rel=1e-5)
    for figure in figures.values():
        assert figure["low"] <= figure["value"] <= figure["high"] and figure["n"] == 25


def test_slices_of_logits_do_not_show(monkeypatch):
    logits, labels = torch.randn(2, 9, 11, generator=torch.Generator().manual_seed(0)), torch.randint(0, 11, (2, 9))
    labels[0, :4] = -100
    whole, rows = token_nats(logits, labels, LanguageModel())
    monkeypatch.setattr("flatshift.finetune.evaluate.perplexity.slice_rows", lambda vocabulary, device, width: 2)
    sliced, same = token_nats(logits, labels, LanguageModel())
    assert torch.equal(whole, sliced) and torch.equal(rows, same) and rows.tolist() == [0] * 5 + [1] * 8


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral", "bloom"])
def test_ranking_scores_whole_completions(kind):
    model = tiny_model(kind, len(TOKENIZER))
    task = Completion(prompt="{text} is", completion=" {label}", score="rank")
    coded = encoded(task, count=9)
    scores = rank_choices(model, coded.examples, EvalBatching(4, 0), task=task)
    for example, ours in zip(coded.examples, scores, strict=True):
        prompt = example.input_ids[: example.labels.count(-100)]
        for choice, score in zip(example.choices, ours, strict=True):
            with torch.no_grad():
                logp = model(input_ids=torch.tensor([[*prompt, *choice]])).logits[0].double().log_softmax(-1)
            expected = sum(float(logp[len(prompt) - 1 + i, token]) for i, token in enumerate(choice))
            assert score == pytest.approx(expected, abs=2e-4)
    figures = evaluate(model, TOKENIZER, coded.examples, task=task, config=CONFIG, label_names=coded.label_names)
    gold = np.array([example.gold for example in coded.examples])
    assert figures["accuracy"]["value"] == (scores.argmax(-1) == gold).mean()
    assert figures.keys() >= FLOORED | {"perplexity", "bits_per_byte"}
    plain = evaluate(model, TOKENIZER, coded.examples, task=Completion(), config=CONFIG)
    assert figures["loss"]["value"] == pytest.approx(plain["loss"]["value"], rel=1e-5)


def test_a_model_whose_cache_cannot_be_shared_is_scored_row_by_row(monkeypatch):
    model = tiny_model("llama", len(TOKENIZER))
    examples = encoded(Completion(score="rank"), count=6).examples
    shared = rank_choices(model, examples, EvalBatching(4, 0), task=Completion())

    def wrong(*arguments):
        return np.zeros((2, 3))

    monkeypatch.setattr(ranking, "_rank_with_shared_prompt", wrong)
    apart = rank_choices(model, examples, EvalBatching(4, 0), task=Completion())
    np.testing.assert_allclose(apart, shared, atol=1e-4)
    assert np.abs(apart).min() > 0


def test_generation_continues_each_prompt_as_it_would_alone():
    task = Completion(prompt="{text}", completion=" {label}", score="generate", max_new_tokens=6)
    for kind in ("llama", "gpt2"):
        model = tiny_model(kind, len(TOKENIZER))
        examples = encoded(task, count=9).examples
        ours = generate_answers(model, TOKENIZER, examples, EvalBatching.of(TOKENIZER, batch_size=4), max_new_tokens=6)
        for example, answer in zip(examples, ours, strict=True):
            ids = example.input_ids[: example.labels.count(-100)]
            said: list[int] = []
            while len(said) < 6:
                with torch.no_grad():
                    said.append(int(model(input_ids=torch.tensor([ids + said])).logits[0, -1].argmax()))
                if said[-1] == 2:
                    break
            assert answer == TOKENIZER.decode(said, skip_special_tokens=True).strip()


def test_exact_match_compares_the_whole_stripped_answer(monkeypatch):
    model = tiny_model("llama", len(TOKENIZER))
    task = Completion(prompt="{text}", completion=" {label}\n", score="generate", max_new_tokens=4)
    rows = [row(i, text="the cat", label=label) for i, label in enumerate(["good", "bad", "good", "goo"])]
    examples = encode(rows, task=task, tokenizer=TOKENIZER, max_length=32).examples
    monkeypatch.setattr("flatshift.finetune.evaluate.evaluator.generate_answers", lambda *a, **k: ["good"] * 4)
    figures = evaluate(model, TOKENIZER, examples, task=task, config=CONFIG)
    assert figures["exact_match"]["value"] == 0.5 and figures["exact_match"]["n"] == 4
    with pytest.raises(UserError, match=r"do not fit the backbone's 40 positions"):
        long = encode(text_rows(3, words=(15, 16)), task=task, tokenizer=TOKENIZER, max_length=64).examples
        small = tiny_model("llama", len(TOKENIZER), max_position_embeddings=40)
        generate_answers(small, TOKENIZER, long, EvalBatching.of(TOKENIZER, batch_size=2), max_new_tokens=30)


@pytest.mark.parametrize(("kind", "tokenizer"), [("llama-classes", TOKENIZER), ("bert-classes", bert_tokenizer())])
def test_classes_one_by_one(kind, tokenizer):
    model = tiny_model(kind, len(tokenizer))
    examples = encode(text_rows(25), task=Classify(), tokenizer=tokenizer, max_length=32).examples
    with torch.no_grad():
        logits = torch.cat([model(input_ids=torch.tensor([example.input_ids])).logits for example in examples]).double()
    labels = torch.tensor([example.labels for example in examples])
    figures = evaluate(model, tokenizer, examples, task=Classify(), config=CONFIG)
    assert figures.keys() >= FLOORED
    expected = float(torch.nn.functional.cross_entropy(logits, labels))
    assert figures["loss"]["value"] == pytest.approx(expected, rel=1e-5)
    assert figures["accuracy"]["value"] == float((logits.argmax(-1) == labels).double().mean())
    assert figures["majority_floor"]["value"] == int(labels.bincount().max()) / 25


def test_evaluation_leaves_no_trace():
    model = tiny_model("gpt2", len(TOKENIZER), resid_pdrop=0.5).train()
    model.transformer.h[0].eval()  # a mixed state must come back as it was
    modes = [module.training for module in model.modules()]
    state, examples = torch.get_rng_state(), encoded(LanguageModel()).examples
    first = evaluate(model, TOKENIZER, examples, task=LanguageModel(), config=CONFIG, seed=1)
    assert first == evaluate(model, TOKENIZER, examples, task=LanguageModel(), config=CONFIG, seed=1)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    json.dumps(first, allow_nan=False)


@pytest.mark.bf16
def test_autocast_changes_little():
    model = tiny_model("llama", len(TOKENIZER))
    examples = encoded(LanguageModel()).examples
    exact, _ = document_nats(model, examples, EvalBatching(8, 0), task=LanguageModel())
    coarse, _ = document_nats(model, examples, EvalBatching(8, 0, autocast_dtype=torch.bfloat16), task=LanguageModel())
    assert not np.array_equal(exact, coarse)
    np.testing.assert_allclose(coarse, exact, rtol=2e-2)


def test_nothing_to_evaluate():
    with pytest.raises(UserError, match="the split has no examples"):
        evaluate(tiny_model("llama", 320), TOKENIZER, [], task=LanguageModel(), config=CONFIG)
