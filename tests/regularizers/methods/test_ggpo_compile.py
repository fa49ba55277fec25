"""GGPO under torch.compile: what the eager model computes, from graphs that are made once."""

from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.utils import counters

from flatshift.regularizers import GGPO, build
from tests.support.regularizer_models import loss_of, tiny_llama, tokens, with_lora

STEPS = 6


def course(settings: dict[str, Any], lora: dict[str, Any], **compiled: Any) -> tuple[list[Tensor], dict, list[int]]:
    """Losses and state of six updates, and how many graphs there were after each."""
    torch._dynamo.reset()
    counters.clear()
    model = with_lora(tiny_llama(layers=1), target_modules=["q_proj", "down_proj"], **lora)
    called = torch.compile(model, **compiled) if compiled else model
    regularizer = build(GGPO(**({"sigma": 0.2, "refresh": 2} | settings))).attach(model, seed=3, total_steps=STEPS)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses, graphs = [], []
    for t in range(STEPS):
        with regularizer.step(t):
            regularizer.on_micro_batch(0)
            loss = loss_of(called, tokens(seed=t))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        graphs.append(counters["stats"]["unique_graphs"])
    return losses, regularizer.state_dict(), graphs


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[int]]] = {
    "step": ({}, {}, [1] * STEPS),
    "microbatch": ({"scope": "microbatch"}, {"lora_dropout": 1e-9}, [1] * STEPS),
    "rare-sketches": ({"sketch_every": 2}, {"lora_bias": True}, [1] + [2] * (STEPS - 1)),
}


@pytest.mark.parametrize("case", ["step", "microbatch", pytest.param("rare-sketches", marks=pytest.mark.slow)])
def test_compiled_equals_eager_in_one_graph_for_all_steps(case: str) -> None:
    settings, lora, expected = CASES[case]
    losses, state, _ = course(settings, lora)
    compiled, compiled_state, graphs = course(settings, lora, backend="aot_eager", fullgraph=True)
    assert graphs == expected
    assert torch.allclose(torch.stack(losses), torch.stack(compiled), rtol=1e-6)
    assert len(losses) == len(set(map(float, losses)))  # the noise is not frozen into the graph
    for name, value in state.items():
        assert torch.allclose(value.double(), compiled_state[name].double(), rtol=1e-4), name


@pytest.mark.slow
def test_a_noise_for_every_sample_leaves_the_graph_but_not_the_result() -> None:
    losses, state, _ = course({"scope": "sample"}, {})
    compiled, compiled_state, graphs = course({"scope": "sample"}, {}, backend="aot_eager")
    assert graphs[1] == graphs[-1] > 0  # no recompilation from step to step
    assert torch.allclose(torch.stack(losses), torch.stack(compiled), rtol=1e-6)
    for name, value in state.items():
        assert torch.allclose(value.double(), compiled_state[name].double(), rtol=1e-4), name


@pytest.mark.slow
def test_compiled_by_inductor_equals_eager() -> None:
    losses, _, _ = course({}, {})
    compiled, _, graphs = course({}, {}, backend="inductor")
    assert graphs == [1] * STEPS
    assert torch.allclose(torch.stack(losses), torch.stack(compiled), rtol=1e-6)
