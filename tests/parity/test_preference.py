"""A loss of whole answers is the papers' formula over the whole update, however it is cut, and every reference is the
backbone alone: beside a naive loop in float64."""

from __future__ import annotations

import math

import pytest
import torch

from flatshift.finetune.adapters.adapter import attach_adapter, trainable
from flatshift.finetune.config import Adapter, Evaluate, Optimizer, Train
from flatshift.finetune.data.batches import TrainingDataLoader
from flatshift.finetune.data.eval_batching import EvalBatching
from flatshift.finetune.data.example import Example
from flatshift.finetune.evaluate.preference import point_metrics, score_answers
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.run_directory import RunDirectory, read_metrics
from flatshift.finetune.tasks import Preference
from flatshift.finetune.train.stage import TrainingStage
from flatshift.finetune.train.trainer import Trainer
from flatshift.regularizers import GGPO, MGPO, SAM, BiLora, LoraSAM, NEFTune, Plain, build
from tests.support.finetune_models import IGNORED, PadOnly

LOSSES = {
    "dpo": Preference(beta=0.3),
    "cdpo": Preference(beta=0.3, label_smoothing=0.2),
    "dpo per token": Preference(beta=2.0, per_token=True),
    "ipo": Preference(loss="ipo", beta=0.4),
    "simpo": Preference(loss="simpo", gamma=0.3, label_smoothing=0.1),
    "orpo": Preference(loss="orpo", odds_weight=0.5),
    "kto": Preference(loss="kto", beta=0.3, desirable_weight=1.5, undesirable_weight=0.5),
}


