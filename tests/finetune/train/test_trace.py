"""What a run records: steps, split figures, the adapter against dense matrices, curvature, and label noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from flatshift.experiments.recipe import from_override, load_recipe
from flatshift.finetune.adapters.adapter import attach_adapter, trainable
from flatshift.finetune.compute.loss import find_head
from flatshift.finetune.config import Adapter, Optimizer, TraceRecording
from flatshift.finetune.data.eval_batching import EvalBatching
from flatshift.finetune.data.example import Example
from flatshift.finetune.data.noise import replace_answers, shuffle_tokens
from flatshift.finetune.errors import UserError
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.tasks import Classify, Completion, LanguageModel, Seq2Seq
from flatshift.finetune.train.optimizer import AdapterOptimizer
from flatshift.finetune.train.trace.curvature import curvature_metrics
from flatshift.finetune.train.trace.examples import ExampleScores, LabelNoise, Recording, score_examples, split_metrics
from flatshift.finetune.train.trace.factors import AdaptedLayers, LayerFactors, adapter_metrics, gradient_norms
from flatshift.finetune.train.trace.files import recorded_steps, stability_threshold
from tests.support.data_models import row
from tests.support.finetune_models import IGNORED, save_backbone
from tests.support.seq2seq_models import save_encoder_decoder

LM = LanguageModel()


# ---------------------------------------------------------------------------------------------------------- steps


def test_steps_are_even_in_the_logarithm_and_hold_both_ends():
    assert recorded_steps(TraceRecording(), 100) == (0, 1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 100)
    assert recorded_steps(TraceRecording(per_doubling=1), 64) == (0, 1, 2, 4, 8, 16, 32, 64)
    assert recorded_steps(TraceRecording(), 1) == (0, 1)
    assert recorded_steps(TraceRecording(steps=(7, 3, 900), sharpness=(5,)), 10) == (0, 3, 5, 7, 10)


def test_record_in_a_recipe():
    recipe = load_recipe(
        None, [from_override("record.steps", "[1, 5]"), from_override("record.sharpness", "[5]")]
    ).recipe
    assert recipe.record == TraceRecording(steps=(1, 5), sharpness=(5,))
    assert load_recipe(None).recipe.record is None
    assert load_recipe(None, [from_override("record.steps", "log")]).recipe.record == TraceRecording()
    with pytest.raises(UserError, match=r"record\.steps must hold numbers ≥ 0, got -1"):
        load_recipe(None, [from_override("record.steps", "[-1]")])
    with pytest.raises(UserError, match=r"record\.steps cannot be 'logs'; did you mean 'log'"):
        load_recipe(None, [from_override("record.steps", "logs")])


@pytest.mark.parametrize(
    ("written", "rank", "rslora", "scale"),
    [
        ("null", 4, False, 2.0),
        ("rank", 4, False, 1.0),
        ("8", 16, False, 0.5),
        ("8", 16, True, 2.0),
        ("rank", 4, True, 2.0),
    ],
)
def test_the_policy_of_alpha(written, rank, rslora, scale, tmp_path):
    adapter = load_recipe(None, [from_override("adapter.alpha", written)]).recipe.adapter
    adapter = Adapter(rank=rank, alpha=adapter.alpha, rslora=rslora)
    model = attach_adapter(load_backbone(save_backbone("llama", tmp_path), task=LM), adapter, task=LM, seed=0)
    assert adapter_metrics(AdaptedLayers(model).factors())["scale"] == pytest.approx(scale)


def test_alpha_is_a_number_or_rank():
    with pytest.raises(UserError, match=r"adapter\.alpha cannot be 'rang'; did you mean 'rank'"):
        load_recipe(None, [from_override("adapter.alpha", "rang")])
    with pytest.raises(UserError, match=r"adapter\.alpha must be ≥ 0"):
        load_recipe(None, [from_override("adapter.alpha", "-1")])


# ---------------------------------------------------------------------------------------------------------- splits


def test_split_figures_of_classes_by_hand():
    judged = ExampleScores(
        np.array([0.5, 1.0, 2.0, 0.1]), np.array([0, 1, 1, 0]), np.ones(4, dtype=int), np.array([2, 1, 0, 1])
    )
    flipped = LabelNoise(np.array([False, True, True, True]), np.array([2, 1, 2, 0]))
    figures = split_metrics("train", judged, flipped)
    assert figures == {
        "train.loss": pytest.approx(0.9),
        "train.error": 0.5,
        "train.error.items": 4,  # whose binomial variance is the least of a run along the steps
        "train.error_clean": 0.0,
        "train.error_noisy": pytest.approx(2 / 3),
        "train.memorised": pytest.approx(1 / 3),  # the last says what it was told
        "train.recovered": pytest.approx(1 / 3),  # the second says what is true; the third neither
    }
    assert split_metrics("test", judged).keys() == {"test.loss", "test.error", "test.error.items"}


def test_split_figures_of_tokens_by_hand():
    judged = ExampleScores(np.array([4.0, 6.0]), np.array([1, 0]), np.array([3, 2]))
    figures = split_metrics("dev", judged)
    assert figures == {"dev.loss": 2.0, "dev.error": 0.2, "dev.exact_error": 0.5}
    noisy = split_metrics("train", judged, LabelNoise(np.array([False, False])))
    assert noisy["train.error_clean"] == 0.2 and noisy["train.error_noisy"] is None
    assert noisy["train.memorised"] is None and noisy["train.recovered"] is None


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "granite"])
def test_each_example_of_a_language_model_against_its_own_forward_pass(kind, tmp_path):
    model = attach_adapter(load_backbone(save_backbone(kind, tmp_path), task=LM), Adapter(rank=2), task=LM, seed=0)
    model.train()
    _spread(model)
    rows = _texts(count=9)
    head = find_head(model, {"input_ids": torch.tensor([rows[0].input_ids])}, task=LM)
    assert head is not None
    judged = score_examples(model, rows, EvalBatching(4, 0), task=LM, head=head)
    assert model.training
    model.eval()
    for index, example in enumerate(rows):
        logits = model(torch.tensor([example.input_ids])).logits[0, :-1].detach().double()
        labels = torch.tensor(example.labels[1:])
        kept = labels != IGNORED
        nats = F.cross_entropy(logits[kept], labels[kept], reduction="sum")
        assert judged.loss[index] == pytest.approx(float(nats), rel=1e-5)
        assert judged.wrong[index] == int((logits[kept].argmax(-1) != labels[kept]).sum())
        assert judged.supervised[index] == int(kept.sum())
    assert judged.predicted is None and 0 < judged.wrong.sum() < judged.supervised.sum()


@pytest.mark.parametrize("kind", ["t5", "t5-gated"])
def test_each_example_of_an_encoder_decoder_against_its_own_forward_pass(kind, tmp_path):
    task = Seq2Seq()
    model = attach_adapter(
        load_backbone(save_encoder_decoder(kind, tmp_path), task=task), Adapter(rank=2), task=task, seed=0
    )
    rows = [
        Example(
            each.input_ids,
            each.input_ids[: 2 + k % 3],
            each.id,
            each.where,
            decoder_ids=[0, *each.input_ids[: 1 + k % 3]],
        )
        for k, each in enumerate(_texts(count=7))
    ]
    inputs = {"input_ids": torch.tensor([rows[0].input_ids]), "decoder_input_ids": torch.tensor([rows[0].decoder_ids])}
    head = find_head(model, inputs, task=task)
    judged = score_examples(model, rows, EvalBatching(3, 0), task=task, head=head)
    model.eval()
    for index, example in enumerate(rows):
        inputs = {
            "input_ids": torch.tensor([example.input_ids]),
            "decoder_input_ids": torch.tensor([example.decoder_ids]),
        }
        logits, labels = model(**inputs).logits[0].detach().double(), torch.tensor(example.labels)
        assert judged.loss[index] == pytest.approx(float(F.cross_entropy(logits, labels, reduction="sum")), rel=1e-5)
        assert judged.wrong[index] == int((logits.argmax(-1) != labels).sum())
        assert judged.supervised[index] == len(labels)


def test_each_example_of_a_classifier_against_its_own_forward_pass(tmp_path):
    task = Classify(labels=("a", "b", "c"))
    source = save_backbone("bert", tmp_path)
    model = attach_adapter(
        load_backbone(source, task=task, label_names=task.labels), Adapter(rank=2), task=task, seed=0
    )
    rows = [Example(each.input_ids, index % 3, each.id, each.where) for index, each in enumerate(_texts(count=7))]
    judged = score_examples(model, rows, EvalBatching(3, 0), task=task)
    model.eval()
    for index, example in enumerate(rows):
        logits = model(torch.tensor([example.input_ids])).logits.detach().double()
        assert judged.loss[index] == pytest.approx(
            float(F.cross_entropy(logits, torch.tensor([example.labels]))), rel=1e-5
        )
        assert judged.predicted is not None and judged.predicted[index] == int(logits.argmax())
        assert judged.wrong[index] == int(logits.argmax() != example.labels)


def _texts(count: int) -> list[Example]:
    generator = torch.Generator().manual_seed(3)
    rows = []
    for index in range(count):
        ids = torch.randint(3, 20, (4 + index % 5,), generator=generator).tolist()
        labels = [IGNORED, *(IGNORED if (index + k) % 4 == 0 else token for k, token in enumerate(ids[1:]))]
        rows.append(Example(ids, labels, str(index), f"f:{index}"))
    return rows


def _spread(model: torch.nn.Module) -> None:
    """Weights at which some tokens are right: labels are guessed from a few steps of training on the rows."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05)
    rows = _texts(count=9)
    for _ in range(6):
        for example in rows:
            labels = torch.tensor([example.labels])
            logits = model(torch.tensor([example.input_ids])).logits
            F.cross_entropy(logits[0, :-1], labels[0, 1:], ignore_index=IGNORED).backward()
        optimizer.step()
        optimizer.zero_grad()


