"""What is said before step 1: the capacity of the adapter by hand, and Adam's threshold where λ_max is known."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from flatshift.experiments.recipe import from_override, load_recipe
from flatshift.experiments.workflows.context import _report_capacity
from flatshift.experiments.workflows.train import train
from flatshift.finetune.adapters.adapter import trainable
from flatshift.finetune.config import Adapter, Mesh, Optimizer, Train
from flatshift.finetune.data.batches import TrainingDataLoader
from flatshift.finetune.data.encoding import encode
from flatshift.finetune.planner.capacity import Capacity, bits_per_label
from flatshift.finetune.tasks import Classify, Completion, LanguageModel, Preference, Regress
from flatshift.finetune.train.optimizer import AdapterOptimizer
from flatshift.finetune.train.trace.curvature import curvature_metrics, format_rate_line, mean_squared_gradients
from flatshift.finetune.train.trace.files import read_trace
from tests.finetune.data.test_mixture import MIXTURE, SIZES
from tests.support.data_models import byte_tokenizer, text_rows
from tests.support.regularizer_models import frozen_checksums, tiny_gpt2, with_lora

# ----------------------------------------------------------------------------------------------------------- capacity


def test_bits_of_a_label():
    assert (
        bits_per_label(LanguageModel(), None)
        == bits_per_label(Completion(), None)
        == bits_per_label(Preference(), None)
        == 1
    )
    assert bits_per_label(Classify(), 8) == 3 and bits_per_label(Classify(multi=True), 8) == 8
    assert bits_per_label(Regress(), None) is None


def test_capacity_counted_by_hand():
    parameters = {
        "q.lora_A.weight": torch.zeros(4, 16),
        "q.lora_B.weight": torch.zeros(10, 4),
        "score.weight": torch.zeros(2, 16),
    }
    found = Capacity.of(parameters, rank=4, labels=1000, each=1.0, counted="tokens")
    assert (found.parameters, found.factors) == (4 * 16 + 10 * 4 + 2 * 16, 4 * 26) == (136, 104)
    assert found.ratio == pytest.approx(2 * 136 / 1000)
    assert found.enough == math.ceil((500 - 32) / 26) == 18  # 26 numbers a rank, 32 at any
    line = found.line()
    assert "136 trained numbers hold some 272 bit (2 each)" in line and "1,000 target tokens" in line
    assert line.endswith("takes up to 1 kbit (1 each), what adapter.rank 18 would hold (now 4)")
    at = Capacity(parameters=32 + 26 * 18, factors=26 * 18, rank=18, labels=1000, each=1.0, counted="tokens")
    assert at.ratio >= 1 and at.enough == 18 and at.line().endswith("adapter.rank 18 holds (now 18)")
    soft = Capacity.of({"prompt": torch.zeros(5, 8)}, rank=8, labels=10, each=1.0, counted="tokens")
    assert soft.enough is None and "adapter.rank" not in soft.line()
    assert Capacity.of(parameters, rank=4, labels=1, each=1.0, counted="tokens").enough == 1


@pytest.mark.parametrize("task", [LanguageModel(pack=False), LanguageModel(pack=True), Classify()], ids=repr)
@pytest.mark.parametrize("mixture", [None, MIXTURE])
def test_labels_of_a_run_are_counted_once(task, mixture):
    examples = encode(text_rows(sum(SIZES)), task=task, tokenizer=byte_tokenizer(), max_length=48).examples
    batches = TrainingDataLoader(examples, task=task, batch_size=4, seed=5, max_length=48, pad_id=0, mixture=mixture)
    counts = np.array(
        [1 if task.traits.is_sequence_level else sum(label != -100 for label in e.labels) for e in examples]
    )
    assert batches.labels(10_000) == counts.sum()
    ends = np.cumsum(SIZES if mixture else [sum(SIZES)])
    for steps in (1, 3, 8):
        seen = sorted({i for step in range(steps) for micro in batches.rows_at(step) for row in micro for i in row})
        sources = np.split(counts, ends[:-1])
        met = np.bincount(np.searchsorted(ends, seen, side="right"), minlength=len(sources))
        expected = sum(n * source.mean() for n, source in zip(met, sources, strict=True))
        assert batches.labels(steps) == pytest.approx(expected, abs=1, rel=0.25 if task.pack else 0)


@pytest.mark.parametrize(("fixed", "ep", "said"), [(None, 1, "136"), (("a",), 1, "72"), (None, 2, None)])
def test_what_does_not_move_stores_nothing(fixed, ep, said):
    """Nor is it said of a part of the experts."""
    lines: list[str] = []
    parameters = {"q.lora_A.weight": torch.zeros(4, 16), "q.lora_B.weight": torch.zeros(18, 4)}
    context: Any = SimpleNamespace(
        recipe=SimpleNamespace(mesh=Mesh(dp=2, ep=ep), adapter=Adapter(rank=4)),
        console=SimpleNamespace(outline=lambda short, long: lines.extend(long)),
    )
    plan: Any = SimpleNamespace(
        prepared=SimpleNamespace(label_names=None),
        task=LanguageModel(),
        train=Train(),
        optimizer=Optimizer(fixed=fixed),
    )
    loader: Any = SimpleNamespace(labels=lambda steps: 1000)
    _report_capacity(context, plan, cast(Any, SimpleNamespace(parameters=parameters)), loader)
    assert [line.split()[1] for line in lines] == ([] if said is None else [said])


@pytest.mark.parametrize(("rank", "printed"), [(1, True), pytest.param(64, False, marks=pytest.mark.slow)])
def test_train_says_it_where_the_adapter_is_the_smaller(rank, printed, tmp_path, capfd):
    laid = {
        "adapter.rank": rank, "adapter.targets": "[q_proj]", "adapter.layers": "[0]",
        "train.steps": 2, "train.batch_size": 16, "train.max_length": 64, "train.max_cut": 1,
        "data.train.limit": 200, "data.dev.limit": 2, "data.test.limit": 2, "eval.train_limit": 0, "eval.cold": 0,
    }  # fmt: skip
    resolved = load_recipe("language-model", [from_override(key, value) for key, value in laid.items()])
    train(resolved, tmp_path / "run")
    logged = [line for line in (tmp_path / "run" / "log.txt").read_text().splitlines() if "capacity: " in line]
    assert len(logged) == 1
    assert ("capacity: " in capfd.readouterr().err) is printed
    assert ("would hold" in logged[0]) is printed


# --------------------------------------------------------------------------------------------------------------- rate


def quadratic(model):
    """½ Σ c (b − t)² over every number b of the factors B, times `scale`; c and t of all."""
    factors = [p for name, p in trainable(model).items() if ".lora_B." in name]
    generator = torch.Generator().manual_seed(3)
    curved = [torch.rand(p.shape, generator=generator, dtype=p.dtype) + 0.5 for p in factors]
    wanted = [torch.rand(p.shape, generator=generator, dtype=p.dtype) + 0.5 for p in factors]
    wanted[0][0, 0] = 0.1  # λ_max = 1/min t stands alone

    def loss(scale=1.0):
        parts = zip(factors, curved, wanted, strict=True)
        return scale * sum((c * (p - t).square()).sum() / 2 for p, c, t in parts)

    return loss, torch.cat([c.flatten() for c in curved]), torch.cat([t.flatten() for t in wanted])


def test_the_threshold_of_a_quadratic_is_known():
    model = with_lora(tiny_gpt2(), trained=False)
    loss, curved, wanted = quadratic(model)
    parameters = trainable(model)
    before = {name: p.detach().clone() for name, p in parameters.items()}
    frozen, state = frozen_checksums(model), torch.random.get_rng_state()
    settings = Optimizer(lr=1e-2, lora_plus=4.0)

    squares = mean_squared_gradients(model, [loss, lambda: loss(3.0)], parameters=parameters)
    for name, square in squares.items():
        assert square.any() == (".lora_B." in name)  # A has no gradient while B = 0
    gradient = curved * wanted
    of_b = torch.cat([square.flatten() for name, square in squares.items() if ".lora_B." in name])
    torch.testing.assert_close(of_b, gradient.square() * (1 + 9) / 2)

    preconditioner = AdapterOptimizer(parameters, settings).first_preconditioner(squares)
    assert all(p.isinf().all() for name, p in preconditioner.items() if ".lora_A." in name)
    figures = curvature_metrics(model, loss, parameters=parameters, preconditioner=preconditioner, seed=0)
    expected = float((curved / ((gradient * math.sqrt(5) + 1e-8) / 4.0)).max())  # H is diagonal, and so is P
    assert figures["sharpness.preconditioned"] == pytest.approx(expected, rel=0.03)

    line = format_rate_line(expected, settings, rows=2)
    assert f"above {38 / expected:.2g} " in line and f"is {0.01 * expected / 38:.2g} of that" in line
    assert f"above {2 / expected:.2g} " in format_rate_line(expected, Optimizer(betas=(0.0, 0.999)), rows=2)
    assert frozen_checksums(model) == frozen and torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(before[name], p) and p.grad is None for name, p in parameters.items())


def test_only_adam_has_a_preconditioner():
    parameters = {"x.lora_B.weight": nn.Parameter(torch.zeros(2, 2))}
    squares = {"x.lora_B.weight": torch.tensor([[4.0, 0.0], [1.0, 9.0]])}
    (found,) = AdapterOptimizer(parameters, Optimizer()).first_preconditioner(squares).values()
    torch.testing.assert_close(found, torch.tensor([[2.0, math.inf], [1.0, 3.0]]), atol=1e-7, rtol=0)
    assert AdapterOptimizer(parameters, Optimizer(kind="gauss-newton", clip=None)).first_preconditioner(squares) == {}


def test_a_run_that_records_curvature_at_its_start_says_where_the_edge_is(tmp_path, capfd):
    laid = {
        "adapter.targets": "[q_proj]", "train.steps": 1, "train.batch_size": 2, "train.max_length": 32,
        "data.train.limit": 8, "data.dev.limit": 2, "data.test.limit": 2, "eval.train_limit": 0,
        "eval.cold": 0, "task.pack": False, "train.max_cut": 1, "record.steps": "[1]", "record.sharpness": "[0]",
        "record.train_rows": 2, "record.heldout_rows": 1,
    }  # fmt: skip
    resolved = load_recipe("language-model", [from_override(key, value) for key, value in laid.items()])
    train(resolved, tmp_path / "run")
    first = read_trace(tmp_path / "run")[0]
    expected = format_rate_line(first["sharpness.preconditioned"], resolved.recipe.optimizer, rows=2)
    assert first["step"] == 0 and first["sharpness.preconditioned"] > 0
    assert expected in (tmp_path / "run" / "log.txt").read_text() and expected in capfd.readouterr().err
