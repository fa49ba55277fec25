"""What weight decay reaches: the groups of transformers' Trainer, and no vector beside them."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from transformers import Trainer

from flatshift.finetune.adapters.adapter import attach_adapter, trainable
from flatshift.finetune.config import Adapter, Optimizer
from flatshift.finetune.models.checkpoint import canonical_name
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.tasks import LanguageModel
from flatshift.finetune.train.optimizer import AdapterOptimizer, has_weight_decay
from tests.support.finetune_models import save_backbone

needs_library = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not here")


def model_of(directory, kind, adapter):
    backbone = load_backbone(save_backbone(kind, directory / kind), task=LanguageModel())
    return attach_adapter(backbone, adapter, task=LanguageModel(), seed=0)


@pytest.mark.parametrize(
    ("kind", "adapter"),
    [
        ("gpt2", Adapter(rank=2, bias="all", train_whole=("ln_f",))),
        ("gpt2", Adapter(rank=2, bias="adapted", dora=True)),
        ("llama", Adapter(rank=2, train_whole=("norm", "embed_tokens"), targets=("q_proj",))),
        ("llama", Adapter(rank=2, dora=True)),
    ],
)
def test_the_groups_are_the_trainers_and_vectors_stay_out(tmp_path, kind, adapter):
    model = model_of(tmp_path, kind, adapter)
    names: list[str] = Trainer.get_decay_parameter_names(None, model)  # it reads nothing of the trainer
    theirs = {canonical_name(name) for name, p in model.named_parameters() if p.requires_grad and name in names}
    trained = trainable(model)
    ours = {name for name, p in trained.items() if has_weight_decay(name, p)}
    # theirs know LayerNorm by its class; RMSNorm by its name; DoRA's magnitudes not at all
    assert ours <= theirs
    assert all("magnitude" in name and trained[name].ndim == 1 for name in theirs - ours)
    assert len(theirs - ours) == sum("magnitude" in name for name in trained)
    assert ours and (len(ours) < len(trained)), "every case has tensors of both groups"


def reference(values, gradients, *, rate, decay, plus, steps):
    """Loshchilov & Hutter's algorithm 2 in float64, a decay and a rate for each tensor."""
    found = {}
    for name, value in values.items():
        w, m, v = value.double().clone(), 0.0, 0.0
        own = rate * (plus if ".lora_B." in name else 1.0)
        shrink = decay if value.ndim == 2 and "norm" not in name and "bias" not in name else 0.0
        for t in range(1, steps + 1):
            g = gradients[name][t - 1].double()
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            w = w - own * shrink * w - own * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        found[name] = w
    return found


@pytest.mark.parametrize("kind", ["adamw", pytest.param("adamw-8bit", marks=needs_library)])
@pytest.mark.parametrize("plus", [None, 8.0])
def test_updates_decay_matrices_only(plus, kind):
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "q.lora_A.weight": (2, 5),
        "q.lora_B.weight": (5, 2),
        "q.lora_B.bias": (5,),
        "q.lora_magnitude_vector.weight": (5,),
        "model.norm.weight": (5,),
        "experts.gate_up_proj_bias": (3, 4),  # two-dimensional, and a bias all the same
        "embed.weight": (7, 5),
    }
    values = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    gradients = {name: torch.randn(5, *shape, generator=generator) for name, shape in shapes.items()}
    parameters = {name: torch.nn.Parameter(value.clone()) for name, value in values.items()}
    optimizer = AdapterOptimizer(parameters, Optimizer(kind=kind, weight_decay=0.3, lora_plus=plus))
    for step in range(5):
        for name, parameter in parameters.items():
            parameter.grad = gradients[name][step].clone()
        optimizer.step(1e-2)
    wanted = reference(values, gradients, rate=1e-2, decay=0.3, plus=plus or 1.0, steps=5)
    everywhere = reference(values, gradients, rate=1e-2, decay=0.0, plus=plus or 1.0, steps=5)
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.double(), wanted[name], rtol=0, atol=2e-6)
    decayed = {name for name in values if (wanted[name] - everywhere[name]).abs().max() > 1e-4}
    assert decayed == {"q.lora_A.weight", "q.lora_B.weight", "embed.weight"}
    assert optimizer.preconditioner().keys() == optimizer.counters().keys() == values.keys()
    names = ("exp_avg", "exp_avg_sq") if kind == "adamw" else ("state1", "state2")
    assert {kept: of.keys() for kept, of in optimizer.moments().items()} == dict.fromkeys(names, values.keys())


def test_a_state_goes_from_one_group_layout_to_the_other():
    """A checkpoint knows names, not groups."""
    values = {"a.lora_A.weight": torch.ones(2, 2), "a.bias": torch.ones(2)}

    def made(decay):
        parameters = {name: torch.nn.Parameter(value.clone()) for name, value in values.items()}
        return AdapterOptimizer(parameters, Optimizer(weight_decay=decay))

    whole, again = made(0.1), made(0.1)
    for optimizer, rounds in ((whole, 3), (again, 1)):
        for _ in range(rounds):
            for parameter in optimizer.parameters.values():
                parameter.grad = torch.full_like(parameter, 0.5)
            optimizer.step(1e-2)
    counters = {name: n.clone() for name, n in whole.counters().items()}
    saved = {kind: {n: t.clone() for n, t in of.items()} for kind, of in whole.moments().items()}
    room = again.expect(counters)
    assert {kind: of.keys() for kind, of in room.items()} == {kind: of.keys() for kind, of in saved.items()}
    for kind, of in saved.items():
        for name, tensor in of.items():
            room[kind][name].copy_(tensor)
    with torch.no_grad():
        for name, parameter in whole.parameters.items():
            again.parameters[name].copy_(parameter)
    for optimizer in (whole, again):
        for parameter in optimizer.parameters.values():
            parameter.grad = torch.full_like(parameter, -0.25)
        optimizer.step(1e-2)
    assert all(torch.equal(p, whole.parameters[name]) for name, p in again.parameters.items())