# ---------------------------------------------------------------------------------------------------------- adapter


def _layer(d_in, d_out, rank, *, scale=1.5, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(rank, d_in, generator=generator, dtype=torch.float64)
    b = torch.randn(d_out, rank, generator=generator, dtype=torch.float64) * torch.logspace(0, -3, rank)
    return LayerFactors(f"layer{seed}", a.to(dtype), b.to(dtype), scale, 10.0 + seed)


@pytest.mark.parametrize("shapes", [[(9, 7, 3)], [(9, 7, 3), (9, 7, 3), (5, 12, 8)], [(4, 6, 16)]])
def test_adapter_figures_against_dense_matrices(shapes):
    layers = [_layer(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    figures = adapter_metrics(layers)
    updates = [layer.scale * layer.b @ layer.a for layer in layers]
    spectra = [torch.linalg.svdvals(update) for update in updates]
    directions = [float(s.square().sum() ** 2 / s.pow(4).sum()) for s in spectra]
    wanted = {
        "scale": 1.5,
        "update.ratio": math.sqrt(sum(float(u.square().sum()) for u in updates))
        / math.sqrt(sum(layer.w0_norm**2 for layer in layers)),
        "balance": sum(float(layer.a.square().sum() - layer.b.square().sum()) for layer in layers),
        "stable_rank": sum(float(s.square().sum() / s[0] ** 2) for s in spectra) / len(layers),
        "participation": sum(directions) / len(layers),
        "effective_params": sum(p * (sum(u.shape) - p) for p, u in zip(directions, updates, strict=True)),
    }
    assert figures == {name: pytest.approx(value, rel=1e-10) for name, value in wanted.items()}


def test_an_orthogonal_update_of_rank_k_counts_k_directions():
    a, b = torch.eye(5, 40), torch.eye(30, 5)
    figures = adapter_metrics([LayerFactors("x", a, b, 2.0, 1.0)])
    assert figures["stable_rank"] == pytest.approx(5) and figures["participation"] == pytest.approx(5)
    assert figures["effective_params"] == pytest.approx(5 * (40 + 30 - 5))
    assert figures["update.ratio"] == pytest.approx(2 * 5**0.5) and figures["balance"] == pytest.approx(0)


def test_a_fresh_and_a_broken_adapter():
    layer = _layer(6, 5, 2)
    fresh = adapter_metrics([LayerFactors("x", layer.a, torch.zeros(5, 2), 1.0, 3.0)])
    assert fresh["update.ratio"] == 0 and fresh["effective_params"] == 0
    assert fresh["stable_rank"] is None and fresh["participation"] is None
    broken = adapter_metrics([LayerFactors("x", layer.a * torch.nan, layer.b, 1.0, 3.0), _layer(6, 5, 2, seed=1)])
    assert math.isnan(broken["update.ratio"] or 0)


def test_layers_of_a_model_are_read_as_they_are(tmp_path):
    model = attach_adapter(
        load_backbone(save_backbone("gpt2", tmp_path), task=LM), Adapter(rank=3, alpha=6), task=LM, seed=0
    )
    with torch.no_grad():
        for name, parameter in trainable(model).items():
            if ".lora_B." in name:
                parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
    adapted = AdaptedLayers(model)
    layers = adapted.factors()
    dense = {}
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            dense[name] = (module.get_delta_weight("default"), module.base_layer.weight)
    assert adapted.notes == () and len(layers) == len(dense) and len(layers) > 4
    ratio = math.sqrt(sum(float(u.double().square().sum()) for u, _ in dense.values())) / math.sqrt(
        sum(float(w.double().square().sum()) for _, w in dense.values())
    )
    assert adapter_metrics(layers)["update.ratio"] == pytest.approx(ratio, rel=1e-5)


@pytest.mark.parametrize(
    ("adapter", "note"),
    [
        (Adapter(rank=2, dora=True), "direction of DoRA"),
        (Adapter(rank=2, init="pissa"), "PiSSA"),
        (Adapter(rank=2, init="olora"), "OLoRA"),
        (Adapter(rank=2, targets=("q_proj", "embed_tokens")), "embed_tokens"),
    ],
)
def test_what_means_something_else_is_noted(adapter, note, tmp_path):
    model = attach_adapter(load_backbone(save_backbone("llama", tmp_path), task=LM), adapter, task=LM, seed=0)
    adapted = AdaptedLayers(model)
    assert len(adapted.notes) == 1 and note in adapted.notes[0]
    assert all(layer.a.shape[0] == 2 for layer in adapted.factors()) and adapted.factors()


def test_gradient_norms_by_factor():
    gradients = {"x.lora_A.weight": torch.tensor([3.0]), "y.lora_A.weight": torch.tensor([4.0])}
    found = gradient_norms({**gradients, "x.lora_B.weight": torch.tensor([2.0]), "score.weight": torch.tensor([9.0])})
    assert found == {"grad.a": 5.0, "grad.b": 2.0}


# ---------------------------------------------------------------------------------------------------------- curvature


def test_curvature_against_the_dense_hessian_and_adams_own_state(tmp_path):
    task = Classify(labels=("a", "b"))
    source = save_backbone("bert", tmp_path, num_hidden_layers=1, hidden_size=8, intermediate_size=8)
    backbone = load_backbone(source, task=task, label_names=task.labels)
    model = attach_adapter(backbone, Adapter(rank=1, targets=("query", "value")), task=task, seed=0)
    model.set_attn_implementation("eager")  # a dense Hessian needs a second derivative
    parameters = trainable(model)
    settings = Optimizer(lr=1e-2, lora_plus=4.0)
    optimizer = AdapterOptimizer(parameters, settings)
    ids = torch.randint(3, 60, (12, 6), generator=torch.Generator().manual_seed(1))
    wanted = torch.arange(12) % 2

    def loss():
        return F.cross_entropy(model(ids).logits, wanted)

    model.eval()
    for _ in range(5):
        loss().backward()
        optimizer.step(1e-2)

    second = optimizer.moments()["exp_avg_sq"]
    by_hand = {
        name: ((v / (1 - 0.999**5)).sqrt() + 1e-8) / (4.0 if ".lora_B." in name else 1.0) for name, v in second.items()
    }
    found = optimizer.preconditioner()
    assert found.keys() == parameters.keys()
    for name, value in by_hand.items():
        torch.testing.assert_close(found[name], value)

    figures = curvature_metrics(model, loss, parameters=parameters, preconditioner=found, seed=0)
    names = list(parameters)
    hessian = _dense_hessian(loss, [parameters[name] for name in names])
    root = torch.cat([by_hand[name].double().rsqrt().reshape(-1) for name in names])
    factors = torch.cat([torch.full((parameters[n].numel(),), ".lora_" in n) for n in names])
    own = hessian[factors][:, factors]
    assert figures["sharpness.lambda_max"] == pytest.approx(float(torch.linalg.eigvalsh(own)[-1]), rel=0.02)
    assert figures["sharpness.preconditioned"] == pytest.approx(
        float(torch.linalg.eigvalsh(root[:, None] * hessian * root)[-1]), rel=0.03
    )
    assert math.isfinite(figures["sharpness.trace"] or math.nan)
    assert (
        curvature_metrics(model, loss, parameters=parameters, preconditioner={}, seed=0)["sharpness.preconditioned"]
        is None
    )


def _dense_hessian(loss, parameters):
    gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss(), parameters, create_graph=True)])
    rows = [
        torch.cat([g.reshape(-1) for g in torch.autograd.grad(entry, parameters, retain_graph=True)])
        for entry in gradient
    ]
    hessian = torch.stack(rows).double()
    return (hessian + hessian.T) / 2


