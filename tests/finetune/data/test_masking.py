"""Masked language modelling: what is hidden, that it is a function of seed and place, its loss, and warm-ups by it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from flatshift.finetune.adapters.adapter import attach_adapter, load_adapter, save_adapter, trainable
from flatshift.finetune.compute.loss import batch_loss, find_head
from flatshift.finetune.config import Adapter, Evaluate
from flatshift.finetune.data.batches import TrainingDataLoader
from flatshift.finetune.data.encoding import encode
from flatshift.finetune.data.eval_batching import EvalBatching
from flatshift.finetune.data.masking import SPECIAL, Masking, unmask_tokens
from flatshift.finetune.data.panel import format_first_batch
from flatshift.finetune.errors import UserError
from flatshift.finetune.evaluate.evaluator import evaluate
from flatshift.finetune.evaluate.perplexity import document_nats
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.seeds import numpy_generator
from flatshift.finetune.tasks import Classify, MaskedLM
from tests.support.data_models import byte_tokenizer, row, text_rows
from tests.support.finetune_models import save_backbone
from tests.support.objective_models import masked_tokenizer, save_encoder, scatter

TASK = MaskedLM()
TOKENIZER = masked_tokenizer()
MASK = TOKENIZER.mask_token_id


def test_no_token_becomes_one_that_was_added_to_the_vocabulary():
    tokenizer = masked_tokenizer()
    tokenizer.add_tokens([f"<extra {i}>" for i in range(9)])
    assert Masking.of(TASK, tokenizer).replacements.tolist() == Masking.of(TASK, TOKENIZER).replacements.tolist()


def encoded(rows, task=TASK, max_length=64):
    return encode(rows, task=task, tokenizer=TOKENIZER, max_length=max_length).examples


def batches_of(examples, task=TASK, **settings):
    how = {"batch_size": 4, "seed": 0, "max_length": 64, "pad_id": 0, **settings}
    return TrainingDataLoader(examples, task=task, masking=Masking.of(task, TOKENIZER), **how)


def own(example):
    return unmask_tokens(np.array(example.input_ids), np.array(example.labels)).tolist()


def test_fifteen_per_cent_are_chosen_and_fare_as_in_bert():
    masking = Masking(MASK, np.arange(5, 120))
    ids = np.full(1000, 50, dtype=np.int64)
    words = np.arange(1000)
    words[:100] = SPECIAL
    fates: Counter[str] = Counter()
    places = np.zeros(1000)
    for seed in range(200):
        read, labels = masking.draw(ids, words, np.random.default_rng(seed))
        chosen = labels != -100
        assert chosen.sum() == 135 and not chosen[:100].any()
        assert (labels[chosen] == 50).all() and (read[~chosen] == 50).all()
        places += chosen
        fates.update("masked" if t == MASK else "kept" if t == 50 else "random" for t in read[chosen].tolist())
    total = sum(fates.values())
    assert fates["masked"] / total == pytest.approx(0.8, abs=0.01)
    assert fates["random"] / total == pytest.approx(0.1 * 114 / 115, abs=0.01)
    assert places[100:].max() < 60 and places[100:].min() > 8  # of 200, each place with probability 0.15


def test_one_token_is_hidden_even_of_a_short_row():
    masking = Masking(MASK, np.arange(5, 120))
    _, labels = masking.draw(np.array([2, 9, 3]), np.array([SPECIAL, 0, SPECIAL]), np.random.default_rng(0))
    assert labels.tolist() == [-100, 9, -100]


def test_whole_words_are_hidden_whole_and_never_more_than_the_share():
    masking = Masking(MASK, np.arange(5, 120), share=0.3, whole_words=True)
    words = np.repeat(np.arange(12), [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4])
    sizes = Counter(words.tolist())
    seen: Counter[int] = Counter()
    for seed in range(300):
        _, labels = masking.draw(np.full(len(words), 7), words, np.random.default_rng(seed))
        hidden = Counter(words[labels != -100].tolist())
        assert all(count == sizes[word] for word, count in hidden.items())
        assert 0 < hidden.total() <= 9  # ⌊0.3 · 30 + ½⌋
        seen.update(hidden.keys())
    assert set(seen) == set(range(12))
    long = np.array([SPECIAL, 0, 0, 0, 0, 1, 1, 1, 1, 1])
    _, labels = masking.draw(np.full(10, 7), long, np.random.default_rng(0))
    assert (labels != -100).tolist() == [False] + [True] * 4 + [False] * 5  # the shortest, as none fits


def test_a_row_has_the_tokenizers_template_and_words():
    (example,) = encoded([row(text="positive cat [MASK]")])
    ids = TOKENIZER("positive cat [MASK]")["input_ids"]
    assert own(example) == ids and example.words[0] == example.words[-1] == SPECIAL
    assert example.words[ids.index(MASK)] == SPECIAL, "a special token written out is not to be told"
    pieces = len(TOKENIZER("positive", add_special_tokens=False)["input_ids"])
    assert pieces > 1 and example.words[1 : 1 + pieces] == [0] * pieces and example.words[1 + pieces] == 1
    (cut,) = encoded([row(text="cat " * 50)], max_length=16)
    assert len(cut.input_ids) == 16 and own(cut)[-1] == TOKENIZER.sep_token_id


def test_judged_rows_keep_one_draw_whatever_stands_beside_them():
    rows = text_rows(12, words=(5, 30))
    assert encoded(rows)[4:8] == encoded(rows[4:8])
    assert any(e.input_ids != own(e) for e in encoded(rows))
    with pytest.raises(UserError, match="no token that could be hidden"):
        encoded([row(text="[SEP]")])


@pytest.mark.parametrize("task", [TASK, MaskedLM(whole_words=True, share=0.4)], ids=["tokens", "words"])
def test_training_hides_anew_by_the_row_and_its_epoch_alone(task):
    examples = encoded(text_rows(6, words=(8, 20)), task)
    batches = batches_of(examples, task, batch_size=3, accumulate=2)
    whole = [batches.at(step) for step in range(4)]
    again = batches_of(examples, task, batch_size=3, accumulate=2)
    for step in (3, 1, 0, 2):
        for one, other in zip(again.at(step), whole[step], strict=True):
            assert torch.equal(one.inputs["input_ids"], other.inputs["input_ids"])
            assert torch.equal(one.labels, other.labels)
        assert again.supervised(step) == sum(micro.supervised for micro in whole[step])
        assert again.supervised(step) == sum(int((micro.labels != -100).sum()) for micro in whole[step])
    masking, seen, draws = Masking.of(task, TOKENIZER), Counter(), set()
    for micro in (micro for step in whole for micro in step):
        for r, (i,) in enumerate(micro.rows):
            ids, words = np.array(own(examples[i])), np.array(examples[i].words)
            read, labels = masking.draw(ids, words, numpy_generator(0, "mask", i, seen[i]))
            assert micro.inputs["input_ids"][r, : len(ids)].tolist() == read.tolist()
            assert micro.labels[r, : len(ids)].tolist() == labels.tolist()
            assert (micro.labels[r, len(ids) :] == -100).all()
            draws.add((i, tuple(labels.tolist())))
            seen[i] += 1
    assert len(draws) > 12, "each of six rows came up four times, and hardly ever with the same tokens hidden"


def test_a_data_rank_sees_its_part_of_the_same_masks():
    examples = encoded(text_rows(9, words=(8, 20)))
    (whole,) = batches_of(examples, seed=5).at(2)
    parts = [batches_of(examples, seed=5, share=(i, 2)) for i in range(2)]
    assert parts[0].supervised(2) == whole.supervised
    for i, part in enumerate(parts):
        (micro,) = part.at(2)
        width = micro.labels.shape[1]
        assert torch.equal(micro.labels, whole.labels[2 * i : 2 * i + 2, :width])


def test_masks_are_needed_here_and_nowhere_else():
    examples = encoded(text_rows(4, words=(5, 9)))
    with pytest.raises(ValueError, match="masking"):
        TrainingDataLoader(examples, task=TASK, batch_size=2, seed=0, max_length=64, pad_id=0)
    assert "tokens supervised" in format_first_batch(batches_of(examples).at(0)[0], TOKENIZER, TASK)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return save_encoder(tmp_path_factory.mktemp("encoder"))


def test_sliced_and_whole_loss_are_the_naive_one(source):
    model = scatter(attach_adapter(load_backbone(source, task=TASK), Adapter(rank=4), task=TASK, seed=0))
    (micro,) = batches_of(encoded(text_rows(8, words=(6, 20)))).at(0)
    head = find_head(model, micro.inputs, task=TASK)
    assert head is not None
    logits = model(**micro.inputs).logits
    naive = sum(
        -F.log_softmax(logits[r, t], -1)[micro.labels[r, t]] for r, t in (micro.labels != -100).nonzero().tolist()
    )
    naive.backward()
    expected = {name: p.grad.clone() for name, p in trainable(model).items()}
    for route in (head, None):
        model.zero_grad()
        loss = batch_loss(model, micro, task=TASK, head=route)
        assert loss.item() == pytest.approx(naive.item(), rel=1e-6)
        loss.backward()
        for name, parameter in trainable(model).items():
            assert (parameter.grad - expected[name]).norm() <= 1e-5 * expected[name].norm(), name


@torch.no_grad()
def test_judged_is_the_loss_of_hidden_tokens_row_by_row(source):
    model = scatter(attach_adapter(load_backbone(source, task=TASK), Adapter(rank=4), task=TASK, seed=0)).eval()
    examples = encoded(text_rows(7, words=(4, 20)))
    nats, tokens = document_nats(model, examples, EvalBatching(3, 0), task=TASK)
    for i, example in enumerate(examples):
        logits = model(input_ids=torch.tensor([example.input_ids])).logits[0]
        alone = F.cross_entropy(logits, torch.tensor(example.labels), reduction="sum").item()
        assert nats[i] == pytest.approx(alone, rel=1e-4)
        assert tokens[i] == sum(label != -100 for label in example.labels)
    figures = evaluate(model, TOKENIZER, examples, task=TASK, config=Evaluate(bootstrap=20))
    assert figures.keys() == {"loss", "pseudo_perplexity"}
    assert figures["loss"]["value"] == pytest.approx(nats.sum() / tokens.sum())
    assert figures["pseudo_perplexity"]["value"] == pytest.approx(np.exp(nats.sum() / tokens.sum()))


def test_a_warmed_encoder_continues_under_a_classifier(source, tmp_path):
    warm = scatter(attach_adapter(load_backbone(source, task=TASK), Adapter(rank=4), task=TASK, seed=0))
    save_adapter(warm, tmp_path / "adapter")
    task = Classify(labels=("a", "b"))
    model = attach_adapter(load_backbone(source, task=task, label_names=("a", "b")), Adapter(rank=4), task=task, seed=0)
    before = {name: p.clone() for name, p in trainable(model).items()}
    load_adapter(model, tmp_path / "adapter", partial=True)
    told, after = trainable(warm), trainable(model)
    body = [name for name in after if ".lora_" in name and ".layer." in name]
    assert len(body) == 2 * 2 * 6 and all(torch.equal(after[name], told[name]) for name in body)
    rest = after.keys() - set(body)
    assert rest and all(torch.equal(after[name], before[name]) for name in rest), "head and pooler stay their own"
    with pytest.raises(UserError, match="has no partner"):
        other = attach_adapter(
            load_backbone(source, task=task, label_names=("a", "b")),
            Adapter(rank=4, targets="query"),
            task=task,
            seed=0,
        )
        load_adapter(other, tmp_path / "adapter", partial=True)


def test_a_head_that_the_checkpoint_lacks_is_drawn_and_trains(tmp_path):
    source = save_encoder(tmp_path, head=False)
    model = attach_adapter(load_backbone(source, task=TASK), Adapter(rank=4), task=TASK, seed=3)
    new = model.get_base_model().new_parameters
    assert {"cls.predictions.transform.dense.weight", "cls.predictions.bias"} <= set(new)
    whole = {name for name in trainable(model) if ".lora_" not in name}
    transform = "cls.predictions.transform"
    assert whole == {f"{transform}.{n}" for n in ("dense.weight", "dense.bias", "LayerNorm.weight", "LayerNorm.bias")}
    first = {name: p.detach() for name, p in trainable(model).items()}
    assert first[f"{transform}.LayerNorm.weight"].eq(1).all()
    assert first[f"{transform}.dense.weight"].std().item() == pytest.approx(0.1, rel=0.2)  # initializer_range
    output = model.get_base_model().get_output_embeddings()
    assert not output.weight.requires_grad and not output.bias.any()
    assert output.weight.data_ptr() == model.get_base_model().get_input_embeddings().weight.data_ptr()
    save_adapter(model, tmp_path / "adapter")
    twin = attach_adapter(load_backbone(source, task=TASK), Adapter(rank=4), task=TASK, seed=4)
    load_adapter(twin, tmp_path / "adapter")
    (micro,) = EvalBatching(3, 0).batches(encoded(text_rows(3, words=(5, 9))), TASK)
    with torch.no_grad():
        assert torch.equal(model.eval()(**micro.inputs).logits, twin.eval()(**micro.inputs).logits)


@pytest.mark.parametrize("head", [True, False])
def test_a_saved_adapter_loads_in_plain_peft(head, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForMaskedLM

    source = save_encoder(tmp_path / "encoder", head=head)
    model = scatter(attach_adapter(load_backbone(source, task=TASK), Adapter(rank=4), task=TASK, seed=0)).eval()
    save_adapter(model, tmp_path / "adapter")
    plain = PeftModel.from_pretrained(AutoModelForMaskedLM.from_pretrained(source), tmp_path / "adapter").eval()
    (micro,) = EvalBatching(3, 0).batches(encoded(text_rows(3, words=(5, 9))), TASK)
    with torch.no_grad():
        assert torch.allclose(plain(**micro.inputs).logits, model(**micro.inputs).logits, atol=1e-5)


def test_mistakes_are_told(source, tmp_path):
    assert open_backbone(source).reads_both_ways and not open_backbone("flatshift-5m").reads_both_ways
    with pytest.raises(UserError, match=r"no masked language modelling class.*masked-lm is for encoders"):
        load_backbone("flatshift-5m", task=TASK)
    with pytest.raises(UserError, match=r"tokenizer has a mask token.*task.kind: language-model"):
        encode(text_rows(2), task=TASK, tokenizer=byte_tokenizer(), max_length=32)
    with pytest.raises(UserError, match=r"bert.*task.kind: masked-lm"):
        from flatshift.finetune.tasks import LanguageModel

        load_backbone(save_backbone("bert", tmp_path), task=LanguageModel())
    with pytest.raises(ValueError, match="share"):
        MaskedLM(share=0.0)