def model_of(source, task):
    model = attach_adapter(load_backbone(source, task=task), Adapter(rank=4), task=task, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # B away from zero, so that the reference is another model
        for parameter in trainable(model).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def _ids(length, generator):
    return torch.randint(3, 60, (length,), generator=generator).tolist()


def examples(single=False):
    """Answers of very unequal lengths."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for index, (prompt, better, worse) in enumerate([(3, 9, 2), (1, 2, 7), (5, 4, 4), (2, 12, 1)]):
        asked, *answers = (_ids(length, generator) for length in (prompt, better, worse))
        (ids, labels), (other, other_labels) = [(asked + answer, [IGNORED] * len(asked) + answer) for answer in answers]
        pair = {"rejected_ids": other, "rejected_labels": other_labels}
        pair = {"desirable": index % 2 == 0} if single else pair
        made.append(Example(ids, labels, str(index), f"f:{index}", **pair))
    return made


def one_update(model, task, made, directory, *, batch_size, accumulate, steps=1, regularizer=None, dev=()):
    """The lines of metrics.jsonl, and how far each parameter moved: AdamW with a huge eps moves by lr·gradient/eps."""
    start = {n: p.detach().clone() for n, p in trainable(model).items()}
    batches = TrainingDataLoader(
        made, task=task, batch_size=batch_size, accumulate=accumulate, seed=0, max_length=20, pad_id=0
    )
    stage = TrainingStage(
        name="s",
        task=task,
        batches=batches,
        dev=dev,
        optimizer=Optimizer(lr=1.0, eps=1e2, clip=None, schedule="constant", warmup=0.0),
        train=Train(steps=steps, batch_size=batch_size, accumulate=accumulate, max_length=20),
        evaluate=Evaluate(),
        regularizer=build(regularizer or Plain()),
        run=RunDirectory.create(directory),
        seed=0,
    )
    Trainer(model, PadOnly(), stage).fit()
    lines = list(read_metrics(directory / "metrics.jsonl"))
    return lines, {n: start[n] - p.detach() for n, p in trainable(model).items()}, batches


def log_p(model, ids, labels):
    """Σ log p of the supervised tokens of one row, and their number."""
    logits = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0].double(), dim=-1)
    places = [t for t in range(1, len(ids)) if labels[t] != IGNORED]
    return sum(logits[t - 1, labels[t]] for t in places), len(places)


def rows_of(example):
    rows = [(example.input_ids, example.labels, example.desirable is not False)]
    if example.rejected_ids is not None:
        rows.append((example.rejected_ids, example.rejected_labels, False))
    return rows


def crossed(own, other):
    """The prompt of one row with the answer of another."""
    prompt = [token for token, label in zip(own[0], own[1], strict=True) if label == IGNORED]
    answer = [token for token, label in zip(other[0], other[1], strict=True) if label != IGNORED]
    while len(prompt) + len(answer) > max(len(own[0]), len(other[0])):
        del prompt[1]
    return prompt + answer, [IGNORED] * len(prompt) + answer


def naive(source, task, made, order):
    """The definition, row by row in float64: the mean over pairs (kto: answers)."""
    model, backbone = model_of(source, task).double(), load_backbone(source, task=task).double()
    beta, log_sigmoid = task.scale, torch.nn.functional.logsigmoid
    drift = 0.0
    if task.loss == "kto":
        apart = []
        for place, index in enumerate(order):
            following = made[order[(place + 1) % len(order)]]
            for own, other in zip(rows_of(made[index]), rows_of(following), strict=True):
                ids, labels = crossed(own, other)
                apart.append((log_p(model, ids, labels)[0] - log_p(backbone, ids, labels)[0]).item())
        drift = max(0.0, sum(apart) / len(apart))
    terms = []
    for example in made:
        found = []
        for ids, labels, wanted in rows_of(example):
            value, tokens = log_p(model, ids, labels)
            with torch.no_grad():
                reference = log_p(backbone, ids, labels)[0]
            found.append((value, reference, tokens, wanted))
        if task.loss == "kto":
            for value, reference, _, wanted in found:
                ahead = beta * (value - reference - drift)
                weight = task.desirable_weight if wanted else task.undesirable_weight
                terms.append(weight * (1 - torch.sigmoid(ahead if wanted else -ahead)))
            continue
        (w, w0, n, _), (l, l0, m, _) = found
        if task.loss == "ipo":
            terms.append(((w - w0) / n - (l - l0) / m - 1 / (2 * beta)) ** 2)
        elif task.loss == "orpo":
            p, q = torch.exp(w / n), torch.exp(l / m)
            odds = torch.log(p / (1 - p)) - torch.log(q / (1 - q))
            terms.append(-w / n - task.odds_weight * log_sigmoid(odds))
        else:
            simple = task.loss == "simpo"
            each = (1, 1) if not (simple or task.per_token) else (n, m)
            first, second = (w, l) if simple else (w - w0, l - l0)
            margin = beta * (first / each[0] - second / each[1]) - (task.gamma if simple else 0.0)
            wrong = task.label_smoothing or 0.0
            terms.append(-(1 - wrong) * log_sigmoid(margin) - wrong * log_sigmoid(-margin))
    loss = sum(terms) / len(terms)
    loss.backward()
    return loss.item(), len(terms), {n: p.grad for n, p in trainable(model).items()}, drift


@pytest.mark.parametrize(("name", "single"), [*((name, False) for name in LOSSES), ("kto", True)])
def test_every_cut_of_the_update_gives_the_naive_loss_and_gradient(name, single, source, tmp_path):
    task = LOSSES[name]
    made, expected = examples(single), None
    for batch_size, accumulate in ((4, 1), (2, 2), (1, 4)):
        where = tmp_path / f"{batch_size}"
        model = model_of(source, task)
        (line,), moved, batches = one_update(model, task, made, where, batch_size=batch_size, accumulate=accumulate)
        if expected is None:
            order = [i for micro in batches.rows_at(0) for (i,) in micro]
            expected = naive(source, task, made, order)
            if task.loss == "kto":
                assert (expected[3] > 0) is not single, "one drift that counts, and one that is not let below 0"
        loss, count, gradients, _ = expected
        assert line["tokens"] == count
        assert line["loss"] == pytest.approx(loss, rel=1e-5), (batch_size, accumulate)
        norm = sum(g.square().sum().item() for g in gradients.values()) ** 0.5
        assert line["grad_norm"] == pytest.approx(norm, rel=1e-4)
        for parameter, gradient in gradients.items():
            # the first update is u = g/(|g| + eps), so g = eps·u/(1 − |u|); u is a difference of float32 weights
            recovered = 1e2 * moved[parameter] / (1 - moved[parameter].abs())
            error = (recovered - gradient).abs().max().item()
            assert error <= 1e-4 * gradient.abs().max().item() + 3e-5, parameter


def test_without_an_update_the_model_is_its_reference(source, tmp_path):
    task = Preference()
    model = attach_adapter(load_backbone(source, task=task), Adapter(rank=4), task=task, seed=0)
    made = examples()
    lines, _, _ = one_update(model, task, made, tmp_path / "r", batch_size=4, accumulate=1, dev=made)
    assert lines[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    dev = lines[-1]
    assert dev["split"] == "dev" and dev["preference_accuracy"] in (0.25, 0.5, 0.75, 1.0)
    assert dev["reward_margin"] == pytest.approx(dev["chosen_reward"] - dev["rejected_reward"], abs=1e-6)


@pytest.mark.parametrize("single", [False, True])
def test_the_distance_is_how_far_each_answer_s_log_likelihood_is_from_the_backbone_s(single, source):
    task = Preference(loss="kto", beta=0.3)  # not of β, and kto has single answers too
    model, backbone = model_of(source, task), load_backbone(source, task=task)
    made = examples(single)
    scores = score_answers(model, made, EvalBatching(3, 0), task=task)
    with torch.no_grad():
        apart = [
            (log_p(model.double(), ids, labels)[0] - log_p(backbone.double(), ids, labels)[0]).item()
            for example in made
            for ids, labels, _ in rows_of(example)
        ]
    assert min(apart) < 0 < max(apart)
    assert point_metrics(scores)["reference_distance"] == pytest.approx(sum(map(abs, apart)) / len(apart), rel=1e-5)


def test_a_loss_without_a_reference_has_no_distance_from_it(source):
    task = Preference(loss="simpo")
    scores = score_answers(model_of(source, task), examples(), EvalBatching(4, 0), task=task)
    assert point_metrics(scores).keys() == set(task.figure_names)
    assert "reference_distance" in Preference().figure_names
    assert "reference_distance" not in task.figure_names


def test_a_regularizer_never_moves_the_reference(source, tmp_path, monkeypatch):
    """The reference of an update under noise is that of one without: known by the losses that tell it."""
    import flatshift.finetune.parallel.engine as engine

    seen = []
    usual = engine.add_reference

    def watched(*arguments, **how):
        found = usual(*arguments, **how)
        seen.append(torch.cat([micro.preference.reference for micro in found]))
        return found

    monkeypatch.setattr(engine, "add_reference", watched)
    task, steps = Preference(), 2
    kinds = (
        Plain(),
        GGPO(sigma=0.5),
        LoraSAM(rho=0.5),
        MGPO(rho=0.5),
        SAM(rho=0.5),
        BiLora(rho=0.5),
        NEFTune(alpha=50),
    )
    for kind in kinds:
        where = tmp_path / kind.kind
        model = model_of(source, task)
        one_update(model, task, examples(), where, batch_size=2, accumulate=2, steps=steps, regularizer=kind)
    plain = seen[:steps]
    for place, kind in enumerate(kinds):
        for found, expected in zip(seen[place * steps :][:steps], plain, strict=True):
            assert torch.equal(found, expected), kind.kind
    batches = TrainingDataLoader(examples(), task=task, batch_size=2, accumulate=2, seed=0, max_length=20, pad_id=0)
    rows = [row for (index,) in batches.epoch(0) for row in rows_of(examples()[index])]
    backbone = load_backbone(source, task=task).double()
    with torch.no_grad():
        alone = torch.tensor([log_p(backbone, ids, labels)[0].item() for ids, labels, _ in rows])
    torch.testing.assert_close(plain[0], alone, rtol=1e-5, atol=1e-5)