def test_the_threshold_of_adam():
    assert stability_threshold(0.9) == pytest.approx(38)
    assert stability_threshold(0.0) == pytest.approx(2)  # gradient descent: λ lr < 2


# ---------------------------------------------------------------------------------------------------------- rows


def test_rows_are_nested_and_held_out_rows_are_the_same_for_every_seed():
    rows = [Example([3, 4], index % 3, f"r{index}", "f") for index in range(40)]
    noise = {"flipped": ["r3", "r7"], "true_labels": {"r3": 2, "r7": 0}}

    def choose(count, seed):
        record = TraceRecording(train_rows=count, heldout_rows=5, sharpness=(1,), sharpness_rows=4)
        return Recording.choose(record, train=rows, dev=[], test=rows, seed=seed, **noise)

    few, many, other = choose(10, 0), choose(20, 0), choose(10, 1)
    ids = [[each.id for each in r.splits["train"]] for r in (few, many, other)]
    assert set(ids[0]) < set(ids[1]) and ids[0] != ids[2] and len(ids[0]) == 10
    assert few.splits["test"] == other.splits["test"] and len(few.splits["test"]) == 5
    assert "dev" not in few.splits and len(few.curved) == 4
    whole = choose(None, 0)
    assert whole.splits["train"] == rows and whole.flipped is not None and whole.flipped.true is not None
    assert np.flatnonzero(whole.flipped.mask).tolist() == [3, 7]
    assert whole.flipped.true[[3, 7, 4]].tolist() == [2, 0, 1]


# ---------------------------------------------------------------------------------------------------------- noise


def _answered(count):
    return [row(i, text=f"q{i}", answer="abc"[i % 3], why=str(i % 3)) for i in range(count)]


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.35, 1.0])
def test_answers_are_exchanged_for_other_ones(rate):
    rows = _answered(31)
    new, ids = replace_answers(rows, columns=("answer", "why"), rate=rate, seed=4)
    changed = [old.id for old, now in zip(rows, new, strict=True) if old.values["answer"] != now.values["answer"]]
    assert changed == ids and len(ids) == math.floor(rate * 31 + 0.5)
    assert all(now.values["text"] == old.values["text"] for old, now in zip(rows, new, strict=True))
    pairs = {("a", "0"), ("b", "1"), ("c", "2")}
    assert {(r.values["answer"], r.values["why"]) for r in new} <= pairs  # both columns come from one row


def test_exchanged_answers_are_uniform_over_the_others_and_nested():
    rows = [row(i, text="t", answer="a" if i < 20_000 else "bbbc"[i % 4]) for i in range(40_000)]
    new, ids = replace_answers(rows, columns=("answer",), rate=0.5, seed=0)
    given = [
        now.values["answer"]
        for old, now in zip(rows, new, strict=True)
        if old is not now and old.values["answer"] == "a"
    ]
    share = given.count("c") / len(given)
    assert abs(share - 0.25) < 4 * math.sqrt(0.25 * 0.75 / len(given))
    fewer, chosen = replace_answers(rows, columns=("answer",), rate=0.1, seed=0)
    some = set(chosen)
    assert some < set(ids) and all(a == b for a, b in zip(fewer, new, strict=True) if a.id in some)
    assert replace_answers(rows, columns=("answer",), rate=0.1, seed=1)[1] != chosen


def test_texts_are_shuffled_token_by_token():
    texts = [Example([1, *range(3, 3 + n), 2], [IGNORED, *range(3, 3 + n), 2], str(n), "f") for n in range(2, 22)]
    new, ids = shuffle_tokens(texts, rate=0.5, fixed={1, 2}, seed=0)
    changed = [old.id for old, now in zip(texts, new, strict=True) if old.input_ids != now.input_ids]
    assert changed == ids and len(ids) == 10
    for old, now in zip(texts, new, strict=True):
        assert sorted(now.input_ids) == sorted(old.input_ids)
        assert now.input_ids[0] == 1 and now.input_ids[-1] == 2
        assert now.labels == [IGNORED, *now.input_ids[1:]]
    fewer, some = shuffle_tokens(texts, rate=0.2, fixed={1, 2}, seed=0)
    assert set(some) < set(ids)
    assert all(a.input_ids == b.input_ids for a, b in zip(fewer, new, strict=True) if a.id in some)


def test_a_part_of_the_texts_has_the_noise_of_all():
    texts = [Example([1, *range(3, 3 + n), 2], [IGNORED, *range(3, 3 + n), 2], str(n), "f") for n in range(2, 42)]
    pool = [text.id for text in texts]
    whole, drawn = shuffle_tokens(texts, rate=0.5, fixed={1, 2}, seed=0)
    part, some = shuffle_tokens(texts[5:20], rate=0.5, fixed={1, 2}, seed=0, pool=pool)
    assert part == whole[5:20] and some == [name for name in drawn if name in set(pool[5:20])] != []


def test_what_cannot_be_made_wrong():
    same = [row(i, text="t", answer="yes") for i in range(4)]
    with pytest.raises(UserError, match="all have the same"):
        replace_answers(same, columns=("answer",), rate=0.5, seed=0)
    assert replace_answers(same, columns=("answer",), rate=0.1, seed=0)[1] == []
    dull = [Example([5, 5, 5], [IGNORED, 5, 5], "0", "f"), Example([5, 6, 7], [IGNORED, 6, 7], "1", "f")]
    found = [shuffle_tokens(dull, rate=0.5, fixed=(), seed=seed) for seed in range(6)]
    assert {tuple(ids) for _, ids in found} == {(), ("1",)}  # one of two is drawn; the first stays as it is
    assert all(texts[0] == dull[0] and (texts[1] == dull[1]) == (not ids) for texts, ids in found)
    with pytest.raises(UserError, match=r"1\.0 of 2 rows is 2, and only 1 have two different tokens.*at most 0\.5"):
        shuffle_tokens(dull, rate=1.0, fixed=(), seed=0)
    with pytest.raises(UserError, match="2 is not a share"):
        replace_answers(same, columns=("answer",), rate=2, seed=0)


def test_which_columns_are_the_answer():
    assert Completion(prompt="{q}", completion="{q} {a} {b}").input_format.answer_columns() == ("a", "b")
    assert Seq2Seq(prompt="{text}", target="{label}").input_format.answer_columns() == ("label",)
    with pytest.raises(UserError, match=r"data\.label_noise: the answer of task\.kind: completion has no column"):
        Completion(prompt="{q}", completion=" yes, {q}").input_format.answer_columns()
